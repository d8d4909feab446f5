"""Shards that several ranks hold alike, from all of them at once: for links between hosts, which may differ in speed.

Every holder says first what the shards are, and the destination makes room for them. Both cut them into the same
ranges. The destination then asks each holder for one range after another, over several streams, with a few under way
on each, until all have come: a holder whose link carries more is asked more often. Towards the end a slow holder is
asked no more, if the others would have everything before it had sent another range (:func:`takes_another`).

Large contiguous tensors travel straight from and into their own memory. Each holder sends the digests of all shards at
the end, and the destination compares all of them with its own: ranges of two ranks make a whole only where both have
the same bits.
"""

from __future__ import annotations

import collections
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.runtime.side_by_side import run_side_by_side
from flashrecovery.state import codec
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import ShardSpec, TensorSpec, decode_spec, encode_spec
from flashrecovery.worker.transfer.chunks import Message, flip_a_bit, messages, pack, unpack
from flashrecovery.worker.transfer.direct_reads import Arrivals
from flashrecovery.worker.transfer.payload import checked, first_with_bytes, in_place, placed, staging_buffer

STREAMS = 2
"""Connections between a holder and a destination that carry ranges."""
UNDER_WAY = 2
"""Ranges that a stream has been asked for and that have not come."""
_LEAST_RANGE, _MOST_RANGE, _RANGES = 512 << 10, 8 << 20, 64
_TAG = 0x10000  # of the first ranged transfer, where it says what is sent; the streams' tags follow
_END = -1
_DIGEST_BYTES = 16
_LOOK_AGAIN_S = 0.05
_THREADS = "flashrecovery-transfer"


@dataclass(frozen=True)
class RangesToSend:
    """This rank sends ranges of ``sources`` to ``dest``. ``number``: of the transfer, among those of ``dest``."""

    dest: int
    number: int
    sources: Sequence[ShardSource]


@dataclass(frozen=True)
class RangesToReceive:
    """This rank gets the shards ``names`` from ``holders``. ``number``: of the transfer, among those of this rank."""

    holders: Sequence[int]
    number: int
    names: Sequence[str]


@dataclass(frozen=True)
class Arrived:
    """Of each shard, its digest here and that of its holders; if they differ among each other, one that is not the one
    here. Hex. ``nbytes``: of all of them."""

    digests: Sequence[str]
    expected: Sequence[str]
    nbytes: int


# -- which range from whom -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HolderProgress:
    """What has come from one holder.

    Attributes:
        nbytes: in whole ranges.
        seconds: for which something was under way.
        under_way: bytes of ranges that it has been asked for, and that have not come.
    """

    nbytes: int = 0
    seconds: float = 0.0
    under_way: int = 0

    @property
    def speed(self) -> Fraction:
        """Bytes a second, not rounded; 0 if it is not known."""
        return self.nbytes / Fraction(self.seconds) if self.seconds > 0 else Fraction(0)


def takes_another(own: HolderProgress, others: Sequence[HolderProgress], left: int, nbytes: int) -> bool:
    """Whether a holder is to send the next range, of ``nbytes`` bytes.

    No, if the others would have sent that and everything else that is ``left`` (ranges of that size) before it has
    come. A holder of which nothing has come yet sends one range, by which its speed becomes known. One holder always
    says yes: the one from which the next range would come first. With rounded numbers, two alike would each leave the
    last range to the other.
    """
    if own.speed == 0:
        return own.under_way == 0
    comes_after = (own.under_way + nbytes) / own.speed
    sent = sum(max(0, math.ceil((o.speed * comes_after - o.under_way) / nbytes) - 1) for o in others if o.speed > 0)
    return sent < left


