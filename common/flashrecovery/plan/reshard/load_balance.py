"""Which of several holders serves a request, so that none is much busier than the others.

Requests come in *streams* of equal size, each of which one set of ranks can serve. A set assigns its requests from a
*deck*, cyclically: a list of its members in which each occurs as often as it is to serve. If all members have equal
other work, the deck is the set itself. Members that are the only holders of other things occur less often (sets with
few members are served first, and the others fill up what is below the level).

The deck alone gives the holder of request n, without a table: so a plan for thousands of tensors is as small as one for
a single tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashrecovery.plan.reshard.overlay import Ints

_TURNS = 16
"""A deck's length, in members, where they are to serve unequally often."""


@dataclass(frozen=True)
class LoadBalance:
    """The decks of all sets, laid end to end.

    Attributes:
        cards: ranks.
        starts, lengths: of each set's deck.
        first: the number of each stream's first request.
        load: bytes that each rank serves.
    """

    cards: Ints
    starts: Ints
    lengths: Ints
    first: Ints
    load: Ints

    def serving(self, holders: Ints, request: Ints) -> Ints:
        """Which one of each set serves the request with this number."""
        found: Ints = self.cards[self.starts[holders] + request % self.lengths[holders]]
        return found


def deal(sets: Sequence[Ints], holders: Ints, counts: Ints, sizes: Ints, ranks: int) -> LoadBalance:
    """A deck for each of ``sets``. Stream i: ``counts[i]`` requests of ``sizes[i]`` bytes for set ``holders[i]``."""
    order = np.lexsort((-sizes, holders))
    begins = np.flatnonzero(np.diff(holders[order], prepend=-1))
    first = np.empty(len(order), np.int64)
    first[order] = np.cumsum(counts[order]) - counts[order]  # each set's streams go on where the one before ends

    load = np.zeros(ranks, np.int64)
    members = np.array([len(one) for one in sets], np.int64)
    wanted = np.bincount(holders, weights=(counts * sizes).astype(float), minlength=len(sets))
    single = members[holders] == 1
    alone = np.array([one[0] if len(one) else 0 for one in sets], np.int64)
    np.add.at(load, alone[holders[single]], (counts * sizes)[single])
    cards = list(sets)
    streams = np.split(order, begins[1:])
    of_set = {int(holders[some[0]]): some for some in streams if len(some)}
    for number in sorted((n for n in of_set if members[n] > 1), key=lambda n: (int(members[n]), n)):
        cards[number] = _deck(sets[number], load[sets[number]], float(wanted[number]))
        for stream in of_set[number].tolist():
            rounds, rest = divmod(int(counts[stream]), len(cards[number]))
            if rounds:
                np.add.at(load, cards[number], rounds * int(sizes[stream]))
            if rest:
                at = (int(first[stream]) + np.arange(rest)) % len(cards[number])
                np.add.at(load, cards[number][at], int(sizes[stream]))
    lengths = np.array([len(one) for one in cards], np.int64)
    joined = np.concatenate(cards) if cards else np.zeros(0, np.int64)
    return LoadBalance(joined, np.cumsum(lengths) - lengths, lengths, first, load)


def _deck(members: Ints, load: Ints, wanted: float) -> Ints:
    """``wanted`` bytes for these members, which have ``load`` already: filled up to one level, dealt evenly in time."""
    low = np.sort(load)
    # The level at which the lowest n members have taken everything; the right n is the last that stays below the next.
    levels = (wanted + np.cumsum(low)) / np.arange(1, len(low) + 1)
    level = levels[np.flatnonzero(levels > low)[-1]]
    shares = np.maximum(level - load, 0.0)
    if shares.max() - shares.min() <= 1e-9 * shares.max():
        return members
    slots = _TURNS * len(members)
    times = np.floor(shares / shares.sum() * slots + 0.5).astype(np.int64)
    times[int(shares.argmax())] += int(times.sum() == 0)
    owner = np.repeat(np.arange(len(members)), times)
    turn = np.arange(len(owner)) - np.repeat(np.cumsum(times) - times, times)
    when = (turn + 0.5) / np.repeat(np.maximum(times, 1), times)
    deck: Ints = members[owner[np.lexsort((owner, when))]]
    return deck
