"""Shards between ranks: this rank's part of a restore plan, over the recovery's own group and the devices' one.

Bytes on the wire are the bytes lost, plus one small header a pair of ranks. For each pair that exchanges anything::

length (8 bytes) -> header: every shard's name and spec -> payload -> digests (16 bytes a shard)

Both sides cut the payload into the same messages (:mod:`.chunks`). Large contiguous host tensors travel straight
from and into their own memory, everything else (devices, strided views) is staged through one bounded set of host
buffers, pinned if a device is involved. The digests come last so that hashing overlaps with sending.

Where the source has tensors on a device, its header says which, the destination answers which of them lie on its
device, too, and the source says which are *matched*: those for which that is so at every destination of the shard.
They do not go with the payload but from device to device (:mod:`.device_lanes`), and their fingerprints, which are
computed where they lie, take the place of their bytes in the digests. The source decides it for all destinations,
because a shard has one digest. Without a device nothing is asked.

On one host the destination reads contiguous host tensors from the source's memory (:mod:`.direct_reads`); they do not
go with the payload either. Whatever way a shard comes, its digest is computed beside what comes behind it.

Each (peer, direction) has its own thread and a window of messages under way: sources and destinations overlap, and no
order of waits can make two ranks wait for each other. When the group is abandoned every thread raises, and only then
does ``exchange`` raise: nothing touches a tensor afterwards, but for what a device is still about (``groups.drain``
and the device's being idle say when that is over).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.groups.accelerator import accelerator
from flashrecovery.runtime import process_memory
from flashrecovery.runtime.side_by_side import run_side_by_side
from flashrecovery.state import codec
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import ShardSpec, decode_spec, encode_spec
from flashrecovery.worker.transfer.chunks import WINDOW, Message, flip_a_bit, messages, pack, unpack
from flashrecovery.worker.transfer.device_lanes import Lane, Lanes, Patience, prints_of
from flashrecovery.worker.transfer.direct_reads import NO, NOT_PERMITTED, YES, Arrivals, Offer, ReadableMemory, Reading
from flashrecovery.worker.transfer.payload import Payload, checked, first_with_bytes, in_place, placed, staging_buffer
from flashrecovery.worker.transfer.ranges import RangesToReceive, RangesToSend, receive_ranges, send_ranges

_TAG, _ANSWER_TAG = 0x4652, 0x4653
_DIGEST_BYTES = 16


@contextlib.contextmanager
def within(deadline_s: float) -> Iterator[None]:
    """Transfers that take longer are given up, with all communication of this process: a peer that stands still would
    be waited for as long as it does. It is found in the next generation, in which it does not answer.

    Raises RestoreError after ``deadline_s`` seconds. Nothing gives up any more once this has been left: what comes
    next may already communicate in the groups of another generation.
    """
    late = threading.Event()
    said = f"the transfers of a restore took more than {deadline_s:g} s (timeouts.restore_s)"

    def give_up() -> None:
        late.set()
        groups.abandon(said)

    timer = threading.Timer(deadline_s, give_up)
    timer.name, timer.daemon = "flashrecovery-restore-deadline", True
    timer.start()
    try:
        yield
    except RuntimeError as e:
        if late.is_set() and groups.is_communication_error(e):
            raise RestoreError(said) from e
        raise
    finally:
        timer.cancel()
        timer.join()
    if late.is_set():  # over at the same moment, and its groups are abandoned
        raise RestoreError(said)


@dataclass
class TransferReport:
    """What this rank has sent and received. Bytes are payload bytes; digests by shard name, hex. ``bytes_on_device``:
    how many of those received have come from device to device; ``bytes_read``: from a source's memory.

    ``mismatched`` names received shards whose content is not what their source had; nothing is raised for it,
    because the controller can take the next source.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_on_device: int = 0
    bytes_read: int = 0
    sent_digests: dict[str, str] = field(default_factory=dict)
    received_digests: dict[str, str] = field(default_factory=dict)
    mismatched: list[str] = field(default_factory=list)

    def sent(self, nbytes: int) -> None:
        """So much more, to one rank."""
        self.bytes_sent += nbytes

    def sent_all(self, digests: Mapping[str, str]) -> None:
        """Of what has been sent."""
        self.sent_digests = dict(digests)

    def received(self, names: Sequence[str], digests: Sequence[str], expected: Sequence[str]) -> None:
        """Shards from one rank. ``digests``: here; ``expected``: there."""
        self.received_digests.update(zip(names, digests, strict=True))
        self.mismatched += [n for n, a, b in zip(names, digests, expected, strict=True) if a != b]

    def count_received(self, nbytes: int, on_device: int, read: int) -> None:
        """So much more. Of it, what has come from device to device, and what was read from the source's memory."""
        self.bytes_received += nbytes
        self.bytes_on_device += on_device
        self.bytes_read += read


