"""A job changes its size, and its state is sharded among the ranks: this rank's part of sharding it otherwise.

Three moves. *Make ready* (with the restore, when every rank has its own shards of the version in the old sharding): the
core plans which rank sends what to which, each rank fills memory that its adapters have prepared, and copies of it go
to the new neighbour. Nothing of the old sharding changes, neither the live tensors nor the copies of them. *Put in
place* (with the resume, or with the stop of a later recovery if the controller had decided for it): the adapters
exchange their tensors; the old ones, and the copies of them, go. *Drop*: a rank has failed before all were ready; the
old state is still there.

Where replicas consist of several ranks, each model rank has its own state, which is sharded among the ranks that
have it: places in a sharding are counted among these, in the order of the replicas. (An adapter may say that the state
of several model ranks is sharded among all of theirs, :meth:`.ShardLayout.sharers`.) All ranks talk over the group of
all of them, in which they are known by their numbers there.

Which of the two comes is the controller's decision alone, made when all ranks are ready: a stop says for which members
it was made last. So of all ranks none goes on in the old sharding while another one is in the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from flashrecovery import groups
from flashrecovery.contract import roles
from flashrecovery.contract.adapter import Shard, ShardSpec
from flashrecovery.contract.shard_layout import LocalBox, Prepared, ShardedTensor, ShardLayout
from flashrecovery.errors import JobFailedError, RestoreError, UnsupportedError
from flashrecovery.plan.reshard.boxes import Space
from flashrecovery.plan.reshard.layouts import Placement, Ranks, Share
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.state import codec
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.reshard.redistribution import Change, Moved, redistribute

_DIGEST_BYTES = 16
_TAG = 0x4656


class ReadyShard(Shard):
    """A shard of the sharding that has been made ready, before the framework has it."""

    def __init__(
        self, name: str, holders: tuple[int, ...], tensors: dict[str, torch.Tensor], values: dict[str, Any]
    ) -> None:
        self.name, self.holders = name, holders
        self._tensors, self._values = tensors, values

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def values(self) -> dict[str, Any]:
        return self._values

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """Raises RestoreError: nothing is restored into what is not in place yet."""
        raise RestoreError(f"{self.name!r} is not in place yet")


@dataclass(frozen=True)
class _Sharers:
    """Those of a layout among which this rank's state is sharded: mostly, those with its model rank.

    Attributes:
        ranks: as the job was launched, by their places in the sharding.
        numbers: of these in the layout.
        rank: this one, as the job was launched.
    """

    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    rank: int

    @staticmethod
    def of(ranks: Sequence[int], layout: Sequence[int], rank: int) -> _Sharers:
        number_of = {member: number for number, member in enumerate(layout)}
        return _Sharers(tuple(ranks), tuple(number_of[peer] for peer in ranks), rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def place(self) -> int:
        """The place of this rank, which is one of them."""
        return self.ranks.index(self.rank)


@dataclass(frozen=True)
class _Ready:
    """What has been made ready, of which version, and for which members."""

    members: tuple[int, ...]
    version: int
    prepared: Sequence[Prepared]


@dataclass(frozen=True)
class _ShardLayouts:
    """The shardings of a job's adapters, as one: their tensors' names are prefixed with the adapters' numbers."""

    shard_layouts: Mapping[int, ShardLayout]
    descriptions: Mapping[int, dict[str, Any]]
    cache: dict[int, list[tuple[int, ShardedTensor]]] = field(default_factory=dict)

    def tensors(self, size: int) -> list[tuple[int, ShardedTensor]]:
        if size not in self.cache:
            self.cache[size] = [
                (number, tensor)
                for number, shard_layout in self.shard_layouts.items()
                for tensor in shard_layout.tensors(self.descriptions[number], size)
            ]
        return self.cache[size]

    def parts(self, number: int, tensor: ShardedTensor, place: int, local: torch.Tensor) -> list[LocalBox]:
        return self.shard_layouts[number].parts(tensor, place, local)


