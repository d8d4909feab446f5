"""Everything that a script registered, and the plain state that goes with it: what there is to protect on this rank.

Plain state is *common* (taken to be equal on all ranks, so that a replacement gets its peers') or the *rank-local
state* (this rank's own). Registered objects are common until they turn out to differ between the ranks, and the
rank-local state says what this rank's were like: a replacement notices if its predecessor's had been others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from flashrecovery.contract import roles
from flashrecovery.contract.adapter import Adapter
from flashrecovery.errors import DivergedError, RegistrationError, UnsupportedError
from flashrecovery.plan.elastic.new_ranks import members_of
from flashrecovery.plan.elastic.replicas import ReplicaShape, shape_of
from flashrecovery.plan.ownership import own_name
from flashrecovery.plan.reshard.rules import TensorRule
from flashrecovery.runtime import page_reserve
from flashrecovery.runtime.page import LOCAL_STATE_LIMIT
from flashrecovery.state import codec, witness
from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.object_shard import COMMON, ObjectShard
from flashrecovery.state.shard import Shard
from flashrecovery.worker.data.global_batches import GlobalBatches
from flashrecovery.worker.data.sampler_settings import SamplerValues
from flashrecovery.worker.data.step_data import DataPosition, StepData
from flashrecovery.worker.local_state.dynamic_shapes import DynamicShapes
from flashrecovery.worker.local_state.generators import Stateful, as_stateful
from flashrecovery.worker.local_state.grad_scaler import settled
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.local_state.step_profile import StepProfile

AdapterFactory = Callable[[torch.nn.Module, Sequence[Optimizer]], Adapter]
ModuleAdapterFactory = Callable[[torch.nn.Module], Adapter]

Drawn = tuple[
    RngState, list[tuple[DataPosition, SamplerValues]], list[Any], dict[str, codec.StateMark], dict[str, bytes]
]
"""What a step may have moved on this rank: the random number streams, the data streams, the adapters' marks, this
rank's own objects, and its own settings of the models."""

_DIGESTS_KEPT = 3
_SHOWN = 5
"""Parts that are named where there is too much."""


class ScriptPlace(Protocol):
    """Where a script is in its own loops: a part of this rank's own state. A protocol, as the loops lie above."""

    def mark(self) -> bytes:
        """Changes whenever what :meth:`capture` gives does."""

    def capture(self, version: int) -> Any:
        """In plain values."""

    def restore(self, state: Any, version: int) -> None:
        """The script is to go there."""


