"""The survivors of a parity group decode what it has lost, chunk by chunk; the least busy member decodes each chunk.

:func:`~flashrecovery.plan.parity.decode.decode_plan` says which member gathers which chunk; every member computes the
plan itself from the same order. A survivor sends its part of each chunk to the gathering member. That adds the parts
up, compares the result with the digest stored with the parity, and sends it to the lost member, which checks it again.

Sending, gathering and receiving have a thread each, and all threads process the chunks in the same order. So everything
that belongs to the first unfinished chunk is under way, and there is no deadlock.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from flashrecovery.errors import RestoreError
from flashrecovery.plan.parity.code import DIGEST_BYTES, ParityLayout, StripePart
from flashrecovery.plan.parity.decodable import DecodeOrder
from flashrecovery.plan.parity.decode import DecodeTask, StripeSource, Undecodable, decode_plan
from flashrecovery.redundancy.parity.bucket import decode_bucket
from flashrecovery.redundancy.parity.frames import digest
from flashrecovery.redundancy.parity.member import ParityMember
from flashrecovery.runtime.side_by_side import run_side_by_side

_PART_TAG, _RESULT_TAG = 0x5044, 0x5052
_WINDOW = 2
"""Messages under way from a member."""


class WrongParityError(RestoreError):
    """Parity, or what is decoded from it, does not have its digest. Trying again would not help.

    Do: nothing by hand; the checkpoint is used. Check the memory of the nodes if it comes back.
    """


class Decoding:
    """One member's part in carrying out an order.

    Args: group: process group of all ranks. own: this member's own bytes at the version, None if it is lost. parity:
        what it holds; None if nothing. to: where a lost member's bytes go. give_up: called with the reason when this
        member cannot go on; it is to end all communication of this process, because others wait for it, and its own
        threads for others. corrupt (fault injection): one bit of what a lost member receives is flipped.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        order: DecodeOrder,
        rank: int,
        own: memoryview | None,
        parity: ParityMember | None,
        to: memoryview | None,
        give_up: Callable[[str], object],
        corrupt: bool = False,
    ) -> None:
        self._group, self._order, self._give_up = group, order, give_up
        self._me = order.ranks.index(rank)
        self._layout: ParityLayout = order.layout
        self._own, self._parity, self._to, self._corrupt = own, parity, to, corrupt
        plan = decode_plan(self._layout, order.held, order.version)
        if isinstance(plan, Undecodable):
            raise RestoreError(plan.reason)
        self._tasks = plan.data

    def run(self) -> int:
        """Returns the bytes that this member has got back.

        Raises WrongParityError, RestoreError if this member lacks what the order says it has, and what the group's
        operations raise.
        """
        jobs = [functools.partial(self._guarded, job) for job in (self._gather, self._send, self._receive)]
        run_side_by_side(jobs, "flashrecovery-parity-decode")
        return len(self._to) if self._to is not None else 0

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except RestoreError as e:
            self._give_up(str(e))
            raise

    # -- three threads ----------------------------------------------------------------------------

    def _send(self) -> None:
        """This member's part of the chunks that others gather."""
        pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for task in self._tasks:
            if task.at == self._me:
                continue
            for source in task.sources:
                if source.member == self._me:
                    self._post(pending, self._part(task, source), task.at, _PART_TAG)
        while pending:
            pending.popleft()[0].wait()

    def _gather(self) -> None:
        pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for task in self._tasks:
            if task.at != self._me:
                continue
            parts = {source: self._take(task, source) for source in task.sources}
            found = self._decode(task, parts)
            for result in _data(task):
                self._post(pending, found[result], result.member, _RESULT_TAG)
        while pending:
            pending.popleft()[0].wait()

    def _receive(self) -> None:
        for task in self._tasks:
            for result in _data(task):
                if result.member == self._me:
                    data = self._get(self._length(task, result, with_digests=True), task.at)
                    if self._corrupt:
                        data[0] ^= 1
                        self._corrupt = False
                    self._put(task, result, data)

    # -- pieces -----------------------------------------------------------------------------------

    def _post(self, pending: deque[tuple[dist.Work, torch.Tensor]], data: bytearray, member: int, tag: int) -> None:
        if len(pending) >= _WINDOW:
            pending.popleft()[0].wait()
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        pending.append((self._group.send([tensor], self._order.ranks[member], tag), tensor))

    def _get(self, nbytes: int, member: int, tag: int = _RESULT_TAG) -> memoryview:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._group.recv([tensor], self._order.ranks[member], tag).wait()
        return memoryview(tensor.numpy().data)

    def _take(self, task: DecodeTask, source: StripeSource) -> memoryview:
        if source.member == self._me:
            return memoryview(self._part(task, source))
        return self._get(self._length(task, source), source.member, _PART_TAG)

    def _part(self, task: DecodeTask, source: StripeSource) -> bytearray:
        """What this member has: of data the bytes, of parity also the digests of what is missing."""
        if source.part is StripePart.DATA:
            if self._own is None:
                raise RestoreError(f"member {self._me} is to give what it has lost")
            start = self._layout.data_bucket(task.stripe, task.buckets[0], source.member)[0]
            return bytearray(self._own[start : start + self._length(task, source)])
        if self._parity is None:
            raise RestoreError(f"member {self._me} is to give parity that it does not have")
        store, version = self._parity.stores[task.stripe, source.part], self._order.version
        found = bytearray()
        for bucket in range(*task.buckets):
            try:
                found += store.bucket(version, bucket)
            except RestoreError as e:
                raise WrongParityError(str(e)) from e
        for bucket in range(*task.buckets):
            for result in _data(task):
                found += store.data_digest(version, bucket, result.column)
        return found

    def _length(self, task: DecodeTask, source: StripeSource, *, with_digests: bool = False) -> int:
        """Bytes of a message."""
        count = task.buckets[1] - task.buckets[0]
        if source.part is StripePart.DATA:
            digests = count * DIGEST_BYTES if with_digests else 0
            return digests + sum(length for _, length in self._lengths(task, source))
        return count * DIGEST_BYTES * len(_data(task)) + sum(length for _, length in self._lengths(task, source))

    def _lengths(self, task: DecodeTask, source: StripeSource) -> Iterator[tuple[int, int]]:
        """(bucket, bytes)."""
        for bucket in range(*task.buckets):
            if source.part is StripePart.DATA:
                yield bucket, self._layout.data_length(task.stripe, bucket, source.column)
            else:
                yield bucket, self._layout.parity_length(task.stripe, source.part, bucket)

    def _decode(self, task: DecodeTask, parts: dict[StripeSource, memoryview]) -> dict[StripeSource, bytearray]:
        """What comes out, each bucket after another, and then the digests of all of them."""
        at = dict.fromkeys(parts, 0)
        results = _data(task)
        found = {result: bytearray() for result in results}
        known = {result: bytearray() for result in results}
        digests = self._digests(task, parts)
        lengths = {source: dict(self._lengths(task, source)) for source in (*parts, *results)}
        for bucket in range(*task.buckets):
            columns: dict[int, memoryview] = {}
            parity: dict[StripePart, memoryview] = {}
            for source, content in parts.items():
                piece = content[at[source] : at[source] + lengths[source][bucket]]
                at[source] += len(piece)
                if source.part is StripePart.DATA:
                    columns[source.column] = piece
                else:
                    parity[source.part] = piece
            wanted = digests[bucket]
            try:
                decoded = decode_bucket(self._layout, task.stripe, bucket, columns, parity, wanted)
            except RestoreError as e:
                raise WrongParityError(f"version {self._order.version}: {e}") from e
            for result in results:
                if lengths[result][bucket]:
                    found[result] += decoded[result.column]
                known[result] += wanted[result.column]
        return {result: found[result] + known[result] for result in results}

    def _digests(self, task: DecodeTask, parts: dict[StripeSource, memoryview]) -> dict[int, dict[int, bytes]]:
        """The digests of each missing column, by bucket, from the first of the parities."""
        source, content = next((s, c) for s, c in parts.items() if s.part is not StripePart.DATA)
        at = sum(length for _, length in self._lengths(task, source))
        found: dict[int, dict[int, bytes]] = {}
        for bucket in range(*task.buckets):
            found[bucket] = {}
            for result in _data(task):
                found[bucket][result.column] = bytes(content[at : at + DIGEST_BYTES])
                at += DIGEST_BYTES
        return found

    def _put(self, task: DecodeTask, result: StripeSource, data: memoryview) -> None:
        """Take what a lost member has got to where it belongs."""
        if self._to is None:
            raise RestoreError(f"member {self._me} is to get version {self._order.version}, and has lost nothing")
        start = self._layout.data_bucket(task.stripe, task.buckets[0], self._me)[0]
        lengths = [length for _, length in self._lengths(task, result)]
        at, digests = 0, data[sum(lengths) :]
        for number, length in enumerate(lengths):
            piece = data[at : at + length]
            if length and digest(piece) != bytes(digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]):
                place = f"bucket {task.buckets[0] + number} of stripe {task.stripe}"
                raise RestoreError(f"{place} did not arrive with its digest")
            self._to[start + at : start + at + length] = piece
            at += length


def _data(task: DecodeTask) -> list[StripeSource]:
    """The results that are shards. Parity that is lost is made again by the next exchange."""
    return [result for result in task.results if result.part is StripePart.DATA]
