"""Argument checks shared by the stages. Every message names the argument, what was got, and what would work.

They read types, shapes, dtypes and devices alone: kernels and fake kernels call the same ones, and symbolic sizes pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_WIDTH = 256  # writes or reads per token
MAX_CHUNK = 256  # tokens per chunk
ID_DTYPES = (torch.int32, torch.int64)


class UnsupportedConfigurationError(ValueError):
    """The arguments are well formed, but no route of this library computes them. The message says what would work."""


def float_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The float dtypes that the ops take on this device: float64 is for checking gradients on the CPU."""
    if device.type == "cuda":
        return (torch.bfloat16, torch.float32)
    return (torch.bfloat16, torch.float32, torch.float64)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over this dtype are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_float(name: str, tensor: Tensor) -> None:
    allowed = float_dtypes(tensor.device)
    if tensor.dtype not in allowed:
        hint = "; under autocast name its dtype, torch.bfloat16" if tensor.dtype == torch.float16 else ""
        raise UnsupportedConfigurationError(
            f"{name} has dtype {tensor.dtype}; on {tensor.device.type} use one of {_names(allowed)}{hint}"
        )


def check_ids(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in ID_DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; slot ids are {_names(ID_DTYPES)}")


def check_rank(name: str, tensor: Tensor, layout: str) -> None:
    """`layout` is the documented shape, such as "[P, T, W]"; its commas give the rank."""
    if tensor.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {layout}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], layout: str) -> None:
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {layout} = {tuple(shape)}")


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype, given: str) -> None:
    """`given` says what the dtype follows from, such as "with a torch.float32 bank"."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; {given} it is {dtype}")


def check_staged_ids(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {tensor.dtype}; staged ids are int32")


def check_like(name: str, tensor: Tensor, other: str, like: Tensor) -> None:
    """The shape and dtype of `like`, the argument called `other`."""
    check_shape(name, tensor, like.shape, f"the shape of {other}")
    check_dtype(name, tensor, like.dtype, f"like {other}")


def check_devices(**tensors: Tensor | None) -> None:
    """All are where the first one is."""
    (anchor, first), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {first.device}, where {anchor} is")


def check_contiguous_bank(memory: Tensor, name: str = "memory") -> None:
    if not memory.is_contiguous():
        raise ValueError(
            f"{name} has strides {tuple(memory.stride())}; an in-place call needs a contiguous bank: "
            "pass its contiguous() and keep that tensor"
        )


def check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        spelled = expected.__name__[1].isupper()  # such as SDMState
        article = "an" if expected.__name__[0] in ("AEFHILMNORSX" if spelled else "AEIOU") else "a"
        raise TypeError(f"{name} is a {type(value).__name__}; expected {article} {expected.__name__}")


def made_in_inference_mode(name: str) -> RuntimeError:
    """The error of a tensor that could be updated in inference mode alone, which is over."""
    return RuntimeError(
        f"{name} made under torch.inference_mode() cannot be updated outside it: clone it first, or make it outside "
        "inference mode"
    )


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UnsupportedConfigurationError(f"{name} is {value}; supported are {low} to {high}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def check_inputs(
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    head_dim: int | None = None,
    lead: str = "P, T",
) -> None:
    """What every op requires of a call's inputs but the bank; `lead` names their leading dimensions.

    `head_dim` is the bank's; None: whatever v has.
    """
    for name, ids in (("k_idx", k_idx), ("q_idx", q_idx)):
        check_ids(name, ids)
        if lead == "P, T":
            check_rank(name, ids, "[P, T, W]" if name == "k_idx" else "[P, T, R]")
        elif ids.dim() == 0:
            raise ValueError(f"{name} is a scalar; expected [{lead}, {'W' if name == 'k_idx' else 'R'}]")
    writes, reads = k_idx.shape[-1], q_idx.shape[-1]
    check_range("the number of writes W (last dimension of k_idx)", writes, 1, MAX_WIDTH)
    check_range("the number of reads R (last dimension of q_idx)", reads, 1, MAX_WIDTH)
    outer = tuple(k_idx.shape[:-1])
    check_shape("k_val", k_val, (*outer, writes), f"[{lead}, W] like k_idx")
    check_shape("v", v, (*outer, v.shape[-1] if head_dim is None else head_dim), f"[{lead}, D]")
    check_shape("beta", beta, (*outer, 1), f"[{lead}, 1]")
    one_gate = g.dim() == len(outer) + 1 and g.shape[-1] == 1
    check_shape("g", g, (*outer, 1 if one_gate else writes), f"[{lead}, 1] or [{lead}, W]")
    check_shape("q_idx", q_idx, (*outer, reads), f"[{lead}, R] with k_idx's leading dimensions")
    check_shape("q_val", q_val, (*outer, reads), f"[{lead}, R] like q_idx")
    for name, tensor in (("k_val", k_val), ("v", v), ("beta", beta), ("g", g), ("q_val", q_val)):
        check_float(name, tensor)


def check_token_inputs(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    lead: str = "P, T",
    bank: str = "memory",
) -> None:
    """`check_inputs`, and what every op requires of their bank, the argument called `bank`."""
    check_rank(bank, memory, "[num_slots, D]")
    check_float(bank, memory)
    check_range(f"head_dim D (last dimension of {bank})", memory.shape[1], 1, 2**20)
    check_range(f"the number of slots (first dimension of {bank})", memory.shape[0], 0, 2**31 - 1)
    check_inputs(k_idx, k_val, v, beta, g, q_idx, q_val, memory.shape[1], lead)
    check_devices(**{bank: memory}, k_idx=k_idx, k_val=k_val, v=v, beta=beta, g=g, q_idx=q_idx, q_val=q_val)


def check_chunk_size(chunk_size: int) -> None:
    check_range("chunk_size", chunk_size, 1, MAX_CHUNK)


def check_ids_in_bank(num_slots: int, **ids: Tensor) -> None:
    """CPU only, as it reads values: an id at or above the bank's end is an error."""
    for name, tensor in ids.items():
        if tensor.numel() and int(tensor.max()) >= num_slots:
            raise IndexError(
                f"{name} holds slot id {int(tensor.max())}, but memory has {num_slots} rows; "
                f"ids are 0 to {num_slots - 1}, or negative for no slot"
            )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
