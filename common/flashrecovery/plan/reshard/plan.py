"""From one layout to another, memory to memory: which rank sends which box of which tensor to which rank.

What a rank needs in the new layout, minus what it has in the old one, is cut where the old layout's boxes end. Each
piece goes to each rank that lacks it exactly once, from one of its holders. So the bytes on the wire are what is needed
minus what is held already, by construction. Two arguments describe which ranks leave, join or get another number: which
old ranks can still send (``alive``), and which new rank each of them becomes (``becomes``). A checkpoint is a layout
whose "ranks" are files that become no rank, so the same function converts any layout to any other.

Everything is planned for whole classes of tensors that are cut alike (the layers of a stage), as columns of numbers;
the messages of one rank are written out when it asks for them (:mod:`.schedule`). So 18,000 ranks with thousands of
tensors are planned in about a second. Deterministic: ranks that plan from the same facts agree without communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flashrecovery.plan.reshard.boxes import Box, NoHolderError, Space, left_of
from flashrecovery.plan.reshard.layouts import Placement, RankLayout, Ranks
from flashrecovery.plan.reshard.load_balance import LoadBalance, deal
from flashrecovery.plan.reshard.overlay import Boxes, Ints, disjoint, meeting, spread
from flashrecovery.plan.words import ranks_text

_SHOWN = 3
_FEW_TENSORS = 20
"""Number of incomplete tensors that an error examines closely."""


@dataclass(frozen=True, slots=True)
class Portion:
    """``box`` of ``tensor``: ``nbytes`` from rank ``source`` of the old layout to rank ``dest`` of the new one."""

    tensor: str
    box: Box
    source: int
    dest: int
    nbytes: int


@dataclass(frozen=True)
class Reshard:
    """The way from an old layout to a new one. Bytes are summed over all ranks.

    The columns describe classes of tensors that are cut alike: class c has the tensors ``names[c]``. Piece p is a box
    of all tensors of a class; request e is that a rank gets a piece.

    Attributes:
        names, dims, itemsize: of each class, its tensors, their number of dimensions and bytes of an element.
        pieces: every piece (``group`` is its class, ``holders`` the set that holds it).
        request_piece, request_dest: what travels: the piece, and the rank that gets it, ascending by piece.
        first_request: of each piece, the number of its first request.
        kept_piece, kept_dest: what a rank has already.
        decks: which place serves a request.
        stream: of each piece, its stream in ``decks``; -1 if it does not travel.
        needed_bytes: what the new layout has, replicas included.
        held_bytes: of that, what the same process holds already.
        received: bytes by new rank.
    """

    names: tuple[tuple[str, ...], ...]
    dims: Ints
    itemsize: Ints
    pieces: Boxes
    request_piece: Ints
    request_dest: Ints
    first_request: Ints
    kept_piece: Ints
    kept_dest: Ints
    decks: LoadBalance
    stream: Ints
    needed_bytes: int
    held_bytes: int
    received: Ints

    @property
    def moved_bytes(self) -> int:
        """Bytes on the wire: what is needed, less what is held."""
        return self.needed_bytes - self.held_bytes

    @property
    def sent(self) -> Ints:
        """Bytes by old rank."""
        return self.decks.load

    @cached_property
    def piece_bytes(self) -> Ints:
        """The bytes of each piece, in each tensor of its class."""
        sizes: Ints = self.pieces.sizes * self.itemsize[self.pieces.group]
        return sizes

    @cached_property
    def requests_of_piece(self) -> Ints:
        """How many ranks get it."""
        return np.bincount(self.request_piece, minlength=len(self.pieces))

    def sources(self, requests: Ints, tensor: Ints | int) -> Ints:
        """Which places serve these requests, for the class's tensor number ``tensor`` (shapes as numpy combines
        them)."""
        piece = self.request_piece[requests]
        turn = self.decks.first[self.stream[piece]] + requests - self.first_request[piece]
        return self.decks.serving(self.pieces.holders[piece], turn + tensor * self.requests_of_piece[piece])

    def turns(self, pieces: Ints, tensor: int) -> bytes:
        """Equal for tensors of a class whose requests for these pieces are served by the same ranks."""
        lengths = self.decks.lengths[self.pieces.holders[pieces]]
        return (tensor * self.requests_of_piece[pieces] % lengths).tobytes()

    def portion(self, request: int, tensor: int, source: int) -> Portion:
        piece = int(self.request_piece[request])
        group = int(self.pieces.group[piece])
        box = self.pieces.box(piece, int(self.dims[group]))
        dest = int(self.request_dest[request])
        return Portion(self.names[group][tensor], box, source, dest, int(self.piece_bytes[piece]))

    def kept(self, dest: int) -> list[tuple[str, Box]]:
        """What new rank ``dest`` takes from its own old memory."""
        found = []
        for piece in self.kept_piece[self.kept_dest == dest].tolist():
            group = int(self.pieces.group[piece])
            box = self.pieces.box(piece, int(self.dims[group]))
            found += [(name, box) for name in self.names[group]]
        return found

    def explain(self) -> list[str]:
        """What moves, in plain sentences."""
        needed, moved = max(self.needed_bytes, 1), self.moved_bytes
        lines = [
            f"The new layout has {self.needed_bytes:,} bytes on {np.count_nonzero(self._needed_by):,} ranks; "
            f"{self.held_bytes:,} of them ({self.held_bytes / needed:.1%}) are already where they are needed."
        ]
        if not moved:
            return [*lines, "Nothing has to be sent."]
        senders, receivers = np.flatnonzero(self.sent), np.flatnonzero(self.received)
        busiest, most = int(self.sent.argmax()), int(self.received.argmax())
        lines.append(
            f"{moved:,} bytes are sent, each once to each rank that lacks it: by {ranks_text(senders.tolist())} of the "
            f"old layout, to {ranks_text(receivers.tolist())} of the new one."
        )
        lines.append(
            f"The busiest sender is rank {busiest} with {int(self.sent[busiest]):,} bytes (on average "
            f"{moved / len(senders):,.0f}); rank {most} receives the most, {int(self.received[most]):,} bytes."
        )
        return lines

    @cached_property
    def _needed_by(self) -> Ints:
        counts = np.bincount(self.request_dest, minlength=len(self.received))
        return counts + np.bincount(self.kept_dest, minlength=len(self.received))


class _Sets:
    """Sets of ranks by number; equal ones have one."""

    def __init__(self, allowed: frozenset[int] | None) -> None:
        self._allowed = allowed
        self._known: dict[Ranks, int] = {}
        self._unions: dict[tuple[int, int], int] = {}
        self.members: list[Ints] = []

    def number(self, ranks: Ranks) -> int:
        """Raises ValueError for a rank that is in it twice, or below 0."""
        ranks = ranks if isinstance(ranks, range) else tuple(ranks)
        known = self._known.get(ranks)
        if known is not None:
            return known
        if len(set(ranks)) < len(ranks) or (ranks and min(ranks) < 0):
            raise ValueError(f"ranks = {list(ranks)[:8]}: each rank once, 0 or more, is allowed")
        living = ranks if self._allowed is None else [r for r in ranks if r in self._allowed]
        self.members.append(np.array(living, np.int64))
        self._known[ranks] = len(self.members) - 1
        return self._known[ranks]

    def union(self, one: int, other: int) -> int:
        key = (min(one, other), max(one, other))
        if key not in self._unions:
            both = np.union1d(self.members[one], self.members[other])
            self._unions[key] = self.number(tuple(both.tolist()))
        return self._unions[key]

    def counts(self) -> Ints:
        return np.array([len(m) for m in self.members], np.int64)

    def joined(self) -> Ints:
        return np.concatenate(self.members) if self.members else np.zeros(0, np.int64)


class _Columns:
    """Placements as arrays. Each placement object is read once."""

    def __init__(self, dims: int, sets: _Sets) -> None:
        self._dims, self._sets = dims, sets
        self._known: dict[int, tuple[Ints, Ints, Ints]] = {}
        self._found: list[tuple[int, tuple[Ints, Ints, Ints]]] = []

    def add(self, group: int, placement: Placement, shape: Sequence[int]) -> None:
        """Raises ValueError for a box that is not in the tensor."""
        if id(placement) not in self._known:
            parts = [part for part in placement if part.ranks]
            pad = self._dims - len(shape)
            for part in parts:
                if len(part.box.low) != len(shape):
                    raise ValueError(f"box {part.box}: {len(shape)} dimensions are needed, as in shape {shape}")
            low = np.array([(*part.box.low, *(0,) * pad) for part in parts], np.int64).reshape(-1, self._dims)
            high = np.array([(*part.box.high, *(1,) * pad) for part in parts], np.int64).reshape(-1, self._dims)
            wrong = (low < 0).any(axis=1) | (high > np.array([*shape, *(1,) * pad])).any(axis=1)
            if wrong.any():
                raise ValueError(f"box {parts[int(wrong.argmax())].box}: a part of shape {tuple(shape)} is allowed")
            holders = np.array([self._sets.number(part.ranks) for part in parts], np.int64)
            some = (low < high).all(axis=1)
            self._known[id(placement)] = (low[some], high[some], holders[some])
        self._found.append((group, self._known[id(placement)]))

    def boxes(self) -> Boxes:
        nothing = np.zeros((0, self._dims), np.int64)
        group = [np.full(len(holders), group, np.int64) for group, (_, _, holders) in self._found]
        return Boxes(
            np.concatenate([nothing[:, 0], *group]),
            np.concatenate([nothing, *(low for _, (low, _, _) in self._found)]),
            np.concatenate([nothing, *(high for _, (_, high, _) in self._found)]),
            np.concatenate([nothing[:, 0], *(holders for _, (_, _, holders) in self._found)]),
        )


def plan_reshard(
    spaces: Iterable[Space],
    old: RankLayout,
    new: RankLayout,
    *,
    alive: Collection[int] | None = None,
    becomes: Mapping[int, int] | None = None,
) -> Reshard:
    """How every rank of ``new`` gets its boxes from those of ``old``.

    Args:
        spaces: of every tensor in ``new``; tensors move in this order.
        alive: old ranks that can send; None: all. Copies that a rank keeps for others are ordinary parts of ``old``.
        becomes: the new rank of each old one that continues as the same process; None: the same number. ``{}``: none
            continues, as when files are read.

    Raises:
        NoHolderError: no live rank holds some box that is needed; names the tensor and the box.
        ValueError: a tensor has no space, a box is outside of its tensor, or a rank needs something twice.
    """
    wanted = [space for space in spaces if space.name in new]
    nowhere = sorted(set(new) - {space.name for space in wanted})
    if nowhere or len(wanted) > len({space.name for space in wanted}):
        raise ValueError(f"tensors without their own space: {nowhere[:_SHOWN]}: one space for each is allowed")
    dims = max([1, *(len(space.shape) for space in wanted)])
    living = None if alive is None else frozenset(alive)
    holders, needers = _Sets(living), _Sets(None)
    have, want = _Columns(dims, holders), _Columns(dims, needers)
    placements = [(old.get(space.name, ()), new[space.name]) for space in wanted]  # held, so that no id comes twice
    classes: dict[tuple[tuple[int, ...], int, int, int], list[int]] = defaultdict(list)
    for number, (space, (mine, theirs)) in enumerate(zip(wanted, placements, strict=True)):
        classes[space.shape, space.itemsize, id(mine), id(theirs)].append(number)
    for group, alike in enumerate(classes.values()):
        shape, (mine, theirs) = wanted[alike[0]].shape, placements[alike[0]]
        have.add(group, mine, shape)
        want.add(group, theirs, shape)
    tensors = [[wanted[number] for number in alike] for alike in classes.values()]
    held = have.boxes()
    held = held.take(np.flatnonzero(holders.counts()[held.holders] > 0)) if len(held) else held
    held = disjoint(held, holders.union)
    needed = want.boxes()
    _refuse_twice(needed, needers, tensors)
    i, j = meeting(held, needed)
    pieces = Boxes(
        held.group[i], np.maximum(held.low[i], needed.low[j]), np.minimum(held.high[i], needed.high[j]), held.holders[i]
    )
    _refuse_missing(pieces, j, held, needed, tensors)
    return _assemble(tensors, pieces, needed.holders[j], holders, needers, becomes)


def _assemble(
    tensors: Sequence[Sequence[Space]],
    pieces: Boxes,
    needed_by: Ints,
    holders: _Sets,
    needers: _Sets,
    becomes: Mapping[int, int] | None,
) -> Reshard:
    """Give each rank each piece that it needs: from its own memory, or else from one of the holders."""
    counts = needers.counts()
    starts = np.cumsum(counts) - counts
    members = needers.joined()
    piece, place = (
        spread(starts[needed_by], counts[needed_by]) if len(counts) else (np.zeros(0, np.int64), np.zeros(0, np.int64))
    )
    dest = members[place]
    has = _has_already(pieces.holders[piece], dest, holders, becomes)

    itemsize = np.array([alike[0].itemsize for alike in tensors], np.int64)
    repeats = np.array([len(alike) for alike in tensors], np.int64)
    piece_bytes = pieces.sizes * itemsize[pieces.group] if len(pieces) else np.zeros(0, np.int64)
    times = repeats[pieces.group] if len(pieces) else np.zeros(0, np.int64)
    request_piece, request_dest = piece[~has], dest[~has]
    requests = np.bincount(request_piece, minlength=len(pieces))
    travelling = np.flatnonzero(requests)
    stream = np.full(len(pieces), -1, np.int64)
    stream[travelling] = np.arange(len(travelling))
    ranks = 1 + max([-1, *(int(m.max()) for m in holders.members if len(m))])
    decks = deal(
        holders.members,
        pieces.holders[travelling],
        (requests * times)[travelling],
        piece_bytes[travelling],
        ranks,
    )
    total = piece_bytes * times
    received = np.zeros(int(members.max(initial=-1)) + 1, np.int64)
    np.add.at(received, request_dest, total[request_piece])
    kept = int(total[piece[has]].sum())
    return Reshard(
        names=tuple(tuple(space.name for space in alike) for alike in tensors),
        dims=np.array([len(alike[0].shape) for alike in tensors], np.int64),
        itemsize=itemsize,
        pieces=pieces,
        request_piece=request_piece,
        request_dest=request_dest,
        first_request=np.cumsum(requests) - requests,
        kept_piece=piece[has],
        kept_dest=dest[has],
        decks=decks,
        stream=stream,
        needed_bytes=int(received.sum()) + kept,
        held_bytes=kept,
        received=received,
    )


def _has_already(
    holders_of: Ints, dest: Ints, holders: _Sets, becomes: Mapping[int, int] | None
) -> npt.NDArray[np.bool_]:
    """Whether the process that becomes ``dest`` is one of the holders."""
    members, counts = holders.joined(), holders.counts()
    if not len(members) or not len(dest):
        return np.zeros(len(dest), bool)
    span = int(max(members.max(), dest.max())) + 1
    if becomes is None:
        new_number = np.arange(span)
    else:
        new_number = np.full(span, -1, np.int64)
        for old_rank, new_rank in becomes.items():
            if old_rank < span:
                new_number[old_rank] = new_rank
    owner = np.repeat(np.arange(len(counts)), counts)
    becoming = new_number[members]
    span = max(span, int(becoming.max()) + 1)
    known = np.unique((owner * span + becoming)[becoming >= 0])
    asked = holders_of * span + dest
    place = np.minimum(np.searchsorted(known, asked), max(len(known) - 1, 0))
    return known[place] == asked if len(known) else np.zeros(len(dest), bool)


def _refuse_twice(needed: Boxes, needers: _Sets, tensors: Sequence[Sequence[Space]]) -> None:
    i, j = meeting(needed, needed)
    for a, b in zip(i[i < j].tolist(), j[i < j].tolist(), strict=True):
        both = np.intersect1d(needers.members[int(needed.holders[a])], needers.members[int(needed.holders[b])])
        if len(both):
            space = tensors[int(needed.group[a])][0]
            dims = len(space.shape)
            raise ValueError(
                f"tensor {space.name!r}: {ranks_text(both.tolist())} would have boxes {needed.box(a, dims)} and "
                f"{needed.box(b, dims)}: boxes of one rank that do not overlap are allowed"
            )


def _refuse_missing(
    pieces: Boxes, of_needed: Ints, held: Boxes, needed: Boxes, tensors: Sequence[Sequence[Space]]
) -> None:
    covered = np.zeros(len(needed), np.int64)
    np.add.at(covered, of_needed, pieces.sizes)
    lacking = np.flatnonzero(covered < needed.sizes)
    if not len(lacking):
        return
    missing: list[tuple[str, Box]] = []
    groups = np.unique(needed.group[lacking])
    for group in groups[:_FEW_TENSORS].tolist():
        space = tensors[group][0]
        dims = len(space.shape)
        of_group = lacking[needed.group[lacking] == group]
        have = [held.box(row, dims) for row in np.flatnonzero(held.group == group).tolist()]
        rest = left_of(needed.box(int(of_group[0]), dims), have)
        missing += [(space.name, box) for box in rest]
    named = "; ".join(f"{box} of tensor {name!r}" for name, box in missing[:_SHOWN])
    count = sum(len(tensors[group]) for group in groups.tolist())
    raise NoHolderError(
        f"no live rank holds {named}; in all {count:,} of {sum(map(len, tensors)):,} tensors lack something",
        tuple(missing),
    )
