"""Product-key top-k: the k best of prod(n) slots, found without scoring them all.

A slot (c_0, .., c_{F-1}) is row (..(c_0 n_1 + c_1)..) n_{F-1} + c_{F-1} of its head and scores the sum of its F
factor scores, added in factor order in float32. Rank each factor's columns, then fold the factors left to right: the
pair of the i-th best prefix and the j-th best column has (i + 1)(j + 1) pairs, itself among them, that score at least
as much, so only pairs with (i + 1)(j + 1) <= k can be among the k best: about k ln k of them, whatever the widths.

    scores [..., sum(n)]  ->  values [..., k] (input dtype), indices [..., k] (int64, ascending)

Best first means: by score, NaN last, equal ones (0.0 and -0.0 are equal) by the smaller column or slot id. Rounding can
make two sums equal whose factor scores are not; the rule decides such ties as the fold meets them.

Ops: `sdm::product_key_topk`, differentiable in the scores, and `sdm::product_key_topk_bwd`. SPEC section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import (
    MAX_WIDTH,
    UnsupportedConfigurationError,
    accumulate_dtype,
    check_devices,
    check_float,
    check_range,
    check_shape,
)
from .registry import register

MAX_SLOTS = 2**61  # slot ids, and three times their number, stay within int64
_SLAB_ENTRIES = 2**18  # candidates that are in memory at once


def _check_topk(scores: Tensor, factors: Sequence[int], k: int) -> None:
    check_float("scores", scores)
    width = _check_factors(factors)
    if scores.dim() < 1 or scores.shape[-1] != width:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; expected [..., sum(factors)] = [..., {width}]")
    check_range("k", k, 1, MAX_WIDTH)
    if k > math.prod(factors):
        raise ValueError(f"k is {k}; factors {list(factors)} make only {math.prod(factors)} slots")


def _check_topk_bwd(dvalues: Tensor, indices: Tensor, factors: Sequence[int]) -> None:
    check_float("dvalues", dvalues)
    _check_factors(factors)
    if indices.dtype != torch.int64:
        raise ValueError(f"indices has dtype {indices.dtype}; expected int64, as product_key_topk returns them")
    if dvalues.dim() < 1:
        raise ValueError("dvalues has no dimensions; expected [..., k]")
    check_shape("indices", indices, dvalues.shape, "the shape of dvalues")
    check_devices(dvalues=dvalues, indices=indices)


def _check_factors(factors: Sequence[int]) -> int:
    """The width of all factors together."""
    if not factors or min(factors) < 1:
        raise ValueError(f"factors is {list(factors)}; expected one positive width per factor")
    if math.prod(factors) > MAX_SLOTS:
        raise UnsupportedConfigurationError(
            f"factors {list(factors)} make {math.prod(factors)} slots; supported are 2**61"
        )
    return sum(factors)


def _empty_topk_outputs(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


def _empty_topk_bwd_outputs(dvalues: Tensor, factors: Sequence[int]) -> Tensor:
    return dvalues.new_empty((*dvalues.shape[:-1], sum(factors)))


def _topk_fwd_fake(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    _check_topk(scores, factors, k)
    return _empty_topk_outputs(scores, k)


def _topk_bwd_fake(dvalues: Tensor, indices: Tensor, factors: Sequence[int]) -> Tensor:
    _check_topk_bwd(dvalues, indices, factors)
    return _empty_topk_bwd_outputs(dvalues, factors)


def _topk_fwd_cpu(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    _check_topk(scores, factors, k)
    values, indices = _empty_topk_outputs(scores, k)
    pairs = _candidate_pairs(k, k, k)[0].numel()
    slab = max(1, _SLAB_ENTRIES // max(pairs, sum(factors)))
    rows = (scores.reshape(-1, sum(factors)), values.view(-1, k), indices.view(-1, k))
    for some_scores, some_values, some_indices in zip(*(x.split(slab) for x in rows), strict=True):
        best = _fold(some_scores.to(accumulate_dtype(scores.dtype)), factors, k)
        some_values.copy_(best[0])
        some_indices.copy_(best[1])
    return values, indices


def _topk_fwd_cuda(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    from .topk_kernels import launch_topk

    _check_topk(scores, factors, k)
    values, indices = _empty_topk_outputs(scores, k)
    launch_topk(scores.reshape(-1, sum(factors)).contiguous(), factors, k, values.view(-1, k), indices.view(-1, k))
    return values, indices


def _fold(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k best slots of rows [n, sum(factors)]: their scores and ids [n, k], by ascending id."""
    first, *others = scores.split(list(factors), dim=-1)
    best, ids = first, _columns(first)
    for part in others:
        prefix, prefix_ids = _ranked(best, ids, k)
        column, column_ids = _ranked(part, _columns(part), k)
        i, j = _candidate_pairs(prefix.shape[-1], column.shape[-1], k)
        sums = prefix.index_select(-1, i) + column.index_select(-1, j)
        slots = prefix_ids.index_select(-1, i) * part.shape[-1] + column_ids.index_select(-1, j)
        best, ids = _best(sums, slots, k)
    return (best, ids) if others else _best(best, ids, k)


def _columns(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1]).expand(scores.shape)


