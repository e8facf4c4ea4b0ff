"""What the tests of the ops share: one comparison, what a sample of an op is, and how an op and its reference are run.

`tests.samples` lists the samples: one `OpCase` per registered op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from sdm_compile.ops.registry import OPS, RegisteredOp

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2e-2}


def assert_close(got: Any, expected: Any, dtype: torch.dtype | None = None) -> None:
    """Tensors, or sequences of them, agree within one tolerance per dtype, relative to the norm of what was expected.

    Shapes, integers, float8 codes, zero tensors, and where NaN and infinities are, agree exactly.

    Args:
        dtype: whose tolerance; None for that of each tensor got. Name it where a coarser dtype took part.
    """
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert len(got) == len(expected), f"{len(got)} tensors, expected {len(expected)}"
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape, f"tensor {i}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        tolerance = TOLERANCES.get(a.dtype if dtype is None else dtype)
        if tolerance is None or not a.is_floating_point() or a.element_size() == 1:
            assert a.dtype == b.dtype, f"tensor {i}: {a.dtype}, expected {b.dtype}"
            assert torch.equal(a.double(), b.double()), f"tensor {i}: {a}, expected {b}"
            continue
        a, b = a.detach().double(), b.detach().double()
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), f"tensor {i}: finite elsewhere than expected"
        torch.testing.assert_close(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True)
        error, norm = (a - b)[finite].norm(), b[finite].norm()
        assert error <= tolerance * norm, f"tensor {i}: error {error:.3g} of norm {norm:.3g} is above {tolerance}"


def assert_same_bits(got: Any, expected: Any) -> None:
    """Tensors, or sequences of them, agree in dtype and in every element, zeros in their sign too; NaN is NaN."""
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    wide = [[x.double() if x.is_floating_point() else x for x in xs] for xs in (got, expected)]
    torch.testing.assert_close(*wide, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(*wide, strict=True):
        if a.is_floating_point():
            assert not ((a.signbit() != b.signbit()) & ~a.isnan()).any(), "zeros of other signs"


@dataclass(frozen=True)
class Sample:
    """One set of arguments of an op, as the stages before it would make them."""

    name: str
    make: Callable[[torch.dtype], Sequence[Any]]  # the positional arguments for a bank dtype
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def args(self, dtype: torch.dtype) -> list[Any]:
        """Fresh contiguous tensors, so that a test may change them."""
        args = self.make(dtype)
        return [x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x for x in args]


@dataclass(frozen=True)
class OpCase:
    """An op with its samples and its meaning.

    The first two samples differ in every size, have no size below two and no two equal, and agree in all else: with
    dynamic shapes, one graph serves both.
    """

    op: str
    samples: Sequence[Sample]
    reference: Callable[..., Any]  # of the same arguments: what `run` returns
    differentiable: tuple[int, ...] = ()  # outputs with a gradient
    through_bank: bool = False  # a bank row is rounded on the way, so that float32 outputs are as coarse as the bank
    # Of the arguments and the outputs: the outputs, with zeros in place of what is undefined.
    specified: Callable[[Sequence[Any], list[Tensor]], list[Tensor]] = lambda args, outputs: outputs

    @property
    def registered(self) -> RegisteredOp:
        return OPS[self.op]

    def __call__(self, *args: Any) -> Any:
        return self.registered.overload(*args)

    def run(self, args: Sequence[Any]) -> list[Tensor]:
        """The outputs, then the arguments that the op writes to (it writes to clones)."""
        args = list(args)
        for i in self.registered.mutated:
            args[i] = args[i] if args[i] is None else args[i].clone()
        outputs = self.specified(args, tensors(self(*args)))
        return [*outputs, *(args[i] for i in self.registered.mutated if args[i] is not None)]

    def expected(self, args: Sequence[Any]) -> list[Tensor]:
        """What `run` should return: the reference in float64, of the same numbers."""
        return tensors(self.reference(*in_float64(args)))

    def tolerance_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        return dtype if self.through_bank else None


def tensors(outputs: Any) -> list[Tensor]:
    """An op's outputs as a list, whether it returns nothing, one tensor or several."""
    return [] if outputs is None else [outputs] if isinstance(outputs, Tensor) else list(outputs)


def in_float64(args: Iterable[Any]) -> list[Any]:
    """The same numbers in float64, and float64 for a dtype; ids, codes and settings stay."""

    def convert(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return torch.float64
        return x.double() if isinstance(x, Tensor) and x.dtype in DTYPES else x

    return [convert(x) for x in args]


def float_positions(args: Sequence[Any]) -> list[int]:
    """Which arguments can require a gradient."""
    return [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dtype in DTYPES]


def requiring_grad(args: Sequence[Any], positions: Iterable[int] | None = None) -> list[Any]:
    """The arguments with fresh leaves at `positions` (all floats, where None)."""
    wanted = set(float_positions(args) if positions is None else positions)
    return [x.detach().clone().requires_grad_() if i in wanted else x for i, x in enumerate(args)]


def normal_like(x: Tensor, seed: int = 7) -> Tensor:
    """Random numbers of x's shape and dtype: the same for every dtype, up to its rounding."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.dtype)


def vjp(function: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of every float argument, given those of the outputs (None: there is none), by autograd."""
    with torch.enable_grad():
        leaves = requiring_grad(args)
        outputs = tensors(function(*leaves))
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [leaves[i] for i in float_positions(args)]
        if not pairs:
            return [torch.zeros_like(x) for x in wanted]
        outs, given = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outs, wanted, given, materialize_grads=True))


def masked(grads: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Gradients as backward ops return them: an empty tensor where none was wanted."""
    return [grad if wanted else grad.new_zeros(0) for grad, wanted in zip(grads, mask, strict=True)]


def as_fakes(args: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """The arguments without their numbers, and the mode to use them in."""
    mode = FakeTensorMode()
    return mode, [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]


def assert_fake_agrees(op: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """The fake kernel's outputs have the shape, dtype, device and strides of the real ones, which are contiguous."""
    real = tensors(op(*args))
    mode, fakes = as_fakes(args)
    with mode:
        fake = tensors(op(*fakes))
    assert len(real) == len(fake)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
        assert a.is_contiguous()


def opcheck_utils(args: Sequence[Any]) -> tuple[str, ...]:
    """The quick checks of `torch.library.opcheck` that apply: PyTorch cannot compare float8 arguments."""
    float8 = any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in args)
    return ("test_faketensor",) if float8 else ("test_schema", "test_faketensor")


LAYOUTS = ("transposed", "sliced", "expanded")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; "expanded" repeats the first slice of a float tensor with stride zero."""
    if x.dim() == 0 or x.numel() == 0:
        return x
    if layout == "transposed":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "sliced":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x[:1].expand(x.shape) if x.dtype in DTYPES else x
