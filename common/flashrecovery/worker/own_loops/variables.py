"""What the functions around a script's own loop keep in their variables: taken down with each version, and put back.

Of numbers, texts, small tensors and containers of these the value comes back; of objects of the script's own classes
their attributes of these kinds; of the script's other modules their variables; of generators of random numbers their
state. Nothing of the script's code runs for it.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, Dataset

from flashrecovery.worker.local_state.fingerprints import CONTAINERS
from flashrecovery.worker.local_state.generators import is_generator
from flashrecovery.worker.own_loops.rewrite import LoopText
from flashrecovery.worker.script_text.extents import is_array
from flashrecovery.worker.script_text.held_state import MODULES, held_by, may_lose, objects_from, referred_to_from
from flashrecovery.worker.script_text.plain_values import (
    LARGE,
    NO_REFERENCES,
    SMALL,
    Putting,
    References,
    copies_of,
    is_kept,
    is_referred_to,
    is_whole,
    storage_of,
)
from flashrecovery.worker.script_text.script_frames import frames, is_own

ALIASED = 1 << 20
"""Elements of a tensor that no statement of the loop sets, but a part of which is in a container that it changes."""
_MODULE = "module "
"""Before the names of modules in paths."""
NAMES = "its names"
"""A key for the names of all attributes of an object that may lose some."""


@dataclass(frozen=True)
class LoopVariables:
    """Which variables of one function belong to its loop.

    Attributes:
        own: set or changed in it.
        remade: of these, those that each round sets before it reads them.
        read_after: of these, those that are read below the loop.
        carried: of these, those that a round of it may read as the round before has left them.
        passed: handed to functions that may change them: containers among them belong to the loop, too.
        read: all that may lead to an object whose attributes change.
        local: those that the rewritten text assigns.
    """

    own: frozenset[str]
    remade: frozenset[str]
    read_after: frozenset[str]
    passed: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()

    @functools.cached_property
    def in_order(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Those that may lead to objects and are not the loop's own, its own, and ``passed``."""
        return tuple(sorted(self.read - self.own)), tuple(sorted(self.own)), tuple(sorted(self.passed))

    @staticmethod
    def of(text: LoopText) -> LoopVariables:
        carried = text.carried
        own = {path.partition(".")[0] for path in carried.names | carried.set_here | carried.remade}
        own |= text.local | text.shared
        over = (carried.names | carried.set_here) - carried.remade
        return LoopVariables(
            frozenset(own), carried.remade, text.read_after, text.passed - own, text.read, frozenset(over), text.local
        )


class Identities(frozenset[int]):
    """The identities of objects and storages. ``held``: keeps the place of each storage, and nothing of its memory, so
    that no storage that is made later has the same identity. ``references``: what was there before the loop began."""

    held: tuple[StorageWeakRef, ...] = ()
    references: References = NO_REFERENCES

    @classmethod
    def of(cls, ids: set[int], tensors: Iterable[torch.Tensor], references: References) -> Identities:
        """``ids`` and those of the storages of ``tensors``."""
        every = [*tensors]
        found = cls(ids | {storage_of(tensor) for tensor in every})
        found._keep(tuple(ref for tensor in every if (ref := _held(tensor)) is not None), references)
        return found

    def _keep(self, held: tuple[StorageWeakRef, ...], references: References) -> None:
        self.held, self.references = held, references


def protected(
    things: Iterable[object], tensors: Iterable[torch.Tensor], references: References = NO_REFERENCES
) -> Identities:
    """Identities of ``things`` and of their parameter groups, and of the storages of ``tensors`` and of theirs: a
    variable that leads to one of them is none of the loop's own state, but for which of them it leads to."""
    ids, every = set[int](), list(tensors)
    for thing in things:
        ids.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            every += (*thing.parameters(), *thing.buffers())
        groups = getattr(thing, "param_groups", None)
        for group in groups if isinstance(groups, list) else ():
            ids |= {id(groups), id(group), id(group["params"])}
            every += (tensor for tensor in group["params"] if isinstance(tensor, torch.Tensor))
    return Identities.of(ids, every, references)


def references_at(frame: types.FrameType) -> References:
    """To what the running functions of the script, from ``frame`` outwards, and its modules lead."""
    roots: list[tuple[str, Any]] = []
    for number, one in enumerate(frames(frame)):
        roots += ((f"{number}:{name}", value) for name, value in one.f_locals.items())
    for name, module in MODULES.besides({}):
        roots += ((f"{_MODULE}{name}.{variable}", value) for variable, value in vars(module).items())
    return References(referred_to_from(roots))


def _held(tensor: torch.Tensor) -> StorageWeakRef | None:
    """None for a tensor without its own storage."""
    try:
        return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


