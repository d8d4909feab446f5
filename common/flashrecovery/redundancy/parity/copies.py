"""Parity in a running job: what no other rank holds, added up over a group of ranks on different failure domains.

At each commit the live shards are copied to this rank's own memory (the two newest versions), as with neighbour copies.
What differs from the version before then goes to the members that hold parity of it (:mod:`.rounds`), beside
the next step. With what belongs to a version besides tensors (the rank-local state, small values, the layout of the
tensors) is sent to the next ``losses`` members of the group, so that it survives wherever the parity is useful.

**What an exchange begins with.** Each member tells every other one how long its shards are, which version it has
besides, and which versions its parity is of. All of them draw the same conclusions from that: which parities are to be
made, and from what. So nothing has to be known from before; after a recovery the same exchange makes again what was
lost, and leaves alone what is there.

**Two encodings.** If the length of a member's shards changes (optimizer state appears), parity gets a new layout. The
old one stays until the new one is complete on all members, which is so at the next commit.

Why version i-1 is whole until i is, and i until anybody changes its state:
:mod:`flashrecovery.redundancy.memory.peer_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.parity.code import ParityLayout, StripePart, bucket_for
from flashrecovery.plan.parity.decodable import DecodeOrder, EncodingHeld, ParityHeld, Told
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.flat_buffer import NOTHING, Beside, FirstShards, Layout, Outliving, Slot
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.redundancy.memory.peer_exchange import (
    STREAMS,
    CopyContext,
    CopyHolding,
    Exchange,
    byte_tensor,
    plain_source,
)
from flashrecovery.redundancy.parity.decode import Decoding, WrongParityError
from flashrecovery.redundancy.parity.frames import NO_BASE, DeltaBase, Frame, ParityPlace, PayloadRoom, deltas
from flashrecovery.redundancy.parity.making import ENCODINGS, MemberState, key_of, to_make
from flashrecovery.redundancy.parity.member import ParityMember
from flashrecovery.redundancy.parity.rounds import BatchMemory, Rounds
from flashrecovery.rpc.parity_messages import decode_order, parity_message
from flashrecovery.snapshot.memory import HEADER, SharedMemory
from flashrecovery.state import codec
from flashrecovery.state.shard import Shard, ShardSource

_MAGIC = 0x46525059
_TAG = 0x5043
_LAYOUT = "parity/layout"
"""Under this name a member's layout is kept beside its rank-local state."""


@dataclass
class Encoding:
    """Parity of one layout, as far as this member holds it. ``outliving``: where its memory is kept, too."""

    key: int
    member: ParityMember
    outliving: Outliving | None = None

    @property
    def layout(self) -> ParityLayout:
        return self.member.layout

    @property
    def newest(self) -> int:
        """The newest version of which all of it is whole."""
        return min((max(versions, default=-1) for versions in self.member.clean().values()), default=-1)

    def held(self) -> dict[StripePart, list[int]]:
        """Versions held whole of its P and its Q."""
        return {part: versions for (_, part), versions in self.member.clean().items()}

    @property
    def nbytes(self) -> int:
        """Host memory, bytes."""
        return sum(ParityMember.places(self.layout, self.member.member).values())

    def free(self) -> None:
        """Give the memory back."""
        if self.outliving is not None:
            self.outliving.keep(None)


@dataclass(frozen=True)
class GroupMember:
    """A rank in its parity group.

    Attributes:
        rank: this rank.
        ranks: those of the group, this one among them, in the same order on all of them.
        losses: how many members may be lost, 1 or 2.
        max_size: members of a group at most.
        domain: this process's failure domain; -1: none.
        bucket: bytes; None: by the sizes of the shards.

    Raises ValueError if there are too few ranks.
    """

    rank: int
    ranks: tuple[int, ...]
    losses: int = 1
    max_size: int = 8
    domain: int = -1
    bucket: int | None = None

    def __post_init__(self) -> None:
        if len(self.ranks) <= self.losses:
            raise ValueError(f"a parity group of ranks {list(self.ranks)}: more than {self.losses} are needed (losses)")


