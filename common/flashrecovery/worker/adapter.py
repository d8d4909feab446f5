"""The adapter contract: all that the recovery core needs to know about a framework.

An adapter says which *shards* this rank has, when a step seals, mutates and ends, how half-finished state is
reset, and what rank-only state belongs to the *capsule*. Everything else (tags, planning, interrupting,
regrouping, transfers, digests, data rollback) is the core's.

The moments of a step, in order, as an adapter reports them through :class:`StepHooks`::

    begin (core)  forward ...  sealed()  backward, gradient sync  mutating()  optimizer  mutated()  commit (core)

``sealed`` must come before this rank's *last* contribution to the gradient synchronisation: whoever leaves that
synchronisation then knows that every rank has sealed. That is the barrier before the optimizer step of
FlashRecovery section III-E, merged with the synchronisation that training does anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a shard."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        numel = 1
        for n in self.shape:
            numel *= n
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class ShardSpec:
    """What a shard consists of at one version: its tensors by key, and small plain values by key.

    It travels in front of the bytes, so that a replacement whose optimizer state is still empty (state is created
    lazily by the first step) can make room for it.
    """

    tensors: Mapping[str, TensorSpec]
    values: Mapping[str, Any] = field(default_factory=dict)


class Shard(ABC):
    """One named piece of this rank's state, living in tensors that the framework owns.

    Equal names on two ranks mean equal bits at equal versions.

    Attributes:
        name: unique within the rank; contains the coordinate when the piece is unique (``...#fsdp=1/4``).
        holders: all global ranks, this one included and ascending, that hold an equal piece.
    """

    name: str
    holders: tuple[int, ...]

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by key, plain local tensors (no DTensor), in a fixed order; never a copy."""

    def values(self) -> dict[str, Any]:
        """Small plain values by key that belong to this shard (not to the capsule)."""
        return {}

    @abstractmethod
    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """Give the live state the structure of ``spec`` (create missing tensors, drop surplus ones, set the
        values) and return the live tensors, whose content the caller overwrites."""

    def spec(self) -> ShardSpec:
        return ShardSpec({k: TensorSpec(tuple(t.shape), t.dtype) for k, t in self.tensors().items()}, self.values())


class CheckpointFormat(ABC):
    """A framework's own checkpoint format, in which the fallback checkpoints are then written, for its users' tools.

    Attributes:
        name: of the format; a checkpoint is only loaded by the format that wrote it.
    """

    name: str

    def layout(self) -> str:
        """How the state is divided among the ranks, in words, equal on all of them. What ranks of another layout have
        written is loaded, too, without what is a rank's own (random numbers, data position). "": it is not."""
        return ""

    @abstractmethod
    def capture(
        self, directory: Path, tag: str, copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[Path], None]:
        """This rank's part of the live state, at a step boundary, without communication.

        Args:
            directory, tag: the checkpoint will be found in ``directory/tag``.
            copy: gives the copy in host memory of a live tensor.

        Returns:
            What writes the part into a directory, which will be moved there when all ranks have done so. Another thread
            calls it. What it has written is durable when it returns. DCP checkpoints in subdirectories
            ``<name>-<rank>`` (not ``part-``) become parts of the one in the directory.
        """

    @abstractmethod
    def load(self, directory: Path, tag: str) -> None:
        """Make ``directory/tag`` the live state. All ranks call it at the same time, with groups that work.

        Raises:
            RestoreError: it cannot be read.
        """


class StepHooks(Protocol):
    """What the core gives to an adapter to report the moments of a step. All are idempotent within a step."""

    def sealed(self, *, recheck: bool = False) -> None:
        """Forward is over: the rank-only state of version i+1 is sealed early. May come several times; the last counts.
        ``recheck``: no forward pass since the last call, so only random numbers and data can have moved."""

    def mutating(self) -> None:
        """Gradients are synchronised; the first mutation follows. Raises StepInterrupted if the step was stopped."""

    def mutated(self) -> None:
        """All parameters and optimizer states of this rank now have version i+1."""


class Adapter(ABC):
    """Maps one framework's state and step onto the core. One instance per registered model."""

    name: str

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

    def touch_mark(self) -> Any:
        """Compared between the hand-out of a step and its mutation or its stop: another value says that tensors of the
        shards have been changed before ``mutating``. Such a step must have its pre-step copy from the beginning."""
        return None

    def restore_rank(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Adopt what ``capture_rank`` returned on this rank."""

    def checkpoint_format(self) -> CheckpointFormat | None:
        """The framework's own format; None: the core's. Only asked where this is the job's only adapter."""
        return None

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        """For fault injection: phase name -> function that arms a one-shot callback at that phase of this step
        (phases ``forward``, ``backward``, ``optimizer``, ``param-gather`` as far as the framework has them)."""
        return {}
