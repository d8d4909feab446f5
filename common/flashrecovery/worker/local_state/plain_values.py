"""Plain values of a script's variables: which are taken down with a version, and how they are put back."""

from __future__ import annotations

import collections
import enum
import sys
from typing import Any

import torch

from flashrecovery.worker.local_state.fingerprints import KEPT_NUMBERS

_NUMBERS = frozenset((*KEPT_NUMBERS, complex, bytes))
_DEPTH = 3
SMALL = 4096
"""Elements of a container or tensor that is taken down."""
LARGE = 1 << 20
"""Elements of a tensor that a variable carries from one round of a loop to the next: a hidden state, a batch that was
read ahead."""
_DICTIONARIES = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


_ENUM = "member of an enumeration"
_DTYPES = "biufcSUMm"
"""Kinds of numpy's dtypes whose values are plain."""


def is_kept(value: Any, known: frozenset[int] = frozenset(), depth: int = _DEPTH, *, largest: int = SMALL) -> bool:
    """Numbers, texts, members of enumerations, tensors and arrays of at most ``largest`` elements, and containers of
    these. ``known``: identities of what
    is protected otherwise: tensors, their storages (:func:`storage_of`), containers."""
    if type(value) in _NUMBERS:
        return True
    if id(value) in known:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() <= largest and type(value) is torch.Tensor and storage_of(value) not in known
    if type(value) in (list, tuple, set, frozenset, collections.deque, *_DICTIONARIES):
        if not depth or len(value) > SMALL:
            return False
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        if _NUMBERS.issuperset(map(type, parts)):
            return True
        keys = value if isinstance(value, (dict, set, frozenset)) else ()
        if any(isinstance(key, enum.Enum) for key in keys):
            return False
        return all(is_kept(part, known, depth - 1, largest=largest) for part in parts)
    if isinstance(value, enum.Enum):
        return "<locals>" not in type(value).__qualname__
    return _is_of_numpy(type(value)) and value.dtype.kind in _DTYPES and value.size <= largest


def _is_of_numpy(kind: type) -> bool:
    """Whether it is the class of its arrays, or of one of its numbers."""
    numpy = sys.modules.get("numpy") if kind.__module__ == "numpy" else None
    return numpy is not None and (
        kind is numpy.ndarray or (issubclass(kind, numpy.generic) and kind.__module__ == "numpy")
    )


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of its memory; of a DTensor, that of its part."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # one without a storage of its own
        return id(tensor)


def copy_of(value: Any) -> Any:
    """Of what :func:`is_kept` says yes to."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple) and _NUMBERS.issuperset(map(type, value)):
        return value.copy() if type(value) is list else value
    if type(value) in _DICTIONARIES:
        if value.keys() == {_ENUM}:
            return _member(value)
        return {key: copy_of(part) for key, part in value.items()}
    if type(value) is collections.deque:
        return collections.deque((copy_of(part) for part in value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(copy_of(part) for part in value)
    if isinstance(value, enum.Enum):
        return {_ENUM: (type(value).__module__, type(value).__qualname__, value.name)}
    return value.copy() if _is_of_numpy(type(value)) else value


def _member(saved: dict[str, Any]) -> enum.Enum:
    module, path, name = saved[_ENUM]
    kind: Any = sys.modules[module]
    for part in path.split("."):
        kind = getattr(kind, part)
    found: enum.Enum = kind[name]
    return found


def put(now: Any, saved: Any) -> Any:
    """``saved``, in the object that is there now if it is a container of this kind: others may hold it, too."""
    if type(saved) is dict and saved.keys() == {_ENUM}:
        return _member(saved)
    value = copy_of(saved)
    if type(value) is dict and type(now) in _DICTIONARIES:
        now.clear()
        now.update(value)
        return now
    if type(now) is not type(value):
        return value
    if type(value) is list:
        now[:] = value
        return now
    if type(value) is set:
        now.clear()
        now.update(value)
        return now
    if type(value) is collections.deque and now.maxlen == value.maxlen:
        now.clear()
        now.extend(value)
        return now
    if _is_of_numpy(type(value)) and value.shape and now.shape == value.shape and now.dtype == value.dtype:
        now[...] = value
        return now
    return value


def write(now: Any, saved: Any) -> bool:
    """Make the tensor ``now``, which no statement can set, what ``saved`` is. Returns whether it is one, and can be."""
    if type(now) is not torch.Tensor or type(saved) is not torch.Tensor or now.dtype != saved.dtype:
        return False
    with torch.no_grad():
        if now.shape == saved.shape:
            now.copy_(saved)
        else:
            now.resize_(saved.shape).copy_(saved)
    return True
