"""What the functions around a script's own loop keep in their variables: taken down with each version, and put back.

Of numbers, texts, small tensors and containers of these the value comes back; of objects of the script's own classes
their attributes of these kinds; of the script's other modules their variables; of generators of random numbers their
state. Nothing of the script's code runs for it.
"""

from __future__ import annotations

import ast
import collections
import enum
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, Dataset

from flashrecovery.worker.data import lightning_fabric
from flashrecovery.worker.local_state.fingerprints import CONTAINERS, ELEMENTS, KEPT_NUMBERS, attributes_of
from flashrecovery.worker.local_state.generators import as_stateful, is_generator
from flashrecovery.worker.own_loops.rewrite import LoopText
from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_text.plain_values import (
    LARGE,
    SMALL,
    Putting,
    copies_of,
    has_items,
    is_array,
    is_kept,
    items_of,
    plain_base,
    set_items,
    slots_of,
    storage_of,
)
from flashrecovery.worker.script_text.script_frames import STATIC, is_own
from flashrecovery.worker.script_text.script_modules import ScriptModules, attributes_of_class

_DEPTH = 3
_OBJECTS = 10_000
_MODULES = ScriptModules()
_MODULE = "module "
"""Before the names of modules in paths."""


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
    """Of objects and storages. ``held``: keeps the place of each storage, and nothing of its memory, so that no storage
    that is made later has the same identity."""

    held: tuple[StorageWeakRef, ...] = ()


def protected(things: Iterable[object], tensors: Iterable[torch.Tensor]) -> Identities:
    """Identities of ``things`` and of their parameter groups, and of the storages of ``tensors`` and of theirs: a
    variable that leads to one of them is none of the loop's own state."""
    ids, every = set[int](), list(tensors)
    for thing in things:
        ids.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            every += (*thing.parameters(), *thing.buffers())
        groups = getattr(thing, "param_groups", None)
        for group in groups if isinstance(groups, list) else ():
            ids |= {id(groups), id(group), id(group["params"])}
            every += (tensor for tensor in group["params"] if isinstance(tensor, torch.Tensor))
    found = Identities(ids | {storage_of(tensor) for tensor in every})
    found.held = tuple(ref for tensor in every if (ref := _held(tensor)) is not None)
    return found


def _held(tensor: torch.Tensor) -> StorageWeakRef | None:
    """None of a tensor without a storage of its own."""
    try:
        return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


@dataclass
class Saved:
    """``variables``: by name. ``attributes``: of objects, by the path that leads to them and the name. ``too_long``:
    lists and the like that are not among them, by name or path. ``left_out``: variables that the loop carries on, which
    cannot be taken down: arrays that are too large, containers of what cannot be made again."""

    variables: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    too_long: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

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
        return _MODULES.besides(self._global)


def take_down(frame: types.FrameType, names: LoopVariables, known: frozenset[int]) -> Saved:
    """``known``: identities of objects that are protected, or are none of the script's state."""
    variables, saved = _Variables(frame), Saved()
    _, own, passed = names.in_order
    for name, value in variables.of(own):
        largest = LARGE if name in names.carried else SMALL
        if not is_kept(value, known, largest=largest):
            if isinstance(value, CONTAINERS) and len(value) > largest:
                saved.too_long.append(name)
            elif name in names.carried and _is_left_out(value, known):
                saved.left_out.append(name)
        elif name in names.read_after or not _is_passing(name, value, names):
            saved.variables[name] = value
    for name, value in variables.of(passed):
        if isinstance(value, CONTAINERS) and is_kept(value, known):
            saved.variables[name] = value
    attributes, too_long, paths = _of_objects(variables, names, known)
    copies = copies_of({**{f"={n}": v for n, v in saved.variables.items()}, **attributes}, paths)
    saved.variables = {name: copies.pop(f"={name}") for name in saved.variables}
    saved.attributes = copies
    saved.too_long += too_long
    return saved


def values_of_objects(frame: types.FrameType, names: LoopVariables, known: frozenset[int]) -> dict[str, Any]:
    """``attributes`` of what :func:`take_down` gives."""
    attributes, _, paths = _of_objects(_Variables(frame), names, known)
    return copies_of(attributes, paths)


