"""Plain values of a script's variables: which are taken down with a version, and how they are put back.

Plain are numbers, texts, tensors and arrays, containers of plain values, methods and partials of such, and objects of
the script's own classes, and modules without parameters, whose attributes are plain; where it is asked for, generators
of random numbers, too, and what was made at set-up (:class:`References`). No code of the script runs to take one down,
or to make it again. What two places hold together they hold together afterwards, too, as far as both are put back at
once.
"""

from __future__ import annotations

import abc
import argparse
import array
import bisect
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from flashrecovery.worker.local_state import generators
from flashrecovery.worker.local_state.fingerprints import KEPT_NUMBERS
from flashrecovery.worker.script_text.extents import (
    ALIGNED,
    bytes_around,
    extent_of,
    in_memory,
    is_array,
    is_of_numpy,
    is_same_place,
    strides_of,
    together,
)
from flashrecovery.worker.script_text.script_frames import is_own

_NUMBERS = frozenset((*KEPT_NUMBERS, complex, bytes))
_DEPTH = 5
SMALL = 4096
"""Elements of a container or tensor that is taken down."""
LARGE = 1 << 24
"""Elements of a tensor that a variable carries from one round of a loop to the next: a hidden state, a batch that was
read ahead."""
_PARTS = 20_000
"""Parts of one value, all levels of it together."""
_DICTIONARIES = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque, *_DICTIONARIES)
_BUFFERS = (bytearray, array.array)
_IMMUTABLE = frozenset((torch.device, torch.dtype, torch.Size, range))
BY_PARTS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    slice: (lambda s: (s.start, s.stop, s.step), slice),
    decimal.Decimal: (lambda d: (str(d),), decimal.Decimal),
    fractions.Fraction: (lambda f: (f.numerator, f.denominator), fractions.Fraction),
    pathlib.PosixPath: (lambda p: (str(p),), pathlib.PosixPath),
    datetime.datetime: (lambda t: (t.isoformat(),), datetime.datetime.fromisoformat),
    datetime.date: (lambda t: (t.isoformat(),), datetime.date.fromisoformat),
    datetime.timedelta: (lambda t: (t.days, t.seconds, t.microseconds), datetime.timedelta),
}
"""Values that never change: into plain parts, and made of these."""


def made_of_parts(name: str, parts: Iterable[Any]) -> Any:
    """A value of one of :data:`BY_PARTS`. ``name``: of its class."""
    return next(make for kind, (_, make) in BY_PARTS.items() if kind.__name__ == name)(*parts)


class _Whole(typing.NamedTuple):
    """How objects of a class that are read and written by methods alone give their content, with the place in it, and
    get it back. ``size``: in characters, bytes or numbers."""

    size: Callable[[Any], int]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    make: Callable[[], Any] | None = None
    """None: only the one that is there can get it back."""
    longest: int = SMALL


LONGEST = 1 << 20
"""Characters or bytes of a text in memory that is taken down."""
_IN_MEMORY = {
    kind: _Whole(
        lambda text: len(text.getvalue()),
        lambda text: text.__getstate__()[:-1],  # but for its attributes
        lambda text, state: text.__setstate__((*state, None)),
        kind,
        LONGEST,
    )
    for kind in (io.StringIO, io.BytesIO)
}
_NUMBER = _Whole(lambda _: 1, lambda one: one.get_obj().value, lambda one, v: setattr(one.get_obj(), "value", v))
_ARRAY = _Whole(
    lambda a: len(a.get_obj()), lambda a: a.get_obj()[:], lambda a, v: a.get_obj().__setitem__(slice(None), v)
)


@functools.lru_cache(4096)
def _whole(kind: Any) -> _Whole | None:
    if kind.__module__ != "multiprocessing.sharedctypes":
        return _IN_MEMORY.get(kind)
    return {"Synchronized": _NUMBER, "SynchronizedArray": _ARRAY, "SynchronizedString": _ARRAY}.get(kind.__name__)


def is_whole(kind: type) -> bool:
    """Whether objects of this class are taken down as a whole, and have no attributes: generators of random numbers,
    texts and bytes in memory, numbers that processes share (`multiprocessing.Value`)."""
    found = _whole(kind)
    return found is not None or generators.is_generator(kind)


_DTYPES = "biufcSUMm"
"""Kinds of numpy's dtypes whose values are plain."""

