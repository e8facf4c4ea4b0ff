"""The settings of a Sparse Delta Memory layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from .ops.checks import MAX_CHUNK, MAX_WIDTH, check_choice
from .ops.snapshot import CALL_MODES

DEFAULT_CHUNK_SIZE = 64

# Activations of torch.nn that mix or halve entries, or that need more than one input: no use as weights of slots.
_NOT_ELEMENTWISE = {"GLU", "LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin"}
_NEED_ARGUMENTS = {"Threshold"}
ACTIVATIONS = (
    "Softmax",
    "l2_normalize",
    *sorted({*nn.modules.activation.__all__, "Identity"} - _NOT_ELEMENTWISE - _NEED_ARGUMENTS),
)


@dataclass(frozen=True)
class SparseDeltaMemoryConfig:
    """Settings of `SparseDeltaMemory`, checked when made. SPEC section 7.

    Args:
        dim: width of the layer's input and output.
        num_heads: heads, each with a memory of its own and `dim // num_heads` columns.
        slots_per_head: rows of a head's memory.
        num_writes, num_reads: slots that a token writes and reads in each head, 1 to 256.
        chunk_size: tokens that are computed together, 1 to 256; None: 64.
        read_act, write_act: from scores to weights: "Softmax" (of the scale times the scores), "l2_normalize", or the
            name of an elementwise `torch.nn` activation.
        read_act_scale, write_act_scale: the scale of "Softmax"; no other activation uses it.
        normalize_readings: a LayerNorm over each head's readings, with epsilon `norm_eps`.
        A_init_range: where the initial decay rates are drawn from, uniformly.
        backprop_on_memory: the initial memory is a learned parameter; otherwise it is zero.
        output_gate: the merged readings are multiplied by the sigmoid of a projection of the input.
        query_batchnorm: a BatchNorm1d over the scores of reads and of writes.
        key_weighted_decay: each write decays its slot in proportion to its weight, instead of all alike.
        snapshot_quant: how training stores the rows that its backward needs, as `sdm_write_read` takes it. Forward
            values do not depend on it.
        grad_bank_fp32: the backward keeps the bank's gradient in float32.
        product_key_factor_dims: widths of the product key's factors, whose product is `slots_per_head`; None: two
            equal ones.
    Raises:
        ValueError: a setting is out of range, or two do not fit together.
    """

    dim: int
    num_heads: int = 1
    slots_per_head: int = 10000
    num_writes: int = 64
    num_reads: int = 64
    chunk_size: int | None = None
    read_act: str = "Softmax"
    write_act: str = "Softmax"
    read_act_scale: float = 1.0
    write_act_scale: float = 1.0
    normalize_readings: bool = False
    norm_eps: float = 1e-6
    A_init_range: tuple[float, float] = (0, 16)
    backprop_on_memory: bool = True
    output_gate: bool = False
    query_batchnorm: bool = False
    key_weighted_decay: bool = False
    snapshot_quant: str = "none"
    grad_bank_fp32: bool = False
    product_key_factor_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "num_heads", "slots_per_head"):
            self._check_integer(name, 1)
        if self.dim % self.num_heads:
            raise ValueError(f"dim is {self.dim} and num_heads {self.num_heads}; dim must be a multiple of num_heads")
        for name in ("num_writes", "num_reads"):
            self._check_integer(name, 1, min(MAX_WIDTH, self.slots_per_head))
        if self.chunk_size is not None:
            self._check_integer("chunk_size", 1, MAX_CHUNK)
        for name in ("read_act", "write_act"):
            check_choice(name, getattr(self, name), ACTIVATIONS)
        for name in ("norm_eps", "read_act_scale", "write_act_scale"):
            if not isinstance(getattr(self, name), int | float) or not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a finite number")
        if self.norm_eps < 0:
            raise ValueError(f"norm_eps is {self.norm_eps}; it must be at least 0")
        check_choice("snapshot_quant", self.snapshot_quant, CALL_MODES)
        self._check_decay_range()
        self._check_factors()

    def _check_integer(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name} is {value!r}; it must be an integer {wanted}")

    def _check_decay_range(self) -> None:
        bounds = tuple(self.A_init_range) if isinstance(self.A_init_range, list | tuple) else (self.A_init_range,)
        numbers = all(isinstance(bound, int | float) for bound in bounds)
        if len(bounds) != 2 or not numbers or not 0 <= bounds[0] <= bounds[1] < math.inf:
            raise ValueError(f"A_init_range is {bounds}; it must be (low, high) with 0 <= low <= high")
        object.__setattr__(self, "A_init_range", bounds)  # a list, as JSON gives it, would not be hashable

    def _check_factors(self) -> None:
        if self.product_key_factor_dims is None:
            root = math.isqrt(self.slots_per_head)
            if root**2 != self.slots_per_head:
                raise ValueError(
                    f"slots_per_head is {self.slots_per_head}, not a square; choose a square, such as {root**2} or "
                    f"{(root + 1) ** 2}, or set product_key_factor_dims"
                )
            return
        if isinstance(self.product_key_factor_dims, int):
            raise ValueError(
                f"product_key_factor_dims is {self.product_key_factor_dims}; expected the width of each factor, "
                "such as (16, 16)"
            )
        factors = tuple(self.product_key_factor_dims)
        if not factors or any(type(n) is not int or n < 1 for n in factors):
            raise ValueError(f"product_key_factor_dims is {factors}; it must be one or more integers of at least 1")
        if math.prod(factors) != self.slots_per_head:
            raise ValueError(
                f"product_key_factor_dims is {factors} with product {math.prod(factors)}; the product must be "
                f"slots_per_head, which is {self.slots_per_head}"
            )
        object.__setattr__(self, "product_key_factor_dims", factors)

    @property
    def head_dim(self) -> int:
        """Columns of a head's memory."""
        return self.dim // self.num_heads

    @property
    def factors(self) -> tuple[int, ...]:
        """Widths of the product key's factors."""
        return self.product_key_factor_dims or (math.isqrt(self.slots_per_head),) * 2

    @property
    def key_size(self) -> int:
        """Scores per token, of all heads together."""
        return self.num_heads * sum(self.factors)

    @property
    def tokens_per_chunk(self) -> int:
        """The chunk size that is used."""
        return self.chunk_size or DEFAULT_CHUNK_SIZE