def _of_objects(
    variables: _Variables, names: LoopVariables, known: frozenset[int]
) -> tuple[dict[str, Any], list[str], dict[int, str]]:
    """What they have, by path; the paths of what is too long; and their own paths, by identity."""
    attributes: dict[str, Any] = {}
    too_long = []
    paths: dict[int, str] = {}
    for path, thing in _objects(variables, names, known):
        paths[id(thing)] = path
        generator = as_stateful(thing)
        if generator is not None:
            attributes[path] = generator.state_dict()
            continue
        for name, value in _attributes(thing).items():
            if is_kept(value, known):
                attributes[f"{path}.{name}"] = value
            elif isinstance(value, CONTAINERS) and len(value) > SMALL:
                too_long.append(f"{path}.{name}")
    return attributes, too_long, paths


def put_back(frame: types.FrameType, names: LoopVariables, known: frozenset[int], saved: Saved) -> dict[str, Any]:
    """Put back what can be put back from outside. Returns the values of variables, which the function's own text
    assigns."""
    putting = Putting()
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


def objects_of(frame: types.FrameType, names: LoopVariables, known: frozenset[int]) -> Iterator[tuple[str, object]]:
    """Generators of random numbers, functions with variables of others, the script's other modules, and objects of its
    own classes."""
    return _objects(_Variables(frame), names, known)


def is_of_module(path: str) -> bool:
    """Whether an object at ``path`` was come to by another module of the script."""
    return path.startswith(_MODULE)


def iterators_of(frame: types.FrameType, names: LoopVariables, known: frozenset[int]) -> dict[str, object]:
    """Iterators that modules and objects hold, by path, but for what is iterated over itself."""
    return {
        f"{path}.{name}": value
        for path, thing in _objects(_Variables(frame), names, known)
        if as_stateful(thing) is None and not hasattr(type(thing), "__iter__")
        for name, value in _attributes(thing).items()
        if isinstance(value, Iterator)
    }


def put_back_objects(
    frame: types.FrameType,
    names: LoopVariables,
    known: frozenset[int],
    saved: Mapping[str, Any],
    putting: Putting | None = None,
) -> None:
    """``saved``: some of what :func:`values_of_objects` gave."""
    putting = Putting() if putting is None else putting
    of_objects: dict[str, dict[str, Any]] = {}
    for where, value in saved.items():
        path, _, name = where.rpartition(".")
        of_objects.setdefault(path, {})[name] = value
    variables = _Variables(frame)
    for path, thing in _objects(variables, names, known):
        putting.found(path, thing)
        generator = as_stateful(thing)
        if generator is not None:
            if path in saved:
                generator.load_state_dict(saved[path])
            continue
        _put_attributes(thing, of_objects.pop(path, {}), putting)
    for path, values in of_objects.items():  # functions that have kept nothing here yet
        function = _function_at(variables, path)
        if function is not None:
            _put_attributes(function, values, putting)


def _put_attributes(thing: object, values: Mapping[str, Any], putting: Putting) -> None:
    attributes = _attributes(thing)
    for name, value in values.items():
        now = attributes.get(name)
        if as_stateful(now) is None:  # what a generator has comes later
            attributes[name] = putting.put(now, value)


def _function_at(variables: _Variables, path: str) -> types.FunctionType | None:
    """The function of that name, of the script or of one of its modules."""
    where, _, name = path.rpartition(".")
    module = sys.modules.get(where.removeprefix(_MODULE))
    found = vars(module).get(name) if module is not None else dict(variables.of([path])).get(path)
    return found if isinstance(found, types.FunctionType) else None


def _is_left_out(value: Any, known: frozenset[int]) -> bool:
    """Of what cannot be taken down as a whole: whether nothing else brings it back, or sees that it changes."""
    if isinstance(value, (list, tuple, set, collections.deque)):
        return bool(value) and not any(id(part) in known or isinstance(part, _BROUGHT_BACK) for part in value)
    return is_array(value)


_BROUGHT_BACK = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Dataset, DataLoader)


def _is_passing(name: str, value: Any, names: LoopVariables) -> bool:
    """A tensor that each round makes anew: a batch, a loss."""
    return name in names.remade and isinstance(value, torch.Tensor)


def _objects(variables: _Variables, names: LoopVariables, known: frozenset[int]) -> Iterator[tuple[str, object]]:
    """Generators of random numbers, functions with variables of others, the script's other modules, and objects of its
    own classes, each with the shortest of its paths; paths from variables that the loop sets come last, for they may
    not be set yet."""
    seen: set[int] = set()
    outer, own, _ = names.in_order
    yield from _objects_from(variables.of(outer), known, seen)
    for name, module in variables.modules():
        where = f"{_MODULE}{name}"
        yield where, module
        yield from _objects_from(((f"{where}.{n}", v) for n, v in _OfModule(module).items()), known, seen)
    yield from _objects_from(variables.of(own), known, seen)