_ENUM = "member of an enumeration"
_GLOBAL = "function or class"
_OBJECT = "object of a class of the script's"
_TUPLE = "named tuple of the script's"
_DICT = "dictionary of another kind"
_VALUE = "value of one of a few kinds"
_GENERATOR = "generator of random numbers"
_VIEW = "tensor in the memory of others"
_SHARED = "held in several places"
_AT = "object at a path"
_REFERENCE = "what was made at set-up"
_METHOD = "method of an object"
_PARTIAL = "function with some of its arguments"
_BUFFER = "bytes or numbers that can be written"
_CONTENT = "content of what is read and written by methods"
_MARKS = frozenset(
    (
        _ENUM,
        _GLOBAL,
        _OBJECT,
        _TUPLE,
        _DICT,
        _VALUE,
        _GENERATOR,
        _VIEW,
        _SHARED,
        _AT,
        _REFERENCE,
        _METHOD,
        _PARTIAL,
        _BUFFER,
        _CONTENT,
    )
)
"""Keys of dictionaries that stand for something else; each is the only one."""


class References:
    """What a script has made before its loop began, by the path that led to it then. A replacement runs the same lines,
    and finds the same things there: a variable that refers to one of them needs no copy of it."""

    def __init__(self, things: Iterable[tuple[str, object]] = ()) -> None:
        self._things: dict[str, weakref.ref[Any]] = {}
        self._paths: dict[int, str] = {}
        for path, thing in things:
            if id(thing) not in self._paths:
                self._things[path] = weakref.ref(thing)
                self._paths[id(thing)] = path

    def path_of(self, thing: object) -> str | None:
        path = self._paths.get(id(thing))
        return path if path is not None and self._things[path]() is thing else None

    def at(self, path: str) -> Any:
        """None if it is gone."""
        return self._things[path]() if path in self._things else None


NO_REFERENCES = References()


def is_kept(
    value: Any,
    known: frozenset[int] = frozenset(),
    *,
    largest: int = SMALL,
    with_generators: bool = False,
    references: References = NO_REFERENCES,
) -> bool:
    """Whether ``value`` is plain, its tensors and arrays have at most ``largest`` elements, and its containers
    :data:`SMALL`. ``known``: identities of what is protected otherwise: tensors, their storages (:func:`storage_of`),
    containers, objects. ``with_generators``: those of random numbers count as plain, and so does what ``references``
    has."""
    return type(value) in _NUMBERS or _Kept(known, largest, with_generators, references).has(value, _DEPTH)