class Ranges:
    """The ranges of one transfer, each of which one holder is asked for. For several threads."""

    def __init__(
        self, sizes: Sequence[int], holders: Sequence[int], check: Callable[[], None], now: Callable[[], float]
    ) -> None:
        """``sizes``: of the ranges, in bytes. ``check`` raises when communication has been abandoned."""
        self._sizes, self._check, self._now = sizes, check, now
        self._next = 0
        self._stopped = False
        self._progress = {holder: HolderProgress() for holder in holders}
        self._busy_since: dict[int, float] = {}
        self._changed = threading.Condition()

    def stop(self) -> None:
        """No range is asked for any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def leave_out(self, holder: int) -> None:
        """It is not asked."""
        with self._changed:
            del self._progress[holder]
            self._changed.notify_all()

    def take(self, holder: int, *, wait: bool) -> int | None:
        """The number of the range that ``holder`` is asked for next. None if there is none: with ``wait``, never
        again."""
        with self._changed:
            while not self._stopped and holder in self._progress and self._next < len(self._sizes):
                if self._is_for(holder):
                    number = self._next
                    self._next += 1
                    self._count(holder, asked=self._sizes[number])
                    return number
                if not wait:
                    return None
                self._changed.wait(_LOOK_AGAIN_S)
                self._check()
            return None

    def arrived(self, holder: int, number: int) -> None:
        """The range has come."""
        with self._changed:
            self._count(holder, came=self._sizes[number])
            self._changed.notify_all()

    def _is_for(self, holder: int) -> bool:
        progress = {one: self._until_now(one) for one in self._progress}
        others = [it for one, it in progress.items() if one != holder]
        return takes_another(progress[holder], others, len(self._sizes) - self._next, self._sizes[self._next])

    def _until_now(self, holder: int) -> HolderProgress:
        known = self._progress[holder]
        busy = self._now() - self._busy_since[holder] if holder in self._busy_since else 0.0
        return HolderProgress(known.nbytes, known.seconds + busy, known.under_way)

    def _count(self, holder: int, *, asked: int = 0, came: int = 0) -> None:
        known = self._until_now(holder)
        self._progress[holder] = HolderProgress(known.nbytes + came, known.seconds, known.under_way + asked - came)
        self._busy_since.pop(holder, None)
        if self._progress[holder].under_way:
            self._busy_since[holder] = self._now()


def cut(specs: Sequence[TensorSpec]) -> list[Message]:
    """The ranges of a payload of these tensors: both sides compute the same ones."""
    whole = sum(spec.nbytes for spec in specs)
    return list(messages(specs, min(_MOST_RANGE, max(_LEAST_RANGE, whole // _RANGES))))


def _tag(number: int, stream: int = -1) -> int:
    return _TAG + number * (STREAMS + 1) + stream + 1


# -- a holder ----------------------------------------------------------------------------------------------------------


def send_ranges(group: dist.ProcessGroup, ranges: RangesToSend, digests: Callable[[], Sequence[str]]) -> int:
    """Send what the destination asks for, and then what ``digests`` waits for: one of each source. Returns how many
    bytes of shards were sent. Raises what the group's operations raise."""
    dest, sources = ranges.dest, ranges.sources
    header = codec.dumps([(source.name, encode_spec(source.spec)) for source in sources])
    tag = _tag(ranges.number)
    group.send([torch.tensor([len(header)], dtype=torch.int64)], dest, tag).wait()
    group.send([torch.frombuffer(bytearray(header), dtype=torch.uint8)], dest, tag).wait()
    numbered = cut([spec for source in sources for spec in source.spec.tensors.values()])
    tensors = [tensor.detach() for source in sources for tensor in source.tensors]
    sent = [0] * STREAMS

    def stream(place: int) -> None:
        for nbytes in _serve(group, dest, _tag(ranges.number, place), numbered, tensors):
            sent[place] += nbytes

    run_side_by_side([functools.partial(stream, place) for place in range(STREAMS)], _THREADS)
    raw = b"".join(map(bytes.fromhex, digests()))
    group.send([torch.frombuffer(bytearray(raw), dtype=torch.uint8)], dest, tag).wait()
    return sum(sent)