def _objects_from(
    roots: Iterable[tuple[str, Any]], known: frozenset[int], seen: set[int]
) -> Iterator[tuple[str, object]]:
    waiting = collections.deque((name, value, _DEPTH) for name, value in roots if _leads_to(value))
    while waiting and len(seen) < _OBJECTS:
        path, thing, depth = waiting.popleft()
        kind = _leads_to(thing)
        if id(thing) in seen or id(thing) in known or (kind is _Kind.FUNCTION and not _keeps_something(thing)):
            continue
        seen.add(id(thing))
        parts: Iterable[tuple[str, Any]] = ()
        if kind is _Kind.CONTAINER:
            assert isinstance(thing, _WALKED)
            if isinstance(thing, dict) and len(thing) <= ELEMENTS and not is_kept(thing, known):
                yield path, thing
            if len(thing) <= ELEMENTS:
                pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
                parts = [(f"{path}[{key!r}]", part) for key, part in pairs if isinstance(key, (int, str))]
        elif kind is _Kind.CALL:
            if isinstance(thing, functools.partial):
                yield path, thing
            parts = [(f"{path}.{name}", part) for name, part in _parts_of_call(thing)]
        elif kind is not _Kind.OTHER:
            yield path, thing
            if kind is not _Kind.GENERATOR:
                parts = [(f"{path}.{name}", part) for name, part in _attributes(thing).items()]
        if depth:
            waiting.extend((where, part, depth - 1) for where, part in parts if _leads_to(part))


_WALKED = (list, tuple, dict, collections.deque, collections.OrderedDict, collections.defaultdict)


def _parts_of_call(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, types.MethodType):
        yield from (("__self__", thing.__self__), ("__func__", thing.__func__))
    elif isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))


class _Kind(enum.Enum):
    """Of a class, what an object of it may lead to."""

    OTHER = "other"
    FUNCTION = "function"
    CONTAINER = "container"
    CALL = "method or partial"
    GENERATOR = "generator"
    OWN = "own"
    CLASS = "class"


_LEAVES = (*STATIC, *KEPT_NUMBERS, torch.Tensor, torch.nn.Module, Dataset, DataLoader)


def _leads_to(thing: object) -> _Kind | None:
    """None: to nothing."""
    if isinstance(thing, type):
        return _kind_of_class(thing)
    return _kind_of(type(thing))  # type: ignore[arg-type] # a class is hashable


@functools.lru_cache(4096)
def _kind_of_class(thing: type) -> _Kind | None:
    """Numbers and the like may be counted in a class of the script's own."""
    plain = not issubclass(thing, (enum.Enum, torch.nn.Module, BaseException)) and is_own(thing)
    return _Kind.CLASS if plain else None


@functools.lru_cache(4096)
def _kind_of(kind: type) -> _Kind | None:
    if issubclass(kind, types.FunctionType):
        return _Kind.FUNCTION
    if kind in (types.MethodType, functools.partial):
        return _Kind.CALL
    if issubclass(kind, _LEAVES):
        return None
    if is_generator(kind):
        return _Kind.GENERATOR
    if kind in _WALKED:
        return _Kind.CONTAINER
    if issubclass(kind, enum.Enum):
        return None
    return _Kind.OWN if _has_plain_state(kind) else _Kind.OTHER


def _attributes(thing: object) -> MutableMapping[str, Any]:
    """Of a function, what it has from the functions around it, its own attributes, and its default arguments."""
    if isinstance(thing, types.FunctionType):
        return _OfFunction(thing)
    if isinstance(thing, type):
        return _OfClass(thing)
    if isinstance(thing, types.ModuleType):
        return _OfModule(thing)
    if isinstance(thing, functools.partial):
        return _OfPartial(thing)
    if type(thing) in _WALKED:
        return _OfDictionary(thing)
    base = plain_base(type(thing))  # type: ignore[arg-type] # a class is hashable
    if base is not None and base is not tuple and has_items(base):
        return _OfContainer(thing, base)
    slots = slots_of(type(thing))  # type: ignore[arg-type] # a class is hashable
    return _OfSlots(thing, slots) if slots else attributes_of(thing)


