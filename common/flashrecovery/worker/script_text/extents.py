"""Where tensors and arrays lie in memory: which of them share elements, and how one is made where others are."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

ALIGNED = 16
"""Bytes: of the largest element."""
_Thing = TypeVar("_Thing")


def is_of_numpy(kind: type) -> bool:
    """Whether it is the class of its arrays, or of one of its numbers."""
    numpy = sys.modules.get("numpy") if kind.__module__ == "numpy" else None
    return numpy is not None and (
        kind is numpy.ndarray or (issubclass(kind, numpy.generic) and kind.__module__ == "numpy")
    )


def is_array(value: object) -> bool:
    """Whether it is one of numpy's."""
    return is_of_numpy(type(value))


def extent_of(value: Any) -> tuple[int, int, int] | None:
    """Addresses of a tensor or array: of its first byte, behind its last one, and of its first element. None: it has
    none, or two of its elements are one."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or not value.numel() or not value.data_ptr():
            return None
        itemsize, first = value.element_size(), value.data_ptr()
        strides = [int(stride) * itemsize for stride in value.stride()]
    elif is_of_numpy(type(value)) and value.shape and value.size:
        itemsize, first, strides = value.itemsize, value.__array_interface__["data"][0], value.strides
    else:
        return None
    if any(size > 1 and not stride for size, stride in zip(value.shape, strides, strict=True)):
        return None
    low, high = _reach(value.shape, strides, itemsize)
    return first + low, first + high, first


def _reach(shape: Iterable[int], strides: Iterable[int], itemsize: int) -> tuple[int, int]:
    """How far a tensor or array lies around the first byte of its first element: its first byte, and behind its last
    one. ``strides``: in bytes."""
    ways = [(int(size) - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(way for way in ways if way < 0), sum(way for way in ways if way > 0) + itemsize


def together(
    extents: Iterable[tuple[int, int, int, _Thing]],
) -> list[tuple[int, int, list[tuple[_Thing, int]]]]:
    """Parts of the memory, from the lowest on: addresses of the first byte and behind the last one, and what lies
    there, each with the address of its first element. ``extents``: what :func:`extent_of` gives, and of what."""
    found: list[tuple[int, int, list[tuple[_Thing, int]]]] = []
    for low, high, first, value in sorted(extents, key=lambda one: one[0]):
        if found and low < found[-1][1]:
            begin, end, parts = found[-1]
            parts.append((value, first))
            found[-1] = (begin, max(end, high), parts)
        else:
            found.append((low, high, [(value, first)]))
    return found


def strides_of(now: Any) -> tuple[int, ...]:
    """In elements of a tensor, in bytes of an array."""
    return tuple(now.stride()) if isinstance(now, torch.Tensor) else tuple(now.strides)


def bytes_around(now: Any) -> tuple[torch.Tensor, int] | None:
    """All of the memory in which a tensor or array lies, and at which of its bytes its first element is."""
    if isinstance(now, torch.Tensor):
        storage = now.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        return whole, int(now.storage_offset()) * now.element_size()
    root = now
    while type(root.base) is type(root):
        root = root.base
    if not (root.flags.forc and root.flags.writeable):
        return None
    begin = root.__array_interface__["data"][0]
    return torch.from_numpy(root.reshape(-1, order="A").view("uint8")), now.__array_interface__["data"][0] - begin


def in_memory(memory: torch.Tensor, first: int, strides: tuple[int, ...], like: Any) -> Any:
    """A tensor or array of the form of ``like`` in ``memory``, from byte ``first`` on; None if it has no room there."""
    tensor = isinstance(like, torch.Tensor)
    itemsize = like.element_size() if tensor else like.itemsize
    low, high = _reach(like.shape, [stride * (itemsize if tensor else 1) for stride in strides], itemsize)
    if first + low < 0 or first + high > memory.numel():
        return None
    if not tensor:
        if memory.device.type != "cpu":
            return None
        numpy = sys.modules["numpy"]
        return numpy.ndarray(like.shape, like.dtype, buffer=memory.numpy(), offset=first, strides=strides)
    if first % itemsize:
        return None
    there = torch.empty(0, dtype=like.dtype, device=memory.device)
    return there.set_(memory.untyped_storage(), first // itemsize, like.shape, strides)


def is_same_place(one: Any, other: Any) -> bool:
    """Whether two of one kind have the same elements."""
    if isinstance(one, torch.Tensor):
        return one.is_set_to(other)
    place = "data", "strides", "shape", "typestr"
    return all(one.__array_interface__[name] == other.__array_interface__[name] for name in place)