class _Kept:
    def __init__(self, known: frozenset[int], largest: int, with_generators: bool, references: References) -> None:
        self._known, self._largest, self._with_generators = known, largest, with_generators
        self._references = references
        self._left = _PARTS

    def has(self, value: Any, depth: int) -> bool:
        kind = type(value)
        if kind in _NUMBERS:
            return True
        if isinstance(value, _WHICH) and self._references.path_of(value) is not None:
            return True
        if id(value) in self._known:
            return False
        if isinstance(value, torch.Tensor):
            return kind is torch.Tensor and value.numel() <= self._largest and storage_of(value) not in self._known
        if kind in _CONTAINERS:
            return self._has_all(value, depth)
        if isinstance(value, enum.Enum):
            return "<locals>" not in kind.__qualname__
        if kind in _BUFFERS:
            return len(value) <= SMALL
        whole = _whole(kind)  # type: ignore[arg-type] # a class is hashable
        if whole is not None:
            return not getattr(value, "closed", False) and whole.size(value) <= whole.longest
        if kind in _IMMUTABLE or kind in BY_PARTS:
            return kind is not datetime.datetime or value.tzinfo is None
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return is_global(value)
        if kind is types.MethodType:
            owner = value.__self__
            return _is_method(value) and (
                self._references.path_of(owner) is not None or (bool(depth) and self.has(owner, depth - 1))
            )
        if kind is functools.partial:
            return bool(depth) and not vars(value) and self._has_parts(_parts_of_partial(value), depth)
        if isinstance(value, torch.nn.Module):  # a parameter is not plain
            return bool(depth) and is_global(kind) and self._has_parts(vars(value).values(), depth)
        if generators.is_generator(kind):
            return self._with_generators and generators.made_of(value) is not None
        if plain_base(kind) is not None:  # type: ignore[arg-type] # a class is hashable
            return bool(depth) and self._has_parts(state_of(value).values(), depth) and self._has_items(value, depth)
        return is_of_numpy(kind) and value.dtype.kind in _DTYPES and value.size <= self._largest

    def _has_items(self, value: Any, depth: int) -> bool:
        items = items_of(value)
        return items is None or self._has_all(items, depth)

    def _has_all(self, value: Any, depth: int) -> bool:
        if not depth or len(value) > SMALL:
            return False
        if type(value) is collections.defaultdict and not _is_factory(value.default_factory):
            return depth == _DEPTH  # it is there, and is not made again
        parts = value.values() if isinstance(value, dict) else value
        keys = value if isinstance(value, (dict, set, frozenset)) else ()
        of_dictionary = parts is not keys
        if not _NUMBERS.issuperset(map(type, keys)) and not all(
            _is_key(key) or (of_dictionary and self._is_made_key(key)) for key in keys
        ):
            return False
        if parts is keys or _NUMBERS.issuperset(map(type, parts)):
            return True
        return self._has_parts(parts, depth)

    def _is_made_key(self, key: Any) -> bool:
        """Whether it is a key of a dictionary by what it is like (a class, a member of an enumeration, a path, a frozen
        data class), or a module or parameter that was made at set-up."""
        if type(key) is tuple:
            return all(_is_key(part) or self._is_made_key(part) for part in key)
        if isinstance(key, _KEYS) and self._references.path_of(key) is not None:
            return True
        named = isinstance(key, (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType))
        return (named or type(key) in BY_PARTS or _is_frozen(type(key))) and self.has(key, _DEPTH)

    def _has_parts(self, parts: Iterable[Any], depth: int) -> bool:
        for part in parts:
            self._left -= 1
            if self._left < 0 or not self.has(part, depth - 1):
                return False
        return True


def _is_frozen(kind: type) -> bool:
    """Whether its objects are equal, and have one hash, if their fields do."""
    made = getattr(kind, "__dataclass_params__", None)
    return made is not None and made.frozen and made.eq


def _is_key(key: Any) -> bool:
    """Whether it may be one of a dictionary, or in a set, as it is."""
    kind = type(key)
    if kind in (tuple, frozenset):
        return all(map(_is_key, key))
    return kind in _NUMBERS or kind in _IMMUTABLE or (is_of_numpy(kind) and key.shape == ())


def _parts_of_partial(value: functools.partial[Any]) -> tuple[Any, ...]:
    return value.func, value.args, value.keywords


def _is_method(value: types.MethodType) -> bool:
    """Whether it is what its name leads to in its object's class."""
    return getattr(type(value.__self__), value.__name__, None) is value.__func__


