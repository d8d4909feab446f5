"""Everything that a script registered, and the plain state that goes with it: what there is to protect on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from flashrecovery.errors import RegistrationError
from flashrecovery.worker import codec
from flashrecovery.worker.adapter import Adapter, CheckpointFormat, Shard
from flashrecovery.worker.data import DataStream
from flashrecovery.worker.objects import COMMON, ObjectShard
from flashrecovery.worker.rng import RngState, restore_rng

AdapterFactory = Callable[[torch.nn.Module, Sequence[Optimizer]], Adapter]


@dataclass
class Habits:
    """What the core has learned about the steps of this script; common to all ranks.

    Attributes:
        known: a first step has shown the rest.
        early_seal: the capsule of version i+1 is final when the forward pass of step i ends; False if a step draws
            random numbers or data later.
        undo: steps need an own pre-step copy on every rank.
    """

    known: bool = False
    early_seal: bool = False
    undo: bool = False


class Registry:
    """Models (through adapters), stateful objects and data streams of one worker.

    ``open`` until the first step; the set of shards is fixed from then on.
    """

    def __init__(self, rank: int, world_size: int, adapter_for: AdapterFactory) -> None:
        self.rank = rank
        self.world_size = world_size
        self._adapter_for = adapter_for
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self.adapters: list[Adapter] = []
        self.objects: dict[str, Any] = {}
        self.streams: list[DataStream] = []
        self.shards: dict[str, Shard] = {}
        self.habits = Habits()
        self.common = ObjectShard(COMMON, tuple(range(world_size)))
        self.capsule = ObjectShard(f"capsule@{rank}", (rank,))
        self._start = b""

    def register(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], objects: dict[str, Any]) -> None:
        """Raises RegistrationError if something is registered twice or cannot be protected."""
        if self.shards:
            raise RegistrationError("register() after the first step; register everything before recovery.steps()")
        if any(m is model for m in self._models):
            raise RegistrationError(f"this model ({type(model).__name__}) is registered already")
        for optimizer in optimizers:
            if any(o is optimizer for o in self._optimizers):
                raise RegistrationError(f"this optimizer ({type(optimizer).__name__}) is registered already")
        self._check_objects(objects)
        self.adapters.append(self._adapter_for(model, optimizers))
        self._models.append(model)
        self._optimizers += optimizers
        self.objects.update(objects)

    def register_adapter(self, adapter: Adapter, objects: dict[str, Any]) -> None:
        """For frameworks that bring their own adapter."""
        self._check_objects(objects)
        self.adapters.append(adapter)
        self.objects.update(objects)

    def _check_objects(self, objects: dict[str, Any]) -> None:
        for name, thing in objects.items():
            if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
                raise RegistrationError(
                    f"{name}={type(thing).__name__}: an object with state_dict() and load_state_dict() is needed"
                )
            for known, other in self.objects.items():
                if other is thing or known == name:
                    raise RegistrationError(f"{name!r} is registered already (as {known!r})")

    def close(self) -> None:
        """Fix the set of shards. Raises RegistrationError if nothing, or a name twice, was registered."""
        if not self.adapters:
            raise RegistrationError(
                "no model is registered: call recovery.register(model=..., optimizer=...) before recovery.steps()"
            )
        for adapter in self.adapters:
            for shard in adapter.shards():
                if shard.name in self.shards:
                    raise RegistrationError(f"two registered models both have a shard {shard.name!r}")
                self.shards[shard.name] = shard
        for objects in (self.common, self.capsule):
            self.shards[objects.name] = objects

    def unique_shards(self) -> list[Shard]:
        """Shards of tensors that no other rank holds."""
        mine = (self.rank,)
        return [s for s in self.shards.values() if s.holders == mine and s is not self.capsule]

    def tensor_shards(self) -> list[Shard]:
        return [s for s in self.shards.values() if not isinstance(s, ObjectShard)]

    def checkpoint_format(self) -> CheckpointFormat | None:
        """The framework's own format for fallback checkpoints; None for the core's."""
        return self.adapters[0].checkpoint_format() if len(self.adapters) == 1 else None

    # -- plain state ------------------------------------------------------------------------------

    def capture_common(self) -> bytes:
        """State that is equal on every rank at a step boundary: schedulers, scaler, extra objects, hyper-parameters."""
        return codec.dumps(
            {
                "objects": {name: thing.state_dict() for name, thing in self.objects.items()},
                "adapters": [a.capture_common() for a in self.adapters],
                "habits": asdict(self.habits),
            }
        )

    def restore_common(self, data: bytes) -> None:
        state = codec.loads(data)
        for adapter, part in zip(self.adapters, state["adapters"], strict=True):
            adapter.restore_common(part)
        self.habits = Habits(**state["habits"])
        for name, thing in self.objects.items():
            thing.load_state_dict(state["objects"][name])

    def capture_capsule(self, rng: RngState) -> bytes:
        """State of this rank alone: random number streams (``rng``, as they stand now), data position, rank-only
        framework state."""
        return codec.dumps(
            {
                "rng": rng.plain(),
                "data": [s.capture() for s in self.streams],
                "adapters": [a.capture_rank() for a in self.adapters],
            }
        )

    def remember_start(self) -> None:
        """Now, before the first step, this rank's own state is what the script has made it."""
        self._start = self.capture_capsule(RngState.now())

    def begin_anew(self) -> None:
        """Bring this rank's own state back to the script's start."""
        self.restore_capsule(self._start, 0, fresh=True)

    def mark_data(self, version: int) -> None:
        """The data fetched so far belongs to steps before ``version``."""
        for stream in self.streams:
            stream.commit(version)

    def restore_capsule(self, data: bytes, version: int, *, fresh: bool) -> None:
        """Adopt a capsule. ``fresh``: this process is a replacement, its data sources stand at their beginning."""
        state = codec.loads(data)
        for stream, part in zip(self.streams, state["data"], strict=True):
            if fresh:
                stream.restore(part)
                stream.commit(version)
            else:
                stream.rollback(version)
        for adapter, part in zip(self.adapters, state["adapters"], strict=True):
            adapter.restore_rank(part)
        restore_rng(state["rng"])  # last: skipping data consumes random numbers
