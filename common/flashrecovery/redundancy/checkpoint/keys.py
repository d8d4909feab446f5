"""Which rank writes a shard to a checkpoint, and under which DCP keys."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from flashrecovery.state.shard import Shard


def writer_among(name: str, holders: Sequence[int]) -> int:
    """The rank that writes the shard of this name."""
    return holders[xxhash.xxh32_intdigest(name.encode()) % len(holders)]


def writer_of(shard: Shard) -> int:
    """The rank that writes a shard: one of its holders, the same one on all of them."""
    return writer_among(shard.name, shard.holders)


def tensor_key(shard: Shard, key: str) -> str:
    """DCP key of one tensor of a shard."""
    return f"{tensor_prefix(shard.name, len(shard.holders) > 1, shard.holders[0])}{key}"


def tensor_prefix(name: str, shared: bool, rank: int) -> str:
    """With which the DCP keys of a shard's tensors begin. ``rank``: the one that has written it."""
    return f"shared/{name}/" if shared else f"rank{rank}/{name}/"
