"""What a script's objects, functions, classes and modules hold, by name, and how one leads to another. Nothing of the
script's code runs for it."""

from __future__ import annotations

import ast
import collections
import contextvars
import enum
import functools
import threading
import types
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flashrecovery.worker.local_state.fingerprints import ELEMENTS, KEPT_NUMBERS, attributes_of
from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_text.extents import is_array
from flashrecovery.worker.script_text.function_parts import shared_variables
from flashrecovery.worker.script_text.plain_values import (
    has_items,
    is_kept,
    is_referred_to,
    is_whole,
    items_of,
    plain_base,
    set_items,
    slots_of,
)
from flashrecovery.worker.script_text.script_frames import STATIC, carried_by_own_classes, is_own
from flashrecovery.worker.script_text.script_modules import ScriptModules, attributes_of_class, is_made_by_hand

_DEPTH = 3
_OBJECTS = 10_000
MODULES = ScriptModules()


def objects_from(
    roots: Iterable[tuple[str, Any]], known: frozenset[int], seen: set[int], *, modules: bool = False
) -> Iterator[tuple[str, object]]:
    """Generators of random numbers, texts in memory, functions with variables of others, classes and objects of the
    script's own, each with the shortest of its paths from ``roots``. ``seen``: identities of those that have been
    yielded; grows. ``modules``: the script's own ones among neural networks and their parts, too, also if they are
    ``known``."""
    waiting = collections.deque((name, value, _DEPTH) for name, value in roots if _leads_to(value))
    while waiting and len(seen) < _OBJECTS:
        path, thing, depth = waiting.popleft()
        kind = _leads_to(thing)
        if kind is _Kind.MODULE:
            for place, one in _own_parts(thing) if modules else ():
                if id(one) not in seen:
                    seen.add(id(one))
                    where = f"{path}.{place}" if place else path
                    if _names_in(one):
                        yield where, one
                    waiting.extend((f"{where}.{name}", part, depth) for name, part in _led_to_by(one))
            continue
        elsewhere = id(thing) in known and kind is not _Kind.OPTIMIZER  # what the script adds to it is its own
        if id(thing) in seen or elsewhere or (kind is _Kind.FUNCTION and not _keeps_something(thing)):
            continue
        seen.add(id(thing))
        parts: Iterable[tuple[str, Any]] = ()
        if kind is _Kind.CONTAINER:
            assert isinstance(thing, _WALKED)
            if isinstance(thing, dict) and len(thing) <= ELEMENTS and not is_kept(thing, known, with_generators=True):
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
            if kind is not _Kind.WHOLE:
                parts = [(f"{path}.{name}", part) for name, part in held_by(thing).items()]
        if depth:
            waiting.extend((where, part, depth - 1) for where, part in parts if _leads_to(part))


def referred_to_from(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, object]]:
    """Modules, optimizers, functions and the like, and objects of the script's own classes, each with the shortest of
    its paths from ``roots``, and the parameters of these modules. Not methods: a new one is made each time."""
    seen: set[int] = set()
    within: set[int] = set()
    waiting = collections.deque((name, value, _DEPTH) for name, value in roots)
    while waiting and len(seen) < _OBJECTS:
        path, thing, depth = waiting.popleft()
        kind = _leads_to(thing)
        if (kind is None and not is_referred_to(thing)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        parts: Iterable[tuple[Any, Any]] = ()
        if kind is _Kind.CONTAINER:
            assert isinstance(thing, _WALKED)
            parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
        elif kind is _Kind.CALL:
            parts = _parts_of_call(thing)
        elif isinstance(thing, torch.nn.Module):
            parts = thing.named_children()
            if id(thing) not in within:  # else those of the module around it are these, too
                within.update(map(id, thing.modules()))
                yield from ((f"{path}.{name}", parameter) for name, parameter in thing.named_parameters())
        elif kind in (_Kind.OWN, _Kind.CLASS, _Kind.FUNCTION):
            parts = held_by(thing).items()
        by_path = (is_referred_to(thing) and not isinstance(thing, types.MethodType)) or kind is _Kind.OWN
        if by_path and type(thing).__weakrefoffset__:
            yield path, thing
        if depth:
            waiting.extend((f"{path}.{key}", part, depth - 1) for key, part in parts if isinstance(key, (int, str)))


_WALKED = (list, tuple, dict, collections.deque, collections.OrderedDict, collections.defaultdict)


def _parts_of_call(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, types.MethodType):
        yield from (("__self__", thing.__self__), ("__func__", thing.__func__))
    elif isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))


