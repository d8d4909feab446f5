"""When each part of a :class:`~flashrecovery.plan.reshard.Reshard` travels, so that memory is bounded and nobody waits
for ever.

A *round* is what may be under way at one time: in it no rank sends more than a limit, nor receives more. A tensor moves
as a whole in one round where that fits, otherwise in contiguous chunks in several. All messages have one order (round,
tensor, piece, receiver, chunk), and each rank takes its own in that order. The first message that is not done yet is
then the next one of both its ends: so it goes through even where a send blocks until it is received, and there is no
deadlock. Ranks that have nothing to do with each other share rounds.

Tensors are taken in the order of the plan, and a rank's old parts of one can go when its last round is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashrecovery.plan.boxes import chunks
from flashrecovery.plan.overlay import Ints
from flashrecovery.plan.reshard import Portion, Reshard


@dataclass(frozen=True)
class Timetable:
    """Attributes:
    limit: bytes that a rank sends, and that it receives, in a round at most.
    rounds: how many there are.
    whole: (class, tensor of the class, round) of tensors that move in one round.
    chunked: of the other ones (round, class, tensor of the class, request, chunk), all in the common order.
    """

    plan: Reshard
    limit: int
    rounds: int
    whole: Ints
    chunked: Ints

    def messages(self, source: int | None = None, dest: int | None = None) -> list[tuple[int, Portion]]:
        """What the process that was rank ``source`` and becomes rank ``dest`` sends and receives (None: nothing), with
        its rounds, in the order in which it does so."""
        found: list[tuple[tuple[int, int, int, int, int], Portion]] = []
        plan = self.plan
        groups = plan.pieces.group[plan.request_piece] if len(plan.request_piece) else np.zeros(0, np.int64)
        for group in np.unique(groups).tolist():
            lines = self.whole[self.whole[:, 0] == group]
            first, last = np.searchsorted(groups, [group, group + 1])
            requests = np.arange(first, last)
            if not len(lines):
                continue
            sources = plan.sources(requests[None, :], lines[:, 1:2])
            mine = np.zeros(sources.shape, bool)
            if source is not None:
                mine |= sources == source
            if dest is not None:
                mine |= plan.request_dest[requests][None, :] == dest
            for line, column in zip(*(axis.tolist() for axis in np.nonzero(mine)), strict=True):
                tensor, number = int(lines[line, 1]), int(lines[line, 2])
                request = int(requests[column])
                portion = plan.portion(request, tensor, int(sources[line, column]))
                found.append(((number, group, tensor, request, 0), portion))
        for number, group, tensor, request, part, sender in self._chunked_of(source, dest):
            portion = plan.portion(request, tensor, sender)
            box = chunks(portion.box, self._elements(group))[part]
            nbytes = box.size * int(plan.itemsize[group])
            cut = Portion(portion.tensor, box, portion.source, portion.dest, nbytes)
            found.append(((number, group, tensor, request, part), cut))
        found.sort(key=lambda line: line[0])
        return [(order[0], portion) for order, portion in found]

    def _chunked_of(self, source: int | None, dest: int | None) -> list[tuple[int, int, int, int, int, int]]:
        if not len(self.chunked):
            return []
        requests = self.chunked[:, 3]
        senders = self.plan.sources(requests, self.chunked[:, 2])
        mine = (senders == (-1 if source is None else source)) | (
            self.plan.request_dest[requests] == (-1 if dest is None else dest)
        )
        return [
            (number, group, tensor, request, part, sender)
            for (number, group, tensor, request, part), sender in zip(
                self.chunked[mine].tolist(), senders[mine].tolist(), strict=True
            )
        ]

    def _elements(self, group: int) -> int:
        return self.limit // int(self.plan.itemsize[group])

    def explain(self) -> list[str]:
        """In plain sentences."""
        split = len(np.unique(self.chunked[:, 1:3], axis=0)) if len(self.chunked) else 0
        return [
            *self.plan.explain(),
            f"That takes {self.rounds:,} rounds, in each of which no rank sends or receives more than {self.limit:,} "
            f"bytes; {len(self.whole):,} tensors move in one round each, {split:,} in chunks.",
        ]


class _Desk:
    """For one direction: the round in which each rank is, and how many bytes it has in it."""

    def __init__(self, ranks: int) -> None:
        self.round = np.zeros(ranks, np.int64)
        self.used = np.zeros(ranks, np.int64)

    def fits(self, ranks: Ints, nbytes: Ints, number: int, limit: int) -> bool:
        there = np.where(self.round[ranks] == number, self.used[ranks], 0)
        return bool((there + nbytes <= limit).all())

    def take(self, ranks: Ints, nbytes: Ints, number: int) -> None:
        fresh = self.round[ranks] != number
        self.used[ranks] = np.where(fresh, 0, self.used[ranks]) + nbytes
        self.round[ranks] = number


def timetable(plan: Reshard, limit: int) -> Timetable:
    """Rounds for everything that travels. ``limit``: bytes; a rank's staging memory is twice that at most, for what it
    sends and what it receives.

    Raises ValueError if an element does not fit into ``limit``.
    """
    if len(plan.itemsize) and limit < int(plan.itemsize.max()):
        raise ValueError(f"limit = {limit} bytes: {int(plan.itemsize.max())} or more is allowed, an element's size")
    sending, receiving = _Desk(len(plan.sent)), _Desk(len(plan.received))
    whole: list[tuple[int, int, int]] = []
    chunked: list[tuple[int, int, int, int, int]] = []
    rounds = 0
    groups = plan.pieces.group[plan.request_piece] if len(plan.request_piece) else np.zeros(0, np.int64)
    for group in np.unique(groups).tolist():
        first, last = np.searchsorted(groups, [group, group + 1])
        requests = np.arange(first, last)
        sizes = plan.piece_bytes[plan.request_piece[requests]]
        to, into = _summed(plan.request_dest[requests], sizes, len(plan.received))
        for tensor in range(len(plan.names[group])):
            sources = plan.sources(requests, tensor)
            by, out = _summed(sources, sizes, len(plan.sent))
            if out.max() <= limit and into.max() <= limit:
                number = int(max(sending.round[by].max(), receiving.round[to].max()))
                if not (sending.fits(by, out, number, limit) and receiving.fits(to, into, number, limit)):
                    number += 1
                sending.take(by, out, number)
                receiving.take(to, into, number)
                whole.append((group, tensor, number))
                rounds = max(rounds, number + 1)
                continue
            for request, source in zip(requests.tolist(), sources.tolist(), strict=True):
                at = np.array([source]), plan.request_dest[request : request + 1]
                for part, size in enumerate(_chunk_sizes(plan, request, group, limit)):
                    nbytes = np.array([size])
                    number = int(max(sending.round[source], receiving.round[at[1][0]]))
                    if not (
                        sending.fits(at[0], nbytes, number, limit) and receiving.fits(at[1], nbytes, number, limit)
                    ):
                        number += 1
                    sending.take(at[0], nbytes, number)
                    receiving.take(at[1], nbytes, number)
                    chunked.append((number, group, tensor, request, part))
                    rounds = max(rounds, number + 1)
    return Timetable(
        plan,
        limit,
        rounds,
        np.array(whole, np.int64).reshape(-1, 3),
        np.array(sorted(chunked), np.int64).reshape(-1, 5),
    )


def _summed(ranks: Ints, sizes: Ints, count: int) -> tuple[Ints, Ints]:
    """The ranks that are in it, and the bytes of each."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, ranks, sizes)
    some = np.flatnonzero(sums)
    return some, sums[some]


def _chunk_sizes(plan: Reshard, request: int, group: int, limit: int) -> list[int]:
    itemsize = int(plan.itemsize[group])
    box = plan.pieces.box(int(plan.request_piece[request]), int(plan.dims[group]))
    return [chunk.size * itemsize for chunk in chunks(box, limit // itemsize)]