class Reshaping:
    """Changes of the sharding on one rank.

    Attributes:
        layout: the ranks (as the job was launched) among which this rank's state is sharded.
    """

    def __init__(self, registry: Registry, copies: Copies, rank: int, members: Sequence[int]) -> None:
        self._registry, self._copies, self._rank = registry, copies, rank
        self.layout = tuple(members) if rank in members else ()  # beyond the launch: of no layout yet
        self._ready: _Ready | None = None

    @property
    def replicas(self) -> int:
        """Number of replicas among which this rank's state is sharded."""
        return len(self._registry.shape.by_replica(self.layout))

    # -- make ready -------------------------------------------------------------------------------

    def make_ready(
        self, message: pb.Reshape, version: int, generation: int, *, corrupt: bool
    ) -> tuple[Moved, list[pb.ShardNeed]]:
        """Divide the state, which is at ``version``, among the members that the message names. They are the groups'
        ranks already. Returns what it took, and what this rank needs from then on.

        Raises RestoreError if something is not held, differs between the ranks, or has not arrived as it was sent.
        """
        self.drop()
        before, after = tuple(message.before), tuple(message.after)
        shard_layouts = roles.shard_layouts(self._registry.adapters)
        if not shard_layouts:
            if self._copies.across:
                self._copies.make_ready(
                    self._registry.tensor_shards(), version, generation, after.index(self._rank), after
                )
                self._ready = _Ready(after, version, [])
            return Moved(0, 0, 0), []
        number = after.index(self._rank)
        old, new = self._sharing(before), self._sharing(after)
        group = groups.control_group() if len(after) > 1 else None
        mine = {n: layout.describe() for n, layout in shard_layouts.items()} if self._rank in before else None
        of_all = _ShardLayouts(shard_layouts, _agree(group, mine, old, new, len(after)))
        custody = {(c.owner, c.shard): c for c in message.custody if c.owner in old.ranks}
        if mine is None:
            _refuse_unlike(of_all)
        change = _change(of_all, old, new, {rank: n for n, rank in enumerate(after)}, custody)
        prepared = {n: d.prepare(of_all.descriptions[n], new.place, new.size) for n, d in shard_layouts.items()}
        into = {
            _name(n, tensor): of_all.parts(n, tensor, new.place, prepared[n].tensors[tensor.name])
            for n, tensor in of_all.tensors(new.size)
            if tensor.shards[new.place]
        }
        held = self._held(of_all, old, custody.values(), version)
        moved = redistribute(group, number, change, held, into, corrupt=corrupt)
        shards = self._ready_shards(of_all, prepared, new)
        self._copies.make_ready(shards, version, generation, number, after)
        self._ready = _Ready(after, version, list(prepared.values()))
        plain = [self._registry.common, self._registry.local_state]
        needs = [pb.ShardNeed(name=s.name, nbytes=s.spec().nbytes, sharded=isinstance(s, ReadyShard)) for s in shards]
        return moved, needs + [pb.ShardNeed(name=s.name, nbytes=s.nbytes()) for s in plain]

    def _sharing(self, layout: Sequence[int]) -> _Sharers:
        return _Sharers.of(self._registry.sharers(layout, self._rank), layout, self._rank)

    def _held(
        self, of_all: _ShardLayouts, old: _Sharers, custody: Iterable[pb.Custody], version: int
    ) -> dict[str, list[LocalBox]]:
        """What this rank has of the old sharding: its own, and copies of those that have left."""
        by_shard: dict[tuple[int, str], list[tuple[int, ShardedTensor]]] = {}
        for number, tensor in of_all.tensors(old.size):
            for place, shard in enumerate(tensor.shards):
                by_shard.setdefault((place, shard), []).append((number, tensor))
        found: dict[str, list[LocalBox]] = {}

        def add(place: int, shard: str, tensors: Mapping[str, torch.Tensor]) -> None:
            for number, tensor in by_shard.get((place, shard), ()):
                if tensor.key not in tensors:
                    raise RestoreError(f"shard {shard!r} has no {tensor.key!r} at version {version}")
                parts = of_all.parts(number, tensor, place, tensors[tensor.key].detach())
                found.setdefault(_name(number, tensor), []).extend(parts)

        if self._rank in old.ranks:
            for own in self._registry.tensor_shards():
                add(old.place, own.name, own.tensors())
        for item in custody:
            if item.holder == self._rank:
                source = self._copies.source(item.kind, item.shard, version)
                tensors = dict(zip(source.spec.tensors, source.tensors, strict=True))
                add(old.ranks.index(item.owner), item.shard, tensors)
        return found

    def _ready_shards(self, of_all: _ShardLayouts, prepared: Mapping[int, Prepared], new: _Sharers) -> list[Shard]:
        """All shards of tensors that this rank will have: of the adapters whose state is sharded the new ones."""
        tensors: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
        holders: dict[str, tuple[int, ...]] = {}
        for number, tensor in of_all.tensors(new.size):
            name = tensor.shards[new.place]
            if name:
                local = prepared[number].tensors[tensor.name]
                tensors.setdefault(number, {}).setdefault(name, {})[tensor.key] = local
                holders[name] = tuple(n for n, of in zip(new.numbers, tensor.shards, strict=True) if of == name)
        shards: list[Shard] = []
        was = self._registry.sharded()
        for number, adapter in enumerate(self._registry.adapters):
            shards += [shard for shard in adapter.shards() if shard.name not in was]
            if number in of_all.shard_layouts:
                values = prepared[number].values
                shards += [
                    ReadyShard(name, holders[name], keyed, dict(values.get(name, {})))
                    for name, keyed in tensors.get(number, {}).items()
                ]
        return shards

    def begin(self, layout: tuple[int, ...]) -> bool:
        """Take on the sharding among the members of ``layout``, without content, which is restored as usual.

        Called when this process has just filled a rank, sharded as at launch, or when all ranks go back to a checkpoint
        of another size. A rank that is not among the members has no part until the state is resharded. Returns whether
        the sharding of this rank has changed."""
        if self.layout == layout:
            return False
        if self._rank not in layout:
            self.layout = ()
            return False
        shard_layouts = roles.shard_layouts(self._registry.adapters).values()
        if not shard_layouts and not self._copies.across:
            return False
        self.drop()
        model_rank = self._sharing(layout)
        for prepared in [one.prepare(one.describe(), model_rank.place, model_rank.size) for one in shard_layouts]:
            prepared.install()
        self._registry.sharded_otherwise(layout)
        self._copies.begin_sharded(self._registry.tensor_shards(), layout.index(self._rank), layout)
        self.layout = layout
        return bool(shard_layouts)

    # -- put in place, or drop --------------------------------------------------------------------

    def say(self, reply: pb.Reply) -> None:
        """How this rank's state is sharded, and for which ranks it is ready; nothing if none is sharded, or this rank
        has no part of it."""
        sharded = bool(roles.shard_layouts(self._registry.adapters))
        if self.layout and (sharded or self._copies.across):
            reply.layout.extend(self.layout)
            reply.ready.extend(self._ready.members if self._ready is not None else ())

    def settle(self, members: Sequence[int]) -> int:
        """The controller has decided last for a sharding among ``members``: what was made ready for these is put in
        place, all else is dropped. Returns the version of what was put in place, -1 if nothing was."""
        ready = self._ready
        if ready is None or ready.members != tuple(members):
            self.drop()
            return -1
        self.put_in_place()
        return ready.version

    def put_in_place(self) -> None:
        """All ranks are ready, and the controller has decided for it."""
        ready = self._ready
        if ready is None:
            return
        self._ready = None
        for prepared in ready.prepared:
            prepared.install()
        self._registry.sharded_otherwise(ready.members)
        self._copies.put_in_place(self._registry.tensor_shards())
        self.layout = ready.members

    def drop(self) -> None:
        """Nothing is made ready any more."""
        self._ready = None
        self._copies.drop_ready()

    def check(self, members: Sequence[int]) -> None:
        """Raises JobFailedError if this rank's state is sharded among others than ``members``, with which it is to go
        on."""
        if self.layout != tuple(members) and roles.shard_layouts(self._registry.adapters):
            raise JobFailedError(
                f"the state of rank {self._rank} is sharded among ranks {list(self.layout)}, and the job is to go on "
                f"with {list(members)}: the controller was lost in the middle of the change, and no "
                "checkpoint is there"
            )
        self.layout = tuple(members)


