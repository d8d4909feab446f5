"""State that is said to be equal on several ranks and turns out not to be: what it is called, and when that is
believed. Pure.

A framework's wrapper says which ranks hold an equal piece of a parameter. It does not know of an optimizer whose ranks
own whole parameters, or of weights that are averaged now and then. So what is said is compared, and what differs is
each rank's own from then on: ``param/weight`` on rank 3 becomes ``param/weight#own=3``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

_OWN = "#own="


def own_name(name: str, rank: int) -> str:
    """What the shard ``name`` of this rank is called when it is not what other ranks have under that name."""
    return f"{name}{_OWN}{rank}"


def base_name(name: str) -> str:
    """What a shard was called before it turned out to be a rank's own; its name where that has not happened."""
    return name.partition(_OWN)[0]


def owner_of(name: str) -> int:
    """The rank whose own the shard of this name has turned out to be; -1: none's."""
    owner = name.partition(_OWN)[2]
    return int(owner) if owner else -1


def turned_out_own(names: Iterable[str]) -> set[str]:
    """What those of these shards were called before that have turned out to be a rank's own."""
    return {base_name(name) for name in names if _OWN in name}


def renamed(needs: Mapping[str, int], rank: int, own: Collection[str]) -> dict[str, int]:
    """What a rank needs, where ``own`` (names from before) has turned out to be each rank's own."""
    return {own_name(name, rank) if name in own else name: nbytes for name, nbytes in needs.items()}


def drifted(camps: Sequence[Collection[int]], replaced: Collection[int]) -> bool:
    """Whether ranks that were equal have diverged.

    Args:
        camps: the ranks that have the same, for each of what there is.
        replaced: those that fill the place of a process that has died. If the others are alike, a replacement differs
            because of the recovery (something that is not registered decides what its steps do), and has not drifted.
    """
    return sum(1 for camp in camps if not {*camp} <= {*replaced}) > 1