def _serve(
    group: dist.ProcessGroup, dest: int, tag: int, numbered: Sequence[Message], tensors: Sequence[torch.Tensor]
) -> Iterator[int]:
    """The ranges that are asked for on one stream, as they are sent."""
    asked = torch.empty(1, dtype=torch.int64)
    pending: collections.deque[tuple[dist.Work, torch.Tensor]] = collections.deque()
    while True:
        group.recv([asked], dest, tag).wait()
        number = int(asked.item())
        if number == _END:
            break
        if not 0 <= number < len(numbered):
            raise ProtocolError(f"rank {dest} asks for range {number} of {len(numbered)}")
        message = numbered[number]
        buffer = in_place(message, tensors)
        if buffer is None:
            buffer = staging_buffer(message, tensors)
            pack(message, tensors, buffer)
        if len(pending) >= UNDER_WAY:
            pending.popleft()[0].wait()
        pending.append((group.send([buffer], dest, tag), buffer))
        yield message.nbytes
    while pending:
        pending.popleft()[0].wait()


# -- the destination ---------------------------------------------------------------------------------------------------


def receive_ranges(
    group: dist.ProcessGroup,
    ranges: RangesToReceive,
    allocate: Callable[[str, ShardSpec], Mapping[str, torch.Tensor]],
    corrupt: Set[str],
    check: Callable[[], None],
) -> Arrived:
    """Get the shards from their holders, each filled in place in what ``allocate`` has made of it.

    Args:
        corrupt: (fault injection) shards of which one bit is flipped before the digest is taken.
        check: raises when communication has been abandoned.

    Raises ProtocolError if a holder offers other shards, and what the group's operations raise; shards may then be
    partly overwritten.
    """
    return _Receiver(group, ranges, allocate, corrupt, check).run()


@dataclass(frozen=True)
class _Room:
    """What has been made room for: as it was offered, and where it is filled in."""

    offer: bytes
    specs: Sequence[ShardSpec]
    targets: Sequence[list[torch.Tensor]]
    numbered: Sequence[Message]
    ranges: Ranges
    arrivals: Arrivals

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensors in self.targets for tensor in tensors]


