"""What a framework's objects are like inside: every attribute that can be reached, in words that two processes of one
rank can be compared by.

Of a tensor its type, whether it has a gradient, its value if it has one element, and what a framework has attached to
it. Contents of larger tensors are the business of other tests. Frameworks keep state in modules, in classes and in
caches of functions, too.
"""

from __future__ import annotations

import enum
import functools
import re
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

PACKAGES = (
    *("deepspeed.", "megatron.", "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.optim."),
    "torch.amp.",
)
"""Whose objects are looked into, and whose modules and classes may hold state."""

_PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, complex)
_LIMIT = 400
_DEPTH = 40


def inside(roots: Mapping[str, object]) -> dict[str, str]:
    """Path -> what is there. Below each of ``roots``, and in the modules of :data:`PACKAGES` that are loaded."""
    return _Walk(roots).found


def odd(
    victim: tuple[Mapping[str, str], Mapping[str, str]], survivor: tuple[Mapping[str, str], Mapping[str, str]]
) -> dict[str, str]:
    """What a recovery has not made alike: kind of path -> example.

    Each of the two has what a rank was like at the beginning of a step before a recovery and, when the step was done
    again, after it. What both ranks have lost was reset on all; what only one has lost, its peers still have.
    """
    lost, reset = _changed(*victim), _changed(*survivor)
    both = {p for p in lost & reset if victim[0].get(p) == survivor[0].get(p)}
    found = (lost ^ reset) | {p for p in both if victim[1].get(p) != survivor[1].get(p)}
    return {
        kind_of(path): f"{path}: {victim[0].get(path)} -> {victim[1].get(path)} in the replacement, "
        f"{survivor[0].get(path)} -> {survivor[1].get(path)} in a survivor"
        for path in sorted(found)
    }


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def kind_of(path: str) -> str:
    """A path without numbers, and without names of modules."""
    path = re.sub(r"\[#?\d+\]", "[*]", path)
    path = re.sub(r"_modules\[[^]]*\](\._modules\[[^]]*\])*", "_modules[*]", path)
    return re.sub(r"__composable_api_state_key_[0-9a-f-]*", "__state", path)


class _Walk:
    def __init__(self, roots: Mapping[str, object]) -> None:
        self.found: dict[str, str] = {}
        self._names: dict[int, str] = {}  # id() -> first path, of what has been looked into
        self._kept: list[object] = []  # so that no id() comes twice
        self._sets: dict[str, list[str]] = {}
        todo: deque[tuple[str, object, int]] = deque((name, root, 0) for name, root in roots.items())
        todo.extend((f"module {path}", value, 0) for path, value in _of_modules())
        while todo:  # the shortest path to something is its name
            path, thing, depth = todo.popleft()
            if depth < _DEPTH:
                todo.extend((*child, depth + 1) for child in self._look(path, thing))
        self.found = {path: self._settled(text) for path, text in self.found.items()}
        for path, words in self._sets.items():
            self.found[path] += ", ".join(sorted(map(self._settled, words)))

    def _look(self, path: str, thing: object) -> Iterator[tuple[str, object]]:
        if isinstance(thing, float):
            self.found[path] = thing.hex()
            return
        if isinstance(thing, _PLAIN):
            self.found[path] = repr(thing)[:_LIMIT]
            return
        if id(thing) in self._names:
            self.found[path] = f"-> {self._names[id(thing)]}"
            return
        self._names[id(thing)] = path
        self._kept.append(thing)
        self.found[path] = f"{type(thing).__module__}.{type(thing).__qualname__}"
        if isinstance(thing, torch.Tensor):
            yield from self._tensor(path, thing)
        elif isinstance(thing, Mapping):
            yield from self._mapping(path, thing)
        elif isinstance(thing, (list, tuple, deque)):
            self.found[path] += f" of {len(thing)}"
            yield from ((f"{path}[{i}]", item) for i, item in enumerate(list(thing)))
        elif isinstance(thing, Set):
            self.found[path] += f" of {len(thing)}: "
            self._sets[path] = [self._word(item) for item in thing]
        elif isinstance(thing, (types.FunctionType, types.MethodType, functools.partial, type)):
            self.found[path] += f" {getattr(thing, '__qualname__', '')}"
        if _is_looked_into(thing):
            for key, value in _attributes(thing):
                yield f"{path}.{key}", value

    def _tensor(self, path: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
        text = f" {tensor.dtype} {tuple(tensor.shape)} requires_grad={tensor.requires_grad}"
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() == 1 and tensor.device.type == "cpu":
            text += f" value={tensor.detach().item()!r}"
        self.found[path] += text
        if tensor.is_leaf:
            yield f"{path}.grad", tensor.grad
        for key, value in vars(tensor).items():
            yield f"{path}.{key}", value

    def _mapping(self, path: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
        items = list(mapping.items())
        self.found[path] += f" of {len(items)}"
        if "_hooks" not in path.rpartition(".")[2]:  # whose keys are numbers that torch counts up in a process
            self.found[path] += ": " + ", ".join(self._word(key) for key, _ in items)
        for number, (key, value) in enumerate(items):
            yield (f"{path}[{key!r}]" if isinstance(key, str) else f"{path}[#{number}]"), value

    def _word(self, thing: object) -> str:
        """A key: plain, or what is known by its id() at the end."""
        if isinstance(thing, int) and not isinstance(thing, bool) and thing > 1 << 32:
            return f"\0{thing}\0"
        if isinstance(thing, (float, *_PLAIN)):
            return repr(thing)
        if isinstance(thing, tuple):
            return "(" + ", ".join(map(self._word, thing)) + ")"
        self._kept.append(thing)
        return f"\0{id(thing)}\0"

    def _settled(self, text: str) -> str:
        parts = text.split("\0")
        parts[1::2] = [self._names.get(int(number), "something") for number in parts[1::2]]
        return "".join(parts)


def _is_looked_into(thing: object) -> bool:
    if isinstance(
        thing, (types.ModuleType, types.FunctionType, types.MethodType, type, torch.Tensor, functools.partial)
    ):
        return False
    return isinstance(thing, nn.Module) or f"{type(thing).__module__}.".startswith(PACKAGES)


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def _of_modules() -> Iterator[tuple[str, object]]:
    """Variables of modules and classes that hold plain values or containers, and how full the caches of functions
    are."""
    for name, module in sorted(sys.modules.items()):
        if not f"{name}.".startswith(PACKAGES) or module is None:
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            if isinstance(value, type) and value.__module__ == name:
                for attribute, inner in list(vars(value).items()):
                    if not attribute.startswith("__"):
                        yield from _state(f"{name}.{key}.{attribute}", inner)
            elif not isinstance(value, (type, types.ModuleType)):
                yield from _state(f"{name}.{key}", value)


def _state(path: str, value: object) -> Iterator[tuple[str, object]]:
    info = getattr(_unwrapped(value), "cache_info", None)
    if callable(info):
        yield f"{path}.cached", info().currsize
    elif isinstance(value, (float, *_PLAIN, Mapping, list, tuple, deque, Set)) or _is_looked_into(value):
        yield path, value


def _unwrapped(value: object) -> object:
    """The innermost function of decorators that say what they wrap, or one with a cache on the way."""
    for _ in range(10):
        if hasattr(value, "cache_info") or not hasattr(value, "__wrapped__"):
            break
        value = value.__wrapped__
    return value
