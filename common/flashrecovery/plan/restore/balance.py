"""Choose one source for each transfer so that the busiest sender sends as few bytes as possible.

This is makespan scheduling with restricted assignment, which is NP-hard. So:

1. *Greedy*: the choices with the largest shard and then the fewest holders first, each to its least loaded
   holder.
2. *Local search*: move a shard from a sender to another holder as long as that makes the larger of the two
   loads smaller (also swap two shards, for the busiest sender). Ends at the latest after a fixed number of
   moves per shard.
3. *Certificate*: let R be the senders that can be reached from the busiest one through shards that a member
   sends and another could send. Whatever R sends can only be sent by R, so no assignment has a busiest sender
   below ``bytes sent by R / |R|``; nor below the largest shard. If the result meets that bound, it is
   optimal. It is a bound for the whole problem, also where step 1 and 2 look at some of the holders only (of
   a shard with thousands of holders, each transfer considers ``_CANDIDATES`` of them, another window for
   each).
4. *Exact search* (branch and bound) if it does not and the problem is small (``_EXACT_LIMIT`` choices).

When the local search has ended by itself, no move improves: a sender that is d steps away from the busiest
one in R sends at least ``busiest - d * largest shard``. So the result is at most d_max largest shards above
the optimum, with d_max = 1 when all lost shards have the same holders (replicas of one group). The bound
actually reached is part of the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_EXACT_LIMIT = 16
_EXACT_NODES = 50_000
_MOVES_PER_CHOICE = 20
_SWAP_LIMIT = 200
_MAX_SWAPS = 500
_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """``dest`` needs ``shard`` (``nbytes`` bytes) from one of ``sources``: preferred first, never empty."""

    dest: int
    shard: str
    nbytes: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Balanced:
    """``sources[i]`` serves choice i; ``busiest`` and ``lower_bound`` in bytes."""

    sources: tuple[int, ...]
    busiest: int
    lower_bound: int


def balance(choices: Sequence[Choice]) -> Balanced:
    """The best assignment found, and a bound below which no assignment can be. Deterministic."""
    if not choices:
        return Balanced((), 0, 0)
    search = _Search(choices)
    search.greedy()
    search.improve()
    bound = search.lower_bound()
    busiest = max(search.load.values())
    if busiest > bound and len(choices) <= _EXACT_LIMIT:
        better, complete = _exact(choices, search.chosen, busiest, bound)
        search.adopt(better)
        busiest = max(search.load.values())
        bound = busiest if complete else max(bound, search.lower_bound())
    return Balanced(tuple(search.chosen), busiest, bound)


class _Search:
    """An assignment that is being improved. ``chosen[i]`` is the source of choice i."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self.order = _hard_first(choices)
        self.candidates = [_window(c.sources, i) for i, c in enumerate(choices)]
        self.chosen: list[int] = [c[0] for c in self.candidates]
        self.load: dict[int, int] = {s: 0 for c in self.candidates for s in c}
        self.sends: dict[int, set[int]] = defaultdict(set)

    def adopt(self, chosen: Sequence[int]) -> None:
        self.chosen = list(chosen)
        self.load = dict.fromkeys(self.load, 0)
        self.sends = defaultdict(set)
        for i, source in enumerate(chosen):
            self._add(i, source)

    def _add(self, i: int, source: int) -> None:
        self.chosen[i] = source
        self.load[source] += self.choices[i].nbytes
        self.sends[source].add(i)

    def _move(self, i: int, source: int) -> None:
        old = self.chosen[i]
        self.load[old] -= self.choices[i].nbytes
        self.sends[old].discard(i)
        self._add(i, source)

    def greedy(self) -> None:
        for i in self.order:
            # the first of equals is the preferred one
            self._add(i, min(self.candidates[i], key=self.load.__getitem__))

    def improve(self) -> None:
        """Move (and for the busiest sender swap) while the larger of the two loads becomes smaller."""
        moves, swaps = _MOVES_PER_CHOICE * len(self.choices), _MAX_SWAPS
        while moves > 0:
            moved = self._round_of_moves(moves)
            moves -= moved
            swapped = 0
            while not moved and swaps > 0 and self._swap():
                swaps -= 1
                swapped += 1
            if not moved and not swapped:
                return

    def _round_of_moves(self, limit: int) -> int:
        moved = 0
        for i in self.order:
            source = self.chosen[i]
            target = min(self.candidates[i], key=self.load.__getitem__)
            if self.load[target] + self.choices[i].nbytes < self.load[source]:
                self._move(i, target)
                moved += 1
                if moved >= limit:
                    break
        return moved

    def _swap(self) -> bool:
        """Exchange a shard of the busiest sender for a smaller one of another, if both end below its load."""
        busiest = max(self.load, key=lambda s: (self.load[s], -s))
        if len(self.sends[busiest]) > _SWAP_LIMIT:
            return False
        for i in sorted(self.sends[busiest]):
            mine = self.choices[i]
            for other in self.candidates[i]:
                if other == busiest or len(self.sends[other]) > _SWAP_LIMIT:
                    continue
                for j in sorted(self.sends[other]):
                    theirs = self.choices[j]
                    gain = mine.nbytes - theirs.nbytes
                    fits = gain > 0 and self.load[other] + gain < self.load[busiest]
                    if fits and busiest in theirs.sources:
                        self._move(i, other)
                        self._move(j, busiest)
                        return True
        return False

    def lower_bound(self) -> int:
        """Bytes that the busiest sender sends at least, in any assignment."""
        busiest = max(self.load, key=lambda s: (self.load[s], -s))
        reached, frontier = {busiest}, [busiest]
        seen: set[int] = set()  # by identity: the transfers of one shard share one tuple of sources
        while frontier:
            for i in self.sends.get(frontier.pop(), ()):
                sources = self.choices[i].sources
                if id(sources) not in seen:
                    seen.add(id(sources))
                    new = set(sources) - reached
                    reached |= new
                    frontier.extend(new)
        total = sum(self.load.get(s, 0) for s in reached)
        unit = math.gcd(*(c.nbytes for c in self.choices)) or 1  # every load is a multiple of it
        return max(-(-total // (len(reached) * unit)) * unit, max(c.nbytes for c in self.choices))


def _window(sources: tuple[int, ...], index: int) -> tuple[int, ...]:
    """At most ``_CANDIDATES`` sources; successive indices see windows that wander through all of them."""
    if len(sources) <= _CANDIDATES:
        return sources
    start = index * (_CANDIDATES // 4 + 1) % len(sources)
    return sources[start : start + _CANDIDATES] + sources[: max(0, start + _CANDIDATES - len(sources))]


def _hard_first(choices: Sequence[Choice]) -> list[int]:
    """Indices, the largest shards and among them those with the fewest holders first."""
    return sorted(
        range(len(choices)),
        key=lambda i: (-choices[i].nbytes, len(choices[i].sources), choices[i].shard, choices[i].dest),
    )


def _exact(choices: Sequence[Choice], start: Sequence[int], busiest: int, bound: int) -> tuple[list[int], bool]:
    """Branch and bound from a known assignment. Returns the best one and whether the search was complete."""
    order = _hard_first(choices)
    load: dict[int, int] = {s: 0 for c in choices for s in c.sources}
    best, best_max = list(start), busiest
    chosen = list(start)
    nodes = 0

    def descend(depth: int, highest: int) -> None:
        nonlocal best, best_max, nodes
        nodes += 1
        if depth == len(order):
            best, best_max = list(chosen), highest
            return
        choice = choices[order[depth]]
        for source in choice.sources:
            new = load[source] + choice.nbytes
            if new >= best_max or best_max <= bound or nodes > _EXACT_NODES:
                continue
            load[source] = new
            chosen[order[depth]] = source
            descend(depth + 1, max(highest, new))
            load[source] = new - choice.nbytes

    descend(0, 0)
    return best, nodes <= _EXACT_NODES
