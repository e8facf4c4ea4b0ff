"""The kernels of the dual matmul's and the solve's backward, at every block size: interpreted, and on a GPU.

Inputs are small integers, so that every sum is exact, in TF32 too. The interpreter has to be chosen before Triton is
imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sdm_compile.ops.dual_matmul import _dual_matmul_bwd_cpu, _dual_matmul_bwd_cuda
from sdm_compile.ops.solve import _solve_bwd_cpu, _solve_bwd_cuda
from tests.harness import assert_close, assert_same_bits, in_float64, normal_like
from tests.interpreted import in_the_interpreter, run_interpreted

triton = pytest.importorskip("triton")
from sdm_compile.ops.dual_matmul_kernels import (  # noqa: E402
    lower_matmul_call,
    outer_product_call,
    transposed_lower_matmul_call,
    values_backward_call,
)
from sdm_compile.ops.solve_kernels import beta_backward_call, lower_product_call  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
every_precision = pytest.mark.parametrize(  # the interpreter knows only one
    ("device", "precision"),
    [
        pytest.param("cpu", "highest", marks=in_the_interpreter),
        *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in ("highest", "high", "medium")),
    ],
    indirect=["precision"],
)
# Chunks of one block of every size, of several, and ragged; columns likewise.
every_size = pytest.mark.parametrize(
    ("chunk", "width"), [(1, 1), (16, 3), (17, 40), (63, 65), (64, 130), (65, 20), (130, 33)]
)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def integers(*shape: int, seed: int = 0, top: int = 3) -> Tensor:
    """From -top to top, in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, shape, generator=generator).float()


def to(device: str, *tensors: Tensor) -> list[Tensor]:
    return [x.to(device) for x in tensors]


def assert_same_numbers(got: Any, expected: Any) -> None:
    """As `assert_same_bits`, but of a zero either sign will do: in a sum it depends on the order."""
    assert_same_bits(*(tree_map(lambda x: x + 0.0, xs) for xs in (got, expected)))


def unwritten(*shape: int, device: str) -> Tensor:
    return torch.full(shape, NAN, device=device)


# --- the dual matmul ---


def dual_matmul_args(chunk: int, width: int, dtype: torch.dtype, mask: tuple[bool, ...] = (True,) * 6) -> list[Any]:
    ddelta, dreadings, v, retrieved = (integers(2, chunk, width, seed=i) for i in range(4))
    X, QX = (integers(2, chunk, chunk, seed=i, top=2).tril() for i in range(2))
    return [ddelta, dreadings.to(dtype), X, QX, v.to(dtype), integers(2, chunk, 1, seed=5), retrieved, list(mask)]


def dual_matmul_bwd(args: list[Any], device: str) -> list[Tensor]:
    return [x.cpu() for x in _dual_matmul_bwd_cuda(*to(device, *args[:-1]), args[-1])]


@every_precision
@every_dtype
@every_size
def test_dual_matmul_bwd(chunk: int, width: int, precision: str, dtype: torch.dtype, device: str) -> None:
    args = dual_matmul_args(chunk, width, dtype)
    got, expected = dual_matmul_bwd(args, device), _dual_matmul_bwd_cpu(*in_float64(args))
    assert [x.dtype for x in got] == [F32, F32, dtype, F32, F32, F32]
    assert_close(got[2], expected[2])  # the one that is rounded to the bank's dtype
    assert_same_numbers([x.double() for x in got], [got[2].double() if i == 2 else x for i, x in enumerate(expected)])


@every_device
@pytest.mark.parametrize("wanted", range(6))
def test_each_gradient_alone(wanted: int, device: str) -> None:
    together = dual_matmul_bwd(dual_matmul_args(9, 20, BF16), device)
    alone = dual_matmul_bwd(dual_matmul_args(9, 20, BF16, tuple(i == wanted for i in range(6))), device)
    assert_same_bits(alone, [x if i == wanted else x.new_zeros(0) for i, x in enumerate(together)])


@every_device
def test_other_strides(device: str) -> None:
    args = dual_matmul_args(9, 20, F32)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(x, Tensor) else x for x in args]
    assert not any(x.is_contiguous() for x in strided[:-1])
    assert_same_bits(dual_matmul_bwd(strided, device), dual_matmul_bwd(args, device))


@every_device
@every_dtype
@every_size
def test_transposed_lower_matmul(chunk: int, width: int, dtype: torch.dtype, device: str) -> None:
    X, a = integers(3, chunk, chunk).tril(), integers(3, chunk, width, seed=1).to(dtype)
    X, a, plus = to(device, X, a, integers(3, chunk, width, seed=2))
    expected = X.double().mT @ a.double()
    out = unwritten(3, chunk, width, device=device)
    transposed_lower_matmul_call(X, a, out, dtype).launch()
    assert_same_numbers(out.double(), expected)
    transposed_lower_matmul_call(X, a, out, dtype, plus=plus, many=True).launch()
    assert_same_numbers(out.double(), expected + plus)
    transposed_lower_matmul_call(X, a, out, dtype, plus=out).launch()
    assert_same_numbers(out.double(), 2 * expected + plus)


