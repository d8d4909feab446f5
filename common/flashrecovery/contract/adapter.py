"""The adapter contract: all that the recovery core needs to know about a framework.

An adapter says which *shards* this rank has, when a step seals, mutates and ends, how half-finished state is
reset, and what rank-only state belongs to the *capsule*. Everything else (tags, planning, interrupting,
regrouping, transfers, digests, data rollback) is the core's.

The moments of a step, in order, as an adapter reports them through :class:`StepHooks`::

    begin (core)  forward ...  sealed()  synchronising()  gradient sync  mutating()  optimizer  mutated()  commit (core)

``sealed`` and ``synchronising`` must come before this rank's *last* contribution to the gradient synchronisation:
a rank that leaves that synchronisation then knows that every rank has sealed, and has its copies. That is the barrier
before the optimizer step of FlashRecovery section III-E, merged with the synchronisation that training does anyway.
``synchronising`` waits for the copies of the version before, which are made beside the step: the later it comes, the
better they are hidden. With several micro-batches it comes in the last one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from flashrecovery.contract.division import (
    DividedTensor,
    Division,
    DivisionPlace,
    LocalBox,
    Prepared,
    ReadyTensors,
    RuledDivision,
)
from flashrecovery.contract.logical_state import LogicalState
from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec, TensorSpec

__all__ = [
    "Adapter",
    "CheckpointFormat",
    "DividedTensor",
    "Division",
    "DivisionPlace",
    "LocalBox",
    "LogicalState",
    "Prepared",
    "ReadyTensors",
    "RuledDivision",
    "Shard",
    "ShardSpec",
    "StepHooks",
    "TensorSpec",
]


class StepHooks(Protocol):
    """What the core gives to an adapter to report the moments of a step. All are idempotent within a step."""

    def sealed(self, *, recheck: bool = False) -> None:
        """Forward is over: the rank-only state of version i+1 is sealed early. May come several times; the last counts.
        ``recheck``: no forward pass since the last call, so only random numbers and data can have moved."""

    def synchronising(self) -> None:
        """This rank's last contribution to the gradient synchronisation may follow. Returns when the copies of
        version i are complete. May come several times; the first counts."""

    def mutating(self) -> None:
        """Gradients are synchronised; the first mutation follows. Raises StepInterrupted if the step was stopped."""

    def mutated(self) -> None:
        """All parameters and optimizer states of this rank now have version i+1."""


class Adapter(ABC):
    """Maps one framework's state and step onto the core. One instance per registered model."""

    name: str
    whole_framework = False
    """The framework has its own optimizers, schedulers and scalers, and the adapter protects whichever they are."""

    @abstractmethod
    def watch(self, hooks: StepHooks) -> None:
        """Install the framework's hooks that report the moments of a step. Called once, before the first step."""

    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """The shards of this rank. The set and the names are fixed after the first call."""

    @abstractmethod
    def sync_spans_world(self) -> bool:
        """True if leaving the last gradient synchronisation implies that every rank of the world has sealed.
        Otherwise the core adds a barrier of its own before the optimizer step, and also where shards differ between the
        ranks and no rank keeps its pre-step state."""

    @abstractmethod
    def reset(self) -> None:
        """Drop everything half-finished after an interrupted step: gradients, in-flight handles, buckets,
        unsharded parameters, hooks' flags. Runs while groups are detached (collectives are local no-ops).
        Must be idempotent, and leave survivors and a fresh replacement in the same state."""

    def capture_common(self) -> dict[str, Any]:
        """Plain state of the framework at a step boundary that is equal on every rank, e.g. DDP's bucket layout."""
        return {}

    def restore_common(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Adopt what ``capture_common`` returned on some rank. Called after ``reset``; must not communicate."""

    def capture_rank(self) -> dict[str, Any]:
        """Rank-only state that belongs to the capsule (e.g. persistent buffers that differ between ranks)."""
        return {}

    def capsule_mark(self) -> Any:
        """Compared between a step's seal, its mutation and the next hand-out: another value says that ``capture_rank``
        would return something else by now. Steps that change it after their mutation need an own pre-step copy
        on every rank. Must be cheap."""
        return None

    def look_closely(self, closely: bool) -> None:  # noqa: B027 - optional
        """A step begins. ``closely``: in it, :meth:`capsule_mark` may take its time, and has to learn what of the
        rank-only state changes in a way that it does not see else."""

    def silent(self) -> list[str]:
        """Names of what has been learned like that; each of them is looked at closely in every step."""
        return []

    def adopt_silent(self, names: Collection[str]) -> None:  # noqa: B027 - optional
        """Other ranks have learned ``names``, some of which may not exist here."""

    def rank_bytes(self) -> Mapping[str, int]:
        """The bytes of what makes the newest ``capture_rank`` large, by name."""
        return {}

    def moved_buffers(self) -> Sequence[str]:
        """Names of buffers whose content is not what it was at the start; where they are each rank's own, a job cannot
        change its size."""
        return ()

    def tied_to_size(self) -> Sequence[str]:
        """What of this rank depends on the number of ranks, and cannot follow when that changes: by name, and what is
        allowed instead. Asked in an elastic job, before the first step and at the end of each one."""
        return (f"{self.name}: its schedules and partitions",) if self.whole_framework else ()

    def only_as_launched(self, most: int) -> str:
        """What of this rank can follow when replicas leave and come back, but not when there are more of them than at
        the launch, up to ``most``, or has never been tried so: by name; "" if there is nothing. Asked in a job that may
        grow so far, before the first step."""
        return ""

    def makes_any_call_again(self) -> bool:
        """Whether the framework's own calls can be made again as they were also where they lie far back, at a fallback
        checkpoint. Asked where steps are such calls."""
        return False

    def resized(self) -> None:  # noqa: B027 - optional
        """The process groups have other members now (some have left): bring everything that depends on their number, or
        on this rank's number in them, to what it would be in a job that was started so. Called after :meth:`reset`,
        while the groups are detached; plain state follows with :meth:`restore_common`, and may be of before."""

    def replicas(self) -> dist.ProcessGroup | None:
        """The data-parallel group: of the ranks that stand at this rank's place in every replica of the model, in the
        order of the launch. Its rank and size are the number of this rank's replica, and how many there are. None:
        each rank is a replica by itself, or this adapter cannot tell (another one may).

        Replicas leave an elastic job, and come into it, as a whole. Which ranks are together in one follows from this
        group where the numbers of any two of its ranks that follow on each other are equally far apart: then replicas
        are counted like the dimension of a mesh (:mod:`flashrecovery.plan.elastic.replicas`). Other numberings are
        refused by name, and so are ranks that do not say the same. Asked when the script asks for its first step, in
        the size of the launch. The group itself is resized by the core."""
        return None

    def division(self) -> Division | None:
        """How the state is divided among the ranks, so that the job can change its size; None: all of it is on all
        ranks. Always the same object. Raises UnsupportedError, by name, if it is divided in a way that cannot be
        changed."""
        return None

    def logical(self) -> LogicalState | None:
        """What the state is in words that hold for every parallel layout, so that the job can be laid out in another
        way; None: that is not known."""
        return None

    def in_any_layout(self) -> bool:
        """Whether this adapter has no shards, and what :meth:`capture_common` gives is all that a process of another
        parallel layout needs of it."""
        return False

    def touch_mark(self) -> Any:
        """Compared between the hand-out of a step and its mutation or its stop: another value says that tensors of the
        shards have been changed before ``mutating``. Such a step must have its pre-step copy from the beginning."""
        return None

    def restore_rank(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Adopt what ``capture_rank`` returned on this rank."""

    def known(self) -> Sequence[object]:
        """The script's objects that this adapter protects: modules, optimizers, schedulers."""
        return ()

    def stepped_by_others(self) -> Sequence[object]:
        """Optimizers that a registered one steps by itself, with whose state theirs is kept."""
        return ()

    def checkpoint_format(self) -> CheckpointFormat | None:
        """The framework's own format; None: the core's. Only asked where this is the job's only adapter."""
        return None

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        """For fault injection: phase name -> function that arms a one-shot callback at that phase of this step
        (phases ``forward``, ``backward``, ``optimizer``, ``param-gather`` as far as the framework has them)."""
        return {}