class ParityCopies:
    """Keeps parity. All methods but the exchange itself belong to the training thread.

    Args:
        context: of the job around it; the group is of all ranks.
        member: this rank's place in its parity group.
        shards: all shards of this rank that a rollback concerns.
        copied: names of those that parity is of; by default all that no other rank holds.
    """

    def __init__(
        self,
        context: CopyContext,
        member: GroupMember,
        shards: Sequence[Shard],
        *,
        copied: Collection[str] | None = None,
    ) -> None:
        self._member = member
        self.ranks, self.losses = member.ranks, member.losses
        self._rank, self._me = member.rank, member.ranks.index(member.rank)
        self._on_kept, self._on_risk = context.on_kept, context.on_risk
        self._together: tuple[int, int] | None = None
        if copied is None:
            copied = {s.name for s in shards if s.holders == (member.rank,)}
        self._copied = FirstShards(copied)
        # What parity is of first: it is then one range of the undo buffer.
        ordered = sorted(shards, key=lambda s: s.name not in copied)
        keep = self._keep = context.keep
        self.undo = PreStepCopy(ordered, share=True, look=context.look, same=context.same, keep=keep)
        self._talk = Exchange(context, self.undo, "parity")
        self._batches = BatchMemory()
        self._spare = [keep(f"parity-{i}") for i in range(ENCODINGS)] if keep is not None else []
        self._encodings: list[Encoding] = []
        self._take_over()
        self._next_ranks = self.ranks
        self._pairs = [self._slots_of(number) for number in range(self.losses)]
        self._meet()
        self._sent_layout = -1
        self._layouts: dict[int, tuple[int, bytes]] = {}  # of the members that tell this one, with their idents
        self._doubted: set[int] = set()
        self._decoded: Slot | None = None

    def _slots_of(self, number: int) -> tuple[Slot, Slot]:
        """For two versions of what a member tells this one."""
        slots = [Slot(None if self._keep is None else self._keep(f"told-{number}-{i}")) for i in range(2)]
        return slots[0], slots[1]

    def _meet(self) -> None:
        """Which rank tells which in this group."""
        n = len(self.ranks)
        self._told = [(self._me + i) % n for i in range(1, self.losses + 1)]
        self._tellers = [(self._me - i) % n for i in range(1, self.losses + 1)]
        self._slots = dict(zip(self._tellers, self._pairs, strict=True))
        for teller, slots in self._slots.items():
            for slot in slots:
                if slot.beside.owner != self.ranks[teller]:
                    slot.drop()  # of a rank of another group

    # -- each step --------------------------------------------------------------------------------

    def commit(self, version: int, local_state: bytes | None, *, early: bool = False, beside: Beside = NOTHING) -> None:
        """The live state is ``version`` and does not change before :meth:`before_mutation`. Starts the exchange, in
        which every member of the group takes part. Without a ``local_state``, or if the script changes its state
        meanwhile, nothing is made of this version. ``beside``: what belongs to the own copy.

        Also to be called when training resumes after a recovery. Raises what the previous exchange raised.
        """
        self._talk.commit(version, beside, lambda v, own: self._exchange(v, local_state, early, own))

    def before_mutation(self) -> None:
        """Returns when the live tensors may be changed: they have been copied."""
        self._talk.before_mutation()

    def wait(self) -> None:
        """Returns when the exchange of the last commit is complete. Raises what it has raised (a peer is gone), and
        StepInterrupted from :meth:`halt` to :meth:`reset`."""
        self._talk.wait()

    def settle(self, given_up: Callable[[], bool]) -> None:
        """See :meth:`flashrecovery.redundancy.memory.peer_exchange.Exchange.settle`."""
        self._talk.settle(given_up)

    # -- recovery ---------------------------------------------------------------------------------

    def halt(self, timeout_s: float) -> None:
        """After the groups have been abandoned and *before* they are detached: end the exchange under way.

        Parity that is whole stays. Raises RestoreError if it has not ended within ``timeout_s``.
        """
        self._talk.halt(timeout_s)

    def reset(self, generation: int, version: int) -> None:
        """All ranks are at ``version`` in a new generation: forget newer parity and start afresh."""
        self._talk.reset(generation, version)
        self._sent_layout = -1
        self._doubted = set()
        self._decoded = None
        self._change_group()
        for encoding in self._encodings:
            encoding.member.drop_after(version)
        for slot in self._told_slots():
            slot.drop_after(version)
        self._on_kept(self._newest_kept())

    def regroup(self, ranks: Sequence[int]) -> None:
        """The ranks of this one's group from the next :meth:`reset` on. If they are others, all parity is re-created by
        the next exchange."""
        self._next_ranks = tuple(ranks)

    def _change_group(self) -> None:
        if self._next_ranks == self.ranks:
            return
        self.ranks, self._me = self._next_ranks, self._next_ranks.index(self._rank)
        for encoding in list(self._encodings):
            self._drop(encoding)
        self._layouts.clear()
        self._meet()

    @property
    def error(self) -> BaseException | None:
        """What ended the last exchange before it was complete."""
        return self._talk.error

    # -- what is held -----------------------------------------------------------------------------

    def held(self, live: int) -> ParityHeld:
        """All that this rank has to say of parity. ``live``: the version of its tensors, -1 if they are torn."""
        own = {v: self._copied.of(slot.layout).nbytes for v in self.undo.versions() if (slot := self.undo.slot(v))}
        if live >= 0 and live not in own:
            own[live] = self._copied.of(Layout.of({s.name: s.tensors() for s in self.undo.shards})).nbytes
        encodings = []
        for encoding in self._encodings:
            layout, held = encoding.layout, encoding.held()
            p, q = held[StripePart.P], held.get(StripePart.Q, [])
            encodings.append(
                EncodingHeld(encoding.key, layout.sizes, layout.parity, layout.bucket, frozenset(p), frozenset(q))
            )
        told = []
        for slot in self._told_slots():
            if slot.version >= 0:
                sizes = Layout.decode(slot.beside.plain[_LAYOUT]).payload
                told.append(Told(slot.beside.owner, slot.version, tuple(sizes.items())))
        found = tuple(encodings), tuple(told), frozenset(self._doubted)
        return ParityHeld(self._rank, self.ranks, self.losses, self._member.max_size, own, *found)

    def message(self, live: int) -> pb.Parity:
        """:meth:`held`, for the controller."""
        return parity_message(self.held(live))

    def holdings(self) -> list[CopyHolding]:
        """The rank-local states of other ranks that this rank holds."""
        found: dict[tuple[str, int], CopyHolding] = {}
        for slot in self._told_slots():
            if slot.version >= 0:
                name = _local_state_of(slot.beside.owner)
                size = len(slot.beside.plain[name])
                found[name, slot.version] = CopyHolding(name, slot.version, size, slot.beside.early)
        return sorted(found.values(), key=lambda h: (h.version, h.shard))

    def source(self, shard: str, version: int) -> ShardSource:
        """Rank-local state that is held, or what was decoded, in the form of a transfer's source. Raises RestoreError
        if it is not held."""
        decoded = self.decoded(shard, version)
        if decoded is not None:
            return decoded
        for slot in self._told_slots():
            if slot.version == version and shard == _local_state_of(slot.beside.owner):
                return plain_source(shard, slot.beside.plain[shard])
        raise RestoreError(f"rank {self._rank} holds nothing of {shard!r} at version {version}")

    def _told_of(self, owner: int, version: int) -> Slot:
        for slot in self._told_slots():
            if slot.beside.owner == owner and slot.version == version:
                return slot
        raise RestoreError(f"rank {self._rank} knows nothing of rank {owner} at version {version}")

    def _told_slots(self) -> list[Slot]:
        return [slot for slots in self._slots.values() for slot in slots]

    def _newest_kept(self) -> int:
        return max((encoding.newest for encoding in self._encodings), default=-1)

    # -- decoding ---------------------------------------------------------------------------------

    def decode(
        self,
        group: dist.ProcessGroup,
        order: DecodeOrder,
        live: int,
        give_up: Callable[[str], object],
        *,
        corrupt: bool = False,
    ) -> int:
        """This rank's part in giving the lost members their shards back, over ``group`` (of all ranks). Returns the
        bytes that this rank itself has got; they are there for :meth:`decoded` until the next :meth:`reset`.
        ``give_up``, ``corrupt``: see :class:`.Decoding`.

        Raises RestoreError, and what the group's operations raise.
        """
        me = order.ranks.index(self._rank)  # a process that has just come knows only of the launch's groups
        lost = me in order.lost
        slot = self._exchange_layouts(group, order)
        encoding = next((e for e in self._encodings if e.key == order.key), None)
        member = None if encoding is None else encoding.member
        own = None if lost else self._flat(order.version, live)
        to = None if slot is None else _bytes_of(slot.buffer)
        for what, found in ((own, "has"), (to, "is to get")):
            if what is not None and len(what) != order.sizes[me]:
                raise RestoreError(
                    f"rank {self._rank} {found} {len(what)} bytes of version {order.version}, and its parity is of "
                    f"{order.sizes[me]}"
                )
        try:
            nbytes = Decoding(group, order, self._rank, own, member, to, give_up, corrupt).run()
        except WrongParityError:
            self._doubted.add(order.version)
            raise
        if slot is not None:
            slot.version = order.version
            self._decoded = slot
        return nbytes

    def decode_as_told(
        self,
        group: dist.ProcessGroup,
        order: pb.Decode,
        version: int,
        live: int,
        give_up: Callable[[str], object],
        *,
        corrupt: bool,
    ) -> int:
        """:meth:`decode` of ``version``, by the controller's order."""
        return self.decode(group, decode_order(order, version), live, give_up, corrupt=corrupt)

    def _exchange_layouts(self, group: dist.ProcessGroup, order: DecodeOrder) -> Slot | None:
        """Tell a lost member how its shards are laid out; returns the memory for them on that member."""
        works, slot = [], None
        for member, teller in zip(order.lost, order.tellers, strict=True):
            if teller == self._rank:
                told = self._told_of(order.ranks[member], order.version)
                data = byte_tensor(codec.dumps((told.beside.plain[_LAYOUT], told.values)))
                for tensor in (torch.tensor([data.numel()]), data):
                    works.append((group.send([tensor], order.ranks[member], _TAG), tensor))
            if order.ranks[member] == self._rank:
                length = torch.zeros(1, dtype=torch.int64)
                group.recv([length], teller, _TAG).wait()
                data = torch.empty(int(length.item()), dtype=torch.uint8)
                group.recv([data], teller, _TAG).wait()
                encoded, values = codec.loads(data.numpy().tobytes())
                slot = Slot()
                slot.shape(Layout.decode(encoded), pin=False)
                slot.describe(values)
        for work, _ in works:
            work.wait()
        return slot

    def _flat(self, version: int, live: int = -1) -> memoryview:
        """The bytes of this rank's shards that parity is of. Raises RestoreError if they are not held."""
        if self.undo.slot(version) is None and live == version:
            self.undo.hold(version)
        slot = self.undo.slot(version)
        if slot is None:
            raise RestoreError(f"rank {self._rank} has no own copy of version {version}; held: {self.undo.versions()}")
        return _bytes_of(slot.buffer[: self._copied.of(slot.layout).nbytes])

    def decoded(self, shard: str, version: int) -> ShardSource | None:
        """What was decoded of a shard, if it was."""
        slot = self._decoded
        if slot is None or slot.version != version or shard not in slot.layout.payload:
            return None
        return ShardSource(shard, *slot.content(shard))

    # -- words ------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line: memory, bytes a step, what is survived."""
        sizes = {s.name: s.spec().nbytes for s in self.undo.shards}
        sent = sum(n for name, n in sizes.items() if name in self._copied.names)
        columns = len(self.ranks) - self.losses
        factor = 1.0 if self.losses == 1 else (len(self.ranks) - 1) / columns
        which = "any one rank" if self.losses == 1 else "any two ranks"
        return (
            f"parity {self.losses} over ranks {', '.join(map(str, self.ranks))}: at most {sent * factor / 1e6:.1f} MB "
            f"a step from each; host memory 2 x {sum(sizes.values()) / 1e6:.1f} MB for the own last two versions + "
            f"2 x {sent * self.losses / columns / 1e6:.1f} MB of parity; survives the loss of {which} of each group "
            "at once, with their nodes"
        )

    def nbytes(self) -> int:
        """Host memory taken now, bytes."""
        return self.undo.nbytes() + sum(encoding.nbytes for encoding in self._encodings) + self._batches.nbytes

    def close(self, timeout_s: float = 5.0) -> bool:
        """The job is over, on every rank; see
        :meth:`flashrecovery.redundancy.memory.neighbor_copy.NeighbourCopies.close`."""
        return self._talk.close(timeout_s)

    # -- the exchange, in the background thread ---------------------------------------------------

    def _exchange(self, version: int, local_state: bytes | None, early: bool, own: Slot) -> None:
        layout = self._copied.of(own.layout)
        whole = own.version == version and local_state is not None
        new_layout = layout.encoded if layout.ident != self._sent_layout else None
        values = {name: v for name, v in own.values.items() if name in self._copied.names}
        described = byte_tensor(codec.dumps((local_state, early, values, new_layout)) if whole else b"")
        self._retire()
        mine = MemberState(
            whole=whole,
            nbytes=layout.nbytes,
            ident=layout.ident,
            before=self._version_before(version, layout),
            domain=self._member.domain,
            described=described.numel(),
            held={e.key: _p_and_q(e) for e in self._encodings},
        )
        states = self._tell_all(version, mine)
        self._tell(version, described, states)
        self._sent_layout = layout.ident if whole else self._sent_layout
        self._look_at_domains(states)
        if all(state.whole for state in states):
            self._encode(version, own, layout, states)
        self._on_kept(self._newest_kept())

    def _version_before(self, version: int, layout: Layout) -> int:
        """Another version of these shards that is held whole; the newest one."""
        for other in reversed(self.undo.versions()):
            slot = self.undo.slot(other)
            if other < version and slot is not None and self._copied.of(slot.layout).ident == layout.ident:
                return other
        return -1

    def _tell_all(self, version: int, mine: MemberState) -> list[MemberState]:
        """Tell every member where this one stands; returns where each of them does."""
        head = [_MAGIC, self._talk.generation, version]
        frame = torch.tensor([*head, *mine.words()], dtype=torch.int64)
        others = [(member, rank) for member, rank in enumerate(self.ranks) if member != self._me]
        sends = [self._talk.send(frame, rank, _TAG) for _, rank in others]
        frames = {member: torch.zeros_like(frame) for member, _ in others}
        arriving = [self._talk.recv(frames[member], rank, _TAG) for member, rank in others]
        for work in (*arriving, *sends):
            self._talk.wait_for(work)
        states = []
        for member, rank in enumerate(self.ranks):
            words = frame.tolist() if member == self._me else frames[member].tolist()
            if words[:3] != head:
                raise ProtocolError(
                    f"rank {rank} is at version {words[2]} of generation {words[1]}, but version {version} of "
                    f"generation {self._talk.generation} was expected"
                )
            states.append(MemberState.of(words[3:]))
        return states

    def _tell(self, version: int, described: torch.Tensor, states: Sequence[MemberState]) -> None:
        """Tell the next members what belongs to the version besides tensors, and hear it of those before."""
        works = [self._talk.send(described, self.ranks[member], _TAG) for member in self._told]
        heard = {m: torch.empty(states[m].described, dtype=torch.uint8) for m in self._tellers}
        works += [self._talk.recv(data, self.ranks[member], _TAG) for member, data in heard.items()]
        for work in works:
            self._talk.wait_for(work)
        for member, data in heard.items():
            if states[member].whole:
                self._hear(version, member, data.numpy().tobytes(), states[member])

    def _hear(self, version: int, member: int, data: bytes, state: MemberState) -> None:
        local_state, early, values, layout = codec.loads(data)
        if layout is not None:
            self._layouts[member] = (Layout.decode(layout).ident, layout)
        ident, encoded = self._layouts.get(member, (-1, b""))
        owner = self.ranks[member]
        if ident != state.ident:
            raise ProtocolError(f"rank {owner} has copies of a layout that it has not announced")
        slots = self._slots[member]
        slot = next((s for s in slots if s.version == version), None) or min(slots, key=lambda s: s.version)
        slot.shape(_WITHOUT_TENSORS, pin=False)
        slot.describe(values)
        slot.finish(version, Beside(owner, {_local_state_of(owner): local_state, _LAYOUT: encoded}, early))

    def _look_at_domains(self, states: Sequence[MemberState]) -> None:
        """A member that shares a failure domain with another one is lost with it."""
        seen: dict[int, int] = {}
        together = None
        for rank, state in zip(self.ranks, states, strict=True):
            if state.domain >= 0 and state.domain in seen:
                together = together or (seen[state.domain], rank)
            seen[state.domain] = rank
        if together is not None and together != self._together and self._me == 0:
            one, other = together
            self._on_risk(
                f"ranks {one} and {other} of parity group {list(self._member.ranks)} are on one node now, and lost "
                "with it at once"
            )
        self._together = together

    def _encode(self, version: int, own: Slot, layout: Layout, states: Sequence[MemberState]) -> None:
        sizes, idents = [s.nbytes for s in states], [s.ident for s in states]
        parity = self._layout_of(sizes)
        key = key_of(self.ranks, sizes, idents, self.losses, parity.bucket)
        making = to_make(parity, key, version, states)
        if not making.places:
            return
        known = next((e for e in self._encodings if e.key == key), None)
        encoding = known or self._new_encoding(key, parity)
        base = None if making.base == NO_BASE else DeltaBase(making.base, self._flat(making.base))
        member = encoding.member
        member.begin(version, making.base, making.places)
        now = _bytes_of(own.buffer[: layout.nbytes])

        def frames(room: PayloadRoom) -> Iterator[Frame]:
            return deltas(parity, self._me, version, now, base, places=making.places, room=room)

        paced: AbstractContextManager[None] = nullcontext()
        if self._talk.pacing is not None and layout.nbytes:
            paced = self._talk.pacing.sending(layout.nbytes, STREAMS)
        with paced:
            Rounds(self._talk, self.ranks, member, making.places, self._batches).run(frames)

    def _layout_of(self, sizes: Sequence[int]) -> ParityLayout:
        """``nbytes``: the total size of the shards, of each member."""
        return ParityLayout(tuple(sizes), self.losses, self._member.bucket or bucket_for(sizes, self.losses))

    # -- encodings --------------------------------------------------------------------------------

    def _retire(self) -> None:
        """At a new commit only the encoding of the newest version is useful: all members have it."""
        newest = self._newest_kept()
        for encoding in [e for e in self._encodings if e.newest < newest]:
            self._drop(encoding)

    def _drop(self, encoding: Encoding) -> None:
        self._encodings.remove(encoding)
        encoding.free()
        if encoding.outliving is not None:
            self._spare.append(encoding.outliving)

    def _new_encoding(self, key: int, layout: ParityLayout) -> Encoding:
        while len(self._encodings) >= ENCODINGS:
            self._drop(min(self._encodings, key=lambda e: e.newest))
        outliving = self._spare.pop() if self._spare else None
        sizes = ParityMember.places(layout, self._me)
        buffers = None
        if outliving is not None:
            memory = SharedMemory.create(sum(sizes.values()), notes=True)
            memory.version = -1  # what of it is whole stands in it, part by part
            memory.write_notes(codec.dumps((key, self.ranks, layout.sizes, layout.parity, layout.bucket)))
            buffers = _cut(memory, sizes)
            outliving.keep(memory)
        encoding = Encoding(key, ParityMember(layout, self._me, buffers), outliving)
        self._encodings.append(encoding)
        return encoding

    def _take_over(self) -> None:
        """Go on with the parity of the process before this one."""
        for outliving in list(self._spare):
            memory = outliving.left
            notes = memory.read_notes() if memory is not None else None
            if memory is None or notes is None:
                continue
            key, ranks, sizes, parity, bucket = codec.loads(notes)
            if tuple(ranks) != self.ranks:
                continue
            layout = self._layout_of(sizes)
            if (parity, bucket) != (layout.parity, layout.bucket):
                continue
            places = ParityMember.places(layout, self._me)
            if sum(places.values()) > memory.nbytes:
                continue
            member = ParityMember(layout, self._me, _cut(memory, places))
            self._spare.remove(outliving)
            self._encodings.append(Encoding(key, member, outliving))


def _local_state_of(rank: int) -> str:
    """The shard's name."""
    return f"capsule@{rank}"


_WITHOUT_TENSORS = Layout(("told",))


def _p_and_q(encoding: Encoding) -> tuple[int, int]:
    """The newest version of each."""
    held = encoding.held()
    return max(held[StripePart.P], default=-1), max(held.get(StripePart.Q, []), default=-1)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor."""
    return memoryview(tensor.numpy().data)


def _cut(memory: SharedMemory, sizes: Mapping[ParityPlace, int]) -> dict[ParityPlace, memoryview]:
    """The part of each parity. Sizes are multiples of a row."""
    view, at, found = memoryview(memory.map), HEADER, {}
    for place, nbytes in sizes.items():
        found[place] = view[at : at + nbytes]
        at += nbytes
    return found
