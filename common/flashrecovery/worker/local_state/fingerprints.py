"""What values of a script are like, to be compared later: without running code of the script, and without keeping
anything in memory."""

from __future__ import annotations

import collections
import itertools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from flashrecovery.worker.local_state.generators import as_stateful

PLAIN = (int, float, complex, bool, str, bytes, type(None))
KEPT_NUMBERS = (int, float, bool, str, type(None))
"""Attributes of registered modules of exactly these types are kept, if their names do not begin with an underscore."""
CONTAINERS = (list, tuple, dict, set, collections.deque)
ELEMENTS = 64
"""The most elements of a list or dictionary that are compared."""


def is_plain(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    arrays = (numpy.ndarray, numpy.generic) if numpy is not None else ()
    return isinstance(value, (*PLAIN, *CONTAINERS, torch.Tensor, *arrays))


def mark(thing: object) -> Any:
    """Another value when ``thing`` has changed, as far as that is seen without running code of the script."""
    generator = as_stateful(thing)
    if generator is not None:
        return repr(generator.state_dict())  # some hold arrays, which cannot be compared like other values
    if isinstance(thing, torch.nn.Module):
        return [(identity(t), t._version) for t in (*thing.parameters(), *thing.buffers())]
    return {name: plain_mark(value) for name, value in attributes_of(thing).items()}


def plain_mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return identity(value), value._version
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        return len(value), [_element_mark(part) for part in itertools.islice(parts, ELEMENTS)]
    if isinstance(value, torch.nn.Module) or as_stateful(value) is not None:
        return mark(value)
    return content_mark(value) if is_plain(value) else identity(value)


_NUMBERS = frozenset((*KEPT_NUMBERS, complex, bytes))
_SAMPLED = 4096
"""Elements from which only the first and the last :data:`ELEMENTS` of a container are looked at."""
_ARRAY = 1 << 20
"""Bytes of an array whose values are looked at."""


def content_mark(value: Any, depth: int = 4) -> int:
    """Another number when a plain value, or what its containers hold, has changed."""
    if isinstance(value, torch.Tensor):
        return hash((id(value), value._version))
    if isinstance(value, (str, bytes)):
        return hash(value)
    if isinstance(value, PLAIN):
        return hash(repr(value))  # two NaNs are the same
    if isinstance(value, CONTAINERS) and depth:
        pairs = value.items() if isinstance(value, dict) else value
        parts = [*pairs] if len(value) <= _SAMPLED else [*itertools.islice(pairs, ELEMENTS), *_newest(value)]
        if _NUMBERS.issuperset(map(type, itertools.chain.from_iterable(parts) if isinstance(value, dict) else parts)):
            return hash((len(value), *parts))
        return hash(
            (len(value), *(content_mark(part, depth if isinstance(value, dict) else depth - 1) for part in parts))
        )
    if not is_plain(value) or isinstance(value, CONTAINERS):
        return id(value)
    array: Any = value  # numpy's
    return hash(array.tobytes()) if array.nbytes <= _ARRAY and not array.dtype.hasobject else id(array)


def _newest(value: Any) -> Iterable[Any]:
    if isinstance(value, set):
        return ()
    return itertools.islice(reversed(value.items() if isinstance(value, dict) else value), ELEMENTS)


def _element_mark(value: Any) -> Any:
    if isinstance(value, (*CONTAINERS, torch.nn.Module)):
        return identity(value)
    return plain_mark(value)


def identity(thing: object) -> tuple[int, object]:
    """Equal only for the same object: a number may come again when an object is gone, a weak reference to it not."""
    try:
        reference = weakref.ref(thing)
    except TypeError:
        return id(thing), None
    return id(reference), reference


class InPlace:
    """What a tensor is like: unequal to its earlier self if it is the same one, and has been written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._identity, self._version = identity(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, InPlace)
        return self._identity != other._identity or self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def attributes_of(thing: object) -> dict[str, Any]:
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) else {}