class _Kind(enum.Enum):
    """The objects that an object of a class may refer to."""

    OTHER = "other"
    FUNCTION = "function"
    CONTAINER = "container"
    CALL = "method or partial"
    OPTIMIZER = "optimizer"
    WHOLE = "generator of random numbers, or text in memory"
    OWN = "own"
    MODULE = "neural network"
    CLASS = "class"


_LEAVES = (*STATIC, *KEPT_NUMBERS, torch.Tensor, Dataset, DataLoader)


def _leads_to(thing: object) -> _Kind | None:
    """None: to nothing."""
    if isinstance(thing, type):
        return _kind_of_class(thing)
    if isinstance(thing, types.ModuleType):
        return _Kind.OWN if is_made_by_hand(thing) else None
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
    if issubclass(kind, torch.optim.Optimizer):
        return _Kind.OPTIMIZER
    if issubclass(kind, torch.nn.Module):
        return _Kind.MODULE
    if issubclass(kind, _LEAVES):
        return None
    if is_whole(kind):
        return _Kind.WHOLE
    if kind in _WALKED:
        return _Kind.CONTAINER
    if issubclass(kind, enum.Enum):
        return None
    return _Kind.OWN if _has_plain_state(kind) else _Kind.OTHER


def held_by(thing: object) -> MutableMapping[str, Any]:
    """The objects that a function holds: closure variables, attributes and default arguments."""
    if isinstance(thing, types.FunctionType):
        return _OfFunction(thing)
    if isinstance(thing, type):
        return _OfClass(thing)
    if isinstance(thing, types.ModuleType):
        return _OfModule(thing)
    if isinstance(thing, functools.partial):
        return _OfPartial(thing)
    if isinstance(thing, torch.optim.Optimizer):
        return _OfOptimizer(thing)
    if isinstance(thing, torch.nn.Module):
        return _OfNetwork(thing)
    if type(thing) in _WALKED:
        return _OfDictionary(thing)
    if isinstance(thing, contextvars.ContextVar):
        return _OfContextVariable(thing)
    base = plain_base(type(thing))  # type: ignore[arg-type] # a class is hashable
    if base is not None and base is not tuple and has_items(base):
        return _OfContainer(thing, base)
    slots = slots_of(type(thing))  # type: ignore[arg-type] # a class is hashable
    return _OfSlots(thing, slots) if slots else attributes_of(thing)


def may_lose(thing: object) -> bool:
    """Whether what it has may be taken from it: the attributes of objects, entries of dictionaries."""
    return not isinstance(thing, (types.ModuleType, type, functools.partial, torch.optim.Optimizer, torch.nn.Module))


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
        self._own = function.__dict__
        self._defaults = changing_defaults(function)
        self._shared = [*shared_variables(function)]
        self._names = [*self._shared, *(name for name in self._own if name not in self._shared), *self._defaults]

    def __getitem__(self, name: str) -> Any:
        if name in self._shared:
            return self._every_cell[name].cell_contents
        return self._own[name] if name in self._own else self._defaults[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._every_cell:
            self._every_cell[name].cell_contents = value
        elif name not in self._defaults:  # of which the container itself has been changed
            self._own[name] = value

    def __delitem__(self, name: str) -> None:
        self._own.pop(name, None)  # variables of others stay


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
        of_no_file = [name for name in self._variables if not name.startswith("__")] if is_made_by_hand(module) else ()
        self._names = of_no_file or MODULES.changing(module.__name__)

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


class _OfOptimizer(_Attributes):
    """What a script adds to one: a count of what it has skipped."""

    def __init__(self, thing: torch.optim.Optimizer) -> None:
        self._variables = vars(thing)
        own = ("defaults", "state", "param_groups")
        self._names = [name for name in self._variables if name not in own and not name.startswith("_")]

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value


class _OfNetwork(_Attributes):
    """What a module of the script's own holds besides parameters, buffers and modules, and besides the objects that it
    leads to: what its methods change, and containers, tensors and arrays."""

    def __init__(self, thing: torch.nn.Module) -> None:
        self._variables, self._names = vars(thing), _names_in(thing)

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value


def _names_in(module: torch.nn.Module) -> list[str]:
    changed = _changed_by_methods(type(module))  # type: ignore[arg-type] # a class is hashable
    return [name for name, value in _own_attributes(module) if name in changed or _may_hold(value)]


def _may_hold(value: object) -> bool:
    """Whether what it holds may change: containers, tensors and arrays, iterators."""
    if type(value) in KEPT_NUMBERS or (type(value) is tuple and _FIXED.issuperset(map(type, value))):
        return False
    return isinstance(value, (*_WALKED, set, torch.Tensor, bytearray, Iterator)) or is_array(value)


def _own_attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_NETWORK)


