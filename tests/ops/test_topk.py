"""Product-key top-k: which slots, in which order, with which values and gradients. SPEC section 6."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from sdm_compile import reference
from sdm_compile.machine import why_not_compile
from sdm_compile.ops import topk
from sdm_compile.ops.checks import UnsupportedConfigurationError
from sdm_compile.ops.topk import product_key_topk

FORWARD = torch.ops.sdm.product_key_topk.default
BACKWARD = torch.ops.sdm.product_key_topk_bwd.default
NAN, INF = float("nan"), float("inf")



@dataclass(frozen=True)
class Sample:
    """Scores [*lead, sum(factors)] in a memory layout: contiguous, transposed, sliced or expanded."""

    name: str
    lead: tuple[int, ...]
    factors: tuple[int, ...]
    k: int
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"

    def scores(self, dtype: torch.dtype | None = None) -> Tensor:
        shape = (*self.lead, sum(self.factors))
        return laid_out(shape, self.layout, dtype or self.dtype, seed=len(self.name))


SAMPLES = [
    Sample("two factors", (3, 5), (7, 11), 6),
    Sample("three factors", (4,), (3, 4, 5), 13),
    Sample("four narrow factors", (6,), (2, 3, 1, 2), 9),
    Sample("one factor", (5,), (17,), 4),
    Sample("factor of width 1 first", (3,), (1, 9), 5),
    Sample("factor of width 1 last", (3,), (9, 1), 5),
    Sample("one slot", (2,), (1, 1), 1),
    Sample("best only", (4,), (6, 5), 1),
    Sample("every slot", (3,), (4, 6), 24),
    Sample("no leading dimension", (), (5, 8), 7),
    Sample("no rows", (0, 3), (5, 8), 7),
    Sample("widest k", (2,), (40, 23), 256),
    Sample("bfloat16", (3, 2), (8, 13), 10, torch.bfloat16),
    Sample("float64", (3, 2), (8, 13), 10, torch.float64),
    Sample("transposed", (3, 4), (6, 9), 8, layout="transposed"),
    Sample("sliced", (5,), (6, 9), 8, layout="sliced"),
    Sample("expanded", (4, 3), (6, 9), 8, torch.bfloat16, layout="expanded"),
]
samples = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)


def laid_out(shape: Sequence[int], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    if layout == "transposed":
        return normal(*shape[1:], shape[0]).movedim(-1, 0)
    if layout == "sliced":
        return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    if layout == "expanded":
        return normal(*shape[1:]).expand(tuple(shape))
    return normal(*shape)


def exactly(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=0, atol=0, equal_nan=True)


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# --- which slots, and their values ---


@samples
def test_equals_the_reference_exactly(sample: Sample) -> None:
    scores = sample.scores()
    exactly(
        product_key_topk(scores, sample.factors, sample.k), reference.product_key_topk(scores, sample.factors, sample.k)
    )


@samples
def test_no_slot_left_out_scores_more(sample: Sample) -> None:
    scores = sample.scores().reshape(-1, sum(sample.factors))
    values, indices = product_key_topk(scores, sample.factors, sample.k)
    for row, row_values, row_indices in zip(scores, values, indices, strict=True):
        best, _ = reference.product_key_topk_exhaustive(row, sample.factors, sample.k)
        exactly([row_values.sort().values], [best.sort().values])
        assert torch.equal(row_indices, row_indices.unique())


@pytest.mark.parametrize(("factors", "k"), [((9, 7), 20), ((4, 5, 3), 17), ((30,), 12)])
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_exact_sums_take_the_smallest_ids_of_equal_slots(factors: tuple[int, ...], k: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (40, sum(factors)), generator=generator).float()
    values, indices = product_key_topk(scores, factors, k)
    for row, row_values, row_indices in zip(scores, values, indices, strict=True):
        exactly([row_values, row_indices], reference.product_key_topk_exhaustive(row, factors, k))


def test_a_tie_that_rounding_makes_goes_to_the_better_rank() -> None:
    # 0 + 2**25 and 1 + 2**25 are one float32 number, and slot 1 is the only candidate for k = 1.
    exactly(product_key_topk(rows([0.0, 1.0, 2.0**25]), (2, 1), 1), (rows([2.0**25]), torch.tensor([[1]])))


def test_a_tie_that_rounding_makes_between_candidates_goes_to_the_smaller_id() -> None:
    # Slots 1 (2**25 + 3) and 2 (2**25 + 4) are one float32 number, and both candidates for the place behind slot 3.
    _, indices = product_key_topk(rows([2.0**25, 2.0**25 + 4, 0.0, 3.0]), (2, 2), 2)
    assert indices.tolist() == [[1, 3]]


def test_sums_are_taken_in_factor_order() -> None:
    scores = rows([1.0, 2.0**24, -(2.0**24)])
    values, _ = product_key_topk(scores, (1, 1, 1), 1)
    assert values.item() == 0.0  # (1 + 2**24) rounds to 2**24; any other order gives 1


def test_bfloat16_scores_are_summed_in_float32_and_rounded_once() -> None:
    scores = rows([256.0, 1.0, 1.0, 0.0]).bfloat16()
    values, indices = product_key_topk(scores, (1, 1, 2), 1)  # in bfloat16, (256 + 1) + 1 would be 256
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [[258.0]]
    assert indices.tolist() == [[0]]
    # 257 and 256 round to one bfloat16 number, yet rank apart.
    values, indices = product_key_topk(rows([256.0, 0.0, 1.0]).bfloat16(), (1, 2), 1)
    assert (values.tolist(), indices.tolist()) == ([[256.0]], [[1]])


def test_zeros_of_either_sign_are_equal_and_keep_their_sign() -> None:
    values, indices = product_key_topk(rows([0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, -0.0, 0.0]), (4,), 2)
    assert indices.tolist() == [[0, 1], [0, 1]]
    assert values.signbit().tolist() == [[False, True], [True, False]]
    values, indices = product_key_topk(rows([-0.0, 0.0, -0.0, 0.0]), (2, 2), 2)
    assert indices.tolist() == [[0, 1]]
    assert values.signbit().tolist() == [[True, False]]


def test_slot_ids_beyond_int32() -> None:
    factors = (2048, 2048, 2048)
    scores = laid_out((2, sum(factors)), "contiguous", torch.float32, seed=5)
    scores[:, 2047] += 10
    values, indices = product_key_topk(scores, factors, 6)
    assert indices.min() > 2**32
    exactly((values, indices), reference.product_key_topk(scores, factors, 6))


def test_bits_do_not_depend_on_the_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = laid_out((3, 11, 31), "contiguous", torch.bfloat16, seed=1)
    whole = product_key_topk(scores, (16, 15), 20)
    monkeypatch.setattr(topk, "_SLAB_ENTRIES", 200)
    exactly(product_key_topk(scores, (16, 15), 20), whole)


# --- scores that are not finite ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("factors", "k"), [((6, 5), 7), ((3, 4, 2), 11), ((9,), 5), ((4, 3), 12)])
def test_nan_and_infinite_scores_follow_the_rule(factors: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, 2.0, -1.0], dtype=dtype)
    for kinds in (8, 3, 1):  # from a few to nothing but NaN
        scores = special[torch.randint(kinds, (60, sum(factors)), generator=generator)]
        values, indices = product_key_topk(scores, factors, k)
        exactly((values, indices), reference.product_key_topk(scores, factors, k))
        assert indices.min() >= 0 and indices.max() < math.prod(factors)
        assert (indices.diff(dim=-1) > 0).all()


def test_nan_ranks_after_minus_infinity() -> None:
    values, indices = product_key_topk(rows([NAN, -INF, NAN, 3.0]), (4,), 3)
    exactly((values, indices), (rows([NAN, -INF, 3.0]), torch.tensor([[0, 1, 3]])))
    values, indices = product_key_topk(rows([NAN, 1.0, -INF, 0.0]), (2, 2), 2)
    exactly((values, indices), (rows([-INF, 1.0]), torch.tensor([[2, 3]])))


def test_opposite_infinities_make_a_nan_that_ranks_last() -> None:
    scores = rows([INF, 0.0, -INF, -2.0])
    exactly(product_key_topk(scores, (2, 2), 2), (rows([INF, -2.0]), torch.tensor([[1, 3]])))
    # Slot 2 would be better than slot 0's NaN, but is the worst pair of ranks and no candidate for k = 3.
    exactly(product_key_topk(scores, (2, 2), 3), (rows([NAN, INF, -2.0]), torch.tensor([[0, 1, 3]])))


def test_a_nan_row_leaves_the_others_alone() -> None:
    scores = laid_out((3, 12), "contiguous", torch.float32, seed=2)
    clean = product_key_topk(scores, (5, 7), 6)
    scores[1] = NAN
    values, indices = product_key_topk(scores, (5, 7), 6)
    exactly((values[::2], indices[::2]), (clean[0][::2], clean[1][::2]))
    assert indices[1].tolist() == [0, 1, 2, 3, 4, 5]


# --- gradients ---


@samples
def test_gradients_equal_the_reference_exactly(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(7)
    scores = sample.scores().detach()
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    values, indices = product_key_topk(ours, sample.factors, sample.k)
    expected, _ = reference.product_key_topk(theirs, sample.factors, sample.k)
    # Small integers: the sums over the slots that share a column are exact in any order.
    gradient = torch.randint(-4, 5, values.shape, generator=generator).to(values.dtype)
    values.backward(gradient)
    expected.backward(gradient)
    assert not indices.requires_grad
    exactly([ours.grad], [theirs.grad])


@pytest.mark.parametrize("sample", [s for s in SAMPLES if math.prod(s.factors) < 120], ids=lambda s: s.name)
def test_gradcheck(sample: Sample) -> None:
    scores = sample.scores(torch.float64).clone().requires_grad_()
    torch.autograd.gradcheck(lambda s: product_key_topk(s, sample.factors, sample.k)[0], (scores,))


def test_expanded_gradients() -> None:
    scores = laid_out((2, 5), "contiguous", torch.float32, seed=4).requires_grad_()
    product_key_topk(scores, (2, 3), 6)[0].sum().backward()
    exactly([scores.grad], [rows([3.0, 3.0, 2.0, 2.0, 2.0]).expand(2, 5)])


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    scores = torch.zeros(5, dtype=torch.bfloat16, requires_grad=True)
    values, _ = product_key_topk(scores, (1, 4), 4)
    values.backward(torch.tensor([256.0, 1.0, 1.0, 2.0], dtype=torch.bfloat16))
    assert scores.grad.tolist() == [260.0, 256.0, 1.0, 1.0, 2.0]


def test_float64_gradients_are_summed_in_float64() -> None:
    scores = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    values, _ = product_key_topk(scores, (1, 2), 2)
    values.backward(torch.tensor([1.0, 2.0**-40], dtype=torch.float64))
    assert scores.grad.tolist() == [1 + 2.0**-40, 1.0, 2.0**-40]


def test_a_second_backward_through_one_call_agrees() -> None:
    scores = laid_out((3, 9), "contiguous", torch.float32, seed=6).requires_grad_()
    values, _ = product_key_topk(scores, (4, 5), 7)
    first = torch.autograd.grad(values.sum(), scores, retain_graph=True)
    exactly(torch.autograd.grad(values.sum(), scores), first)
    assert first[0].sum() == 3 * 7 * 2


def test_double_backward_raises() -> None:
    scores = laid_out((3, 9), "contiguous", torch.float32, seed=6).requires_grad_()
    weights = torch.ones(3, 7, requires_grad=True)
    values, _ = product_key_topk(scores, (4, 5), 7)
    (gradient,) = torch.autograd.grad(values, scores, weights, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


# --- as an operator ---


@samples
def test_opcheck_forward(sample: Sample) -> None:
    torch.library.opcheck(FORWARD, (sample.scores(), list(sample.factors), sample.k))
    torch.library.opcheck(FORWARD, (sample.scores().clone().requires_grad_(), list(sample.factors), sample.k))


@samples
def test_opcheck_backward(sample: Sample) -> None:
    values, indices = product_key_topk(sample.scores(), sample.factors, sample.k)
    torch.library.opcheck(BACKWARD, (values, indices, list(sample.factors)))


@samples
def test_fake_outputs_match_real_ones(sample: Sample) -> None:
    scores = sample.scores()
    values, indices = real = FORWARD(scores, list(sample.factors), sample.k)
    # A gradient in the layout of the scores, so that the backward meets every layout as well.
    gradient = laid_out(values.shape, sample.layout, values.dtype, seed=8)
    real += (BACKWARD(gradient, indices, list(sample.factors)),)
    mode = FakeTensorMode()
    with mode:
        fake = FORWARD(mode.from_tensor(scores), list(sample.factors), sample.k)
        fake += (BACKWARD(mode.from_tensor(gradient), fake[1], list(sample.factors)),)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
        assert a.is_contiguous()


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_memory_layout_does_not_matter(layout: str) -> None:
    scores = laid_out((3, 4, 15), layout, torch.float32, seed=9)
    assert not scores.is_contiguous()
    values, indices = product_key_topk(scores, (6, 9), 8)
    exactly((values, indices), product_key_topk(scores.contiguous(), (6, 9), 8))
    gradient = laid_out((3, 4, 8), layout, torch.float32, seed=10)
    assert not gradient.is_contiguous()
    exactly([BACKWARD(gradient, indices, [6, 9])], [BACKWARD(gradient.contiguous(), indices, [6, 9])])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    def loss(scores: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = product_key_topk(scores * 2, (5, 7), 6)
        return (values * indices).sum(-1), indices

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=counter)
    lengths = (3, 4, 5, 8) if dynamic else (4, 4)
    for length in lengths:
        scores = laid_out((2, length, 12), "contiguous", torch.float32, seed=length)
        eager, traced = scores.clone().requires_grad_(), scores.clone().requires_grad_()
        expected, got = loss(eager), compiled(traced)
        exactly(got, expected)
        expected[0].sum().backward()
        got[0].sum().backward()
        exactly([traced.grad], [eager.grad])
    assert counter.frame_count == 1


@pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
def test_compiles_through_inductor() -> None:
    torch._dynamo.reset()

    def weights(scores: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = product_key_topk(scores.transpose(0, 1), (5, 7), 6)
        return values.softmax(-1), indices

    scores = laid_out((4, 3, 12), "contiguous", torch.float32, seed=11)
    values, indices = torch.compile(weights, fullgraph=True)(scores)
    expected, expected_indices = weights(scores)
    torch.testing.assert_close(values, expected)
    exactly([indices], [expected_indices])


# --- errors: the same text from the kernel and from the fake kernel ---

ERRORS = [
    ("float16", torch.zeros(2, 7).half(), (3, 4), 2, UnsupportedConfigurationError, "scores has dtype torch.float16"),
    ("integers", torch.zeros(2, 7).int(), (3, 4), 2, UnsupportedConfigurationError, "scores has dtype torch.int32"),
    ("no dimension", torch.zeros(()), (1,), 1, ValueError, r"scores has shape \(\); expected .* 1\]"),
    ("wrong width", torch.zeros(2, 8), (3, 4), 2, ValueError, r"scores has shape \(2, 8\); expected .* 7\]"),
    ("no factors", torch.zeros(2, 0), (), 1, ValueError, r"factors is \[\]"),
    ("factor of width 0", torch.zeros(2, 3), (3, 0), 1, ValueError, r"factors is \[3, 0\]"),
    ("negative factor", torch.zeros(2, 3), (4, -1), 1, ValueError, r"factors is \[4, -1\]"),
    ("too many slots", torch.zeros(2, 3), (2**31, 2**31), 1, UnsupportedConfigurationError, r"supported are 2\*\*61"),
    ("k of zero", torch.zeros(2, 7), (3, 4), 0, ValueError, "k is 0; supported are 1 to 256"),
    ("k above 256", torch.zeros(2, 40), (20, 20), 257, ValueError, "k is 257; supported are 1 to 256"),
    ("k above the slots", torch.zeros(2, 7), (3, 4), 13, ValueError, r"k is 13; factors \[3, 4\] make only 12 slots"),
]


@pytest.mark.parametrize(
    ("scores", "factors", "k", "error", "text"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_errors(scores: Tensor, factors: tuple[int, ...], k: int, error: type[ValueError], text: str) -> None:
    with pytest.raises(error, match=text):
        product_key_topk(scores, factors, k)
    mode = FakeTensorMode()
    with mode, pytest.raises(error, match=text):
        product_key_topk(mode.from_tensor(scores), factors, k)


def test_one_number_for_the_factors() -> None:
    with pytest.raises(TypeError, match=r"factors is 8; expected the width of each factor, such as \[8, 8\]"):
        product_key_topk(torch.zeros(2, 16), 8, 2)  # type: ignore[arg-type]


BACKWARD_ERRORS = [
    ("float16", torch.zeros(2, 3).half(), torch.zeros(2, 3).long(), "dvalues has dtype torch.float16"),
    ("int32 indices", torch.zeros(2, 3), torch.zeros(2, 3).int(), "indices has dtype torch.int32"),
    ("another shape", torch.zeros(2, 3), torch.zeros(2, 4).long(), r"indices has shape \(2, 4\)"),
    ("no dimension", torch.zeros(()), torch.zeros(()).long(), "dvalues has no dimensions"),
    (
        "another device",
        torch.zeros(2, 3),
        torch.zeros(2, 3, device="meta").long(),
        "indices is on meta; expected cpu, where dvalues is",
    ),
]


@pytest.mark.parametrize(
    ("dvalues", "indices", "text"), [e[1:] for e in BACKWARD_ERRORS], ids=[e[0] for e in BACKWARD_ERRORS]
)
def test_backward_errors(dvalues: Tensor, indices: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BACKWARD(dvalues, indices, [3, 4])


def test_backward_rejects_ids_out_of_range() -> None:
    for slot in (12, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            BACKWARD(torch.ones(1, 1), torch.tensor([[slot]]), [3, 4])
