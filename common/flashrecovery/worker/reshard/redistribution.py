"""From one sharding of tensors to another, over a process group: this rank's part of a
:class:`~flashrecovery.plan.reshard.plan.Reshard`.

Every rank makes the same plan from the same facts, so nothing is talked over. Within a round of the timetable a rank
has all of its sends and receives under way at once; they end before the next round begins, so that no rank needs more
memory
for messages than twice the limit. A message is one box, row by row.

What one rank sends to another one is hashed on both sides, round after round, and the digests are compared at the end.
And a tensor is complete only if as many elements have come as it has.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash

from flashrecovery.contract.shard_layout import LocalBox
from flashrecovery.errors import RestoreError
from flashrecovery.plan.reshard.boxes import Box, Space, part_with
from flashrecovery.plan.reshard.layouts import RankLayout
from flashrecovery.plan.reshard.plan import Portion, plan_reshard
from flashrecovery.plan.reshard.schedule import timetable
from flashrecovery.state.digest import byte_view
from flashrecovery.state.exact import exact_contiguous, exact_copy
from flashrecovery.worker.transfer.chunks import flip_a_bit

LIMIT = 64 << 20
"""Bytes that a rank sends, and receives, in a round."""
_TAG, _DIGEST_TAG = 0x4654, 0x4655
_DIGEST_BYTES = 16

LocalBoxes = Mapping[str, Sequence[LocalBox]]
"""By tensor, where its boxes lie."""


@dataclass(frozen=True)
class Moved:
    """What a redistribution took, in bytes.

    Attributes:
        received: by this rank.
        lacking: what this rank needed and did not hold.
        total: what all ranks together received, by the plan.
    """

    received: int
    lacking: int
    total: int


@dataclass(frozen=True)
class Change:
    """What is to be sharded otherwise: the tensors, and the layouts by the numbers of ranks in the group."""

    spaces: Sequence[Space]
    old: RankLayout
    new: RankLayout


def redistribute(
    group: dist.ProcessGroup | None,
    me: int,
    change: Change,
    held: LocalBoxes,
    into: LocalBoxes,
    *,
    limit: int = LIMIT,
    corrupt: bool = False,
) -> Moved:
    """Fill ``into`` with this rank's boxes of the new layout. ``held``: its boxes of the old one, copies that it keeps
    for others included; they are only read. ``group``: not needed where there is one rank. ``corrupt`` (fault
    injection): a bit of the first message that arrives is flipped.

    Raises:
        NoHolderError: something that is needed is nowhere.
        RestoreError: something else has arrived than was sent, or not everything.
        And whatever the group's operations raise.
    """
    plan = plan_reshard(change.spaces, change.old, change.new)
    table = timetable(plan, max([limit, *(space.itemsize for space in change.spaces)]))
    return _Talk(group, me, held, into, corrupt).run(
        plan.kept(me), table.messages(source=me, dest=me), int(plan.moved_bytes)
    )


class _Talk:
    """One call of :func:`redistribute`."""

    def __init__(
        self, group: dist.ProcessGroup | None, me: int, held: LocalBoxes, into: LocalBoxes, corrupt: bool
    ) -> None:
        self._group, self._me = group, me
        self._held, self._into = _sorted(held), _sorted(into)
        self._corrupt = corrupt
        self._hashes: dict[tuple[bool, int], xxhash.xxh3_128] = defaultdict(xxhash.xxh3_128)  # (sent, peer)
        self._filled: dict[str, int] = defaultdict(int)
        self._received = self._lacking = 0

    def run(self, kept: Iterable[tuple[str, Box]], messages: Sequence[tuple[int, Portion]], total: int) -> Moved:
        with torch.no_grad():
            for name, box in kept:
                self._fill(name, box, _view(self._held, name, box))
            for _, some in itertools.groupby(messages, key=lambda message: message[0]):
                self._round(self._others, [portion for _, portion in some])
        if self._hashes:
            self._compare(self._others)
        self._check_complete()
        return Moved(self._received, self._lacking, total)

    @property
    def _others(self) -> dist.ProcessGroup:
        """The group for the exchange. Raises RestoreError if there is none: a single rank has no peer."""
        if self._group is None:
            raise RestoreError("state is to go to another rank, and there is no group with it")
        return self._group

    def _round(self, group: dist.ProcessGroup, portions: Sequence[Portion]) -> None:
        works: list[dist.Work] = []
        keep: list[torch.Tensor] = []  # what is sent must live until it is
        arriving: list[tuple[Portion, torch.Tensor]] = []
        for portion in portions:
            if portion.source == self._me:
                message = byte_view(exact_contiguous(_view(self._held, portion.tensor, portion.box)).cpu())
                self._hashes[True, portion.dest].update(message.numpy().data)
                keep.append(message)
                works.append(group.send([message], portion.dest, _TAG))
            else:
                message = torch.empty(portion.nbytes, dtype=torch.uint8)
                arriving.append((portion, message))
                self._lacking += portion.nbytes
                works.append(group.recv([message], portion.source, _TAG))
        for work in works:
            work.wait()
        for portion, message in arriving:
            if self._corrupt:
                self._corrupt = False
                flip_a_bit(message)
            self._received += message.numel()
            self._hashes[False, portion.source].update(message.numpy().data)
            target = _view(self._into, portion.tensor, portion.box)
            self._fill(portion.tensor, portion.box, message.view(target.dtype).view(target.shape))

    def _fill(self, name: str, box: Box, data: torch.Tensor) -> None:
        exact_copy(_view(self._into, name, box), data)
        self._filled[name] += box.size

    def _compare(self, group: dist.ProcessGroup) -> None:
        """The digests of both ends, of each pair."""
        expected: dict[int, torch.Tensor] = {}
        works: list[dist.Work] = []
        keep: list[torch.Tensor] = []
        for (sent, peer), digest in sorted(self._hashes.items()):
            if sent:
                keep.append(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))
                works.append(group.send([keep[-1]], peer, _DIGEST_TAG))
            else:
                expected[peer] = torch.empty(_DIGEST_BYTES, dtype=torch.uint8)
                works.append(group.recv([expected[peer]], peer, _DIGEST_TAG))
        for work in works:
            work.wait()
        for peer, theirs in expected.items():
            if theirs.numpy().tobytes() != self._hashes[False, peer].digest():
                raise RestoreError(
                    f"state that is sharded otherwise did not arrive as it was sent: from number {peer} to {self._me}"
                )

    def _check_complete(self) -> None:
        for name, parts in self._into.items():
            wanted = sum(part.box.size for part in parts)
            if self._filled[name] != wanted:
                raise RestoreError(f"of {name!r} {self._filled[name]} elements have come, and {wanted} are needed")


def _sorted(boxes: LocalBoxes) -> LocalBoxes:
    return {name: sorted(parts, key=lambda part: part.box.low) for name, parts in boxes.items()}


def _view(parts: LocalBoxes, name: str, box: Box) -> torch.Tensor:
    """Where ``box`` lies, which is within one of the parts. Raises RestoreError if it does not."""
    part = part_with(parts.get(name, ()), box)
    if part is None:
        raise RestoreError(f"{name!r}: box {box} is not here")
    return part.data[box.within(part.box)]