def _name(number: int, tensor: ShardedTensor) -> str:
    return f"{number}/{tensor.name}"


def _change(
    of_all: _ShardLayouts,
    before: _Sharers,
    after: _Sharers,
    number_of: Mapping[int, int],
    custody: Mapping[tuple[int, str], pb.Custody],
) -> Change:
    """By numbers in the groups: which rank has what now, and which is to have what. The same on all of these ranks."""
    old: dict[str, Placement] = {}
    known: dict[tuple[int, tuple[Ranks, ...]], Placement] = {}
    kept: list[Placement] = []  # so that no id comes twice
    for number, tensor in of_all.tensors(before.size):
        servers: list[Ranks] = []
        for place, rank in enumerate(before.ranks):
            if rank in number_of:
                servers.append((number_of[rank],))
            else:
                item = custody.get((rank, tensor.shards[place]))
                servers.append(() if item is None else (number_of[item.holder],))
        key = (id(tensor.placement), tuple(servers))
        if key not in known:
            kept.append(tensor.placement)
            known[key] = tuple(
                Share(share.box, tuple(sorted({n for place in share.ranks for n in servers[place]})))
                for share in tensor.placement
            )
        old[_name(number, tensor)] = known[key]
    now = of_all.tensors(after.size)
    spaces = [Space(_name(n, tensor), tensor.shape, tensor.dtype.itemsize) for n, tensor in now]
    return Change(spaces, old, {_name(n, tensor): found for n, tensor, found in _numbered(now, after.numbers)})


