"""When each part of a :class:`~.plan.Reshard` is sent, so that memory is bounded and no rank waits for ever.

A *round* is what may be under way at one time: in it no rank sends or receives more than a limit. A tensor moves as a
whole in one round if it fits, otherwise in contiguous chunks in several rounds. All messages have one order (round,
tensor, piece, receiver, chunk), and each rank handles its own in that order. The first unfinished message is then the
next one at both its ends. So it completes even if a send blocks until it is received, and there is no deadlock. Ranks
that exchange nothing with each other share rounds.

Tensors are taken in the order of the plan. A rank can free its old parts of a tensor after the tensor's last round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashrecovery.plan.reshard.boxes import chunks
from flashrecovery.plan.reshard.overlay import Ints
from flashrecovery.plan.reshard.plan import Portion, Reshard


@dataclass(frozen=True)
class Schedule:
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


class _Desks:
    """The round in which each rank is, and how many bytes it has in it: as a sender and as a receiver."""

    def __init__(self, senders: int, receivers: int, limit: int) -> None:
        self._round = np.zeros(senders, np.int64), np.zeros(receivers, np.int64)
        self._used = np.zeros(senders, np.int64), np.zeros(receivers, np.int64)
        self.limit = limit

    def enter(self, count: int, *loads: tuple[Ints, Ints]) -> tuple[int, int]:
        """The first round that has room for this, and is not before one in which these ranks are already; and how often
        it has, up to ``count`` times. ``loads``: ranks that send and their bytes, ranks that receive and theirs."""
        rounds = [self._round[way][ranks] for way, (ranks, _) in enumerate(loads)]
        number = int(max(r.max() for r in rounds))
        used = [np.where(rounds[way] == number, self._used[way][ranks], 0) for way, (ranks, _) in enumerate(loads)]
        fits = min(int(((self.limit - used[way]) // nbytes).min()) for way, (_, nbytes) in enumerate(loads))
        if not fits:
            number += 1
            used = [np.zeros(len(ranks), np.int64) for ranks, _ in loads]
            fits = min(self.limit // int(nbytes.max()) for _, nbytes in loads)
        times = min(fits, count)
        for way, (ranks, nbytes) in enumerate(loads):
            self._round[way][ranks] = number
            self._used[way][ranks] = used[way] + times * nbytes
        return number, times


def timetable(plan: Reshard, limit: int) -> Schedule:
    """Rounds for everything that travels. ``limit``: bytes; a rank's staging memory is twice that at most, for what it
    sends and what it receives.

    Raises ValueError if an element does not fit into ``limit``.
    """
    if len(plan.itemsize) and limit < int(plan.itemsize.max()):
        raise ValueError(f"limit = {limit} bytes: {int(plan.itemsize.max())} or more is allowed, an element's size")
    desks = _Desks(len(plan.sent), len(plan.received), limit)
    whole: list[tuple[int, int, int]] = []
    chunked: list[tuple[int, int, int, int, int]] = []
    groups = plan.pieces.group[plan.request_piece] if len(plan.request_piece) else np.zeros(0, np.int64)
    for group in np.unique(groups).tolist():
        requests = np.arange(*np.searchsorted(groups, [group, group + 1]))
        sizes = plan.piece_bytes[plan.request_piece[requests]]
        received = _summed(plan.request_dest[requests], sizes, len(plan.received))
        loads: dict[bytes, tuple[Ints, Ints]] = {}  # decks come round again and again
        for turns, alike in _served_alike(plan, group, requests):
            if turns not in loads:
                loads[turns] = _summed(plan.sources(requests, alike[0]), sizes, len(plan.sent))
            sent = loads[turns]
            if max(sent[1].max(), received[1].max()) > limit:
                chunked += [line for tensor in alike for line in _in_chunks(plan, group, tensor, requests, desks)]
                continue
            while alike:
                number, times = desks.enter(len(alike), sent, received)
                whole += [(group, tensor, number) for tensor in alike[:times]]
                alike = alike[times:]
    rounds = 1 + max([-1, *(line[2] for line in whole), *(line[0] for line in chunked)])
    columns = np.array(whole, np.int64).reshape(-1, 3), np.array(sorted(chunked), np.int64).reshape(-1, 5)
    return Schedule(plan, limit, rounds, *columns)


def _served_alike(plan: Reshard, group: int, requests: Ints) -> Iterator[tuple[bytes, list[int]]]:
    """The tensors of a class in order, together as long as the same ranks serve them."""
    pieces = np.unique(plan.request_piece[requests])
    turns = [plan.turns(pieces, tensor) for tensor in range(len(plan.names[group]))]
    for key, some in itertools.groupby(range(len(turns)), key=turns.__getitem__):
        yield key, list(some)


def _in_chunks(
    plan: Reshard, group: int, tensor: int, requests: Ints, desks: _Desks
) -> Iterator[tuple[int, int, int, int, int]]:
    """The rounds of a tensor that does not fit into one."""
    itemsize, dims = int(plan.itemsize[group]), int(plan.dims[group])
    for request, source in zip(requests.tolist(), plan.sources(requests, tensor).tolist(), strict=True):
        box = plan.pieces.box(int(plan.request_piece[request]), dims)
        sender, receiver = np.array([source]), plan.request_dest[request : request + 1]
        for part, chunk in enumerate(chunks(box, desks.limit // itemsize)):
            nbytes = np.array([chunk.size * itemsize])
            number, _ = desks.enter(1, (sender, nbytes), (receiver, nbytes))
            yield number, group, tensor, request, part


def _summed(ranks: Ints, sizes: Ints, count: int) -> tuple[Ints, Ints]:
    """The ranks that are in it, and the bytes of each."""
    sums = np.bincount(ranks, weights=sizes, minlength=count).astype(np.int64)  # exact up to 2^53 bytes
    some = np.flatnonzero(sums)
    return some, sums[some]
