"""Where the ranks of another parallel layout are, over the nodes that live, and which rank keeps copies of which there.
Pure.

Ranks are numbered as Megatron does it: those of one tensor-parallel group follow on each other. They talk the most, so
a group is on one node where possible; and as the order of nodes stays, neighbours in the pipeline are near each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STRIDES = 64
"""Distances that are tried at most."""


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """A place for a rank: the node, and the local rank there."""

    node: str
    local_rank: int


def groups_that_fit(tp: int, rooms: Sequence[int]) -> int:
    """How many groups of ``tp`` ranks can be on one node each. ``rooms``: of each node."""
    return sum(room // tp for room in rooms)


def places(tp: int, ranks: int, slots: Mapping[str, Sequence[int]]) -> list[NodeSlot]:
    """A place for each of ``ranks`` ranks. ``slots``: the free local ranks of each node, in the order in which nodes
    and slots are used. A tensor-parallel group for which no node has enough slots left is spread over several.

    Raises ValueError if there are too few.
    """
    left = {node: list(free) for node, free in slots.items()}
    if sum(map(len, left.values())) < ranks:
        raise ValueError(f"{ranks} ranks, and {sum(map(len, left.values()))} places")
    found: list[NodeSlot] = []
    while len(found) < ranks:
        size = min(tp, ranks - len(found))
        node = next((name for name, free in left.items() if len(free) >= size), None)
        if node is not None:
            taken = [NodeSlot(node, local) for local in left[node][:size]]
        else:
            taken = [NodeSlot(name, local) for name, free in left.items() for local in free][:size]
        for slot in taken:
            left[slot.node].remove(slot.local_rank)
        found += taken
    return found


def numbered(domains: Sequence[str], nodes: Sequence[str]) -> tuple[int, ...]:
    """A number for the failure domain of each rank; for its node, where all share one domain. ``domains``, ``nodes``:
    of each rank."""
    names = domains if len(set(domains)) > 1 else nodes
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def stride(domains: Sequence[int]) -> int:
    """How far away the rank is that keeps a rank's copies, so that as few as possible are in its own failure domain.
    ``domains``: of each rank."""
    size = len(domains)
    runs = [at for at in range(1, size) if domains[at] != domains[at - 1]]
    steps = sorted({1, *runs[:_STRIDES], *(size - at for at in runs[-_STRIDES:])} & {*range(1, size)}) or [1]

    def together(step: int) -> int:
        return sum(domains[rank] == domains[(rank + step) % size] for rank in range(size))

    return min(steps, key=lambda step: (together(step), step))