@every_device
@every_dtype
@every_size
def test_an_upper_matrix_is_a_lower_one_transposed(chunk: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Tiles that are all below the diagonal are not read."""
    X, a, plus = integers(3, chunk, chunk).tril(), integers(3, chunk, width, seed=1), integers(3, chunk, width, seed=2)
    X, a, plus = to(device, X, a.to(dtype), plus)
    upper = X.mT.contiguous()
    upper[:, 64:, :64] = NAN
    for many in (False, True):
        out, expected = (unwritten(3, chunk, width, device=device) for _ in range(2))
        lower_matmul_call(upper, a, out, dtype, upper=True, many=many).launch()
        transposed_lower_matmul_call(X, a, expected, dtype, many=many).launch()
        assert_same_numbers(out, expected)
        assert_same_numbers(out.double(), X.double().mT @ a.double())
        for x, matrix, options in ((out, upper, {"upper": True}), (expected, X, {"transposed": True})):
            x.copy_(plus)
            lower_matmul_call(matrix, a, x, dtype, plus=x, many=many, **options).launch()
        assert_same_numbers(out, expected)
        assert_same_numbers(out.double(), X.double().mT @ a.double() + plus)


@every_device
@every_dtype
@every_size
def test_outer_product(chunk: int, width: int, dtype: torch.dtype, device: str) -> None:
    a, b = to(device, integers(3, chunk, width), integers(3, chunk, width, seed=1).to(dtype))
    product = a.double() @ b.double().mT
    for tril, negative, expected in ((None, False, product), (0, False, product.tril()), (-1, True, -product.tril(-1))):
        out = unwritten(3, chunk, chunk, device=device)
        outer_product_call(a, b, out, dtype, tril, negative).launch()
        assert_same_numbers(out.double(), expected)


@every_device
@every_dtype
@pytest.mark.parametrize("width", [1, 5, 1024, 1025, 16385])
def test_values_backward(width: int, dtype: torch.dtype, device: str) -> None:
    """Rows of one block and of several; each output alone as among all."""
    du, v, retrieved = (integers(2, 3, width, seed=i) for i in range(3))
    du, v, retrieved, beta = to(device, du, v.to(dtype), retrieved, integers(2, 3, 1, seed=3))
    expected = beta * du, ((v - retrieved) * du).sum(-1, keepdim=True), -beta * du
    outs = [unwritten(*x.shape, device=device) for x in expected]
    values_backward_call(du, v, beta, retrieved, *outs).launch()
    assert_same_numbers(outs, expected)
    for i, x in enumerate(expected):
        out = unwritten(*x.shape, device=device)
        values_backward_call(du, v, beta, retrieved, *(out if i == j else None for j in range(3))).launch()
        assert_same_numbers(out, x)


@every_device
@every_dtype
@pytest.mark.parametrize(("first_token", "tokens"), [(0, 12), (0, 9), (4, 13), (8, 18)])
@pytest.mark.parametrize("width", [5, 1025])
def test_values_backward_to_a_call(width: int, first_token: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    """dv goes to the call's tokens from the first on, none beyond its end; dbeta has something added to it."""
    streams, chunk = 2, 4
    steps = min(3, -(-(tokens - first_token) // chunk))
    sizes = (steps, streams, chunk)
    du, v, retrieved = (integers(*sizes, width, seed=i) for i in range(3))
    beta, plus = (integers(*sizes, 1, seed=i) for i in (3, 4))
    staged = (du, v.to(dtype), beta, retrieved)
    du, v, beta, retrieved, plus = to(device, *(x.flatten(0, 1) for x in (*staged, plus)))
    # One chunk after the other: [P, T, D] with room for what the last one has too much.
    expected = torch.full((streams, first_token + steps * chunk + tokens, width), NAN)
    rows = (staged[2] * staged[0]).transpose(0, 1).flatten(1, 2)
    expected[:, first_token : first_token + steps * chunk] = rows
    expected = expected[:, :tokens]
    dbeta = ((v - retrieved) * du).sum(-1, keepdim=True)
    for dv_dtype in (F32, BF16):
        for inplace in (False, True):
            fence = torch.full((streams + 2, tokens, width), NAN, dtype=dv_dtype, device=device)
            out = plus.clone() if inplace else unwritten(*plus.shape, device=device)
            values_backward_call(
                *(du, v, beta, retrieved),
                dv=fence[1:-1],
                dbeta=out,
                plus=out if inplace else plus,
                unstage=(first_token, streams),
            ).launch()
            assert_same_numbers(fence[1:-1].cpu(), expected.to(dv_dtype))
            assert fence[[0, -1]].isnan().all()
            assert_same_numbers(out, dbeta + plus)


@every_device
@pytest.mark.parametrize("unstage", [None, (3, 2)])
def test_values_of_tokens_without_a_write_get_nothing(unstage: tuple[int, int] | None, device: str) -> None:
    """Beside NaN and infinities too: that token wrote nothing."""
    du, beta = integers(2, 3, 6) + 0.5, integers(2, 3, 1, seed=1) + 4
    du[0, 1], du[1, 0, 2:4] = NAN, torch.tensor([INF, -INF])
    beta[0, 1], beta[1, 0], beta[1, 2] = 0.0, -0.0, 0.0
    expected = (beta * du).masked_fill(beta == 0, 0)
    assert expected.isfinite().all() and expected.count_nonzero() == 18
    du, beta = to(device, du, beta)
    dv = unwritten(2, 3 if unstage is None else 6, 6, device=device)
    values_backward_call(du, du, beta, du, dv=dv, unstage=unstage).launch()
    assert_same_bits(dv[:, -3:].cpu(), expected)
    assert dv[:, :-3].isnan().all()


# --- the solve ---

every_chunk = pytest.mark.parametrize("chunk", [1, 9, 16, 17, 32, 65])


@every_device
@every_chunk
@pytest.mark.parametrize("transposed", ["neither", "a", "b"])
def test_lower_product(chunk: int, transposed: str, device: str) -> None:
    """What lies above a diagonal is not read."""
    a, b, plus = to(device, *(integers(3, chunk, chunk, seed=i) for i in range(3)))
    left, right = a.double().tril(), b.double().tril()
    product = (left.mT if transposed == "a" else left) @ (right.mT if transposed == "b" else right)
    above = torch.ones(chunk, chunk, device=device).triu(1).bool()
    for negative, added, expected in ((False, None, product), (False, plus, product + plus), (True, None, -product)):
        out = unwritten(3, chunk, chunk, device=device)
        lower_product_call(
            *(x.masked_fill(above, NAN) for x in (a, b)),
            out,
            transpose_a=transposed == "a",
            transpose_b=transposed == "b",
            plus=added,
            negative=negative,
        ).launch()
        assert_same_numbers(out.double(), expected.tril())


@every_device
@every_chunk
def test_beta_backward(chunk: int, device: str) -> None:
    dB, A = (integers(2, 3, chunk, chunk, seed=i).tril(-1) for i in range(2))
    dB, A, beta = to(device, dB, A, integers(2, 3, chunk, 1, seed=2))
    above = torch.ones(chunk, chunk, device=device).triu().bool()
    dA, dbeta = unwritten(*A.shape, device=device), unwritten(*beta.shape, device=device)
    beta_backward_call(dB.masked_fill(above, NAN), A.masked_fill(above, NAN), beta, dA, dbeta).launch()
    assert_same_numbers(dA, beta * dB)
    assert_same_numbers(dbeta, (A * dB).sum(-1, keepdim=True))


@every_precision
@every_chunk
def test_solve_bwd(chunk: int, precision: str, device: str) -> None:
    """In IEEE float32 whatever the setting; what the upper triangles of A and QK hold is not read."""
    A = normal_like(torch.empty(2, 3, chunk, chunk), 1) / max(1, chunk / 8)
    QK, beta = normal_like(A, 2), torch.sigmoid(normal_like(A[..., :1], 3))
    X = torch.linalg.inv(torch.eye(chunk) + beta.double() * A.double().tril(-1)).float()
    args = normal_like(A, 4), normal_like(A, 5), A, QK, beta, X
    expected = _solve_bwd_cpu(*in_float64(args))
    above = torch.ones(chunk, chunk).triu().bool()
    dX, dQX, _, _, _, _ = args
    dirty = dX, dQX, A.masked_fill(above, NAN), QK.masked_fill(above ^ torch.eye(chunk).bool(), NAN), beta, X
    assert_close([x.cpu() for x in _solve_bwd_cuda(*to(device, *dirty))], expected)


@every_device
def test_solve_bwd_keeps_every_bit(device: str) -> None:
    """With X and QK the identity the gradients are those given, whose 24 bits TF32 would cut to 11."""
    eye = torch.eye(33).expand(1, 2, 33, 33)
    dX, dQX = (integers(1, 2, 33, 33, seed=i, top=2**22) for i in range(2))
    beta = torch.full((1, 2, 33, 1), 2.0)
    dA, dQK, dbeta = (x.cpu() for x in _solve_bwd_cuda(*to(device, dX, dQX, eye, eye, beta, eye)))
    assert_same_numbers(dA, -2 * (dX + dQX).tril(-1))
    assert_same_numbers(dQK, dQX.tril())
    assert not dbeta.any()


@every_device
def test_nothing_at_all(device: str) -> None:
    args = dual_matmul_args(4, 3, F32)
    none = [x[:0] if isinstance(x, Tensor) else x for x in args]
    assert [x.shape[0] for x in dual_matmul_bwd(none, device)] == [0] * 6
    eye, beta = torch.empty(2, 0, 4, 4, device=device), torch.empty(2, 0, 4, 1, device=device)
    assert [x.numel() for x in _solve_bwd_cuda(eye, eye, eye, eye, beta, eye)] == [0] * 3
