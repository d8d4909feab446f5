"""What the functions around a script's own loop keep in their variables: taken down with each version, and put back.

Of numbers, texts, small tensors and containers of these the value comes back; of objects of the script's own classes
their attributes of these kinds. Nothing of the script's code runs for it.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flashrecovery.worker.local_state.fingerprints import CONTAINERS, ELEMENTS, KEPT_NUMBERS, attributes_of
from flashrecovery.worker.local_state.plain_values import copy_of, is_kept, put
from flashrecovery.worker.own_loops.rewrite import LoopText
from flashrecovery.worker.script_text.script_frames import STATIC, is_own

_DEPTH = 3
_LEAVES = (*STATIC, *KEPT_NUMBERS, torch.Tensor, torch.nn.Module, Dataset, DataLoader)
_OBJECTS = 1000


@dataclass(frozen=True)
class LoopVariables:
    """Which variables of one function belong to its loop.

    Attributes:
        own: set or changed in it.
        remade: of these, those that each round sets before it reads them.
        read_after: of these, those that are read below the loop.
        read: all that may lead to an object whose attributes change.
    """

    own: frozenset[str]
    remade: frozenset[str]
    read_after: frozenset[str]
    read: frozenset[str] = frozenset()

    @staticmethod
    def of(text: LoopText) -> LoopVariables:
        carried = text.carried
        own = {path.partition(".")[0] for path in carried.names | carried.set_here | carried.remade}
        return LoopVariables(frozenset(own) | text.local | text.shared, carried.remade, text.read_after, text.read)


@dataclass
class Saved:
    """``variables``: by name. ``attributes``: of objects, by the path that leads to them and the name."""

    variables: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {"variables": self.variables, "attributes": self.attributes}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Saved:
        return Saved(dict(plain["variables"]), dict(plain["attributes"]))


def variables_in(frame: types.FrameType) -> Mapping[str, Any]:
    return collections.ChainMap(frame.f_locals, frame.f_globals)


def take_down(frame: types.FrameType, names: LoopVariables, known: frozenset[int]) -> Saved:
    """``known``: identities of objects that are protected, or are none of the script's state."""
    variables, saved = variables_in(frame), Saved()
    for name in sorted(names.own):
        value = variables.get(name, types)
        if is_kept(value, known) and (name in names.read_after or not _is_passing(name, value, names)):
            saved.variables[name] = copy_of(value)
    for path, thing in _objects(variables, names, known):
        for name, value in attributes_of(thing).items():
            if is_kept(value, known):
                saved.attributes[f"{path}.{name}"] = copy_of(value)
    return saved


def put_back(frame: types.FrameType, names: LoopVariables, known: frozenset[int], saved: Saved) -> dict[str, Any]:
    """Put back what can be put back from outside. Returns the values of variables, which the function's own text
    assigns."""
    variables = variables_in(frame)
    for path, thing in _objects(variables, names, known):
        attributes = attributes_of(thing)
        for name in attributes:
            where = f"{path}.{name}"
            if where in saved.attributes:
                attributes[name] = put(attributes[name], saved.attributes[where])
    found = {name: put(variables.get(name), value) for name, value in saved.variables.items()}
    if frame.f_locals is not frame.f_globals:
        shared = set(frame.f_code.co_varnames) | set(frame.f_code.co_cellvars) | set(frame.f_code.co_freevars)
        for name in found.keys() - shared:  # a global one, which this function may only read
            frame.f_globals[name] = found[name]
    return found


def _is_passing(name: str, value: Any, names: LoopVariables) -> bool:
    """A tensor that each round makes anew: a batch, a loss."""
    return name in names.remade and isinstance(value, torch.Tensor)


def _objects(variables: Mapping[str, Any], names: LoopVariables, known: frozenset[int]) -> Iterator[tuple[str, object]]:
    """Objects of the script's own classes, each with the shortest of its paths."""
    roots = sorted(names.own | names.read)
    waiting = collections.deque((name, variables[name], _DEPTH) for name in roots if name in variables)
    seen: set[int] = set()
    while waiting and len(seen) < _OBJECTS:
        path, thing, depth = waiting.popleft()
        if isinstance(thing, _LEAVES) or id(thing) in seen or id(thing) in known:
            continue
        seen.add(id(thing))
        if isinstance(thing, CONTAINERS) and len(thing) <= ELEMENTS:
            parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
            waiting.extend((f"{path}[{key!r}]", part, depth - 1) for key, part in parts if depth)
        elif is_own(type(thing)) or type(thing) is types.SimpleNamespace:
            yield path, thing
            if depth:
                waiting.extend((f"{path}.{name}", part, depth - 1) for name, part in attributes_of(thing).items())