class _Receiver:
    def __init__(
        self,
        group: dist.ProcessGroup,
        ranges: RangesToReceive,
        allocate: Callable[[str, ShardSpec], Mapping[str, torch.Tensor]],
        corrupt: Set[str],
        check: Callable[[], None],
    ) -> None:
        self._group, self._names, self._holders = group, ranges.names, ranges.holders
        self._number, self._allocate, self._corrupt, self._check = ranges.number, allocate, corrupt, check
        self._lock = threading.Lock()
        self._offered = threading.Event()
        self._room: _Room | None = None
        self._failed = False
        self._digests = [""] * len(self._names)
        self._theirs: dict[int, list[str]] = {}

    def run(self) -> Arrived:
        jobs: list[Callable[[], None]] = [functools.partial(self._from, holder) for holder in self._holders]
        run_side_by_side([functools.partial(self._failing_all, job) for job in [*jobs, self._hash]], _THREADS)
        room = self._room
        if room is None:
            raise RestoreError(f"none of ranks {self._holders} has offered shards {self._names}")
        expected = [
            next((digest for digest in theirs if digest != own), own)
            for own, *theirs in zip(self._digests, *self._theirs.values(), strict=True)
        ]
        return Arrived(self._digests, expected, sum(message.nbytes for message in room.numbered))

    def _failing_all(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:
            with self._lock:
                self._failed = True
                if self._room is not None:
                    self._room.ranges.stop()
                    self._room.arrivals.fail()
            self._offered.set()
            raise

    def _from(self, holder: int) -> None:
        """Everything that has to do with one holder."""
        group, tag = self._group, _tag(self._number)
        length = torch.zeros(1, dtype=torch.int64)
        group.recv([length], holder, tag).wait()
        header = torch.empty(int(length.item()), dtype=torch.uint8)
        group.recv([header], holder, tag).wait()
        room = self._make_room(holder, header.numpy().tobytes())
        streams = [functools.partial(self._stream, room, holder, place) for place in range(STREAMS)]
        run_side_by_side([functools.partial(self._failing_all, stream) for stream in streams], _THREADS)
        trailer = torch.empty(_DIGEST_BYTES * len(self._names), dtype=torch.uint8)
        group.recv([trailer], holder, tag).wait()
        raw = trailer.numpy().tobytes()
        self._theirs[holder] = [raw[at : at + _DIGEST_BYTES].hex() for at in range(0, len(raw), _DIGEST_BYTES)]

    def _make_room(self, holder: int, offer: bytes) -> _Room:
        """For what the first holder offers. One that offers something else is not asked for any of it, and its digests
        are not those of what comes."""
        with self._lock:
            room = self._room
            if room is None:
                room = self._room = self._room_for(holder, offer)
                if self._failed:
                    room.ranges.stop()
                    room.arrivals.fail()
                self._offered.set()
            elif room.offer != offer:
                room.ranges.leave_out(holder)
        return room

    def _room_for(self, holder: int, offer: bytes) -> _Room:
        offered: list[tuple[str, bytes]] = codec.loads(offer)
        if [name for name, _ in offered] != list(self._names):
            raise ProtocolError(
                f"rank {holder} sends {[name for name, _ in offered]}, but {list(self._names)} were expected"
            )
        specs = [decode_spec(data) for _, data in offered]
        targets = []
        for name, spec in zip(self._names, specs, strict=True):
            made = self._allocate(name, spec)
            targets.append([checked(name, key, made[key], wanted) for key, wanted in spec.tensors.items()])
        tensor_specs = [spec for one in specs for spec in one.tensors.values()]
        numbered = cut(tensor_specs)
        ranges = Ranges([message.nbytes for message in numbered], self._holders, self._check, time.monotonic)
        return _Room(offer, specs, targets, numbered, ranges, Arrivals([spec.nbytes for spec in tensor_specs]))

    def _stream(self, room: _Room, holder: int, place: int) -> None:
        group, tag = self._group, _tag(self._number, place)
        pending: collections.deque[tuple[dist.Work, int, torch.Tensor | None]] = collections.deque()

        def ask(number: int) -> None:
            group.send([torch.tensor([number], dtype=torch.int64)], holder, tag)

        while True:
            while len(pending) < UNDER_WAY:
                number = room.ranges.take(holder, wait=not pending)
                if number is None:
                    break
                message = room.numbered[number]
                own = in_place(message, room.tensors)
                buffer = own if own is not None else staging_buffer(message, room.tensors)
                ask(number)
                pending.append((group.recv([buffer], holder, tag), number, None if own is not None else buffer))
            if not pending:
                break
            work, number, staged = pending.popleft()
            work.wait()
            message = room.numbered[number]
            room.ranges.arrived(holder, number)
            if staged is not None:
                unpack(message, room.tensors, staged)
            for piece in message.pieces:
                room.arrivals.add(piece.index, piece.nbytes)
        ask(_END)

    def _hash(self) -> None:
        """The digests of what has come, beside what is still coming."""
        while not self._offered.wait(_LOOK_AGAIN_S):
            self._check()
        room = self._room
        if room is None:
            return  # what failed raises
        ours = list(placed(self._names, room.targets))
        for number in room.arrivals.as_completed([range(at, at + len(tensors)) for _, tensors, at in ours]):
            name, tensors, _ = ours[number]
            if name in self._corrupt:
                flip_a_bit(tensors[first_with_bytes(tensors)])
            self._digests[number] = shard_digest(tensors, room.specs[number], {})