@dataclass
class Saved:
    """``variables``: by name. ``attributes``: of objects, by the path that leads to them and the name. ``too_long``:
    lists and the like that are not among them, by name or path. ``left_out``: variables that the loop carries on, which
    cannot be taken down: arrays that are too large, containers of what cannot be made again. ``others``: what variables
    and attributes lead to that cannot be taken down either, which does no harm as long as it is always the same."""

    variables: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    too_long: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {"variables": self.variables, "attributes": self.attributes}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Saved:
        return Saved(dict(plain["variables"]), dict(plain["attributes"]))


class _Variables:
    """Those that a function sees."""

    def __init__(self, frame: types.FrameType) -> None:
        self._local, self._global = frame.f_locals, frame.f_globals

    def of(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Those of ``names`` that are set."""
        for name in names:
            if name in self._local:
                yield name, self._local[name]
            elif name in self._global:
                yield name, self._global[name]

    def modules(self) -> Iterator[tuple[str, types.ModuleType]]:
        """The script's modules that have others."""
        return MODULES.besides(self._global)


def _kept(value: Any, known: Identities, largest: int = SMALL) -> bool:
    return is_kept(value, known, largest=largest, with_generators=True, references=known.references)


def take_down(frame: types.FrameType, names: LoopVariables, known: Identities) -> Saved:
    """``known``: identities of objects that are protected, or are none of the script's state."""
    variables, saved = _Variables(frame), Saved()
    others, own, passed = names.in_order
    for name, value in variables.of(own):
        largest = LARGE if name in names.carried else SMALL
        if not _kept(value, known, largest):
            if isinstance(value, CONTAINERS) and len(value) > largest:
                saved.too_long.append(name)
            elif name in names.carried and _is_left_out(value, known):
                saved.left_out.append(name)
            elif name in names.carried and _is_one_of_many(value):
                saved.others[name] = value
        elif name in names.read_after or not _is_passing(name, value, names):
            saved.variables[name] = value
    for name, value in variables.of(passed):
        if isinstance(value, CONTAINERS) and _kept(value, known):
            saved.variables[name] = value
    attributes, too_long, referred_to, paths = _of_objects(variables, names, known)
    around = {
        f"={name}": value
        for name, value in variables.of(others)
        if (isinstance(value, torch.Tensor) or is_array(value)) and is_kept(value, known, largest=ALIASED)
    }
    values = {**{f"={n}": v for n, v in saved.variables.items()}, **attributes}
    copies = copies_of(values, paths, around, known.references)
    return Saved(
        {name[1:]: copy for name, copy in copies.items() if name.startswith("=")},
        {name: copy for name, copy in copies.items() if not name.startswith("=")},
        others={**saved.others, **referred_to},
        left_out=saved.left_out,
        too_long=[*saved.too_long, *too_long],
    )


def values_of_objects(frame: types.FrameType, names: LoopVariables, known: Identities) -> dict[str, Any]:
    """``attributes`` of what :func:`take_down` gives, but for :data:`NAMES`: some of them are put back alone."""
    attributes, _, _, paths = _of_objects(_Variables(frame), names, known)
    values = {path: value for path, value in attributes.items() if not path.endswith(NAMES)}
    return copies_of(values, paths, references=known.references)


def _of_objects(
    variables: _Variables, names: LoopVariables, known: Identities
) -> tuple[dict[str, Any], list[str], dict[str, Any], dict[int, str]]:
    """What they have, by path; the paths of what is too long; what they refer to, by path; and their own paths, by
    identity."""
    attributes: dict[str, Any] = {}
    others: dict[str, Any] = {}
    too_long = []
    paths: dict[int, str] = {}
    for path, thing in _objects(variables, names, known):
        if is_generator(type(thing)) or (is_whole(type(thing)) and _kept(thing, known)):
            attributes[path] = thing
            continue
        if is_whole(type(thing)):
            too_long.append(path)
            continue
        paths[id(thing)] = path
        held = held_by(thing)
        if may_lose(thing):
            attributes[f"{path}.{NAMES}"] = tuple(held)
        for name, value in held.items():
            if _kept(value, known):
                attributes[f"{path}.{name}"] = value
            elif isinstance(value, CONTAINERS) and len(value) > SMALL:
                too_long.append(f"{path}.{name}")
            elif is_referred_to(value) and not _is_progress_bar(thing):
                others[f"{path}.{name}"] = value
    return attributes, too_long, others, paths


def _is_progress_bar(thing: object) -> bool:
    """Its functions are made again with it, for each epoch."""
    return type(thing).__module__.partition(".")[0] == "tqdm"


def put_back(frame: types.FrameType, names: LoopVariables, known: Identities, saved: Saved) -> dict[str, Any]:
    """Put back what can be put back from outside. Returns the values of variables, which the function's own text
    assigns."""
    putting = Putting(known.references)
    variables = _Variables(frame)
    now = dict(variables.of(saved.variables))
    found = {
        name: now.get(name)
        for name, value in saved.variables.items()
        if name not in names.local and putting.write(now.get(name), value)
    }
    put_back_objects(frame, names, known, saved.attributes, putting)
    for name in [name for name in saved.variables if name not in found]:
        found[name] = putting.put(now.get(name), saved.variables[name])
    if frame.f_locals is frame.f_globals:
        frame.f_globals.update({name: value for name, value in found.items() if name not in names.local})
    else:
        shared = set(frame.f_code.co_varnames) | set(frame.f_code.co_cellvars) | set(frame.f_code.co_freevars)
        for name in found.keys() - shared:  # a global one, which this function may only read
            frame.f_globals[name] = found[name]
    return found


def objects_of(frame: types.FrameType, names: LoopVariables, known: Identities) -> Iterator[tuple[str, object]]:
    """Generators of random numbers, functions with variables of others, the script's other modules, and objects of its
    own classes."""
    return _objects(_Variables(frame), names, known)


def is_of_module(path: str) -> bool:
    """Whether an object at ``path`` was come to by another module of the script."""
    return path.startswith(_MODULE)


def iterators_of(frame: types.FrameType, names: LoopVariables, known: Identities) -> dict[str, object]:
    """Iterators that modules and objects hold, by path, but for what is iterated over itself."""
    return {
        f"{path}.{name}": value
        for path, thing in _objects(_Variables(frame), names, known)
        if not is_whole(type(thing)) and not hasattr(type(thing), "__iter__")
        for name, value in held_by(thing).items()
        if isinstance(value, Iterator)
    }


def put_back_objects(
    frame: types.FrameType,
    names: LoopVariables,
    known: Identities,
    saved: Mapping[str, Any],
    putting: Putting | None = None,
) -> None:
    """``saved``: some of what :func:`values_of_objects` gave."""
    putting = Putting(known.references) if putting is None else putting
    of_objects: dict[str, dict[str, Any]] = {}
    for where, value in saved.items():
        path, _, name = where.rpartition(".")
        of_objects.setdefault(path, {})[name] = value
    variables = _Variables(frame)
    for path, thing in _objects(variables, names, known):
        if is_whole(type(thing)):
            if path in saved:
                putting.put(thing, saved[path])
            continue
        putting.found(path, thing)
        _put_attributes(thing, of_objects.pop(path, {}), putting)
    for path, values in of_objects.items():  # functions that have kept nothing here yet
        function = _function_at(variables, path)
        if function is not None:
            _put_attributes(function, values, putting)


def _put_attributes(thing: object, values: Mapping[str, Any], putting: Putting) -> None:
    attributes = held_by(thing)
    names = values.get(NAMES)
    for name in () if names is None else [name for name in attributes if name not in names]:  # they have come since
        del attributes[name]
    for name, value in values.items():
        if name != NAMES:
            attributes[name] = putting.put(attributes.get(name), value)


def _function_at(variables: _Variables, path: str) -> types.FunctionType | None:
    """The function of that name, of the script or of one of its modules."""
    where, _, name = path.rpartition(".")
    module = sys.modules.get(where.removeprefix(_MODULE))
    found = vars(module).get(name) if module is not None else dict(variables.of([path])).get(path)
    return found if isinstance(found, types.FunctionType) else None


def _is_left_out(value: Any, known: Identities) -> bool:
    """For objects that cannot be copied completely: whether nothing else brings it back, or sees that it changes."""
    if isinstance(value, (list, tuple, set, collections.deque)):
        return bool(value) and not any(id(part) in known or isinstance(part, _BROUGHT_BACK) for part in value)
    return is_array(value)


def _is_one_of_many(value: Any) -> bool:
    """For objects that cannot be copied: whether it matters which one a variable leads to, and can be seen."""
    return is_referred_to(value) or isinstance(value, CONTAINERS) or is_own(type(value))


_BROUGHT_BACK = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Dataset, DataLoader)


def _is_passing(name: str, value: Any, names: LoopVariables) -> bool:
    """Whether the value is a tensor that each iteration creates again: a batch, a loss."""
    return name in names.remade and isinstance(value, torch.Tensor)


def _objects(variables: _Variables, names: LoopVariables, known: Identities) -> Iterator[tuple[str, object]]:
    """Generators of random numbers, functions with variables of others, the script's other modules, and objects of its
    own classes, neural networks among them, each with the shortest of its paths; paths from variables that the loop
    sets come last, for they may not be set yet."""
    seen: set[int] = set()
    outer, own, _ = names.in_order
    yield from objects_from(variables.of(outer), known, seen, modules=True)
    for name, module in variables.modules():
        where = f"{_MODULE}{name}"
        yield where, module
        yield from objects_from(((f"{where}.{n}", v) for n, v in held_by(module).items()), known, seen, modules=True)
    yield from objects_from(variables.of(own), known, seen, modules=True)
