"""What writing a checkpoint needs of this host: copies in its memory, made at once or later."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrecovery.state.digest import byte_view
from flashrecovery.state.exact import exact, exact_contiguous
from flashrecovery.state.shard import Shard, ShardSource


class HostCopies:
    """Copies tensors to host memory, the same tensor only once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or key not in self._made:
            self._made[key] = self._make(tensor)
        return self._made[key]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        on_host = tensor.device.type == "cpu"
        made = exact(tensor).clone(memory_format=torch.contiguous_format) if on_host else exact(tensor).cpu()
        return made.view(tensor.dtype)


@dataclass(frozen=True)
class _Live:
    """A tensor of a shard, ``number``-th of it, and the bytes that it takes."""

    begin: int
    end: int
    shard: str
    number: int


class LaterCopies(HostCopies):
    """For a part of a shard's tensor, memory is only reserved, which :meth:`fill` fills from a copy of the shards that
    is made anyway; whatever else is copied at once.

    ``shards``: those of which there will be a copy.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        self._live: dict[torch.device, list[_Live]] = {}
        for shard in shards:
            for number, tensor in enumerate(shard.tensors().values()):
                if tensor.numel() and tensor.is_contiguous():
                    begin = tensor.data_ptr()
                    one = _Live(begin, begin + tensor.nbytes, shard.name, number)
                    self._live.setdefault(tensor.device, []).append(one)
        for found in self._live.values():
            found.sort(key=lambda one: one.begin)
        self._to_fill: list[tuple[torch.Tensor, _Live, int]] = []

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        live = self._part_of(tensor)
        if live is None:
            return super()._make(tensor)
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._to_fill.append((room, live, tensor.data_ptr() - live.begin))
        return room

    def _part_of(self, tensor: torch.Tensor) -> _Live | None:
        """The tensor of a shard in whose memory this one lies."""
        if not tensor.numel() or not tensor.is_contiguous():
            return None
        known, at = self._live.get(tensor.device, []), tensor.data_ptr()
        place = bisect.bisect_right(known, at, key=lambda one: one.begin) - 1
        return known[place] if place >= 0 and at + tensor.nbytes <= known[place].end else None

    def fill(self, content: Callable[[str], ShardSource]) -> None:
        """``content``: the copy of a shard, by name, with the tensors in their order. Any thread."""
        sources = {name: content(name) for name in {live.shard for _, live, _ in self._to_fill}}
        for room, live, offset in self._to_fill:
            copy = byte_view(exact_contiguous(sources[live.shard].tensors[live.number]))
            room.view(-1).view(torch.uint8).copy_(copy[offset : offset + room.nbytes])
        self._to_fill.clear()

    @property
    def later(self) -> int:
        """Bytes that are still to be filled."""
        return sum(room.nbytes for room, _, _ in self._to_fill)
