"""Ranks that should be equal are not: which are alike, since when, and from what a later launch may go on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flashrecovery.plan.ownership import drifted
from flashrecovery.plan.words import ranks_text

Camps = Sequence[Collection[int]]
"""For an object that several ranks have: the ranks with the same value, for each value."""


@dataclass(frozen=True)
class Past:
    """What a rank's process knows of earlier versions.

    Args:
        joined: the version with which it began in the place of a process that has died; -1: it has been there since the
            start.
        alike: the newest version at which the ranks were compared, and alike; 0: none.
        whole: the newest at which all of each tensor was compared, and not a part.
    """

    joined: int = -1
    alike: int = 0
    whole: int = 0

    def resumed(self, version: int, *, replacement: bool) -> Past:
        """The job goes on at ``version``."""
        joined = self.joined
        if replacement:
            joined = version if joined < 0 else min(joined, version)
        return Past(joined, min(self.alike, version), min(self.whole, version))


@dataclass(frozen=True)
class Divergence:
    """Which ranks differ.

    Args:
        agree: more than half of those that have each thing that differs; () if there is no such majority.
        differ: the other ranks that have one of these things; () without a majority.
        replaced: those of both that fill the place of a process that has died.
        alike: the newest version at which all of them are known to have been alike; 0: none.
        partly: a part of each tensor is known to have been alike then.
    """

    agree: tuple[int, ...] = ()
    differ: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    alike: int = 0
    partly: bool = False

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks whose nodes may be to blame. A majority of replacements alone says nothing of the others: they have
        begun with the same."""
        return () if {*self.agree} <= {*self.replaced} else self.differ

    def __str__(self) -> str:
        if self.agree:
            text = f"The majority is alike, {ranks_text(self.agree)}; {ranks_text(self.differ)} differ"
            text += "s" if len(self.differ) == 1 else ""
        else:
            text = "No majority is alike, so whose state is right is not known"
        if self.replaced:
            one = len(self.replaced) == 1
            text += f" ({ranks_text(self.replaced)}: {'a replacement' if one else 'replacements'})"
        known = "All were alike" if not self.partly else "What was compared of each tensor was alike"
        return text + (f". {known} at version {self.alike}" if self.alike else "")


def judge(found: Mapping[str, Camps], pasts: Sequence[Past]) -> Divergence:
    """``found``: what differs, by name; only ranks that have a thing are in its camps. ``pasts``: by rank."""
    fresh = {rank for rank, past in enumerate(pasts) if past.joined >= 0}
    everybody = {rank for camps in found.values() for camp in camps for rank in camp}
    largest = [(max(camps, key=len), camps) for camps in found.values()]
    differ = {rank for most, camps in largest for camp in camps if camp is not most for rank in camp}
    clear = all(2 * len({*most} - differ) > sum(map(len, camps)) for most, camps in largest)
    agree = everybody - differ if clear else set()
    since = _began(found, pasts, fresh)
    alike = max(since, *(past.alike for past in pasts))
    return Divergence(
        agree=tuple(sorted(agree)),
        differ=tuple(sorted(differ if clear else ())),
        replaced=tuple(sorted(fresh & everybody)),
        alike=alike,
        partly=alike > max(since, *(past.whole for past in pasts)),
    )


def _began(found: Mapping[str, Camps], pasts: Sequence[Past], fresh: Collection[int]) -> int:
    """When the first of the replacements began, if all but these are alike; else 0. A replacement begins with what
    others have, so the difference has come since."""
    if any(drifted(camps, fresh) for camps in found.values()):
        return 0
    began = {rank for camps in found.values() for camp in camps if {*camp} <= {*fresh} for rank in camp}
    return min((pasts[rank].joined for rank in began), default=0)


def from_before(checkpoints: Sequence[tuple[int, str]], alike: int) -> list[tuple[int, str]]:
    """Those of these checkpoints (version, directory) that were made before the ranks may have begun to differ."""
    return [one for one in checkpoints if one[0] <= alike]
