"""The deltas of one version between the members of a parity group: every member sends and receives at once, in rounds.

In round k a member sends the k-th batch to each member it has data for, then receives the k-th batch of each member
that has data for it, and only then continues. The last batch of a pair is marked. So everything that the member in the
earliest round waits for is already on its way, and no cycle of waits can form. A member has one batch of each pair in
memory, and that memory is reused for the next version: fresh pages would cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from flashrecovery.plan.parity.code import HEADER_BYTES
from flashrecovery.redundancy.memory.peer_exchange import Exchange
from flashrecovery.redundancy.parity.frames import Frame, ParityPlace, PayloadRoom, streams
from flashrecovery.redundancy.parity.member import ParityMember

BATCH = 4 << 20
"""Bytes to one member in a round; more by less than a bucket."""
_TAG = 0x5044


class BatchMemory:
    """Memory for batches. Memory that a failed exchange has taken is not reused: a transfer may still write to it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8, at least that many bytes."""
        fitting = [i for i, tensor in enumerate(self._free) if tensor.numel() >= nbytes]
        if fitting:
            return self._free.pop(fitting[-1])
        self._free.clear()  # of another layout
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, tensor: torch.Tensor) -> None:
        """It is not used any more."""
        self._free.append(tensor)

    @property
    def nbytes(self) -> int:
        """Kept now; the system gives pages only to what has been written."""
        return sum(tensor.numel() for tensor in self._free)


class _Outgoing:
    """What goes to one member next: frames, one after another."""

    def __init__(self, memory: BatchMemory, nbytes: int) -> None:
        """``nbytes`` of a usual batch."""
        self._memory, self._usual = memory, nbytes
        self._batch: torch.Tensor | None = None
        self._bytes = self._room = memoryview(b"")
        self.used = 0
        self.ended = False

    def room(self, nbytes: int) -> memoryview:
        """Where the payload of the next frame is going to be."""
        begin = self.used + HEADER_BYTES
        if len(self._bytes) < begin + nbytes:
            self._grow(begin + nbytes)
        self._room = self._bytes[begin : begin + nbytes]
        return self._room

    def add(self, frame: Frame) -> None:
        """Its payload may be in :meth:`room` already."""
        if frame.payload is not self._room:
            self.room(len(frame.payload))[:] = frame.payload
        end = self.used + HEADER_BYTES
        self._bytes[self.used : end] = frame.header()
        self.used = end + len(self._room)

    def take(self) -> tuple[torch.Tensor | None, int]:
        """The batch and its length, bytes; another one begins."""
        batch, nbytes = self._batch, self.used
        self._batch, self._bytes, self.used = None, memoryview(b""), 0
        return batch, nbytes

    def _grow(self, nbytes: int) -> None:
        """Grow the memory: any number of sums may have waited for another member's delta."""
        before = self._bytes[: self.used]
        batch = self._memory.take(self._usual if nbytes <= self._usual else 2 * nbytes)
        self._bytes = memoryview(batch.numpy().data)
        self._bytes[: self.used] = before
        if self._batch is not None:
            self._memory.give(self._batch)
        self._batch = batch


class Rounds:
    """One version's parities, made by all members of the group at once."""

    def __init__(
        self,
        talk: Exchange,
        ranks: Sequence[int],
        member: ParityMember,
        places: Collection[ParityPlace],
        memory: BatchMemory,
    ) -> None:
        """``ranks`` of the members; ``places``: the parities that are made, begun by ``member`` already."""
        self._talk, self._ranks, self._member, self._memory = talk, ranks, member, memory
        layout = member.layout
        pairs = streams(layout, places)
        self._usual = min(BATCH, max(layout.sizes)) + 2 * (layout.bucket + layout.members * HEADER_BYTES)
        self._outgoing = {to: _Outgoing(memory, self._usual) for sender, to in sorted(pairs) if sender == member.member}
        self._sources = [sender for sender, to in sorted(pairs) if to == member.member]
        self._number = 0

    def run(self, frames: Callable[[PayloadRoom], Iterator[Frame]]) -> int:
        """Send these frames, receive and add up those of the others. Returns the bytes that were sent.

        Raises what the group's operations raise, and ProtocolError for what does not belong here."""
        sent, more = 0, True
        ended: set[int] = set()
        coming = frames(self._room)
        while any(not out.ended for out in self._outgoing.values()) or len(ended) < len(self._sources):
            if more:
                more = self._fill(coming)
            works, nbytes, batches = self._send(last=not more)
            sent += nbytes
            for source in self._sources:
                if source not in ended and self._receive(source):
                    ended.add(source)
            for work, _ in works:
                self._talk.wait_for(work)
            for batch in batches:
                self._memory.give(batch)
            self._number += 1
        return sent

    def _room(self, place: ParityPlace, nbytes: int) -> memoryview:
        return self._outgoing[self._member.layout.holder(*place)].room(nbytes)

    def _fill(self, frames: Iterator[Frame]) -> bool:
        """Collect the next batches. Whether there may be more."""
        layout = self._member.layout
        for frame in frames:
            out = self._outgoing[layout.holder(frame.stripe, frame.part)]
            out.add(frame)
            if out.used >= BATCH:
                return True
        return False

    def _send(self, *, last: bool) -> tuple[list[tuple[dist.Work | None, torch.Tensor]], int, list[torch.Tensor]]:
        """Send what is there to each member that has not had its last batch: the operations with what they send, the
        bytes, and the memory that is free when all of them have ended."""
        works, sent, batches = [], 0, []
        for to, out in self._outgoing.items():
            if out.ended:
                continue
            out.ended = last and not self._member.owes_sums(to)
            batch, nbytes = out.take()
            head = torch.tensor([nbytes, int(out.ended)], dtype=torch.int64)
            works.append((self._talk.send(head, self._ranks[to], _TAG), head))
            if batch is not None:
                body = batch[:nbytes]
                works.append((self._talk.send(body, self._ranks[to], self._content_tag()), body))
                batches.append(batch)
            sent += nbytes
        return works, sent, batches

    def _receive(self, source: int) -> bool:
        """Take the next batch of that member in. Whether it was the last one."""
        rank = self._ranks[source]
        head = torch.zeros(2, dtype=torch.int64)
        self._talk.wait_for(self._talk.recv(head, rank, _TAG))
        nbytes, last = head.tolist()
        batch = self._memory.take(max(nbytes, self._usual))
        self._talk.wait_for(self._talk.recv(batch[:nbytes], rank, self._content_tag()))
        content, at = memoryview(batch.numpy().data)[:nbytes], 0
        while at < nbytes:
            header = content[at : at + HEADER_BYTES]
            end = at + HEADER_BYTES + Frame.payload_bytes(header)
            for onward in self._member.receive(Frame.parse(header, content[at + HEADER_BYTES : end])):
                self._outgoing[self._member.layout.holder(onward.stripe, onward.part)].add(onward)
            at = end
        self._memory.give(batch)
        return bool(last)

    def _content_tag(self) -> int:
        return self._talk.content_tag(_TAG, self._number)
