"""Draft and commit: tokens that the bank takes only once they are accepted (SPEC section 8).

    readings, new_rows, slots = the decode step for T tokens in a row, every written row kept beside the bank
    bank[slots] = new_rows        of the accepted tokens' writes to a slot the last one

bank [num_slots, D]; every input [P, T, *]. A draft has the bits of T decode steps. Ops: `draft`, `commit_`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .checks import (
    check_contiguous_bank,
    check_devices,
    check_dtype,
    check_float,
    check_ids_in_bank,
    check_range,
    check_rank,
    check_shape,
    check_staged_ids,
    check_token_inputs,
    made_in_inference_mode,
)
from .decode import decode_tokens, token_dispatch
from .dispatch import record
from .layout import empty
from .registry import register
from .repeats import repeat_count
from .rows import load_rows, store_rows_
from .situation import runs_now

MAX_TOKENS = 64  # of a draft: the ids of each are compared with those of all


def _check_draft(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> None:
    check_token_inputs(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    check_range("the number of drafted tokens T (second dimension of k_idx)", k_idx.shape[1], 0, MAX_TOKENS)


def _empty_draft_outputs(memory: Tensor, k_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    streams, tokens, writes = k_idx.shape
    return (
        empty((streams, tokens, memory.shape[1]), memory),
        empty((streams, tokens, writes, memory.shape[1]), memory),
        empty((streams, tokens, writes), k_idx, torch.int32),
    )


def _draft_cpu(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check_draft(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    check_ids_in_bank(memory.shape[0], k_idx=k_idx, q_idx=q_idx)
    outs = readings, new_rows, slots = _empty_draft_outputs(memory, k_idx)
    # Decode steps on a bank of the touched rows alone.
    ids = torch.cat([k_idx.long(), q_idx.long()], dim=-1)
    touched, place = ids.unique(return_inverse=True)
    small = load_rows(memory, touched, memory.dtype)
    k_place, q_place = torch.where(ids < 0, -1, place).split([k_idx.shape[2], q_idx.shape[2]], dim=-1)
    for t in range(k_idx.shape[1]):
        inputs = (x[:, t].contiguous() for x in (k_place, k_val, v, beta, g, q_place, q_val))
        readings[:, t], written = decode_tokens(small, *inputs)
        slots[:, t] = torch.where(written, k_idx[:, t], -1)
        new_rows[:, t] = load_rows(small, torch.where(written, k_place[:, t], -1), memory.dtype)
    _record("cpu", memory, k_idx, q_idx)
    return outs


def _draft_cuda(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from .draft_kernels import launch_draft  # Triton is not installed everywhere

    inputs = (k_idx, k_val, v, beta, g, q_idx, q_val)
    _check_draft(memory, *inputs)
    outs = _empty_draft_outputs(memory, k_idx)
    launch_draft(memory.contiguous(), [x.contiguous() for x in inputs], *outs, repeat_count(memory.device))
    _record("triton", memory, k_idx, q_idx)
    return outs


def _draft_fake(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check_draft(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    return _empty_draft_outputs(memory, k_idx)


def _record(route: str, memory: Tensor, k_idx: Tensor, q_idx: Tensor) -> None:
    streams, tokens, _ = k_idx.shape
    record(
        "decode",
        replace(token_dispatch(route, memory, k_idx, q_idx), op="draft", streams=streams, tokens=tokens, steps=tokens),
    )


draft_op = register(
    "draft(Tensor memory, Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, Tensor q_idx, Tensor q_val) "
    "-> (Tensor readings, Tensor new_rows, Tensor slots)",
    cpu=_draft_cpu,
    cuda=_draft_cuda,
    fake=_draft_fake,
)


def check_pending(memory: Tensor, new_rows: Tensor, slots: Tensor) -> None:
    """What was drafted can be written to this bank."""
    check_rank("memory", memory, "[num_slots, D]")
    check_float("memory", memory)
    check_contiguous_bank(memory)
    check_rank("slots", slots, "[P, T, W]")
    check_staged_ids("slots", slots)
    check_range("the number of drafted tokens T (second dimension of slots)", slots.shape[1], 0, MAX_TOKENS)
    check_dtype("new_rows", new_rows, memory.dtype, f"with a {memory.dtype} bank")
    check_shape("new_rows", new_rows, (*slots.shape, memory.shape[1]), "[P, T, W, D]")
    check_devices(memory=memory, new_rows=new_rows, slots=slots)


def _check_commit(memory: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> None:
    check_pending(memory, new_rows, slots)
    check_accepted(accepted, slots.shape[0], "[P]")
    check_devices(memory=memory, accepted=accepted)


def check_accepted(accepted: Tensor, count: int, layout: str) -> None:
    """The accepted counts, `count` of them."""
    if not isinstance(accepted, Tensor):
        raise TypeError(f"accepted is a {type(accepted).__name__}; expected an int32 or int64 tensor {layout}")
    if accepted.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"accepted has dtype {accepted.dtype}; counts are int32 or int64")
    check_shape("accepted", accepted, (count,), layout)


def _commit_cpu(memory: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> None:
    _check_commit(memory, new_rows, slots, accepted)
    check_ids_in_bank(memory.shape[0], slots=slots)
    for t in range(slots.shape[1]):  # later tokens' rows over earlier ones
        keep = (slots[:, t] >= 0) & (accepted > t).unsqueeze(-1)
        store_rows_(memory, slots[:, t][keep], new_rows[:, t][keep])


def _commit_cuda(memory: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> None:
    from .draft_kernels import launch_commit  # Triton is not installed everywhere

    _check_commit(memory, new_rows, slots, accepted)
    launch_commit(memory, new_rows.contiguous(), slots.contiguous(), accepted.contiguous())


def _commit_fake(memory: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> None:
    _check_commit(memory, new_rows, slots, accepted)


commit_op = register(
    "commit_(Tensor(a!) memory, Tensor new_rows, Tensor slots, Tensor accepted) -> ()",
    cpu=_commit_cpu,
    cuda=_commit_cuda,
    fake=_commit_fake,
)


class _BankMark(NamedTuple):
    """By which a bank is known again, and whether anything has been written to it since.

    It is nothing outside of the process: pickled, it becomes None.
    """

    address: int
    shape: tuple[int, ...]
    storage: weakref.ref[torch.UntypedStorage]  # as another bank may come to lie at the address of one that was freed
    version: int | None  # None: a tensor made in inference mode has none

    def of_same_bank(self, other: _BankMark) -> bool:
        return self[:2] == other[:2] and self.storage() is other.storage()

    def __deepcopy__(self, memo: object) -> _BankMark:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def _mark(memory: Tensor) -> _BankMark | None:
    """None where the call is only being traced or captured: it will run at another time, on a bank as it is then."""
    if not runs_now(memory):
        return None
    version = None if memory.is_inference() else memory._version
    return _BankMark(memory.data_ptr(), tuple(memory.shape), weakref.ref(memory.untyped_storage()), version)


@dataclass(eq=False)
class SDMPending:
    """What a draft would write, for `sdm_commit_`: a pytree of two tensors, in memory of its own.

    Args:
        new_rows: [P, T, W, D] the rows, in the bank's dtype; unspecified where the slot is negative.
        slots: [P, T, W] int32, the bank row of each; negative: no slot, or one that the token has written already.
        mark: by which an eager commit knows the bank again; None where the draft was traced or captured, or comes out
            of a pickle.
    """

    new_rows: Tensor
    slots: Tensor
    mark: _BankMark | None = None

    def check_bank(self, memory: Tensor) -> None:
        """Raises where `memory` is not the bank of the draft, or was written to since, as far as this can be known.

        Raises:
            ValueError: another bank. RuntimeError: the bank has changed, or was made in inference mode, which is over.
        """
        now = _mark(memory)
        if now is None or self.mark is None:  # in this order, so that a tracer reads no number that it would guard
            return
        if now.version is None and not torch.is_inference_mode_enabled():
            raise made_in_inference_mode("memory")
        if self.mark.storage() is None:
            raise ValueError("memory is not the bank of the draft, which has been freed: draft again")
        if now[:2] == self.mark[:2] and not now.of_same_bank(self.mark):
            raise ValueError("memory is another tensor than the draft's bank, on the same memory: pass that one")
        if not now.of_same_bank(self.mark):
            raise ValueError(
                f"memory of shape {now.shape} at {now.address:#x} is not the bank of the draft, which has shape "
                f"{self.mark.shape} and lies at {self.mark.address:#x}: pass that one, or draft again"
            )
        if now.version != self.mark.version:
            raise RuntimeError(
                f"memory has been written to since the draft (then version {self.mark.version}, now {now.version}), by "
                "a commit of this draft, a step, another request of the same pool (its `acquire` is a write), or a "
                "DecodeGraph that was made of its state: draft again"
            )


def _unflatten(leaves: Iterable[Any], mark: Any) -> SDMPending:
    new_rows, slots = leaves
    return SDMPending(new_rows, slots, mark)


def _flatten(pending: SDMPending) -> tuple[list[Tensor], _BankMark | None]:
    return [pending.new_rows, pending.slots], pending.mark


def _flatten_with_keys(pending: SDMPending) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], _BankMark | None]:
    keys: list[pytree.KeyEntry] = [pytree.GetAttrKey(name) for name in ("new_rows", "slots")]
    leaves, mark = _flatten(pending)
    return list(zip(keys, leaves, strict=True)), mark


pytree.register_pytree_node(
    SDMPending,
    _flatten,
    _unflatten,
    serialized_type_name="sdm_compile.SDMPending",
    to_dumpable_context=lambda mark: None,
    from_dumpable_context=lambda kept: None,
    flatten_with_keys_fn=_flatten_with_keys,
)


def sdm_draft(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, SDMPending]:
    """What T decode steps would read, without writing to the bank.

    Equivalent code: bank = memory.clone(); readings = [sdm_decode_step(bank, *token t of each) for t in range(T)]

    Args:
        memory: [num_slots, D] contiguous, bfloat16 or float32 (float64 on the CPU).
        k_idx: [P, T, W] int32 or int64 bank rows, distinct within a token and over streams; negative means no slot.
        k_val: [P, T, W] write weights. v: [P, T, D] values. beta: [P, T, 1] write strengths.
        g: [P, T, 1 or W] log-decay; -inf erases.
        q_idx, q_val: [P, T, R] bank rows to read, and weights. W and R are 1 to 256, T is at most 64.
    Returns:
        readings: [P, T, D], the bank's dtype, with the bits of the decode steps. pending: for `sdm_commit_`.
    Raises:
        ValueError: shapes disagree, or the bank is not contiguous. UnsupportedConfigurationError: dtype, width or T.
        IndexError: an id at or above num_slots (CPU).
    Note: mutates nothing, copies no bank, can be captured; no derivative. SPEC section 8.
    """
    check_contiguous_bank(memory)
    readings, new_rows, slots = draft_op(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    return readings, SDMPending(new_rows, slots, _mark(memory))


def sdm_commit_(memory: Tensor, pending: SDMPending, accepted: Tensor) -> None:
    """Advances the bank by the first so many tokens of a draft, with the bits of as many decode steps.

    Args:
        memory: the bank of the draft, unchanged since.
        pending: what `sdm_draft` returned.
        accepted: [P] int32 or int64, how many tokens of each stream, taken as 0 below and as T above. It is read on
            the device alone.
    Raises:
        ValueError: shapes disagree, or memory is not the bank of the draft. RuntimeError: memory was written to since
        the draft, by a commit of the same one too; or grad mode is on and a tensor requires a gradient. Nothing has
        been written then. Calls that are traced or captured cannot know the bank again, nor one made under
        `torch.inference_mode()` whether it has changed.
    Note: mutates `memory` alone, can be captured. SPEC section 8.
    """
    pending.check_bank(memory)
    commit_op(memory, pending.new_rows, pending.slots, accepted)
