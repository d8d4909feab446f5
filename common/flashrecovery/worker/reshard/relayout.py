"""A worker's side of a change of the parallel layout: what it writes into the node's memory before it ends, and what it
reads there when it begins in another layout.

Before the first step all ranks tell each other of what each of their shards is in the whole model: which rank keeps
copies of another rank's shards can then write these, too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.contract import roles
from flashrecovery.contract.logical_state import LogicalState
from flashrecovery.errors import ConfigError, RestoreError, UnsupportedError
from flashrecovery.plan.reshard.logical import Description, ShardedParts, ShardParts, sharded_description
from flashrecovery.plan.reshard.rules import from_plain, to_plain
from flashrecovery.plan.strategy.relayout import LayoutFacts
from flashrecovery.plan.strategy.staging_room import StagingRoom
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.staged_files import StagedFiles, write
from flashrecovery.runtime.environment import SEQUENCE_PARALLEL_ENV, STAGING_ENV, in_changed_layout
from flashrecovery.runtime.host_memory import available_memory
from flashrecovery.runtime.parallel_layout import taken
from flashrecovery.state import codec
from flashrecovery.state.shard import ShardSource
from flashrecovery.worker.consistency import all_equal
from flashrecovery.worker.data.global_batches import GlobalBatches
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.policy import all_optimizers, most, placement, ranks_of_node, state_to_come
from flashrecovery.worker.reshard.elastic_checks import refuse_tied_buffers, refuse_unequal
from flashrecovery.worker.reshard.remote_staging import AgentStaging, Fetched


def staging_room(registry: Registry) -> StagingRoom:
    """The staging room of the whole job, before its first step. A collective of all ranks (a replacement gets the
    recorded answer)."""
    shards = [(shard.spec().nbytes, shard.holders[0] == registry.rank) for shard in registry.tensor_shards()]
    own = sum(nbytes for nbytes, _ in shards)
    now = sum(nbytes for nbytes, first in shards if first)
    expected = now + state_to_come(all_optimizers(registry)) * now // max(own, 1)
    free = min(shutil.disk_usage(Path(os.environ[STAGING_ENV])).free, available_memory())
    totals = torch.tensor([now, expected, free // ranks_of_node()])  # all ranks of a node count the same memory
    group = groups.control_group()
    if group is not None:
        dist.all_reduce(totals, group=group)
    (lacking,) = most([-free])
    return StagingRoom(int(totals[0]), int(totals[1]), placement()[1], -lacking, int(totals[2]))


_TAKE = "recovery.elastic_batches(dataset, global_batch=..., micro_batch=...) are allowed (docs/elastic.md)"


class RankStaging:
    """The staging of one worker whose job may change its layout."""

    def __init__(
        self, registry: Registry, settings: Settings, own: Sequence[str], agent: AgentStaging, *, single_calls: bool
    ) -> None:
        """Whether the layout can change; a collective, when everything is registered.

        Raises:
            UnsupportedError: not, and why.
            ConfigError: the ranks say different things of model, layout or batch; or the state does not fit into the
                nodes' memory while the layout changes.
        """
        if STAGING_ENV not in os.environ:
            raise UnsupportedError(
                "the parallel layout can change only in a job that is launched with `flashrecovery run --parallelism`"
            )
        if single_calls:
            _check_calls(registry, settings)
        numbers = [number for number, adapter in enumerate(registry.adapters) if not roles.in_any_layout(adapter)]
        states = [roles.logical(registry.adapters[number]) for number in numbers]
        if len(states) != 1 or states[0] is None:
            names = ", ".join(adapter.name for adapter in registry.adapters)
            raise UnsupportedError(
                f"another parallel layout of a job of {names}: megatron-core's model and optimizer, registered by "
                "fr_megatron.attach(), and nothing besides, are allowed, and Megatron-LM's loop"
            )
        if registry.batches is None or registry.streams:
            raise UnsupportedError(f"another parallel layout of a job with batches of each rank's own: {_TAKE}")
        refuse_unequal([*registry.habits.own, *own])
        self._registry, self._agent, self._batches = registry, agent, registry.batches
        self._state: LogicalState = states[0]
        (self._number,) = numbers  # of the adapter
        self.facts = self._gather_facts(elastic=settings.elastic is not None)
        self._described = self._gather()
        self._sharded = self._gather_sharded()
        self._in_size: dict[int, Description] = {}
        self.warning = "" if in_changed_layout() else _check_room(registry)  # else what is read may still be there

    def _gather_facts(self, *, elastic: bool) -> LayoutFacts:
        batches = self._batches
        all_equal.check_equal("the arguments of elastic_batches()", batches.settings)
        sizes = {name: batches.settings[name] for name in ("global_batch", "micro_batch")}
        facts = LayoutFacts(**self._state.facts(), **sizes, takes=",".join(sorted(taken())), elastic=elastic)
        if SEQUENCE_PARALLEL_ENV in os.environ:  # it is not set in a layout without tensor parallelism
            facts = replace(facts, sequence_parallel=True)
        all_equal.check_equal("layout and model, as Megatron says them,", {"facts": facts.text()})
        return facts

    def _gather(self) -> Description:
        mine = [json.dumps([name, parts.plain()]) for name, parts in self._state.describe().items()]
        found: dict[str, ShardParts] = {}
        for name, plain in map(json.loads, all_equal.union(mine)):
            parts = ShardParts.from_plain(plain)
            if found.setdefault(name, parts) != parts:
                raise UnsupportedError(
                    f"another parallel layout: ranks disagree on what shard {name!r} is in the whole model"
                )
        return found

    def _gather_sharded(self) -> tuple[ShardedParts, ...]:
        """What is sharded among the replicas, and how, for all places in a replica. With another number of replicas the
        shards have other names, and no other rank may be left to say what a kept copy is a copy of."""
        registry, wholes = self._registry, self._state.sharded()
        mine: list[str] = []
        for shard_layout in roles.shard_layouts(registry.adapters).values():
            rules = shard_layout.rules(shard_layout.describe())
            if rules is None:
                raise UnsupportedError("another parallel layout of an elastic job whose state is sharded without rules")
            each = shard_layout.size // registry.shape.replicas
            # Of what other ranks have that plan the same (other experts), these say of what it is.
            for rule in [rule for rule in rules if not rule.of_optimizer and rule.name in wholes]:
                mine.append(codec.dumps((to_plain([rule]), wholes[rule.name].plain(), each)).hex())
        found = []
        for text in all_equal.union(mine):
            (table, rows), whole, each = codec.loads(bytes.fromhex(text))
            (rule,) = from_plain(table, rows)
            found.append(ShardedParts(rule, ShardParts.from_plain(whole), each))
        computed = sharded_description(found, registry.shape.replicas) if found else {}
        odd = sorted(name for name, parts in computed.items() if _in_order(self._described.get(name)) != parts)
        odd = odd or sorted(registry.sharded().difference(computed))
        if odd:
            raise UnsupportedError(
                f"another parallel layout of an elastic job in which shard {odd[0]!r} does not lie as it is computed "
                "for other numbers of replicas"
            )
        return tuple(found)

    def step_rules(self) -> ParallelismRules:
        """What each step keeps to from now on."""
        return ParallelismRules(self._registry, self._batches)

    def _in(self, replicas: int) -> Description:
        """The description of all shards with this many replicas."""
        if not self._sharded:
            return self._described
        if replicas not in self._in_size:
            self._in_size = {replicas: {**self._described, **sharded_description(self._sharded, replicas)}}
        return self._in_size[replicas]

    def write(
        self, staging: pb.Stage, source: Callable[[pb.StagingItem, int], ShardSource], replicas: int
    ) -> tuple[int, Mapping[str, str]]:
        """Write the shards that were ordered of this rank. ``source``: returns a shard's content. ``replicas``: number
        of replicas among which state is sharded. Returns the bytes of tensors that were written, and digests of state
        that should be equal on all its holders: the ranks of the new layout get one holder's.

        Raises RestoreError.
        """
        common = self._registry.common.at(staging.version) or b""
        sources = (source(item, staging.version) for item in staging.items)
        if common:
            self._state.check_common(codec.loads(codec.loads(common)["adapters"][self._number]))
        directory = self._directory(staging.directory)
        # The controller, and so the reader, knows this rank by its number at launch.
        rank = self._registry.members[self._registry.rank]
        try:
            written = write(directory, rank, staging.version, sources, self._in(replicas), common)
        except OSError as e:
            raise RestoreError(f"the state cannot be written to {directory}: {e.strerror}") from e
        alike = self._alike(common)
        alike |= {f"{name!r}, of which there is one for all parameters,": d for name, d in written.numbers.items()}
        # Of two nodes' ranks that write the same shard, each new rank reads the nearer one's.
        alike |= {f"shard {name!r}": digest for name, digest in written.shards.items()}
        return written.nbytes, alike

    def _alike(self, common: bytes) -> dict[str, str]:
        """Digests of what the plain state has that is compared between the ranks, by what it is."""
        if not common:
            return {}
        state = codec.loads(common)
        found = {f"the registered object {name!r}": digest for name, digest in state["digests"].items()}
        for adapter, part in zip(self._registry.adapters, state["adapters"], strict=True):
            if roles.in_any_layout(adapter):
                found[f"what {adapter.name} keeps"] = xxhash.xxh3_128_hexdigest(part)
        return found

    def read(self, place: pb.StagingPlace, version: int, within_s: float) -> int:
        """Bring this rank to ``version``, as ranks of another layout have written it. Its own state is that of the
        script's start. ``within_s``: so long it may take to bring what they have written on other nodes. Returns how
        many bytes of tensors were read. Raises RestoreError."""
        registry = self._registry
        root = Path(os.environ[STAGING_ENV])
        elsewhere = Fetched(root, place, self._agent, within_s) if place.sources else None
        staging = StagedFiles(self._directory(place.directory), place.ranks, version, elsewhere)
        registry.begin_again()
        nbytes = self._state.read(staging)
        registry.local_state.keep(version, registry.capture_local_state(registry.drawn(), version))
        registry.common.keep(version, staging.common)
        return nbytes

    @staticmethod
    def _directory(name: str) -> Path:
        return Path(os.environ[STAGING_ENV]) / name


def _in_order(found: ShardParts | None) -> ShardParts | None:
    """The same, as it lies."""
    return None if found is None else replace(found, parts=tuple(sorted(found.parts, key=lambda part: part.begin)))


def _check_room(registry: Registry) -> str:
    """Returns what will not fit once optimizers have made their state. Raises ConfigError if what there is
    does not."""
    room = staging_room(registry)
    if room.refusal:
        raise ConfigError(room.refusal)
    return room.warning


def _check_calls(registry: Registry, settings: Settings) -> None:
    """Raises UnsupportedError if a job whose steps are a framework's own calls cannot change its layout."""
    if registry.batches is None or not registry.batches.of_calls:
        raise UnsupportedError(
            "another parallel layout of a job whose steps are a framework's own calls: megatron-core in a loop over "
            "recovery.steps() is allowed, and Megatron-LM's loop"
        )
    if settings.checkpoint.dir is not None:
        raise UnsupportedError(
            "another parallel layout of a job with fallback checkpoints (checkpoint.dir) whose steps are a framework's "
            "own calls: they have a format of one layout; without checkpoint.dir it is allowed, and the script may "
            "save checkpoints itself"
        )


