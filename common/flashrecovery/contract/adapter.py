"""The adapter contract: what the recovery core needs to know about a framework for a plain recovery.

An adapter says which *shards* this rank has, when a step seals, mutates and ends, how half-finished state is
reset, and what rank-only state belongs to the *rank-local state*. Everything else (tags, planning, interrupting,
regrouping, transfers, digests, data rollback) is the core's.

The moments of a step, in order, as an adapter reports them through :class:`StepHooks`::

    begin (core)  forward ...  sealed()  synchronising()  gradient sync  mutating()  optimizer  launched()  mutated()
    commit (core)

``sealed`` and ``synchronising`` must come before this rank's *last* contribution to the gradient synchronisation:
a rank that leaves that synchronisation then knows that every rank has sealed, and has its copies. That is the barrier
before the optimizer step of FlashRecovery section III-E, merged with the synchronisation that training does anyway.
``synchronising`` waits for the copies of the version before, which are made beside the step: the later it comes, the
better they are hidden. With several micro-batches it comes in the last one.

Features that only some jobs need have separate classes:
:class:`~flashrecovery.contract.elastic_adapter.ElasticAdapter`,
:class:`~flashrecovery.contract.relayout_adapter.RelayoutAdapter`,
:class:`~flashrecovery.contract.loop_adapter.LoopAdapter`. The core asks in :mod:`flashrecovery.contract.roles`, and
nowhere else, which of them an adapter is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec, TensorSpec

__all__ = ["Adapter", "CheckpointFormat", "InspectableAdapter", "Shard", "ShardSpec", "StepHooks", "TensorSpec"]


class StepHooks(Protocol):
    """What the core gives to an adapter to report the moments of a step. All are idempotent within a step."""

    def sealed(self, *, recheck: bool = False) -> None:
        """Forward is over: the rank-only state of version i+1 is sealed early. May come several times; the last counts.
        ``recheck``: no forward pass since the last call, so only random numbers and data can have moved."""

    def evaluated(self) -> None:
        """A forward pass without gradients is over, in a step or between two."""

    def synchronising(self) -> None:
        """This rank's last contribution to the gradient synchronisation may follow. Returns when the copies of
        version i are complete. May come several times; the first counts."""

    def mutating(self, by: Optimizer | None = None) -> None:
        """The first mutation follows, and what has been queued on the device before it synchronises the gradients.
        Raises StepInterrupted if the step was stopped. ``by``: only this optimizer changes the state until
        :meth:`launched` is called."""

    def launched(self) -> None:
        """The step of the optimizer that :meth:`mutating` was given has been launched. Raises StepInterrupted if the
        step was stopped before the gradients were whole; then nothing has been changed."""

    def mutated(self) -> None:
        """All parameters and optimizer states of this rank now have version i+1."""


class Adapter(ABC):
    """Maps one framework's state and step onto the core. One instance per registered model.

    These nine methods are all that a plain recovery needs. Four are required. The others have nothing to do where all
    state is in shards.
    """

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
        Otherwise the core adds a barrier before the optimizer step, and also where shards differ between the
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
        """Rank-only state that belongs to the rank-local state (e.g. persistent buffers that differ between ranks)."""
        return {}

    def restore_rank(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Adopt what ``capture_rank`` returned on this rank."""

    def local_state_mark(self) -> Any:
        """Compared between a step's seal, its mutation and the next yield: another value says that ``capture_rank``
        would return something else by now. Steps that change it after their mutation need an own pre-step copy
        on every rank. Must be cheap."""
        return None


class InspectableAdapter(Adapter):
    """Lets the core look into its framework. All methods have a default.

    The core then knows which objects of the script are protected and which changes its marks do not show. So it warns
    and copies less. Faults can be injected into the framework's phases, and fallback checkpoints can have its format.
    """

    def touch_mark(self) -> Any:
        """Compared between the yield of a step and its mutation or its stop: another value says that tensors of the
        shards have been changed before ``mutating``. Such a step must have its pre-step copy from the beginning."""
        return None

    def look_closely(self, closely: bool) -> None:
        """A step begins. ``closely``: in it, :meth:`local_state_mark` may take its time, and has to learn what of the
        rank-only state changes in a way that it does not see else."""

    def silent(self) -> list[str]:
        """Names of what has been learned like that; each of them is looked at closely in every step."""
        return []

    def adopt_silent(self, names: Collection[str]) -> None:
        """Other ranks have learned ``names``, some of which may not exist here."""

    def rank_bytes(self) -> Mapping[str, int]:
        """The bytes of what makes the newest ``capture_rank`` large, by name."""
        return {}

    def moved_buffers(self) -> Sequence[str]:
        """Names of buffers whose content is not what it was at the start; where they are each rank's own, a job cannot
        change its size."""
        return ()

    def known(self) -> Sequence[object]:
        """The script's objects that this adapter protects: modules, optimizers, schedulers."""
        return ()

    def stepped_by_others(self) -> Sequence[object]:
        """Optimizers that a registered one steps by itself, with whose state theirs is kept."""
        return ()

    def not_brought_back(self, known: Collection[int]) -> Sequence[str]:
        """What the objects that it protects have in themselves, may change, and cannot be read: where it is and what
        it is, for a notice. ``known``: identities of the tensors of all registered models."""
        return ()

    def checkpoint_format(self) -> CheckpointFormat | None:
        """The framework's own format; None: the core's. Only asked where this is the job's only adapter."""
        return None

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        """For fault injection: phase name -> function that arms a one-shot callback at that phase of this step
        (phases ``forward``, ``backward``, ``optimizer``, ``param-gather`` as far as the framework has them)."""
        return {}