_WHICH = (
    *(torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(torch.utils.data.Dataset, torch.utils.data.DataLoader),
    *(types.FunctionType, types.MethodType, functools.partial),
)
_KEYS = (torch.nn.Module, torch.nn.Parameter)


def is_referred_to(value: object) -> bool:
    """Whether a variable says which one this is, not what it is like: a module, an optimizer, a function."""
    return isinstance(value, _WHICH)


# -- what may be made again ---------------------------------------------------------------------------

_NO_ITEMS = (object, types.SimpleNamespace)
_NO_STATE = frozenset(
    (
        *(object, abc.ABC, typing.Generic, typing.Protocol, argparse.Namespace, collections.Counter),
        *(collections.UserDict, collections.UserList, collections.ChainMap),  # but for their attributes
        torch.quasirandom.SobolEngine,
    )
)
_ABSTRACT = ("collections.abc", "typing")
"""Modules whose classes have methods alone."""
_BASES = (list, set, collections.deque, collections.OrderedDict, dict, tuple, types.SimpleNamespace)
"""Classes of which a class of the script may be a subclass."""


@functools.lru_cache(4096)
def plain_base(kind: Any) -> Any:
    """``object``, or the one of :data:`_BASES` that has the items of such an object; None if the class is not the
    script's own alone, or cannot be found by its name."""
    if kind is object or issubclass(kind, (enum.Enum, type)) or not is_global(kind):
        return None
    base: type = object
    for one in kind.__mro__:
        if one in _BASES:
            return one
        if one not in _NO_STATE and one.__module__ not in _ABSTRACT and not is_own(one):
            return None
    return base


def is_global(thing: Any) -> bool:
    """Whether a function or class is what its name leads to."""
    return _found(thing.__module__, thing.__qualname__) is thing


def _found(module: str | None, path: str) -> Any:
    found: Any = sys.modules.get(module or "")
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _is_factory(factory: Any) -> bool:
    return factory is None or (isinstance(factory, (type, types.FunctionType)) and is_global(factory))


@functools.lru_cache(1024)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Names of the attributes that are slots of its objects."""
    members = (name for one in kind.__mro__ for name, v in vars(one).items() if type(v) is types.MemberDescriptorType)
    return tuple(name for name in members if name != "__dict__")


def state_of(thing: object) -> dict[str, Any]:
    """Its attributes, by name."""
    slots = slots_of(type(thing))  # type: ignore[arg-type] # a class is hashable
    found = getattr(thing, "__dict__", {})
    return {**{name: getattr(thing, name) for name in slots if hasattr(thing, name)}, **found} if slots else found


def has_items(base: Any) -> bool:
    """Whether objects with this :func:`plain_base` are containers."""
    return base not in _NO_ITEMS


def items_of(thing: Any) -> Any:
    """What it has as a container, as one of a kind that everybody has; None if it is none."""
    base = plain_base(type(thing))  # type: ignore[arg-type] # a class is hashable
    if base is None or not has_items(base):
        return None
    if issubclass(base, dict):
        return dict(base.items(thing))
    return tuple(base.__iter__(thing)) if base is tuple else list(base.__iter__(thing))


def set_items(thing: Any, items: Any, base: Any) -> None:
    """As :func:`items_of` gives them. No code of its class runs. ``base``: see :func:`plain_base`."""
    base.clear(thing)
    if isinstance(items, dict):
        for key, value in items.items():
            base.__setitem__(thing, key, value)
    else:
        (base.update if base is set else base.extend)(thing, items)


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of its memory; of a DTensor, that of its part."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # one without its own storage
        return id(tensor)


_BY_NAME = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)


# -- taken down ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """A tensor or array that shares elements with others: the ``memory`` that holds them, from address ``low`` to
    before ``high``; ``first``: address of this one's first element."""

    memory: str
    low: int
    high: int
    first: int


@dataclass
class _Alike:
    """What the values that are taken down together hold together."""

    places: dict[int, tuple[str, str]]
    """Objects that are held in several places, by identity: :data:`_SHARED` or :data:`_AT`, and a name."""
    views: dict[int, _View] = field(default_factory=dict)
    """The views: tensors and arrays that share elements with others, by identity."""
    references: References = NO_REFERENCES


def copies_of(
    values: Mapping[str, Any],
    paths: Mapping[int, str] | None = None,
    around: Mapping[str, Any] | None = None,
    references: References = NO_REFERENCES,
) -> dict[str, Any]:
    """Copies of the objects that :func:`is_kept` accepts. ``paths``: of objects that are taken down one by one, by
    identity: a process that finds such a path when this is put back takes what is there (:meth:`Putting.found`).
    ``around``: tensors and arrays that are taken down, too, if they share elements with those in ``values``.
    ``references``: as :func:`is_kept` had them."""
    if _NUMBERS.issuperset(map(type, values.values())):
        return dict(values)
    seen: dict[int, Any] = {}
    alike = _Alike({number: (_AT, path) for number, path in (paths or {}).items()}, references=references)

    def look_at(more: Mapping[str, Any]) -> None:
        for name, value in more.items():
            again: list[int] = []
            _count(value, seen, again, references)
            for number, one in enumerate(again):
                alike.places.setdefault(one, (_SHARED, f"{name}, {number}"))

    look_at(values)
    sharing = _sharing_with(seen.values(), around) if around else {}
    look_at(sharing)
    alike.views = _views_of(seen.values())
    return {name: _copy(value, alike) for name, value in (*values.items(), *sharing.items())}


def _sharing_with(values: Iterable[Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors and arrays of ``others`` that share elements with those of ``values``."""
    taken = [(low, high) for low, high, _ in together(_extents(values))]
    lows = [low for low, _ in taken]
    found = {}
    for name, value in others.items() if taken else ():
        extent = extent_of(value)
        if extent is not None:
            before = bisect.bisect_left(lows, extent[1])
            if before and taken[before - 1][1] > extent[0]:
                found[name] = value
    return found


def _extents(values: Iterable[Any]) -> Iterator[tuple[int, int, int, Any]]:
    return ((*extent, value) for value in values if (extent := extent_of(value)) is not None)


def _views_of(values: Iterable[Any]) -> dict[int, _View]:
    """The views of tensors and arrays that share elements or overlap, by identity."""
    views: dict[int, _View] = {}
    for low, high, parts in together(_extents(values)):
        if len(parts) > 1:
            memory = f"memory {len(views)}"
            views |= {id(value): _View(memory, low // ALIGNED * ALIGNED, high, first) for value, first in parts}
    return views


def copy_of(value: Any) -> Any:
    """A copy of an object that :func:`is_kept` accepts."""
    return copies_of({"": value})[""]


def _count(value: Any, seen: dict[int, Any], again: list[int], references: References) -> None:
    """Add the things in ``value`` that can be written in place to ``seen``, by identity, and the identities of those
    that are there to ``again``."""
    kind = type(value)
    if kind in _NUMBERS or kind in _IMMUTABLE or kind in BY_PARTS:
        return
    if isinstance(value, _WHICH) and references.path_of(value) is not None:
        return
    if isinstance(value, _BY_NAME) or (kind is types.MethodType and references.path_of(value.__self__) is not None):
        return
    if kind not in (tuple, frozenset, types.MethodType, functools.partial):
        if id(value) in seen:
            again.append(id(value))
            return
        seen[id(value)] = value
    for part in _parts_of(value):
        _count(part, seen, again, references)


def _parts_of(value: Any) -> Iterable[Any]:
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in _BUFFERS or is_of_numpy(kind) or is_whole(kind):
        return ()
    if type(value) in _CONTAINERS:
        parts = value.values() if isinstance(value, dict) else value
        return () if _NUMBERS.issuperset(map(type, parts)) else parts
    if type(value) is types.MethodType:
        return (value.__self__,)
    if type(value) is functools.partial:
        return _parts_of_partial(value)
    items = items_of(value)
    more: Iterable[Any] = () if items is None else items.values() if isinstance(items, dict) else items
    return (*state_of(value).values(), *more)


def _copy(value: Any, alike: _Alike) -> Any:
    if type(value) in _NUMBERS:
        return value
    made, where = _copied(value, alike), alike.places.get(id(value))
    if where is None or (where[0] == _AT and not (type(made) is dict and _OBJECT in made)):
        return made
    return {where[0]: (where[1], made)}


def _copied(value: Any, alike: _Alike) -> Any:
    kind = type(value)
    path = alike.references.path_of(value) if isinstance(value, _WHICH) else None
    if path is not None:
        return {_REFERENCE: path}
    view = alike.views.get(id(value)) if alike.views else None
    if view is not None:
        tensor = isinstance(value, torch.Tensor)
        strides = value.stride() if tensor else value.strides
        return {_VIEW: (*astuple(view), tuple(strides), value.detach().clone() if tensor else value.copy())}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind in (list, tuple, set, collections.deque) and _NUMBERS.issuperset(map(type, value)):
        return value if kind is tuple else value.copy()
    if kind is dict:
        as_they_are = _NUMBERS.issuperset(map(type, value)) or all(map(_is_key, value))
        if as_they_are and _NUMBERS.issuperset(map(type, value.values())) and _MARKS.isdisjoint(value):
            return value.copy()
        if not as_they_are or (len(value) == 1 and not _MARKS.isdisjoint(value)):
            return {_DICT: ("dict", None, _pairs(value, alike))}
        return dict(_pairs(value, alike))
    if kind in _DICTIONARIES:
        factory = getattr(value, "default_factory", None)
        where = None if factory is None or not _is_factory(factory) else (factory.__module__, factory.__qualname__)
        return {_DICT: (kind.__name__, where, _pairs(value, alike))}
    if kind is collections.deque:
        return collections.deque((_copy(part, alike) for part in value), value.maxlen)
    if kind in (list, tuple, set, frozenset):
        return kind(_copy(part, alike) for part in value)
    if isinstance(value, enum.Enum):
        return {_ENUM: (kind.__module__, kind.__qualname__, value.name)}
    if kind in _BUFFERS:
        return {_BUFFER: (getattr(value, "typecode", ""), bytes(value))}
    whole = _whole(kind)  # type: ignore[arg-type] # a class is hashable
    if whole is not None:
        return {_CONTENT: (kind.__module__, kind.__name__, whole.read(value))}
    if kind in BY_PARTS:
        return {_VALUE: (kind.__name__, BY_PARTS[kind][0](value))}
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return {_GLOBAL: (value.__module__, value.__qualname__)}
    if kind is types.MethodType:
        path = alike.references.path_of(value.__self__)
        owner = {_REFERENCE: path} if path is not None else _copy(value.__self__, alike)
        return {_METHOD: (owner, value.__name__)}
    if kind is functools.partial:
        return {_PARTIAL: [_copy(part, alike) for part in _parts_of_partial(value)]}
    generator = generators.as_stateful(value)
    if generator is not None:
        return {_GENERATOR: (*(generators.made_of(value) or ("", "")), generator.state_dict())}
    base = plain_base(kind)  # type: ignore[arg-type] # a class is hashable
    if base is None and not isinstance(value, torch.nn.Module):
        return value.copy() if is_of_numpy(kind) else value
    items = items_of(value)
    saved = None
    if items is not None:
        saved = _pairs(items, alike) if isinstance(items, dict) else [_copy(part, alike) for part in items]
    if base is tuple:
        return {_TUPLE: (kind.__module__, kind.__qualname__, saved)}
    attributes = None
    if state_of(value) is not value:  # an object whose items are its attributes has no others
        attributes = {name: _copy(part, alike) for name, part in state_of(value).items()}
    maxlen = value.maxlen if base is collections.deque else None
    return {_OBJECT: (kind.__module__, kind.__qualname__, attributes, saved, maxlen)}


def _pairs(value: Mapping[Any, Any], alike: _Alike) -> list[tuple[Any, Any]]:
    return [(_copy_of_key(key, alike), _copy(part, alike)) for key, part in value.items()]


def _copy_of_key(key: Any, alike: _Alike) -> Any:
    if type(key) in _NUMBERS or _is_key(key):
        return key
    if type(key) is tuple:
        return tuple(_copy_of_key(part, alike) for part in key)
    path = alike.references.path_of(key) if isinstance(key, _KEYS) else None
    return _copied(key, alike) if path is None else {_REFERENCE: path}


# -- put back -----------------------------------------------------------------------------------------


class Putting:
    """Puts back what was taken down at one time."""

    def __init__(self, references: References = NO_REFERENCES) -> None:
        self._references = references
        self._touched: set[int] = set()
        self._at: dict[str, Any] = {}
        self._filled_at: set[str] = set()
        self._held: list[Any] = []  # so that no identity comes again
        self._shared: dict[str, Any] = {}
        self._memories: dict[str, tuple[torch.Tensor, int]] = {}  # its bytes, and the address that the first one had

    def found(self, path: str, thing: object) -> None:
        """What is put back by itself, and where it is."""
        self._at[path] = self._made(thing)

    def put(self, now: Any, saved: Any) -> Any:
        """``saved``, in the object that is there now if it is one of this kind: others may hold it, too."""
        kind = type(saved)
        if kind in _NUMBERS:
            return saved
        if kind is dict and len(saved) == 1:
            mark = next(iter(saved))
            if mark in _MARKS:
                return self._of_mark(now, mark, saved[mark])
        if kind is dict:
            there = self._in_place(now, dict)
            return self._into_dictionary(self._made({}) if there is None else there, [*saved.items()])
        if kind is list:
            return self._into_list(self._in_place(now, list), saved)
        if kind is collections.deque:
            there = self._in_place(now, collections.deque)
            if there is None or there.maxlen != saved.maxlen:
                there = self._made(collections.deque(maxlen=saved.maxlen))
            return self._refill(there, saved)
        if kind is tuple:
            return tuple(self.put(old, new) for old, new in self._beside(now, saved))
        if kind is set:
            there = self._in_place(now, set)
            return self._filled(self._made(set()) if there is None else there, set(saved))
        if kind is frozenset:
            return saved
        return self._array(saved)

    def write(self, now: Any, saved: Any) -> bool:
        """Make the tensor or array ``now``, which no statement can set, what ``saved`` is. Returns whether it is one,
        and can be."""
        shared = saved.get(_SHARED) if type(saved) is dict else None
        plain = saved if shared is None else shared[1]
        view = plain.get(_VIEW) if type(plain) is dict else None
        if not write(now, plain if view is None else view[-1]):
            return False
        if shared is not None:
            self._shared[shared[0]] = now
        if view is not None:
            memory, _, _, first, strides, _ = view
            there = bytes_around(now) if strides_of(now) == tuple(strides) else None
            if there is not None:
                self._memories.setdefault(memory, (there[0], first - there[1]))
        return True

    def _view(self, now: Any, memory: str, low: int, high: int, first: int, strides: Any, saved: Any) -> Any:
        """A tensor or array that shares memory with others: in their memory, if one of them could not be created
        again."""
        device = saved.device if isinstance(saved, torch.Tensor) else "cpu"
        if memory not in self._memories:
            self._memories[memory] = (torch.empty(high - low, dtype=torch.uint8, device=device), low)
        memory_bytes, begin = self._memories[memory]
        there = in_memory(memory_bytes, first - begin, tuple(strides), saved)
        if there is None:
            return self._array(saved)
        if type(now) is type(there) and is_same_place(now, there):
            there = now
        write(there, saved)
        return there

    def _of_mark(self, now: Any, mark: str, value: Any) -> Any:
        if mark == _SHARED:
            number, saved = value
            if number not in self._shared:
                self._shared[number] = self.put(now, saved)
            return self._shared[number]
        if mark == _AT:
            path, saved = value
            there = self._at.get(path)
            if type(there) is not _found(*saved[_OBJECT][:2]):
                there = self._at[path] = self._new(now, *saved[_OBJECT])
            elif path in self._filled_at:
                return there
            self._filled_at.add(path)
            return self._fill(there, *saved[_OBJECT])
        if mark == _ENUM:
            return _found(value[0], value[1])[value[2]]
        if mark == _GLOBAL:
            return _found(*value)
        if mark == _VALUE:
            return made_of_parts(*value)
        if mark == _REFERENCE:
            there = self._references.at(value)
            return now if there is None else there
        if mark == _METHOD:
            owner = self.put(getattr(now, "__self__", None), value[0])
            return now if owner is None else types.MethodType(getattr(type(owner), value[1]), owner)
        if mark == _PARTIAL:
            function, arguments, keywords = (self.put(None, part) for part in value)
            return functools.partial(function, *arguments, **keywords)
        if mark == _BUFFER:
            code, content = value
            made = array.array(code, content) if code else bytearray(content)
            there = self._in_place(now, type(made))
            if there is None or getattr(there, "typecode", "") != code:
                return self._made(made)
            there[:] = made
            return there
        if mark == _CONTENT:
            return self._content(now, *value)
        if mark == _GENERATOR:
            return self._generator(now, *value)
        if mark == _VIEW:
            return self._view(now, *value)
        if mark == _TUPLE:
            parts = [self.put(old, new) for old, new in self._beside(now, value[2])]
            return tuple.__new__(_found(value[0], value[1]), parts)
        if mark == _DICT:
            name, factory, pairs = value
            kind = dict if name == "dict" else getattr(collections, name)
            there = self._in_place(now, kind)
            if there is None:
                there = self._made(kind())
                if factory is not None:
                    there.default_factory = _found(*factory)
            return self._into_dictionary(there, pairs)
        return self._fill(self._new(now, *value), *value)

    def _generator(self, now: Any, library: str, of: str, state: Any) -> Any:
        """The one that is there if it is of this kind, or could not be made."""
        there = now
        if library and (generators.made_of(now) != (library, of) or id(now) in self._touched):
            there = generators.make(library, of)
        stateful = generators.as_stateful(there)
        if stateful is not None:
            stateful.load_state_dict(state)
        return self._made(there)

    def _content(self, now: Any, module: str, name: str, content: Any) -> Any:
        kind: Any = getattr(io if module == "_io" else sys.modules.get(module), name, type(None))
        whole = _whole(kind)
        there = None if getattr(now, "closed", False) else self._in_place(now, kind)
        if there is None and whole is not None and whole.make is not None:
            there = self._made(whole.make())
        if there is None or whole is None:
            return now
        whole.write(there, content)
        return there

    def _new(self, now: Any, module: str, path: str, attributes: Any, items: Any, maxlen: int | None) -> Any:
        """An object of that class: the one that is there, or one without any state."""
        kind = _found(module, path)
        base = plain_base(kind) or object
        thing = None if issubclass(kind, torch.nn.Module) else self._in_place(now, kind)  # others use a module, too
        if thing is None:
            thing = self._made(base.__new__(kind))
            if base is collections.deque:
                collections.deque.__init__(thing, maxlen=maxlen)
            if attributes is None:
                thing.__dict__ = thing
        return thing

    def _fill(self, thing: Any, module: str, path: str, attributes: Any, items: Any, maxlen: int | None) -> Any:
        kind = type(thing)
        base = plain_base(kind) or object  # type: ignore[arg-type] # a class is hashable
        if items is not None and issubclass(base, dict):
            self._into_dictionary(thing, items)
        elif items is not None:
            self._refill(thing, items, base)
        if attributes is None:
            return thing
        before = dict(state_of(thing))
        slots = slots_of(kind)  # type: ignore[arg-type] # a class is hashable
        for name in before.keys() - attributes.keys():
            object.__delattr__(thing, name) if name in slots else thing.__dict__.pop(name)
        for name, saved in attributes.items():
            value = self.put(before.get(name), saved)
            if name in slots:
                object.__setattr__(thing, name, value)
            else:
                thing.__dict__[name] = value
        return thing

    def _in_place(self, now: Any, kind: type) -> Any:
        """``now`` if it is of this kind, and stands for nothing else; else None."""
        if type(now) is not kind or id(now) in self._touched:
            return None
        return self._made(now)

    def _made(self, thing: Any) -> Any:
        self._touched.add(id(thing))
        self._held.append(thing)
        return thing

    @staticmethod
    def _beside(now: Any, saved: Iterable[Any]) -> list[tuple[Any, Any]]:
        """The parts of ``saved``, each with that which stands in its place."""
        old = list(now) if isinstance(now, (list, tuple, collections.deque)) else []
        parts = list(saved)
        return list(zip([*old, *[None] * len(parts)], parts, strict=False))

    def _into_list(self, there: list[Any] | None, saved: list[Any]) -> list[Any]:
        there = self._made([]) if there is None else there
        there[:] = [self.put(old, new) for old, new in self._beside(there, saved)]
        return there

    def _refill(self, there: Any, saved: Iterable[Any], base: Any = collections.deque) -> Any:
        old = list(base.__iter__(there))
        set_items(there, [self.put(one, new) for one, new in self._beside(old, saved)], base)
        return there

    @staticmethod
    def _filled(there: set[Any], values: set[Any]) -> set[Any]:
        there.clear()
        there.update(values)
        return there

    def _into_dictionary(self, there: Any, pairs: list[tuple[Any, Any]]) -> Any:
        base: Any = collections.OrderedDict if isinstance(there, collections.OrderedDict) else dict
        old = dict(base.items(there))
        made = [(self._key(key), value) for key, value in pairs]
        set_items(there, {key: self.put(old.get(key), value) for key, value in made}, base)
        return there

    def _key(self, saved: Any) -> Any:
        if type(saved) is tuple:
            return tuple(map(self._key, saved))
        return self.put(None, saved) if type(saved) is dict else saved

    @staticmethod
    def _array(saved: Any) -> Any:
        """Not in the place of the one that is there: it may be a part of the script's data."""
        if isinstance(saved, torch.Tensor):
            return saved.detach().clone()
        return saved.copy() if is_of_numpy(type(saved)) else saved


def put(now: Any, saved: Any) -> Any:
    """See :meth:`Putting.put`; of a value that was taken down alone."""
    return Putting().put(now, saved)


def write(now: Any, saved: Any) -> bool:
    """Make the tensor or array ``now``, which no statement can set, what ``saved`` is. Returns whether it is one, and
    can be."""
    if type(now) is not type(saved) or not (type(now) is torch.Tensor or is_array(now)) or now.dtype != saved.dtype:
        return False
    if not isinstance(now, torch.Tensor):
        if now.shape != saved.shape or not now.shape or not now.flags.writeable:
            return False
        now[...] = saved
        return True
    with torch.no_grad():
        if now.shape == saved.shape:
            now.copy_(saved)
        else:
            now.resize_(saved.shape).copy_(saved)
    return True
