"""The script's own modules besides the one of its loop: which of their variables may change while it trains."""

from __future__ import annotations

import collections
import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashrecovery.worker.local_state.fingerprints import CONTAINERS, KEPT_NUMBERS, is_plain
from flashrecovery.worker.preimport.own_files import FRAMEWORKS, is_own_file
from flashrecovery.worker.script_text.constants import NameUses, SetByText, set_by_text, uses_of
from flashrecovery.worker.script_text.script_frames import is_own, parsed, tree_of

_LEFT_OUT = (types.BuiltinFunctionType, types.ModuleType, torch.nn.Module, torch.dtype, torch.device)
_FLAT = (list, set, dict, collections.deque)
_FEW = 16
"""Containers, of as many elements each, that cost less than to know from the text which of them are constants."""


class ScriptModules:
    """The modules that are imported now. Examines them again when there are new modules, or new variables in one."""

    def __init__(self) -> None:
        self._imported = -1
        self._modules: dict[str, types.ModuleType] = {}
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
            by_functions = _set_by(str(module.__file__)).declared
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
        for cached in ("_set", "_are_many", "_uses"):
            self.__dict__.pop(cached, None)
        self._changing.clear()

    @functools.cached_property
    def _set(self) -> SetByText:
        """What the text of all of them sets."""
        parts = [_set_by(str(module.__file__)) for module in self._modules.values()]
        return SetByText(
            frozenset().union(*(part.attributes for part in parts)), frozenset().union(*(part.owners for part in parts))
        )

    @functools.cached_property
    def _are_many(self) -> bool:
        """Containers that may be constants."""
        sizes = [
            len(value)
            for module in self._modules.values()
            for name, value in vars(module).items()
            if type(value) in _FLAT and not name.startswith("__")
        ]
        return len(sizes) > _FEW or any(size > _FEW for size in sizes)

    @functools.cached_property
    def _uses(self) -> NameUses:
        """How the text of all of them uses names."""
        parts = [_uses_of(str(module.__file__), name == "__main__") for name, module in self._modules.items()]
        return NameUses(frozenset().union(*(one.otherwise for one in parts)), any(one.by_any_name for one in parts))

    def _may_change(self, name: str, value: object) -> bool:
        if isinstance(value, _LEFT_OUT):
            return False
        if isinstance(value, types.FunctionType):
            return bool(value.__closure__ or value.__dict__ or name in self._set.owners or _has_changing(value))
        if isinstance(value, type):
            return is_own(value) and any(
                one in self._set.attributes or isinstance(part, CONTAINERS) or (is_plain(part) and not _is_number(part))
                for one, part in attributes_of_class(value).items()
            )
        return name in self._set.attributes or not self._is_constant(name, value)

    def _is_constant(self, name: str, value: object) -> bool:
        """Whether no text sets it: a number, or a container of numbers that nothing changes."""
        if type(value) in (tuple, frozenset):
            return all(self._is_constant("", part) for part in value)  # type: ignore[attr-defined]
        if name and type(value) in _FLAT and self._are_many:
            if self._uses.by_any_name or name in self._uses.otherwise:
                return False
            parts: Any = value
            return all(map(_is_number, parts.values() if isinstance(value, dict) else parts))
        return _is_number(value)


def is_made_by_hand(thing: object) -> bool:
    """Whether it is a module that the script has made itself, of no file: ``types.ModuleType("tools")``."""
    return type(thing) is types.ModuleType and thing.__spec__ is None and not hasattr(thing, "__file__")


def attributes_of_class(kind: type) -> dict[str, Any]:
    """But for its methods and the like."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("__") and not callable(value)}


def _is_number(value: object) -> bool:
    return type(value) in KEPT_NUMBERS or type(value) in (bytes, complex)


def _has_changing(function: types.FunctionType) -> bool:
    """Whether calls can change one of its default arguments."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return any(isinstance(one, CONTAINERS) for one in defaults)


def read_module(file: str) -> None:
    """In a zygote: its forks then know how its text uses names."""
    _set_by(file)
    _uses_of(file, False)


def _set_by(file: str) -> SetByText:
    found = _read(file, _stamp(file))
    return SetByText() if found is None else found[0]


def _uses_of(file: str, whole: bool) -> NameUses:
    if whole:
        tree = tree_of(file)
        return NameUses(by_any_name=True) if tree is None else uses_of(tree, whole=True)
    found = _read(file, _stamp(file))
    return NameUses(by_any_name=True) if found is None else found[1]


@functools.lru_cache(4096)
def _read(file: str, stamp: tuple[int, ...]) -> tuple[SetByText, NameUses] | None:
    """Read an imported module, once while its file is unchanged; its tree is not kept."""
    tree = parsed(file)
    return None if tree is None else (set_by_text(tree), uses_of(tree, whole=False))


def _stamp(file: str) -> tuple[int, ...]:
    try:
        status = os.stat(file)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
