"""Plain values of a script's variables: which are taken down with a version, and how they are put back."""

from __future__ import annotations

import collections
from typing import Any

import torch

from flashrecovery.worker.local_state.fingerprints import KEPT_NUMBERS

_NUMBERS = frozenset((*KEPT_NUMBERS, complex, bytes))
_DEPTH = 3
_ELEMENTS = 4096
"""In a container or tensor that is taken down."""


def is_kept(value: Any, known: frozenset[int] = frozenset(), depth: int = _DEPTH) -> bool:
    """Numbers, texts, small tensors, and containers of these. ``known``: identities of tensors that are protected."""
    if type(value) in _NUMBERS:
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() <= _ELEMENTS and id(value) not in known and type(value) is torch.Tensor
    if type(value) in (list, tuple, set, frozenset, dict, collections.deque):
        if not depth or len(value) > _ELEMENTS:
            return False
        parts = [*value.keys(), *value.values()] if type(value) is dict else value
        if _NUMBERS.issuperset(map(type, parts)):
            return True
        return all(is_kept(part, known, depth - 1) for part in parts)
    return False


def copy_of(value: Any) -> Any:
    """Of what :func:`is_kept` says yes to."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is list and _NUMBERS.issuperset(map(type, value)):
        return value.copy()
    if type(value) is dict:
        return {key: copy_of(part) for key, part in value.items()}
    if type(value) is collections.deque:
        return collections.deque((copy_of(part) for part in value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(copy_of(part) for part in value)
    return value


def put(now: Any, saved: Any) -> Any:
    """``saved``, in the object that is there now if it is a container of this kind: others may hold it, too."""
    value = copy_of(saved)
    if type(now) is not type(value):
        return value
    if type(value) is list:
        now[:] = value
        return now
    if type(value) in (dict, set):
        now.clear()
        now.update(value)
        return now
    if type(value) is collections.deque and now.maxlen == value.maxlen:
        now.clear()
        now.extend(value)
        return now
    return value
