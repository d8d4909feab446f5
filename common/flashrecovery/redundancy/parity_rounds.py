"""The deltas of one version between the members of a parity group: every member sends and receives at once, in rounds.

In round k a member sends the k-th batch to each member to which it has something to send, then receives the k-th batch
of each that has something for it, and only then goes on. The last batch of a pair says so. So whoever is in the
earliest round finds all that it waits for on its way, and no order of members can end in a ring of waits. A member has
one batch of each pair in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashrecovery.plan.parity import HEADER_BYTES
from flashrecovery.redundancy.exchange import Exchange
from flashrecovery.redundancy.parity import Frame, ParityMember, ParityPlace, streams

BATCH = 4 << 20
"""Bytes to one member in a round; more by less than a bucket."""
_TAG = 0x5044


@dataclass
class _Outgoing:
    """What goes to one member next."""

    body: bytearray
    ended: bool = False

    def add(self, frame: Frame) -> None:
        self.body += frame.header()
        self.body += frame.payload


class Rounds:
    """One version's parities, made by all members of the group at once."""

    def __init__(
        self, talk: Exchange, ranks: Sequence[int], member: ParityMember, places: Collection[ParityPlace]
    ) -> None:
        """``ranks`` of the members; ``places``: the parities that are made, begun by ``member`` already."""
        self._talk, self._ranks, self._member = talk, ranks, member
        pairs = streams(member.layout, places)
        self._outgoing = {to: _Outgoing(bytearray()) for sender, to in sorted(pairs) if sender == member.member}
        self._sources = [sender for sender, to in sorted(pairs) if to == member.member]
        self._number = 0

    def run(self, frames: Iterator[Frame]) -> int:
        """Send ``frames``, receive and add up those of the others. Returns the bytes that were sent.

        Raises what the group's operations raise, and ProtocolError for what does not belong here."""
        sent, more = 0, True
        ended: set[int] = set()
        while any(not out.ended for out in self._outgoing.values()) or len(ended) < len(self._sources):
            if more:
                more = self._fill(frames)
            works, nbytes = self._send(last=not more)
            sent += nbytes
            for source in self._sources:
                if source not in ended and self._receive(source):
                    ended.add(source)
            for work, _ in works:
                self._talk.wait_for(work)
            self._number += 1
        return sent

    def _fill(self, frames: Iterator[Frame]) -> bool:
        """Collect the next batches. Whether there may be more."""
        layout = self._member.layout
        for frame in frames:
            out = self._outgoing[layout.holder(frame.stripe, frame.part)]
            out.add(frame)
            if len(out.body) >= BATCH:
                return True
        return False

    def _send(self, *, last: bool) -> tuple[list[tuple[dist.Work | None, torch.Tensor]], int]:
        """Send what is there to each member that has not had its last batch; tensors live until they are sent."""
        works, sent = [], 0
        for to, out in self._outgoing.items():
            if out.ended:
                continue
            out.ended = last and not self._member.owes_sums(to)
            head = torch.tensor([len(out.body), int(out.ended)], dtype=torch.int64)
            body = torch.frombuffer(out.body, dtype=torch.uint8) if out.body else torch.empty(0, dtype=torch.uint8)
            works.append((self._talk.send(head, self._ranks[to], _TAG), head))
            works.append((self._talk.send(body, self._ranks[to], self._content_tag()), body))
            sent += body.numel()
            out.body = bytearray()
        return works, sent

    def _receive(self, source: int) -> bool:
        """Take the next batch of that member in. Whether it was the last one."""
        rank = self._ranks[source]
        head = torch.zeros(2, dtype=torch.int64)
        self._talk.wait_for(self._talk.recv(head, rank, _TAG))
        nbytes, last = head.tolist()
        body = torch.empty(nbytes, dtype=torch.uint8)
        self._talk.wait_for(self._talk.recv(body, rank, self._content_tag()))
        content, at = memoryview(body.numpy().data), 0
        while at < nbytes:
            header = content[at : at + HEADER_BYTES]
            end = at + HEADER_BYTES + Frame.payload_bytes(header)
            for onward in self._member.receive(Frame.parse(header, content[at + HEADER_BYTES : end])):
                self._outgoing[self._member.layout.holder(onward.stripe, onward.part)].add(onward)
            at = end
        return bool(last)

    def _content_tag(self) -> int:
        return self._talk.content_tag(_TAG, self._number)