class Registry:
    """Models (through adapters), stateful objects and data streams of one worker.

    ``open`` until the first step; the set of shards is fixed from then on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        adapter_for: AdapterFactory,
        module_adapter_for: ModuleAdapterFactory,
        number: int | None = None,
        local_state_limit: int = LOCAL_STATE_LIMIT,
    ) -> None:
        """``number``: of this process in the job, where that is none of the ``world_size`` ranks of the launch.
        ``local_state_limit``: bytes that what this rank alone has may take."""
        self.rank = rank
        self._number = rank if number is None else number
        self.world_size = world_size
        self._adapter_for = adapter_for
        self._module_adapter_for = module_adapter_for
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self.adapters: list[Adapter] = []
        self.objects: dict[str, Stateful] = {}
        self.streams: list[StepData] = []
        self.shards: dict[str, Shard] = {}
        self.sharded_shards: frozenset[str] = frozenset()  # as :meth:`sharded` has found last
        self.habits = StepProfile()
        self.learned_sizes = DynamicShapes()
        self.batches: GlobalBatches | None = None
        self.common = ObjectShard(COMMON, tuple(range(world_size)))
        self.local_state = ObjectShard(f"capsule@{self._number}", (rank,))
        self.shape = ReplicaShape(world_size)
        self.members = tuple(range(world_size))
        self._launched: dict[str, tuple[int, ...]] = {}  # holders of the shards, as the job was launched
        self._known: list[tuple[str, object]] = []
        self._digests: dict[int, dict[str, str]] = {}  # of the shared objects, by version
        self.local_state_limit = local_state_limit
        self.place: ScriptPlace | None = None
        self._start = b""

    def follow_place(self, place: ScriptPlace) -> None:
        """``place``: says where the script is in its own loops, which are taken as they are."""
        self.place = place

    def take_batches(self, batches: GlobalBatches) -> None:
        """The script takes its data as global batches, in an elastic job."""
        self.batches = batches

    def register(
        self,
        model: torch.nn.Module | None,
        optimizers: Sequence[Optimizer],
        objects: dict[str, Any],
        per_rank: Collection[str] = (),
    ) -> None:
        """Raises RegistrationError if something is registered twice or cannot be protected."""
        if self.shards:
            raise RegistrationError("register() after the first step; register everything before recovery.steps()")
        if model is None:
            self._check_objects(objects)
            self._add_objects(objects, per_rank)
            return
        if any(m is model for m in self._models):
            raise RegistrationError(f"this model ({type(model).__name__}) is registered already")
        for optimizer in optimizers:
            if any(o is optimizer for o in self._optimizers):
                raise RegistrationError(f"this optimizer ({type(optimizer).__name__}) is registered already")
        self._check_objects(objects)
        self.adapters.append(self._adapter_for(model, optimizers))
        self._models.append(model)
        self._optimizers += optimizers
        self._add_objects(objects, per_rank)

    def register_adapter(self, adapter: Adapter, objects: dict[str, Any], per_rank: Collection[str] = ()) -> None:
        """Protect what a framework's own adapter describes."""
        if hasattr(adapter, "capsule_mark"):
            raise RegistrationError(f"{adapter.name}: capsule_mark() is called local_state_mark() now")
        self._check_objects(objects)
        self.adapters.append(adapter)
        self._add_objects(objects, per_rank)

    def _add_objects(self, objects: dict[str, Any], per_rank: Collection[str]) -> None:
        unknown = sorted(set(per_rank) - set(objects))
        if unknown:
            raise RegistrationError(f"per_rank names {unknown}; registered in this call: {sorted(objects)}")
        for name, thing in objects.items():
            self._known.append((name, thing))
            generator = as_stateful(thing)
            if isinstance(thing, torch.nn.Module):
                self.adapters.append(self._module_adapter_for(thing))
            else:
                self.objects[name] = generator if generator is not None else settled(thing)
            if generator is not None or name in per_rank:
                self.habits.add_own([name])

    def _check_objects(self, objects: dict[str, Any]) -> None:
        for name, thing in objects.items():
            stateful = callable(getattr(thing, "state_dict", None)) and callable(
                getattr(thing, "load_state_dict", None)
            )
            if not stateful and as_stateful(thing) is None:
                raise RegistrationError(
                    f"{name}={type(thing).__name__}: an object with state_dict() and load_state_dict(), or a random "
                    "generator of torch, Python or numpy, is needed"
                )
            for known, other in self._known:
                if other is thing or known == name:
                    raise RegistrationError(f"{name!r} is registered already (as {known!r})")

    def close(self) -> None:
        """Fix the set of shards. Raises RegistrationError if nothing was registered."""
        if not self.adapters:
            raise RegistrationError(
                "no model is registered: call recovery.register(model=..., optimizer=...) before recovery.steps()"
            )
        for number, adapter in enumerate(self.adapters):
            shards = adapter.shards()
            if any(shard.name in self.shards for shard in shards):
                for shard in shards:  # a second model with parameters of the same names
                    shard.rename(f"model{number}/{shard.name}")
            for shard in shards:
                self.shards[shard.name] = shard
        for objects in (self.common, self.local_state):
            self.shards[objects.name] = objects
        self._launched = {name: tuple(shard.holders) for name, shard in self.shards.items()}
        self._launched[self.local_state.name] = (self._number,)

    def replicas(self) -> dist.ProcessGroup | None:
        """The data-parallel group, as the adapters say; None: each rank is a replica.

        Raises UnsupportedError if they do not say the same."""
        found = [
            (adapter.name, group)
            for adapter in roles.elastic(self.adapters)
            if (group := adapter.replicas()) is not None
        ]
        ranks = [(name, tuple(dist.get_process_group_ranks(group))) for name, group in found]
        if len({some for _, some in ranks}) > 1:
            named = ", ".join(f"{name}: {list(some)}" for name, some in ranks)
            raise UnsupportedError(
                f"models that are replicated over different ranks ({named}): in an elastic job all models have the "
                "same replicas"
            )
        return found[0][1] if found else None

    def find_replicas(self) -> None:
        """Learn which ranks make up replicas, in the launch's size.

        Raises UnsupportedError if that does not follow from this rank's data-parallel group."""
        group = self.replicas()
        if group is None:
            return
        peers = dist.get_process_group_ranks(group)
        shape = shape_of(peers, self.world_size)
        if shape is None:
            raise UnsupportedError(
                f"an elastic job of {self.world_size} ranks in which ranks {peers} are data-parallel peers: replicas "
                "are known where the numbers of such ranks are equally far apart, in a job that divides into as many "
                "replicas, as in a device mesh that counts the ranks in their order"
            )
        self.shape = shape

    def sharers(self, members: Sequence[int], rank: int) -> list[int]:
        """Those of ``members`` among which the sharded state of this process, which is ``rank`` as the job was
        launched, is sharded, in the order of their places: of those with its model rank, or with one of several."""
        model_ranks = self.model_ranks() or (self.shape.model_rank(rank),)
        return [member for member in self.shape.in_order(members) if self.shape.model_rank(member) in model_ranks]

    def model_ranks(self) -> tuple[int, ...]:
        """The model ranks among which this rank's state is sharded; none: only its own."""
        shard_layouts = roles.shard_layouts(self.adapters).values()
        said = next((found for shard_layout in shard_layouts if (found := shard_layout.sharers()) is not None), ())
        model_ranks = tuple(sorted({self.shape.model_rank(sharer) for sharer in said}))
        return model_ranks if len(model_ranks) > 1 else ()

    def resize(self, members: Sequence[int], rank: int) -> None:
        """The job consists of these ranks now, as it was launched, of which this process is ``rank``: it has another
        number, in a world of another size. Of those that hold a shard, the members go on to do so; but of what is
        sharded among the ranks :meth:`sharded_otherwise` says which ranks hold it."""
        number = {member: place for place, member in enumerate(members)}
        self.members, self.rank, self.world_size = tuple(members), number[rank], len(members)
        sharded = self.sharded()
        for shard in self.shards.values():
            if shard.name not in sharded:
                launched = self._launched.get(shard.name, self.members)
                holders = members_of(launched, members, rank, self.shape)
                shard.hold_by(tuple(number[holder] for holder in holders))

    def sharded(self) -> set[str]:
        """Names of this rank's shards that belong to an adapter's sharding."""
        found: set[str] = set()
        for number, shard_layout in roles.shard_layouts(self.adapters).items():
            names = {shard.name for shard in self.adapters[number].shards()}
            tensors = shard_layout.tensors(shard_layout.describe(), shard_layout.size)
            found |= names & {name for tensor in tensors for name in tensor.shards}
        self.sharded_shards = frozenset(found)
        return found

    def rules(self) -> tuple[TensorRule, ...] | None:
        """How what is sharded among the ranks of an elastic job is sharded in any number of them; None if there is
        something of which that is not known."""
        found: list[TensorRule] = []
        for number, shard_layout in roles.shard_layouts(self.adapters).items():
            rules = shard_layout.rules(shard_layout.describe())
            if rules is None:
                return None
            found += [replace(rule, name=f"{number}/{rule.name}") for rule in rules]
        return tuple(found)

    def outline(self) -> str:
        """A digest of what is sharded among the ranks of an elastic job, the same on all of them and in all sizes; ""
        if nothing is."""
        shard_layouts = roles.shard_layouts(self.adapters).values()
        outlines = [layout.outline(layout.describe()) for layout in shard_layouts]
        return xxhash.xxh3_128_hexdigest(json.dumps(outlines).encode()) if outlines else ""

    def sharded_otherwise(self, layout: Sequence[int]) -> None:
        """The adapters have put another sharding of their state in place, among those of ``layout`` that share it with
        this rank (:meth:`sharers`): their shards have other names, and as holders places in that sharding. Numbers in
        the layout are in their stead from now on."""
        self.shards = {shard.name: shard for adapter in self.adapters for shard in adapter.shards()}
        numbers = [layout.index(peer) for peer in self.sharers(layout, self.members[self.rank])]
        for name in self.sharded():
            shard = self.shards[name]
            shard.hold_by(tuple(numbers[place] for place in shard.holders))
        for objects in (self.common, self.local_state):
            self.shards[objects.name] = objects
        self.resize(self.members, self.members[self.rank])

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """Those that the script has registered itself."""
        return self._models

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that the script has registered itself."""
        return self._optimizers

    def stepping(self) -> list[Optimizer]:
        """Those, and optimizers that they step by themselves."""
        nested = [one for adapter in roles.inspectable(self.adapters).values() for one in adapter.stepped_by_others()]
        return [*self._optimizers, *(one for one in nested if isinstance(one, Optimizer))]

    def not_brought_back(self) -> list[str]:
        """What registered objects have in themselves and cannot be read."""
        models = [thing for thing in self.known() if isinstance(thing, torch.nn.Module)]
        tensors = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        return [text for one in roles.inspectable(self.adapters).values() for text in one.not_brought_back(tensors)]

    @property
    def joinables(self) -> Iterator[Joinable]:
        """Models and optimizers that can be in a ``join()`` context."""
        return (thing for thing in (*self._models, *self._optimizers) if isinstance(thing, Joinable))

    def known(self) -> list[object]:
        """Everything that is protected: models, optimizers, objects, data streams."""
        objects = [thing for _name, thing in self._known]
        of_adapters = [thing for adapter in roles.inspectable(self.adapters).values() for thing in adapter.known()]
        return [*self._models, *self._optimizers, *objects, *self.streams, *of_adapters]

    def is_reading(self) -> bool:
        """Whether one of the data streams is being read."""
        return any(stream.reading for stream in self.streams)

    def unique_shards(self) -> list[Shard]:
        """Shards of tensors that no other rank holds."""
        mine = (self.rank,)
        return [s for s in self.shards.values() if s.holders == mine and s is not self.local_state]

    def tensor_shards(self) -> list[Shard]:
        return [s for s in self.shards.values() if not isinstance(s, ObjectShard)]

    def host_bytes(self) -> int:
        """Host memory of large tensors: shards, and the models' gradients that there are."""
        tensors = (t for shard in self.tensor_shards() for t in shard.tensors().values())
        return _large_host_bytes(tensors) + self.gradient_bytes()

    def gradient_bytes(self) -> int:
        """Host memory of the models' large gradients that there are."""
        gradients = (p.grad for model in self.models for p in model.parameters())
        return _large_host_bytes(g for g in gradients if type(g) is torch.Tensor and g.layout is torch.strided)

    def checkpoint_format(self) -> CheckpointFormat | None:
        """The framework's own format for fallback checkpoints; None for the core's."""
        only = roles.inspectable(self.adapters).get(0) if len(self.adapters) == 1 else None
        return None if only is None else only.checkpoint_format()

    # -- plain state ------------------------------------------------------------------------------

    def drawn(self) -> Drawn:
        """Changes whenever random numbers or data are drawn, or another part of the rank-local state changes."""
        return (
            RngState.now(),
            [s.mark for s in self.streams],
            [*(a.local_state_mark() for a in self.adapters), *(() if self.place is None else (self.place.mark(),))],
            {name: _encoded(name, self.objects[name]).mark() for name in self.habits.own},
            self._own_settings(),
        )

    def look_closely(self, closely: bool) -> None:
        """A step begins. ``closely``: in it, all rank-only state is compared by content."""
        for adapter in roles.inspectable(self.adapters).values():
            adapter.look_closely(closely)

    def silent(self) -> list[str]:
        """What is known of rank-only state that changes without a sign; names of all adapters, and of all ranks as far
        as they have told each other."""
        mine = {f"{number}/{name}" for number, one in roles.inspectable(self.adapters).items() for name in one.silent()}
        return sorted({*self.habits.silent, *mine})

    def adopt_silent(self, names: Collection[str]) -> None:
        """All ranks know ``names``, of :meth:`silent`."""
        self.habits.add_silent(names)
        for number, adapter in roles.inspectable(self.adapters).items():
            prefix = f"{number}/"
            adapter.adopt_silent([n.removeprefix(prefix) for n in self.habits.silent if n.startswith(prefix)])

    def shared_states(self) -> dict[str, bytes]:
        """The state of every registered object that is taken to be equal on all ranks, encoded."""
        own = self.habits.own
        return {name: _state_of(name, thing) for name, thing in self.objects.items() if name not in own}

    def settings(self) -> dict[str, bytes]:
        """What the adapters say is equal on all ranks, and has not turned out otherwise, encoded: hyper-parameters and
        other settings, by ``<number of the adapter>/<which>``."""
        own = self.habits.own_settings
        everything = (
            (f"{n}/{key}", value) for n, a in enumerate(self.adapters) for key, value in a.capture_common().items()
        )
        return {name: codec.dumps(value) for name, value in everything if name not in own}

    def _own_settings(self) -> dict[str, bytes]:
        """This rank's own ones."""
        own = self.habits.own_settings
        if not own:
            return {}
        states = {number: self.adapters[number].capture_common() for number in {int(n.partition("/")[0]) for n in own}}
        parts = ((name, *name.split("/", 1)) for name in own)
        return {
            name: codec.dumps(states[int(number)][key]) for name, number, key in parts if key in states[int(number)]
        }

    def adopt_own(self, names: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Those shards of this rank that have these names are its own from now on, and are called so. Returns, by the
        names that they had, which ranks were said to hold them."""
        found: dict[str, tuple[int, ...]] = {}
        for name in [n for n, shard in self.shards.items() if n in names and len(shard.holders) > 1]:
            shard = self.shards[name]
            found[name] = shard.holders
            shard.hold_by((self.rank,))
            shard.rename(own_name(name, self._number))
            self._launched[shard.name] = self._launched.pop(name)
        self.shards = {shard.name: shard for shard in self.shards.values()}
        self.habits.add_own_shards(names)
        return found

    def capture_common(self, version: int) -> bytes:
        """State of ``version`` that is equal on every rank: schedulers, scaler, extra objects, hyper-parameters."""
        states = self.shared_states()
        kept = {v: d for v, d in self._digests.items() if version - _DIGESTS_KEPT < v < version}
        self._digests = {**kept, version: {name: _digest(state) for name, state in states.items()}}
        return codec.dumps(
            {
                "objects": states,
                "digests": self._digests[version],
                "before": self._digests.get(version - 1, {}),
                "adapters": [codec.dumps(a.capture_common()) for a in self.adapters],
                "habits": asdict(self.habits),
            }
        )

    def restore_common(self, data: bytes, own: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """``own``: this rank's own settings, which take the place of another rank's."""
        state = codec.loads(data)
        for number, (adapter, part) in enumerate(zip(self.adapters, state["adapters"], strict=True)):
            mine = {n.partition("/")[2]: codec.loads(d) for n, d in own.items() if n.partition("/")[0] == str(number)}
            adapter.restore_common(codec.loads(part) | mine)
        self.habits.restore(StepProfile(**state["habits"]))
        self.adopt_silent(())
        for name, encoded in state["objects"].items():
            self.objects[name].load_state_dict(codec.loads(encoded))

    def capture_local_state(self, drawn: Drawn, version: int) -> bytes:
        """:meth:`encode_local_state`, as a copy."""
        return self.encode_local_state(drawn, version).tobytes()

    def encode_local_state(self, drawn: Drawn, version: int) -> codec.EncodedState:
        """State of this rank alone: random number streams, data position, rank-only framework state and objects, and
        what torch.compile has learned here. ``drawn``: as they stand now. Raises UnsupportedError if it is too large to
        be kept."""
        newest = max(self._digests, default=-1)
        encoded = codec.encode(
            {
                "rng": drawn[0].plain(),
                "data": [s.capture() for s in self.streams],
                "adapters": [a.capture_rank() for a in self.adapters],
                # What has been encoded whole is not encoded again.
                "objects": {n: np.frombuffer(mark.skeleton, np.uint8) for n, mark in drawn[3].items() if mark.whole},
                "states": {n: self.objects[n].state_dict() for n, mark in drawn[3].items() if not mark.whole},
                "settings": drawn[4],
                "compiled": self.learned_sizes.capture(),
                "place": None if self.place is None else self.place.capture(version),
                "shared": (newest, self._digests.get(newest, {})),
            }
        )
        encoded = replace(encoded, end=witness.UNKNOWN)
        if encoded.nbytes > self.local_state_limit:
            raise UnsupportedError(self._too_large(encoded.nbytes, drawn[3], drawn[4]))
        return encoded

    def _too_large(self, size: int, objects: dict[str, codec.StateMark], settings: dict[str, bytes]) -> str:
        parts = {f"registered object {name!r}": mark.nbytes for name, mark in objects.items()}
        parts |= {in_words(name): len(state) for name, state in settings.items()}
        for adapter in roles.inspectable(self.adapters).values():
            parts |= adapter.rank_bytes()
        largest = sorted(parts.items(), key=lambda part: -part[1])[:_SHOWN]
        named = ", ".join(f"{name} ({nbytes:,} bytes)" for name, nbytes in largest)
        return (
            f"the state that rank {self.rank} alone has takes {size:,} bytes; at most {self.local_state_limit:,} "
            "can be kept in each step (rank_local_state_mib, and never more than 1 GiB). "
            f"The largest parts: {named}. Of buffers, only those that change count; what "
            "is equal on all ranks can be a parameter with requires_grad=False instead (docs/limits.md)"
        )

    def witness(self, version: int) -> bytes:
        """What the shared objects are like at ``version``, whose common state has just been captured."""
        return witness.of(self._digests[version])

    def remember_start(self) -> None:
        """Now, before the first step, this rank's own state is what the script has made it."""
        self._start = self.capture_local_state(self.drawn(), 0)

    def begin_again(self) -> None:
        """Bring this rank's own state back to the script's start."""
        self.restore_local_state(self._start, 0, fresh=True)

    def mark_data(self, version: int) -> None:
        """The data fetched so far belongs to steps before ``version``."""
        for stream in self.streams:
            stream.commit(version)

    def restore_local_state(self, data: bytes, version: int, *, fresh: bool) -> None:
        """Adopt rank-local state. ``fresh``: this process is a replacement, its data sources stand at their
        beginning."""
        self._restore_own(codec.loads(data), version, fresh=fresh)

    def _restore_own(self, state: dict[str, Any], version: int, *, fresh: bool) -> None:
        """:meth:`restore_local_state`, of what has been decoded."""
        for stream, part in zip(self.streams, state["data"], strict=True):
            if fresh:
                stream.restore(part)
                stream.commit(version)
            else:
                stream.rollback(version)
        for adapter, part in zip(self.adapters, state["adapters"], strict=True):
            adapter.restore_rank(part)
        for name, own in _own_states(state).items():
            self.objects[name].load_state_dict(own)
        if self.place is not None and state.get("place") is not None:
            self.place.restore(state["place"], version)
        learned = self.learned_sizes.adopt if fresh else self.learned_sizes.go_back
        learned(state.get("compiled", []))
        restore_rng(state["rng"])  # last: skipping data consumes random numbers

    def restore_plain(self, common: bytes, local_state: bytes, version: int, *, fresh: bool) -> None:
        """Bring all plain state to ``version``.

        Raises:
            DivergedError: an object that was taken to be equal on all ranks was not.
        """
        mine = codec.loads(local_state)
        self._compare(codec.loads(common), mine, witness.found(local_state), version)
        self._digests = {v: digests for v, digests in self._digests.items() if v <= version}
        self.restore_common(common, mine.get("settings", {}))
        self._restore_own(mine, version, fresh=fresh)

    def _compare(self, common: dict[str, Any], local_state: dict[str, Any], seen: bytes, version: int) -> None:
        """What the common state says of the registered objects must be what this rank's own had been like: when the
        rank-local state was sealed and, as far as it is known, when the version was complete (``seen``)."""
        at, mine = local_state["shared"]
        theirs = common["digests"] if at == version else common["before"] if at == version - 1 else {}
        own = {*local_state.get("states", ()), *local_state["objects"]}
        odd = sorted(n for n in mine.keys() & theirs.keys() if mine[n] != theirs[n] and n not in own)
        if not odd and seen not in (witness.UNKNOWN, witness.of(common["digests"])):
            at, odd = version, sorted(common["digests"])
        if odd:
            raise DivergedError(
                f"the registered objects {odd} are not equal on all ranks: at version {at} those of rank {self.rank} "
                "had another state than those of its peers, and no other rank has it. Register those that are meant to "
                f"differ with per_rank={odd}; then each rank's own state is kept"
            )


def _large_host_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors if t.device.type == "cpu" and t.nbytes >= page_reserve.LEAST)


def _own_states(local_state: dict[str, Any]) -> dict[str, Any]:
    """This rank's own objects' states, by name. Some are encoded by themselves, as all were by older versions."""
    encoded = {name: codec.loads(memoryview(data)) for name, data in local_state["objects"].items()}
    return {**encoded, **local_state.get("states", {})}


def _state_of(name: str, thing: Stateful) -> bytes:
    with _named(name):
        return codec.dumps(thing.state_dict())


def _encoded(name: str, thing: Stateful) -> codec.EncodedState:
    with _named(name):
        return codec.encode(thing.state_dict())


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What cannot be encoded is refused by the object's name."""
    try:
        yield
    except UnsupportedError as e:
        raise UnsupportedError(
            f"registered object {name!r}: {e}; its state_dict() may hold numbers, texts, tensors, numpy arrays and "
            "containers of these (of a DTensor: its to_local())"
        ) from None


def in_words(setting: str) -> str:
    """A name of :meth:`Registry.settings`, for a message."""
    number, _, key = setting.partition("/")
    return f"{key} of model {number}"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
