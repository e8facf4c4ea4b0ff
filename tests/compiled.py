"""Compiling a kernel launch for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def compile_call(call: Any, capability: int) -> Any:
    """The compiled kernel of a `KernelCall`, for CUDA devices of a capability such as 90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {name: value for name, value in call.options.items() if value is not None}
    options = {name: value for name, value in given.items() if name not in call.kernel.arg_names}
    values = dict(zip(call.kernel.arg_names, call.args, strict=False)) | call.options
    constant = {p.name for p in call.kernel.params if p.is_constexpr or values[p.name] is None}
    signature = {
        name: TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
        for name, value in values.items()
        if name in call.kernel.arg_names
    } | dict.fromkeys(constant, "constexpr")
    source = ASTSource(call.kernel, signature, {name: values[name] for name in constant})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