def _led_to_by(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for name, part in _own_attributes(module):
        if type(part) not in KEPT_NUMBERS and _leads_to(part) is not None:
            yield name, part


_OF_EVERY_NETWORK = frozenset(vars(torch.nn.Module()))
_FIXED = frozenset(KEPT_NUMBERS)


@functools.lru_cache(4096)
def _changed_by_methods(kind: type) -> frozenset[str]:
    found = carried_by_own_classes(kind)
    return found.names | found.remade | found.read


def _own_parts(module: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of the script's own classes in it, itself included, by name."""
    for name, one in module.named_modules():
        if _is_own_network(type(one)):  # type: ignore[arg-type] # a class is hashable
            yield name, one


@functools.lru_cache(4096)
def _is_own_network(kind: type) -> bool:
    """FSDP2 makes a class of its own of each class."""
    return any(is_own(one) for one in kind.__mro__)


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

    def __delitem__(self, name: str) -> None:
        del self._thing[self._keys[name]]


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

    def __delitem__(self, name: str) -> None:
        self._dict.pop(name, None)


_ITEMS = "its items"


class _OfContextVariable(_Attributes):
    """Its value in the training thread, or its default one."""

    def __init__(self, thing: contextvars.ContextVar[Any]) -> None:
        self._thing = thing
        try:
            thing.get()
        except LookupError:
            self._names: tuple[str, ...] = ()
        else:
            self._names = ("value",)

    def __getitem__(self, name: str) -> Any:
        return self._thing.get()

    def __setitem__(self, name: str, value: Any) -> None:
        self._thing.set(value)

    def __delitem__(self, name: str) -> None: ...  # only a token of the script's takes it back


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

    def __delitem__(self, name: str) -> None:
        if name in self._dict:
            del self._dict[name]
        else:
            object.__delattr__(self._thing, name)


def changing_defaults(function: types.FunctionType) -> dict[str, Any]:
    """Default arguments that calls can change, by ``name=``."""
    if not function.__defaults__ and not function.__kwdefaults__:
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    every = {**dict(zip(last, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    kinds = (list, dict, set, collections.deque)
    return {
        f"{name}=": value for name, value in every.items() if isinstance(value, kinds) or _leads_to(value) is _Kind.OWN
    }


def _keeps_something(function: object) -> bool:
    assert isinstance(function, types.FunctionType)
    keeps = function.__closure__ or function.__dict__ or function.__defaults__ or function.__kwdefaults__
    written = getattr(function, "__wrapped__", function)  # by a decorator of a library
    code = getattr(written, "__code__", function.__code__)
    return bool(keeps) and (is_own_file(function.__code__.co_filename) or is_own_file(code.co_filename))


_HOLDERS = (
    *(types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap),
    *(threading.local, contextvars.ContextVar, torch.quasirandom.SobolEngine),
)


def _has_plain_state(kind: type) -> bool:
    """Classes of the script's own, and those that scripts keep numbers of theirs in: a parser's arguments, a progress
    bar; Fabric's loaders, which count epochs."""
    if is_own(kind) or kind in _HOLDERS or _is_loader_of_fabric(kind):
        return True
    return kind.__module__.partition(".")[0] in ("argparse", "tqdm")


def _is_loader_of_fabric(kind: type) -> bool:
    """Whether it is one of Lightning Fabric's loaders, which count their epochs themselves."""
    return (kind.__module__, kind.__name__) == ("lightning.fabric.wrappers", "_FabricDataLoader")