class ParallelismRules:
    """What each step of a job must keep to whose layout may change."""

    def __init__(self, registry: Registry, batches: GlobalBatches) -> None:
        self._registry, self._batches = registry, batches
        self._told = self._modes()

    def check_step(self, step: int) -> None:
        """``step`` is about to be committed.

        Raises:
            RegistrationError: it has not gone through its micro-batches.
            UnsupportedError: it has changed state that is each rank's own, or the model in a way that its script would
                not make it again (evaluation mode, frozen parameters, numbers among its attributes).
            ConfigError: the framework has another batch now.
        """
        registry = self._registry
        self._batches.refuse_unread(step)
        self._batches.check_framework()
        refuse_unequal(registry.habits.own)
        refuse_tied_buffers(registry)
        if self._modes() != self._told:
            raise UnsupportedError(
                "another parallel layout of a job whose script has changed its model since the start (train() or "
                "eval(), requires_grad_(), numbers among the attributes of its modules): of which module of another "
                "layout that is, is not known; what the script sets before its first step is allowed"
            )

    def _modes(self) -> bytes:
        """The settings that the modules of this rank have received since their start."""
        own = [adapter.capture_rank() for adapter in self._registry.adapters]
        return codec.dumps([{key: state.get(key) for key in ("modes", "attributes")} for state in own])
