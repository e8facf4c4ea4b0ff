"""What a captured training step takes from Python as it was at capture: compared before a replay, put back after a
capture that failed.

A graph repeats launches, so it keeps the addresses, shapes and numbers that Python gave them then. Nothing here reads
the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .capture import PARTS, numeric_settings

PLAIN_TYPES = frozenset((bool, int, float, complex, str, type(None)))
NESTS = (dict, OrderedDict, list, tuple)

Attribute = tuple[int, str]  # the id of a module, and the name


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer, outputs: Set[Attribute] = frozenset()) -> list[Any]:
    """Everything that is compared, in the order of `_names`. For 44 modules with 51 parameters it takes 0.3 ms.

    Of a module, its parameters and buffers and those of its attributes that are numbers or strings, `training` among
    them; of the optimizer, the settings of each group and the state of each parameter; at last `tensor_attributes`,
    without those in which the step leaves something.
    """
    modules = list(model.modules())
    groups = [_of_value({**group, "params": [*map(id, group["params"])]}) for group in optimizer.param_groups]
    state = [
        x.data_ptr() if isinstance(x, Tensor) and not _on_host(x) else _of_value(x)
        for values in optimizer.state.values()
        for x in values.values()
    ]
    attributes = {key: x for key, x in tensor_attributes(modules).items() if key not in outputs}
    return [numeric_settings("cuda"), *map(_of_module, modules), *groups, state, attributes]


def tensor_attributes(modules: Iterable[nn.Module]) -> dict[Attribute, list[Any]]:
    """What stands for the tensors in attributes of modules: in lists, tuples and dicts too, but no parameters and
    buffers."""
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            kind = type(value)
            if kind in PLAIN_TYPES or (kind in NESTS and not value) or name in PARTS or kind is set:
                continue  # nearly all, and this runs before every step
            tensors = [_of_tensor(x) if x.layout is torch.strided else id(x) for x in _tensors_in(value)]
            if tensors:
                found[id(module), name] = tensors
    return found


def cut_spent_graphs(modules: Iterable[nn.Module]) -> None:
    """Detaches tensors that an earlier step has left in attributes, whose autograd graph its backward has freed.

    As long as such a graph is there, its nodes that accumulate gradients are used again, on the stream of that step:
    a capture on another stream would have to wait for it, and cannot.
    """

    def detached(x: Tensor) -> Tensor:
        return x if x.grad_fn is None else x.detach()

    for module in modules:
        for name, value in [*vars(module).items()]:
            if (isinstance(value, Tensor) or type(value) in NESTS) and name not in PARTS:
                if any(x.grad_fn is not None for x in _tensors_in(value)):
                    vars(module)[name] = pytree.tree_map_only(Tensor, detached, value)


def _tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, NESTS):
        return []
    return [x for part in (value.values() if isinstance(value, dict) else value) for x in _tensors_in(part)]


def difference(before: list[Any], after: list[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The first thing in which two fingerprints differ, in words; None where they agree."""
    if before == after:
        return None
    if len(before) != len(after):
        return "the number of the model's modules or of the optimizer's groups"
    names = _names(model, optimizer)
    return next(name for name, a, b in zip(names, before, after, strict=True) if a != b)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    yield "a global setting of PyTorch, such as the precision of matrix products"
    for name, _ in model.named_modules():
        yield f"a parameter, buffer or attribute of {f'module {name!r}' if name else 'the model'}"
    for i in range(len(optimizer.param_groups)):
        yield f"a setting of the optimizer's group {i}, other than lr"
    yield "the optimizer's state, by tensors that were replaced or numbers that are kept on the host"
    yield "a tensor in an attribute of a module, other than its parameters and buffers"


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    values = [value for value in vars(module).values() if type(value) in PLAIN_TYPES]
    tensors = [_of_tensor(x) for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    return id(module), values, tensors


def _of_tensor(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x.requires_grad


def _of_value(value: Any) -> Any:
    """A setting or a state of an optimizer; what is on the host, by its value."""
    if isinstance(value, Tensor):
        return value.tolist() if _on_host(value) else _of_tensor(value)
    if isinstance(value, dict):
        return {key: _of_value(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_of_value(x) for x in value]
    return value if type(value) in PLAIN_TYPES else id(value)


@contextmanager
def restored_on_failure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts the attributes of the modules, and the optimizer's settings and state, back where the block raises.

    Tensors on the device are put back, but not what is in them: a capture replaces some, and writes into none.
    """
    spaces = [space for m in model.modules() for space in (vars(m), m._parameters, m._buffers)]
    kept = [(space, dict(space)) for space in (*spaces, *optimizer.param_groups)]
    state = {p: {name: _kept(x) for name, x in values.items()} for p, values in optimizer.state.items()}
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            _put_back(optimizer, kept, state)


def _put_back(
    optimizer: torch.optim.Optimizer, spaces: list[tuple[dict[str, Any], dict[str, Any]]], state: dict[Any, Any]
) -> None:
    for space, values in spaces:
        space.clear()
        space.update(values)
    optimizer.state.clear()
    optimizer.state.update(state)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and _on_host(value) else value


def _on_host(x: Tensor) -> bool:
    return x.is_cpu
