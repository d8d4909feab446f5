"""Neighbour copies: what no other rank holds, and the rank-local state, on the next rank's host memory, every step.

At each commit the live shards are copied to this rank's own undo buffer (the two newest versions) and from
there sent to the neighbour, while the next forward pass runs; at the same time the copies of another rank
arrive. Both sides keep two versions, so that a copy that is cut off halfway is never the only one.

Why every rank may go on when its *own* exchange is complete stands in :mod:`.peer_exchange`: all copies of version i
have arrived before anybody changes its state to i+1. Until then version i-1 is still held everywhere: by its owner
(undo) and by the neighbour (other slot).

One exchange, on a separate process group, to the destination and from the source at once::

    frame (generation, version, layout, sizes, address)  header (rank-local state, small values, the layout if new)
    tensors

The tensors are one contiguous range of the undo buffer and arrive in one contiguous range: no packing. On one host they
do not travel at all: the neighbour maps the undo buffer (:mod:`flashrecovery.snapshot.memory`), whose memory outlives
its owner, and a word in it tells whether the owner had begun to overwrite it. A buffer that the neighbour has not
mapped yet is offered with the frame, and the neighbour's answer says whether the tensors must follow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.redundancy.memory.flat_buffer import NOTHING, Beside, FirstShards, Layout, Slot
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.redundancy.memory.peer_exchange import (
    MESSAGE_BYTES,
    STREAMS,
    CopyContext,
    CopyHolding,
    Exchange,
    byte_tensor,
    plain_source,
)
from flashrecovery.snapshot.memory import MemoryAddress, SharedMemory
from flashrecovery.state import codec
from flashrecovery.state.shard import Shard, ShardSource

_T = TypeVar("_T")
_MAGIC = 0x46524E43
_TAG = 0x4E43
_ANSWER_TAG = 0x4E41
_BUFFERS = 3
"""Buffers in which a rank makes its own copies: two, and one more while a checkpoint is written from the third."""


class _Memory(IntEnum):
    """How the tensors get to the neighbour."""

    SENT = 0
    OFFERED = 1
    MAPPED = 2


@dataclass(frozen=True)
class Ring:
    """Which rank keeps whose copies, as one rank sees it.

    Attributes:
        place: this rank's place in the ring.
        members: by place, the rank of the launch. Rank-local state is named so.
        targets: by place, the place that gets its copies: a permutation without fixed points.

    Raises ValueError if ``targets`` is none.
    """

    place: int
    members: tuple[int, ...]
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        world = len(self.members)
        if sorted(self.targets) != list(range(world)) or any(t == r for r, t in enumerate(self.targets)):
            raise ValueError(
                f"neighbour map {list(self.targets)} is not a permutation of {world} ranks without fixed points"
            )

    @classmethod
    def of_world(cls, rank: int, world: int, stride: int = 1) -> Ring:
        """All ranks of the launch; the copies of each go ``stride`` ranks further."""
        return cls(rank, tuple(range(world)), tuple((r + stride) % world for r in range(world)))

    @property
    def destination(self) -> int:
        """The place that gets the copies of this one."""
        return self.targets[self.place]

    @property
    def source(self) -> int:
        """The place whose copies this one gets."""
        return self.targets.index(self.place)


class NeighbourCopies:
    """Keeps the copies. All methods but the exchange itself belong to the training thread.

    Args:
        context: the group has the ring's ranks, by place.
        ring: which rank keeps whose copies.
        shards: all shards of this rank that a rollback concerns. Own copies are kept of all of them, because a recovery
            point may lie one step back for every shard.
        copied: names of those that go to the neighbour; by default all that no other rank holds.
    """

    def __init__(
        self, context: CopyContext, ring: Ring, shards: Sequence[Shard], *, copied: Collection[str] | None = None
    ) -> None:
        self._set_ring(ring)
        if copied is None:
            copied = {s.name for s in shards if s.holders == (ring.place,)}
        self._sent = FirstShards(copied)
        self._on_kept = context.on_kept
        # What is sent first: it is then one range of the undo buffer.
        ordered = sorted(shards, key=lambda s: s.name not in copied)
        keep = context.keep
        self.undo = PreStepCopy(ordered, share=True, look=context.look, same=context.same, keep=keep)
        self._slots = (Slot(), Slot()) if keep is None else (Slot(keep("other-0")), Slot(keep("other-1")))
        for slot in self._slots:
            if slot.beside.owner != self.source_rank:
                slot.drop()  # of another rank, when the ranks were placed otherwise
        self._talk = Exchange(context, self.undo, "neighbour")
        self._sent_layout: int | None = None
        self._mapped_there: OrderedDict[int, bool] = OrderedDict()  # inodes of own buffers offered: has it mapped them?
        self._mapped: OrderedDict[int, SharedMemory] = OrderedDict()  # buffers of the other rank, by inode
        self._received_layout = Layout()

    def _set_ring(self, ring: Ring) -> None:
        self._ring, self.destination, self.source_rank = ring, ring.destination, ring.source

    def resize(self, ring: Ring) -> None:
        """The group has other members from now on. What is kept for another rank is void."""
        self._set_ring(ring)
        for slot in self._slots:
            slot.drop()

    def adopt(self, shards: Sequence[Shard]) -> None:
        """The shards of these names, of which copies are kept, live in other tensors from now on. No exchange may be
        under way."""
        by_name = {shard.name: shard for shard in shards}
        self.undo.copy_from([by_name[shard.name] for shard in self.undo.shards])

    def copy_others(self, shards: Sequence[Shard], copied: Collection[str]) -> None:
        """From the next :meth:`commit` on: all shards of this rank, and the names of those that go to the neighbour.
        What is held stays. No exchange may be under way."""
        self._sent = FirstShards(copied)
        self.undo.copy_from(sorted(shards, key=lambda s: s.name not in copied))

    def stop_outliving(self) -> None:
        """What is held stays, and is this process's alone from now on."""
        self.undo.stop_outliving()
        for slot in self._slots:
            slot.stop_outliving()

    # -- each step --------------------------------------------------------------------------------

    def commit(self, version: int, local_state: bytes | None, *, early: bool = False, beside: Beside = NOTHING) -> None:
        """The live state is ``version`` and does not change before :meth:`before_mutation`. Starts the
        exchange. Without a ``local_state`` this rank only takes its turn in it, and nothing of it is kept. ``early``:
        the rank-local state is not final. ``beside``: what belongs to the own copy.

        Also to be called when training resumes after a recovery: it makes whole again what the lost rank
        held. Every rank must call it for the same versions. Raises what the previous exchange raised.
        """
        self._talk.commit(version, beside, lambda v, own: self._exchange(v, local_state, early, own))

    def before_mutation(self) -> None:
        """Returns when the live tensors may be changed: they have been copied."""
        self._talk.before_mutation()

    def wait(self) -> None:
        """Returns when the exchange of the last commit is complete.

        Raises what the exchange has raised (a peer is gone), and StepInterrupted from :meth:`halt` to
        :meth:`reset`.
        """
        self._talk.wait()

    def settle(self, given_up: Callable[[], bool]) -> None:
        """See :meth:`.peer_exchange.Exchange.settle`."""
        self._talk.settle(given_up)

    # -- recovery ---------------------------------------------------------------------------------

    def halt(self, timeout_s: float) -> None:
        """After the groups have been abandoned and *before* they are detached: end the exchange under way.

        Copies that are whole stay. Raises RestoreError if the exchange has not ended within ``timeout_s``;
        its operations might then still write into a buffer.
        """
        self._talk.halt(timeout_s)

    def reset(self, generation: int, version: int) -> None:
        """All ranks are at ``version`` in a new generation: forget newer copies and start afresh."""
        self._talk.reset(generation, version)
        self._sent_layout = None
        self._mapped_there.clear()
        for slot in self._slots:
            slot.drop_after(version)
        self._on_kept(self._newest_kept())

    @property
    def error(self) -> BaseException | None:
        """What ended the last exchange before it was complete."""
        return self._talk.error

    def holdings(self) -> list[CopyHolding]:
        """What this rank holds whole for the rank whose neighbour it is. Its own copies: ``undo.versions()``."""
        found: dict[tuple[str, int], CopyHolding] = {}
        for slot in self._slots:
            if slot.version < 0:
                continue
            for name, data in slot.beside.plain.items():
                found[name, slot.version] = CopyHolding(name, slot.version, len(data), slot.beside.early)
            for name, nbytes in slot.layout.payload.items():
                found[name, slot.version] = CopyHolding(name, slot.version, nbytes)
        return sorted(found.values(), key=lambda h: (h.version, h.shard))

    def _newest_kept(self) -> int:
        return max(slot.version for slot in self._slots)

    def source(self, shard: str, version: int) -> ShardSource:
        """A held copy in the form of a transfer's source. Raises RestoreError if it is not held."""
        for slot in self._slots:
            if slot.version == version:
                plain = slot.beside.plain.get(shard)
                if plain is not None:
                    return plain_source(shard, plain)
                if shard in slot.layout.payload:
                    return ShardSource(shard, *slot.content(shard))
        held = sorted({s.version for s in self._slots if s.version >= 0})
        raise RestoreError(
            f"rank {self._ring.place} holds no copy of shard {shard!r} at version {version}; "
            f"it holds versions {held} of rank {self.source_rank}"
        )

    # -- words ------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line: memory cost, bytes a step, what is survived."""
        sizes = {s.name: s.spec().nbytes for s in self.undo.shards}
        sent = sum(n for name, n in sizes.items() if name in self._sent.names)
        own = sum(sizes.values())
        if len(self._ring.members) == 2:
            survives = "the loss of either rank"
        else:
            survives = "the loss of any one rank, and of several at once if none of them holds another one's copies"
        return (
            f"neighbour copies: {sent / 1e6:.1f} MB a step from rank {self._ring.place} to rank {self.destination}; "
            f"host memory 2 x {own / 1e6:.1f} MB for the own last two versions + 2 x {sent / 1e6:.1f} MB for rank "
            f"{self.source_rank}'s (on one host both share one memory, and nothing is sent); survives {survives}"
        )

    def nbytes(self) -> int:
        """Host memory taken now, bytes."""
        return self.undo.nbytes() + sum(s.nbytes for s in self._slots)

    def close(self, timeout_s: float = 5.0) -> bool:
        """The job is over, on every rank: let the last exchange end, then end the thread and free the memory.

        False if that takes longer than ``timeout_s``. The caller should then abandon the groups: a thread that is still
        in an operation when the interpreter ends would take the process down.
        """
        return self._talk.close(timeout_s)

    # -- the exchange, in the background thread ---------------------------------------------------

    def _exchange(self, version: int, local_state: bytes | None, early: bool, own: Slot) -> None:
        local_state = local_state if own.version == version else None
        memory, address = self._offer(own)
        nbytes = self._sent.of(own.layout).nbytes
        paced: AbstractContextManager[None] = nullcontext()
        pacing = self._talk.pacing
        if pacing is not None and memory is _Memory.SENT and nbytes:
            paced = pacing.sending(nbytes, len(_parts(own.buffer[:nbytes])[:STREAMS]))
        with paced:
            self._send_and_receive(version, local_state, early, own, memory, address)

    def _send_and_receive(
        self, version: int, local_state: bytes | None, early: bool, own: Slot, memory: _Memory, address: MemoryAddress
    ) -> None:
        layout = self._sent.of(own.layout)
        values = {name: v for name, v in own.values.items() if name in self._sent.names}
        new_layout = layout.encoded if layout.ident != self._sent_layout else None
        header = byte_tensor(codec.dumps((local_state, early, values, new_layout)))
        sizes = (layout.ident, layout.nbytes, header.numel())
        words = [_MAGIC, self._talk.generation, version, *sizes, memory, *astuple(address)]
        frame = torch.tensor(words, dtype=torch.int64)
        theirs = torch.zeros_like(frame)
        sends = [self._send(frame), self._send(header)]
        if memory is _Memory.SENT:
            sends += self._send_tensors(own.buffer[: layout.nbytes])
        self._wait(self._recv(theirs))
        slot, follows, kept = self._receive_header(version, theirs.tolist(), sends)
        if memory is _Memory.OFFERED and not self._accepted(address):
            sends += self._send_tensors(own.buffer[: layout.nbytes])
        if follows:
            for work in [self._recv(part, self._tag(i)) for i, part in enumerate(_parts(slot.buffer))]:
                self._wait(work)
        if kept is None:
            slot.drop()
        else:
            slot.finish(version, kept)
        self._on_kept(self._newest_kept())
        for work in sends:
            self._wait(work)
        self._sent_layout = layout.ident

    def _offer(self, own: Slot) -> tuple[_Memory, MemoryAddress]:
        """How the tensors of this version get to the neighbour."""
        if own.shared is None or self._mapped_there.get(own.shared.address.inode) is False:
            return _Memory.SENT, MemoryAddress(0, 0, 0, 0, 0)
        known = own.shared.address.inode in self._mapped_there
        if known:
            self._mapped_there.move_to_end(own.shared.address.inode)
        return _Memory.MAPPED if known else _Memory.OFFERED, own.shared.address

    def _accepted(self, address: MemoryAddress) -> bool:
        """The neighbour's answer to an offer."""
        answer = torch.zeros(1, dtype=torch.int64)
        self._wait(self._talk.recv(answer, self.destination, _ANSWER_TAG))
        mapped = bool(answer.item())
        _remember(self._mapped_there, address.inode, mapped)
        return mapped

    def _receive_header(
        self, version: int, frame: list[int], sends: list[dist.Work | None]
    ) -> tuple[Slot, bool, Beside | None]:
        """The slot for this version, whether its tensors will be sent, and what belongs to them; None if nothing of it
        is to be kept. Answers an offer; a send ends when it is received, so nothing waits for that here."""
        magic, generation, their_version, ident, nbytes, header_nbytes, memory = frame[:7]
        if (magic, generation, their_version) != (_MAGIC, self._talk.generation, version):
            raise ProtocolError(
                f"rank {self.source_rank} sends version {their_version} of generation {generation}, but version "
                f"{version} of generation {self._talk.generation} was expected"
            )
        header = torch.empty(header_nbytes, dtype=torch.uint8)
        self._wait(self._recv(header))
        local_state, early, values, new_layout = codec.loads(header.numpy().tobytes())
        if new_layout is not None:
            self._received_layout = Layout.decode(new_layout)
        layout = self._received_layout
        if (layout.ident, layout.nbytes) != (ident, nbytes):
            raise ProtocolError(f"rank {self.source_rank} sends copies of a layout that it has not announced")
        slot, mapped = self._slot_for(MemoryAddress(*frame[7:]), layout, _Memory(memory))
        if memory == _Memory.OFFERED:
            sends.append(self._talk.send(torch.tensor([int(mapped)]), self.source_rank, _ANSWER_TAG))
        slot.describe(values)
        owner = self.source_rank
        return (
            slot,
            not mapped,
            None
            if local_state is None
            else Beside(owner, {f"capsule@{self._ring.members[owner]}": local_state}, early),
        )

    def _slot_for(self, address: MemoryAddress, layout: Layout, memory: _Memory) -> tuple[Slot, bool]:
        """The slot to hold the next version, and whether it shows the owner's memory."""
        mapped = self._mapped.get(address.inode)
        known = next((s for s in self._slots if mapped is not None and s.shared is mapped), None)
        # Of two that are equally old, the one that shows a dead owner's memory: the other one will be filled again.
        slot = known or min(
            self._slots, key=lambda s: (s.version, s.shared is not None and s.shared.address.pid == address.pid)
        )
        if memory is _Memory.OFFERED and mapped is None:
            mapped = SharedMemory.open(address)
        if memory is _Memory.MAPPED and mapped is None:
            raise ProtocolError(f"rank {self.source_rank} has copies in memory that it has not offered")
        if mapped is None or memory is _Memory.SENT:
            slot.shape(layout, pin=False)
            return slot, False
        _remember(self._mapped, address.inode, mapped)
        slot.adopt(mapped, layout)
        return slot, True

    def _send_tensors(self, buffer: torch.Tensor) -> list[dist.Work | None]:
        return [self._send(part, self._tag(i)) for i, part in enumerate(_parts(buffer))]

    def _tag(self, part: int) -> int:
        """The tag of a message that holds tensors."""
        return self._talk.content_tag(_TAG, part)

    def _send(self, tensor: torch.Tensor, tag: int = _TAG) -> dist.Work | None:
        return self._talk.send(tensor, self.destination, tag)

    def _recv(self, tensor: torch.Tensor, tag: int = _TAG) -> dist.Work | None:
        return self._talk.recv(tensor, self.source_rank, tag)

    def _wait(self, work: dist.Work | None) -> None:
        self._talk.wait_for(work)


def _remember(known: OrderedDict[int, _T], inode: int, value: _T) -> None:
    """The buffers that were used last. Both sides see the same sequence, so they remember the same ones."""
    known[inode] = value
    known.move_to_end(inode)
    while len(known) > _BUFFERS:
        known.popitem(last=False)


def _parts(buffer: torch.Tensor) -> list[torch.Tensor]:
    return list(buffer.split(MESSAGE_BYTES)) if buffer.numel() else []
