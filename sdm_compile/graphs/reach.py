"""What a callable reaches by names of its own: the modules, tensors and functions that its graph relies on."""

from __future__ import annotations

import functools
import sys
from collections import deque
from operator import attrgetter, is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

from .capture import Watch
from .entries import chooses

FOREIGN = sys.stdlib_module_names | {"torch", "triton"}  # whose code names nothing of the caller's

_contents = attrgetter("cell_contents")


class Reached(Watch):
    """Watches what a callable reaches, and the places where it finds that.

    Followed are `functools.partial`, methods, decorators, closures, defaults, and the globals that the code names; of
    these, everything that a module, list, tuple or dict holds, but of another object only the attributes that some
    followed code names, and its methods and properties likewise. A global function is followed where `fn` names it, or
    a function of the same file. Not followed are functions of PyTorch and the standard library, attributes of imported
    modules, and names that are made at run time, as for `getattr`.
    """

    def __init__(self, fn: object) -> None:
        self._code_names: set[str] = set()  # in all code that is followed
        known = -1
        while len(self._code_names) > known:  # code that is found late may name attributes of what was found before
            known = len(self._code_names)
            self._functions: deque[tuple[str, FunctionType, int]] = deque()  # still to be followed
            self._level = 0  # how many global functions lead to what is being walked
            self._cells: list[CellType] = []
            self._held: list[object] = []
            super().__init__({"fn": fn}, layouts=False)

    def unchanged(self) -> bool:
        try:
            same = all(map(is_, map(_contents, self._cells), self._held))
        except ValueError:  # one has been emptied
            return False
        return same and super().unchanged()

    def _walk_roots(self, roots: dict[str, object]) -> None:
        super()._walk_roots(roots)
        while self._functions:
            name, function, self._level = self._functions.popleft()
            self._follow(name, function)

    def _walk_other(self, name: str, node: object) -> bool:
        if isinstance(node, FunctionType):
            self._functions.append((name, node, self._level))
            return True
        if isinstance(node, functools.partial):
            return self._any_of(name, node.func, node.args, node.keywords)
        if isinstance(node, MethodType):
            return self._any_of(name, node.__func__, node.__self__)
        if isinstance(node, property):
            return self._any_of(name, node.fget)
        if isinstance(node, staticmethod | classmethod):
            return self._any_of(name, node.__func__)
        if isinstance(node, type | ModuleType) or not hasattr(node, "__dict__"):
            return False
        if chooses(node):
            return super()._walk_other(name, node)
        named = self._code_names | {"__call__"}
        kinds = [kind for kind in type(node).__mro__ if not _is_foreign(kind.__module__)]
        spaces = [vars(node), *map(vars, kinds)]
        pairs = [(space, key) for space in spaces for key in sorted(named & space.keys())]
        return any([self._edge(f"{name}.{key}", space, key, space[key]) for space, key in pairs])

    def _any_of(self, name: str, *nodes: object) -> bool:
        return any([self._walk(name, node) for node in nodes])

    def _follow(self, name: str, function: FunctionType) -> None:
        self._any_of(name, function.__defaults__, function.__kwdefaults__)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType() and self._walk(variable, cell.cell_contents):  # a new cell is an empty one
                self._cells.append(cell)
                self._held.append(cell.cell_contents)
        space, level = function.__globals__, self._level
        if _is_foreign(space.get("__name__")):
            return
        names = _names_in(function.__code__)
        self._code_names |= names
        for key in sorted(names & space.keys()):
            value = space[key]
            if isinstance(value, FunctionType):
                if _is_foreign(value.__globals__.get("__name__")) or (level and value.__globals__ is not space):
                    continue
                self._level = level + 1
            self._edge(key, space, key, value)
            self._level = level


def _is_foreign(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in FOREIGN


def _names_in(code: CodeType) -> set[str]:
    """The globals and attributes that the code names, also in functions within."""
    return set(code.co_names).union(*(_names_in(x) for x in code.co_consts if isinstance(x, CodeType)))