class _Attributes(MutableMapping[str, Any]):
    """Those that have a value when this is made."""

    _names: Sequence[str]

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _OfFunction(_Attributes):
    def __init__(self, function: types.FunctionType) -> None:
        self._every_cell = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._cells = {name: cell for name, cell in self._every_cell.items() if _is_filled(cell)}
        self._own = function.__dict__
        self._defaults = changing_defaults(function)
        self._names = [*self._cells, *(name for name in self._own if name not in self._cells), *self._defaults]

    def __getitem__(self, name: str) -> Any:
        if name in self._cells:
            return self._cells[name].cell_contents
        return self._own[name] if name in self._own else self._defaults[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._every_cell:
            self._every_cell[name].cell_contents = value
        elif name not in self._defaults:  # of which the container itself has been changed
            self._own[name] = value


class _OfClass(_Attributes):
    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._names = [*attributes_of_class(kind)]

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in vars(self._kind) or value is not vars(self._kind)[name]:
            type.__setattr__(self._kind, name, value)


class _OfModule(_Attributes):
    def __init__(self, module: types.ModuleType) -> None:
        self._variables = vars(module)
        self._names = _MODULES.changing(module.__name__)

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value


class _OfPartial(_Attributes):
    """Its arguments, of which only what containers among them hold can change."""

    def __init__(self, thing: functools.partial[Any]) -> None:
        self._arguments = {"args": thing.args, "keywords": thing.keywords}
        self._names = ("args", "keywords")

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def __setitem__(self, name: str, value: Any) -> None: ...


class _OfDictionary(_Attributes):
    """One that cannot be taken down as a whole: what it has under names and numbers."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._keys = {f"[{key!r}]": key for key in thing if type(key) in (int, str) and "." not in str(key)}
        self._names = [*self._keys]

    def __getitem__(self, name: str) -> Any:
        return self._thing[self._keys[name]]

    def __setitem__(self, name: str, value: Any) -> None:
        self._thing[self._keys[name] if name in self._keys else ast.literal_eval(name[1:-1])] = value


class _OfContainer(_Attributes):
    """An object of a class that is derived from a list, a dictionary or the like."""

    def __init__(self, thing: object, base: type) -> None:
        self._thing, self._base, self._dict = thing, base, attributes_of(thing)
        self._names = [_ITEMS, *(self._dict if self._dict is not thing else ())]

    def __getitem__(self, name: str) -> Any:
        return items_of(self._thing) if name == _ITEMS else self._dict[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == _ITEMS:
            set_items(self._thing, value, self._base)
        else:
            self._dict[name] = value


_ITEMS = "its items"


class _OfSlots(_Attributes):
    def __init__(self, thing: object, slots: Sequence[str]) -> None:
        self._thing, self._dict = thing, attributes_of(thing)
        self._names = [*(name for name in slots if hasattr(thing, name)), *self._dict]

    def __getitem__(self, name: str) -> Any:
        if name in self._dict:
            return self._dict[name]
        if not hasattr(self._thing, name):
            raise KeyError(name)
        return getattr(self._thing, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._dict:
            self._dict[name] = value
        else:
            object.__setattr__(self._thing, name, value)


def changing_defaults(function: types.FunctionType) -> dict[str, Any]:
    """Default arguments that calls can change, by ``name=``."""
    if not function.__defaults__ and not function.__kwdefaults__:
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    every = {**dict(zip(last, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    return {
        f"{name}=": value for name, value in every.items() if isinstance(value, (list, dict, set, collections.deque))
    }


def _keeps_something(function: object) -> bool:
    assert isinstance(function, types.FunctionType)
    keeps = function.__closure__ or function.__dict__ or function.__defaults__ or function.__kwdefaults__
    written = getattr(function, "__wrapped__", function)  # by a decorator of a library
    code = getattr(written, "__code__", function.__code__)
    return bool(keeps) and (is_own_file(function.__code__.co_filename) or is_own_file(code.co_filename))


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _has_plain_state(kind: type) -> bool:
    """Classes of the script's own, and those that scripts keep numbers of theirs in: a parser's arguments, a progress
    bar; Fabric's loaders, which count epochs."""
    if is_own(kind) or kind is types.SimpleNamespace or lightning_fabric.is_loader(kind):
        return True
    return kind.__module__.partition(".")[0] in ("argparse", "tqdm")
