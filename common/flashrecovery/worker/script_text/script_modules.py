"""The script's own modules besides the one of its loop: which of their variables may change while it trains."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashrecovery.worker.local_state.fingerprints import CONTAINERS, KEPT_NUMBERS, is_plain
from flashrecovery.worker.preimport.own_files import FRAMEWORKS, is_own_file
from flashrecovery.worker.script_text.script_frames import is_own, tree_of

_LEFT_OUT = (types.BuiltinFunctionType, types.ModuleType, torch.nn.Module, torch.dtype, torch.device)


class ScriptModules:
    """Those that are imported now. Looks at them anew when modules, or variables of one of them, have come."""

    def __init__(self) -> None:
        self._imported = -1
        self._modules: dict[str, types.ModuleType] = {}
        self._set: frozenset[str] | None = None
        self._changing: dict[str, tuple[int, tuple[str, ...]]] = {}

    def besides(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, types.ModuleType]]:
        """With their names, in the order of these; without the one that has ``variables``."""
        if len(sys.modules) != self._imported:
            self._look()
        return ((name, module) for name, module in self._modules.items() if vars(module) is not variables)

    def changing(self, name: str) -> tuple[str, ...]:
        """Variables of the module of that name which may change, or lead to something that does: all but functions and
        classes that keep nothing, and numbers and the like that no text sets."""
        module = self._modules.get(name)
        if module is None:
            return ()
        size, found = self._changing.get(name, (-1, ()))
        if size != len(vars(module)):
            by_functions = _globals_set(str(module.__file__))
            found = tuple(
                one
                for one, value in vars(module).items()
                if not one.startswith("__") and (one in by_functions or self._may_change(one, value))
            )
            self._changing[name] = len(vars(module)), found
        return found

    def _look(self) -> None:
        modules = dict(sys.modules)
        self._imported = len(modules)
        self._modules = {
            name: module
            for name, module in sorted(modules.items())
            if type(module) is types.ModuleType and name.partition(".")[0] not in FRAMEWORKS
            if is_own_file(str(getattr(module, "__file__", None) or ""))
        }
        self._set = None
        self._changing.clear()

    @property
    def _set_anywhere(self) -> frozenset[str]:
        """Names of attributes that the text of one of them sets."""
        if self._set is None:
            files = {str(module.__file__) for module in self._modules.values()}
            self._set = frozenset().union(*map(_attributes_set, sorted(files)))
        return self._set

    def _may_change(self, name: str, value: object) -> bool:
        if isinstance(value, _LEFT_OUT):
            return False
        if isinstance(value, types.FunctionType):
            return bool(value.__closure__ or value.__dict__ or value.__defaults__ or value.__kwdefaults__)
        if isinstance(value, type):
            return is_own(value) and any(
                one in self._set_anywhere or isinstance(part, CONTAINERS) or (is_plain(part) and not _is_number(part))
                for one, part in attributes_of_class(value).items()
            )
        return name in self._set_anywhere or not _is_number(value)


def attributes_of_class(kind: type) -> dict[str, Any]:
    """But for its methods and the like."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("__") and not callable(value)}


def _is_number(value: object) -> bool:
    return type(value) in KEPT_NUMBERS or type(value) in (bytes, complex)


@functools.lru_cache(4096)
def _globals_set(file: str) -> frozenset[str]:
    """Names that functions of the file declare ``global``."""
    tree = tree_of(file)
    nodes = () if tree is None else ast.walk(tree)
    return frozenset(name for node in nodes if isinstance(node, ast.Global) for name in node.names)


@functools.lru_cache(4096)
def _attributes_set(file: str) -> frozenset[str]:
    """Names of attributes that the file sets, of whatever; and those of ``setattr(thing, "name", value)``."""
    tree = tree_of(file)
    found = set[str]()
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return frozenset(found)