def exchange(
    group: dist.ProcessGroup,
    outgoing: Mapping[int, Sequence[ShardSource]],
    incoming: Mapping[int, Sequence[str]],
    shards: Mapping[str, Shard],
    *,
    device: groups.DeviceGroup | None = None,
    corrupt: Set[str] = frozenset(),
    from_memory: bool = True,
    ranges_out: Sequence[RangesToSend] = (),
    ranges_in: Sequence[RangesToReceive] = (),
) -> TransferReport:
    """Send ``outgoing`` (by destination) and receive ``incoming`` (names by source) into ``shards``, all at
    once.

    Ranks are ranks of ``group``, and of ``device``, over which tensors travel that lie on its device on both sides.
    A received shard is made room for by its ``allocate`` and filled in place. ``corrupt`` (fault injection) names
    received shards of which one bit is flipped before the digest is taken. ``from_memory``: this rank may read the
    memory of sources on its host. ``ranges_out``, ``ranges_in``: what goes and comes in ranges besides.

    Raises ProtocolError if a peer offers other shards than expected, and whatever the group's operations
    raise; a shard may then be partly overwritten.
    """
    return _Exchange(group, device, outgoing, incoming, shards, corrupt, from_memory, ranges_out, ranges_in).run()


class _Exchange:
    """One call of :func:`exchange`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: groups.DeviceGroup | None,
        outgoing: Mapping[int, Sequence[ShardSource]],
        incoming: Mapping[int, Sequence[str]],
        shards: Mapping[str, Shard],
        corrupt: Set[str],
        from_memory: bool,
        ranges_out: Sequence[RangesToSend],
        ranges_in: Sequence[RangesToReceive],
    ) -> None:
        self._group, self._device, self._from_memory = group, device, from_memory
        self._outgoing = {dest: sources for dest, sources in outgoing.items() if sources}
        self._incoming = {source: names for source, names in incoming.items() if names}
        self._shards, self._corrupt = shards, corrupt
        self._report = TransferReport()
        self._lock = threading.Lock()  # frameworks' allocate() and the report are not made for several threads
        self._ranges_out, self._ranges_in = ranges_out, ranges_in
        given = [*self._outgoing.values(), *(one.sources for one in ranges_out)]
        self._unique = {s.name: s for sources in given for s in sources}
        self._digests: dict[str, Future[str]] = {name: Future() for name in self._unique}
        self._patience = Patience()
        self._agreement = _Agreement(self._outgoing, device)
        # Of each pair and direction, its lane if it has one: known when it has been talked over.
        self._planned: dict[tuple[bool, int], Future[Lane | None]] = {}

    def run(self) -> TransferReport:
        devices = {t.device for source in self._unique.values() for t in source.tensors if t.is_cuda}
        # The threads below work on other streams than the one that has produced the content.
        for device in devices if self._device is None else {*devices, self._device.device}:
            accelerator().synchronize(device)
        jobs: list[Callable[[], None]] = []
        jobs += [self._pair(self._send, True, dest) for dest in self._outgoing]
        jobs += [self._pair(self._receive, False, source) for source in self._incoming]
        paired = bool(jobs)
        jobs += [functools.partial(self._send_ranges, one) for one in self._ranges_out]
        jobs += [functools.partial(self._receive_ranges, one) for one in self._ranges_in]
        if self._device is not None and paired:
            jobs.append(functools.partial(self._move, self._device))
        if self._unique:
            jobs.append(self._hash)
        run_side_by_side(jobs, "flashrecovery-transfer")
        self._report.sent_all({name: future.result() for name, future in self._digests.items()})
        return self._report

    def _send_ranges(self, ranges: RangesToSend) -> None:
        digests = (self._digests[source.name] for source in ranges.sources)
        sent = send_ranges(self._group, ranges, lambda: [digest.result() for digest in digests])
        with self._lock:
            self._report.sent(sent)

    def _receive_ranges(self, ranges: RangesToReceive) -> None:
        def allocate(name: str, spec: ShardSpec) -> dict[str, torch.Tensor]:
            with self._lock:
                return self._shards[name].allocate(spec)

        arrived = receive_ranges(self._group, ranges, allocate, self._corrupt, self._patience.check)
        with self._lock:
            self._report.received(ranges.names, arrived.digests, arrived.expected)
            self._report.count_received(arrived.nbytes, 0, 0)

    def _pair(self, talk: Callable[[int], None], sending: bool, peer: int) -> Callable[[], None]:
        """A separate job for the messages and data between this rank and another one, in one direction."""
        planned = self._planned[sending, peer] = Future()

        def job() -> None:
            try:
                talk(peer)
            except BaseException as e:
                if sending:
                    self._agreement.fail(e)
                if not planned.done():
                    planned.set_exception(e)  # or the device's lanes would be waited for for ever
                raise

        return job

    def _move(self, device: groups.DeviceGroup) -> None:
        try:
            found = [future.result() for future in self._planned.values()]
        except BaseException as e:  # a peer is gone before its lane was known: no lane begins, not even another peer's
            for planned in self._planned.values():
                planned.add_done_callback(functools.partial(_fail_lane, e))
            raise
        lanes = [lane for lane in found if lane is not None]
        if lanes:
            Lanes(device, self._patience).run(lanes)

    def _hash(self) -> None:
        """The digests of what this rank sends."""
        try:
            matched = self._agreement.reached()
            places = [(name, i) for name, mask in matched.items() for i, both in enumerate(mask) if both]
            known: dict[str, dict[int, bytes]] = {name: {} for name in self._unique}
            if places and self._device is not None:
                stream = accelerator().stream(self._device.device)
                tensors = [self._unique[name].tensors[i] for name, i in places]
                for (name, i), found in zip(places, prints_of(tensors, stream, self._patience), strict=True):
                    known[name][i] = found
            for name, source in self._unique.items():
                self._digests[name].set_result(shard_digest(source.tensors, source.spec, known[name]))
        except BaseException as e:
            for future in self._digests.values():
                if not future.done():
                    future.set_exception(e)  # or the senders would wait for ever
            raise

    def _plan(
        self,
        sending: bool,
        peer: int,
        payload: Payload,
        matched: Sequence[bool],
        damaged: frozenset[int] = frozenset(),
    ) -> Lane | None:
        """The lane of a pair, which begins as soon as all are known; None if nothing of it is matched."""
        lane = None
        if self._device is not None and any(matched):
            chosen = payload.where(matched)
            lane = Lane(
                peer,
                sending,
                chosen.tensors,
                list(messages(chosen.specs)),
                accelerator().mark(self._device.device),
                frozenset(chosen.places.index(i) for i in damaged & {*chosen.places}),
            )
        self._planned[sending, peer].set_result(lane)
        return lane

    def _send(self, peer: int) -> None:
        group, sources = self._group, self._outgoing[peer]
        asked = self._agreement.asks(peer)
        payload = Payload(
            [t for s in sources for t in s.spec.tensors.values()], [t.detach() for s in sources for t in s.tensors]
        )
        held = ReadableMemory(payload.tensors, asked)
        offer = (
            [(s.name, encode_spec(s.spec)) for s in sources],
            bytes(asked) if any(asked) else b"",
            held.offer and held.offer.encoded,
        )
        header = torch.frombuffer(bytearray(codec.dumps(offer)), dtype=torch.uint8)
        length = torch.tensor([header.numel()], dtype=torch.int64)
        pending: collections.deque[tuple[dist.Work, list[torch.Tensor]]] = collections.deque()

        def post(tensor: torch.Tensor) -> None:
            if len(pending) >= WINDOW:
                pending.popleft()[0].wait()
            pending.append((group.send([tensor], peer, _TAG), [tensor]))

        post(length)
        post(header)
        matched = [False] * len(asked)
        if any(asked):
            answer = torch.empty(len(asked), dtype=torch.uint8)
            group.recv([answer], peer, _ANSWER_TAG).wait()
            self._agreement.answered(peer, answer.tolist())
            masks = self._agreement.reached()
            matched = [both for s in sources for both in masks[s.name]]
            post(torch.tensor(matched, dtype=torch.uint8))
        lane = self._plan(True, peer, payload, matched)

        with contextlib.ExitStack() as until_read:
            reads = self._reads_of(peer, held, until_read)
            rest = payload.where([not (both or read) for both, read in zip(matched, reads, strict=True)])
            sent = lane.nbytes if lane is not None else 0
            for message in messages(rest.specs):
                buffer = in_place(message, rest.tensors)
                if buffer is None:
                    buffer = staging_buffer(message, rest.tensors)
                    pack(message, rest.tensors, buffer)
                post(buffer)
                sent += message.nbytes
            if any(reads):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ANSWER_TAG).wait()  # all of it has been read
                sent += sum(spec.nbytes for spec in payload.where(reads).specs)
        raw = b"".join(bytes.fromhex(self._digests[s.name].result()) for s in sources)
        post(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        while pending:
            pending.popleft()[0].wait()
        with self._lock:
            self._report.sent(sent)

    def _reads_of(self, peer: int, held: ReadableMemory, until_read: contextlib.ExitStack) -> list[bool]:
        """Which tensors ``peer`` reads from this rank's memory."""
        if held.offer is None:
            return [False] * held.count
        answer = torch.empty(2 + held.count, dtype=torch.int64)
        self._group.recv([answer], peer, _ANSWER_TAG).wait()
        can, pid, *taken = answer.tolist()
        if can == NOT_PERMITTED:
            declared = until_read.enter_context(process_memory.declared(pid))
            self._group.send([torch.tensor([declared], dtype=torch.uint8)], peer, _TAG).wait()
            self._group.recv([answer], peer, _ANSWER_TAG).wait()
            can, pid, *taken = answer.tolist()
        return [can == YES and bool(read) for read in taken]

    def _receive(self, peer: int) -> None:
        group, names, report = self._group, self._incoming[peer], self._report
        length = torch.zeros(1, dtype=torch.int64)
        group.recv([length], peer, _TAG).wait()
        header = torch.empty(int(length.item()), dtype=torch.uint8)
        group.recv([header], peer, _TAG).wait()
        offer: tuple[list[tuple[str, bytes]], bytes, bytes | None] = codec.loads(header.numpy().tobytes())
        offered, asked, readable = offer
        if [name for name, _ in offered] != list(names):
            raise ProtocolError(f"rank {peer} sends {[n for n, _ in offered]}, but {list(names)} were expected")
        specs = [decode_spec(data) for _, data in offered]
        targets: list[list[torch.Tensor]] = []
        for name, spec in zip(names, specs, strict=True):
            with self._lock:
                allocated = self._shards[name].allocate(spec)
            targets.append([checked(name, key, allocated[key], wanted) for key, wanted in spec.tensors.items()])
        payload = Payload([t for s in specs for t in s.tensors.values()], [t for ts in targets for t in ts])
        matched = self._answer(peer, payload, asked)
        ours = list(placed(names, targets))
        damaged = frozenset(first_with_bytes(ts) + at for name, ts, at in ours if name in self._corrupt)
        lane = self._plan(False, peer, payload, matched, damaged)

        reading = self._reading(peer, payload.tensors, readable)
        reads = reading.taken if reading is not None else [False] * len(matched)
        rest = payload.where([not (both or read) for both, read in zip(matched, reads, strict=True)])
        arrivals = Arrivals([0 if both else spec.nbytes for both, spec in zip(matched, payload.specs, strict=True)])
        trailer = torch.empty(_DIGEST_BYTES * len(names), dtype=torch.uint8)
        digests = [""] * len(names)

        def compute_digests() -> None:
            known: dict[int, bytes] = {}
            if lane is not None:
                places = payload.where(matched).places
                known = {places[number]: found for number, found in lane.arrived.result().items()}
            mine_of = [range(at, at + len(tensors)) for _, tensors, at in ours]
            for number in arrivals.as_completed(mine_of):
                mine, (_, tensors, at) = mine_of[number], ours[number]
                for place in damaged.intersection(mine):
                    if not matched[place]:
                        flip_a_bit(payload.tensors[place])
                digests[number] = shard_digest(tensors, specs[number], {p - at: known[p] for p in mine if p in known})

        def failing_all(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException:
                arrivals.fail()
                if reading is not None:
                    reading.stop()
                raise

        jobs: list[Callable[[], None]] = [lambda: self._take(peer, rest, reading, arrivals, trailer), compute_digests]
        if reading is not None:
            jobs += [functools.partial(reading.run, arrivals)] * reading.threads()
        run_side_by_side([functools.partial(failing_all, job) for job in jobs], "flashrecovery-transfer")
        raw = trailer.numpy().tobytes()
        expected = [raw[at : at + _DIGEST_BYTES].hex() for at in range(0, len(raw), _DIGEST_BYTES)]
        on_device, read = lane.nbytes if lane is not None else 0, reading.nbytes if reading is not None else 0
        with self._lock:
            report.received(names, digests, expected)
            report.count_received(sum(spec.nbytes for spec in payload.specs), on_device, read)

    def _take(
        self, peer: int, rest: Payload, reading: Reading | None, arrivals: Arrivals, trailer: torch.Tensor
    ) -> None:
        """What comes in messages: ``rest`` of the payload and then, into ``trailer``, the digests."""
        group = self._group
        pending: collections.deque[tuple[dist.Work, Message, torch.Tensor | None]] = collections.deque()

        def settle() -> None:
            work, message, buffer = pending.popleft()
            work.wait()
            if buffer is not None:
                unpack(message, rest.tensors, buffer)
            for piece in message.pieces:
                arrivals.add(rest.places[piece.index], piece.nbytes)

        for message in messages(rest.specs):
            if len(pending) >= WINDOW:
                settle()
            own = in_place(message, rest.tensors)
            buffer = own if own is not None else staging_buffer(message, rest.tensors)
            pending.append((group.recv([buffer], peer, _TAG), message, None if own is not None else buffer))
        last = group.recv([trailer], peer, _TAG)
        while pending:
            settle()
        if reading is not None:
            if not arrivals.wait(range(arrivals.count)):
                return  # the reader has raised
            group.send([torch.ones(1, dtype=torch.uint8)], peer, _ANSWER_TAG).wait()
        last.wait()

    def _reading(self, peer: int, targets: Sequence[torch.Tensor], readable: bytes | None) -> Reading | None:
        """What is read from the memory of ``peer``, after having told it."""
        if readable is None:
            return None
        reading = Reading(Offer.decode(readable), targets, self._patience.check)

        def answer(can: int) -> None:
            told = torch.tensor([can, os.getpid(), *reading.taken], dtype=torch.int64)
            self._group.send([told], peer, _ANSWER_TAG).wait()

        can = reading.possible() if self._from_memory else NO
        answer(can)
        if can == NOT_PERMITTED:
            declared = torch.empty(1, dtype=torch.uint8)
            self._group.recv([declared], peer, _TAG).wait()
            can = reading.possible() if declared.item() else NO
            answer(can)
        return reading if can == YES else None

    def _answer(self, peer: int, payload: Payload, asked: bytes) -> list[bool]:
        """Which tensors are matched, after having said which lie on this rank's device."""
        if not asked:
            return [False] * len(payload.tensors)
        device = self._device
        mine = [bool(a) and device is not None and device.holds(t) for a, t in zip(asked, payload.tensors, strict=True)]
        self._group.send([torch.tensor(mine, dtype=torch.uint8)], peer, _ANSWER_TAG).wait()
        decided = torch.empty(len(mine), dtype=torch.uint8)
        self._group.recv([decided], peer, _TAG).wait()
        matched = [bool(both) for both in decided.tolist()]
        if any(both and not here for both, here in zip(matched, mine, strict=True)):
            raise ProtocolError(f"rank {peer} would send to this rank's device what does not lie there")
        return matched


class _Agreement:
    """The agreed tensors that this rank sends, which are on a device here and at all their destinations."""

    def __init__(self, outgoing: Mapping[int, Sequence[ShardSource]], device: groups.DeviceGroup | None) -> None:
        self._outgoing = outgoing
        self._masks: dict[str, list[bool]] = {}
        for source in (s for sources in outgoing.values() for s in sources):
            here = [device is not None and t.numel() > 0 and device.holds(t) for t in source.tensors]
            self._and(source.name, here)
        self._lock = threading.Lock()
        self._reached: Future[dict[str, list[bool]]] = Future()
        self._asked = {peer: [b for s in sources for b in self._masks[s.name]] for peer, sources in outgoing.items()}
        self._missing = {peer for peer, asked in self._asked.items() if any(asked)}
        if not self._missing:
            self._reached.set_result(self._masks)

    def _and(self, name: str, mask: Sequence[bool]) -> None:
        self._masks[name] = [a and b for a, b in zip(self._masks.get(name, mask), mask, strict=True)]

    def asks(self, peer: int) -> list[bool]:
        """The tensors that could go to ``peer`` from this rank's device, in the order of the payload."""
        return self._asked[peer]

    def answered(self, peer: int, there: Sequence[int]) -> None:
        """Which of them lie on the device of ``peer``."""
        with self._lock:
            at = 0
            for source in self._outgoing[peer]:
                count = len(source.tensors)
                self._and(source.name, [bool(a) for a in there[at : at + count]])
                at += count
            self._missing.discard(peer)
            if not self._missing and not self._reached.done():
                self._reached.set_result(self._masks)

    def fail(self, error: BaseException) -> None:
        """A destination will not answer."""
        with self._lock:
            if not self._reached.done():
                self._reached.set_exception(error)

    def reached(self) -> dict[str, list[bool]]:
        """By shard; waits for the answers."""
        return self._reached.result()


def _fail_lane(error: BaseException, planned: Future[Lane | None]) -> None:
    """A thread that waits for what comes by this lane gets ``error``; it would wait for ever."""
    lane = planned.result() if planned.exception() is None else None
    if lane is not None:
        lane.arrived.set_exception(error)