def _numbered(
    tensors: Sequence[tuple[int, ShardedTensor]], numbers: Sequence[int]
) -> Iterator[tuple[int, ShardedTensor, Placement]]:
    """Their placements with numbers in the place of places; one object remains one."""
    known: dict[int, Placement] = {}
    for number, tensor in tensors:
        key = id(tensor.placement)
        if key not in known:
            known[key] = tuple(
                Share(share.box, tuple(numbers[place] for place in share.ranks)) for share in tensor.placement
            )
        yield number, tensor, known[key]


def _agree(
    group: dist.ProcessGroup | None,
    mine: dict[int, dict[str, Any]] | None,
    before: _Sharers,
    after: _Sharers,
    world: int,
) -> dict[int, dict[str, Any]]:
    """The descriptions of the shard layouts: those of the first of these ranks that has state, which all others
    with state must have alike. Raises RestoreError if they differ."""
    encoded = b"" if mine is None else codec.dumps(list(mine.items()))
    rank_of = dict(zip(after.numbers, after.ranks, strict=True))
    holders = [number for number, rank in rank_of.items() if rank in before.ranks]
    empty = [number for number in rank_of if number not in holders]
    if not holders:
        raise RestoreError("none of the ranks that go on has any state")
    if group is not None:
        digest = torch.frombuffer(bytearray(xxhash.xxh3_128_digest(encoded)), dtype=torch.uint8)
        everybody = [torch.empty(_DIGEST_BYTES, dtype=torch.uint8) for _ in range(world)]
        group.allgather([everybody], [digest]).wait()
        odd = [number for number in holders if not torch.equal(everybody[number], everybody[holders[0]])]
        if odd:
            raise RestoreError(
                f"ranks {[rank_of[number] for number in odd]} have other optimizer state than rank "
                f"{rank_of[holders[0]]}: it cannot be sharded otherwise"
            )
        encoded = _tell(group, encoded, holders[0], empty, after.numbers[after.place])
    descriptions: dict[int, dict[str, Any]] = dict(codec.loads(encoded))
    return descriptions


def _refuse_unlike(of_all: _ShardLayouts) -> None:
    """Raises UnsupportedError if this process, which has no part of the state yet, has another model than the others.
    The controller has compared them, if it has known them."""
    for number, shard_layout in of_all.shard_layouts.items():
        mine, theirs = (shard_layout.outline(d) for d in (shard_layout.describe(), of_all.descriptions[number]))
        if mine != theirs:
            raise UnsupportedError(
                "a process that comes into the job has a model with other parameters, shapes or types than the "
                f"others: {next((pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]), 'more')}"
            )


def _tell(group: dist.ProcessGroup, encoded: bytes, teller: int, empty: Sequence[int], me: int) -> bytes:
    """A rank that has nothing yet gets the description."""
    if me == teller:
        content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        length = torch.tensor([content.numel()], dtype=torch.int64)
        for number in empty:
            group.send([length], number, _TAG).wait()
            group.send([content], number, _TAG).wait()
    elif me in empty:
        length = torch.zeros(1, dtype=torch.int64)
        group.recv([length], teller, _TAG).wait()
        content = torch.empty(int(length.item()), dtype=torch.uint8)
        group.recv([content], teller, _TAG).wait()
        encoded = content.numpy().tobytes()
    return encoded