def _ranked(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best (all, if fewer) of each row, best first. The ids ascend."""
    order = (-scores).sort(dim=-1, stable=True).indices[..., :k]
    return scores.gather(-1, order), ids.gather(-1, order)


def _best(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best (all, if fewer) of each row, by ascending id. The ids are distinct, in any order."""
    k = min(k, scores.shape[-1])
    cost = -scores  # ascending cost is best first; NaN comes last
    last = cost.kthvalue(k, dim=-1, keepdim=True).values
    # Whatever costs less than the last is in; where costs equal it (NaN equals NaN), the smaller ids fill what is left.
    # If the last is NaN, all count as worse, and not_better alone tells them apart.
    not_better = (cost >= last) | cost.isnan()
    worse = ~(cost <= last)
    key = ids + MAX_SLOTS * (not_better.to(torch.int64) + worse.to(torch.int64))
    chosen = key.topk(k, dim=-1, largest=False, sorted=False).indices
    ids, order = ids.gather(-1, chosen).sort(dim=-1)
    return scores.gather(-1, chosen.gather(-1, order)), ids


def _candidate_pairs(prefixes: int, columns: int, k: int) -> tuple[Tensor, Tensor]:
    """The ranks (i, j) with (i + 1)(j + 1) <= k."""
    i, j = torch.arange(1, prefixes + 1), torch.arange(1, columns + 1)
    rows, cols = (i[:, None] * j <= k).nonzero().unbind(1)
    return rows, cols


def _topk_bwd_cpu(dvalues: Tensor, indices: Tensor, factors: Sequence[int]) -> Tensor:
    _check_topk_bwd(dvalues, indices, factors)
    dscores = _empty_topk_bwd_outputs(dvalues, factors)
    k = dvalues.shape[-1]
    sums = dscores.new_zeros((dvalues.shape[:-1].numel(), sum(factors)), dtype=accumulate_dtype(dvalues.dtype))
    gradient, rest = dvalues.reshape(-1, k).to(sums.dtype), indices.reshape(-1, k)
    slots = math.prod(factors)
    for part, n in zip(sums.split(list(factors), dim=-1), factors, strict=True):
        slots //= n
        # A row's slots are added one after the other, in the order that they are stored in.
        part.scatter_add_(-1, rest // slots, gradient)
        rest = rest % slots
    return dscores.copy_(sums.view(dscores.shape))


def _topk_bwd_cuda(dvalues: Tensor, indices: Tensor, factors: Sequence[int]) -> Tensor:
    from .topk_kernels import launch_topk_bwd

    _check_topk_bwd(dvalues, indices, factors)
    dscores = _empty_topk_bwd_outputs(dvalues, factors)
    k, width = dvalues.shape[-1], sum(factors)
    launch_topk_bwd(
        dvalues.reshape(-1, k).contiguous(), indices.reshape(-1, k).contiguous(), factors, dscores.view(-1, width)
    )
    return dscores


def _topk_setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[int], int], output: tuple[Tensor, Tensor]) -> None:
    _, ctx.factors, _ = inputs
    _, indices = output
    ctx.mark_non_differentiable(indices)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices)


def _topk_backward(ctx: Any, dvalues: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
    if dvalues is None:
        return None, None, None
    (indices,) = ctx.saved_tensors
    return _topk_bwd(dvalues, indices, ctx.factors), None, None


_topk = register(
    "product_key_topk(Tensor scores, int[] factors, int k) -> (Tensor values, Tensor indices)",
    cpu=_topk_fwd_cpu,
    cuda=_topk_fwd_cuda,
    fake=_topk_fwd_fake,
    setup_context=_topk_setup_context,
    backward=_topk_backward,
)
_topk_bwd = register(
    "product_key_topk_bwd(Tensor dvalues, Tensor indices, int[] factors) -> Tensor dscores",
    cpu=_topk_bwd_cpu,
    cuda=_topk_bwd_cuda,
    fake=_topk_bwd_fake,
)


def product_key_topk(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k best product-key slots. Equivalent code, for two factors and up to ties:
    `(scores[..., :n0, None] + scores[..., None, n0:]).flatten(-2).topk(k)`, then sorted by index.

    Args:
        scores: [..., sum(factors)] bfloat16 or float32 (float64 on the CPU); each factor's scores side by side.
        factors: the width of each factor; prod(factors) slots.
        k: 1 to 256, and at most the number of slots.
    Returns:
        values: [..., k], the chosen slots' scores: float32 sums, rounded once to the dtype of `scores`.
        indices: [..., k] int64, the chosen slots in ascending order: distinct and in range, whatever the scores.
    Raises:
        ValueError: the widths do not fit `scores`, or k exceeds the number of slots.
        UnsupportedConfigurationError: a dtype not named above, k out of 1..256, or more than 2**61 slots.
        TypeError: factors is one int.
    Note: deterministic, also backward: each value's gradient is added to the F columns that its slot was chosen by.
    Equal scores at the last place: the smaller slot id wins; NaN ranks last. SPEC section 6.
    """
    if isinstance(factors, int):
        raise TypeError(f"factors is {factors}; expected the width of each factor, such as [{factors}, {factors}]")
    return _topk(scores, list(factors), k)
