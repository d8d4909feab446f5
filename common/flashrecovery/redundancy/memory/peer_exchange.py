"""One exchange with peers for each version, beside training: what neighbour copies and parity have in common.

A version is first copied to this rank's own memory, then its part of it is exchanged, both in a separate thread.
``wait`` comes before this rank's last contribution to the gradient synchronisation. A rank that leaves that
synchronisation knows that every rank has passed ``wait``, so that what was exchanged of the version is whole everywhere
before anybody changes its state to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from flashrecovery.errors import RestoreError, StepInterrupted
from flashrecovery.redundancy.memory.background import Background
from flashrecovery.redundancy.memory.flat_buffer import Beside, Keep, Slot
from flashrecovery.redundancy.memory.own_copy import ChangeCounter, PreStepCopy, StructureWatch
from flashrecovery.redundancy.memory.pacing import Network, Pacing
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import ShardSpec, TensorSpec

MESSAGE_BYTES = 64 << 20
_LOOK_S = 0.005
STREAMS = 4
"""TCP connections for the content: one alone does not fill a fast network. A message after another goes to the next."""

Talk = Callable[[int, Slot], None]
"""The exchange of one version with the peers, given this rank's own copy of it (whose version is another one if the
script has changed its state meanwhile). In the thread of the exchange."""


@dataclass(frozen=True)
class CopyContext:
    """What the neighbour copies or the parity of one rank need of the job around them.

    Attributes:
        group: process group of all ranks that nothing else uses. Its handle stays valid over recoveries.
        generation: the one in which they begin.
        look, same: see :class:`.own_copy.PreStepCopy`. Nothing is kept of a version that the script changes during the
            copy.
        network: holds the content back while training communicates; without it everything goes as fast as it can.
        keep: lets copies outlive this process, and begin with what the process before has left.
        on_kept: gets the newest version that is whole for another rank, -1 for none, whenever it may have changed; in
            any thread.
        on_risk: gets a text about a protection that has become worse; in any thread.
    """

    group: dist.ProcessGroup
    generation: int = 0
    look: ChangeCounter | None = None
    same: StructureWatch | None = None
    network: Network | None = None
    keep: Keep | None = None
    on_kept: Callable[[int], None] = lambda version: None
    on_risk: Callable[[str], None] = lambda text: None


class Exchange:
    """Runs one exchange after another. All methods but those of the last section belong to the training thread."""

    def __init__(self, context: CopyContext, undo: PreStepCopy, name: str) -> None:
        self.undo = undo
        self.generation = context.generation
        self.pacing = None if context.network is None else Pacing(context.network)
        self._group = context.group
        self._name = name
        self._background = Background(f"flashrecovery-{name}")
        self._halted = False

    def commit(self, version: int, beside: Beside, talk: Talk) -> None:
        """The live state is ``version`` and does not change before :meth:`before_mutation`. Raises what the previous
        exchange raised."""
        self.wait()
        if self.pacing is not None:
            self.pacing.committed()
        capture = self.undo.capture(beside)
        self.undo.begin()
        self._background.submit(lambda: talk(version, self.undo.copy(version, capture)))

    def before_mutation(self) -> None:
        """Returns when the live tensors may be changed: they have been copied."""
        self.undo.before_mutation()
        if self._background.error is not None:
            raise self._background.error

    def wait(self) -> None:
        """Returns when the exchange of the last commit is complete.

        Raises what the exchange has raised (a peer is gone), and StepInterrupted from :meth:`halt` to
        :meth:`reset`.
        """
        if self.pacing is not None:
            self.pacing.needed()
        with self.undo.between.resting():
            self._background.wait()
        if self._background.error is not None:
            raise self._background.error
        self.check()

    def settle(self, given_up: Callable[[], bool]) -> None:
        """Returns when the exchange of the last commit has ended, well or not, or ``given_up()``."""
        if self.pacing is not None:
            self.pacing.needed()
        with self.undo.between.resting():
            while not self._background.wait(_LOOK_S) and not given_up():
                pass

    @property
    def error(self) -> BaseException | None:
        """What ended the last exchange before it was complete."""
        return self._background.error

    def halt(self, timeout_s: float) -> None:
        """After the groups have been abandoned and *before* they are detached: end the exchange under way.

        Raises RestoreError if it has not ended within ``timeout_s``; its operations might then still write into a
        buffer.
        """
        self._halted = True
        with self.undo.between.resting():
            ended = self._background.wait(timeout_s)
        if not ended:
            raise RestoreError(f"the exchange of {self._name} copies did not end within {timeout_s} s")

    def reset(self, generation: int, version: int) -> None:
        """All ranks are at ``version`` in a new generation: newer own copies are void."""
        self.halt(0.0)
        self.generation = generation
        self._halted = False
        self._background.clear_error()
        self.undo.reset(version)

    def close(self, timeout_s: float) -> bool:
        """The job is over, on every rank: let the last exchange end, then end the thread and free the memory. False if
        that takes longer than ``timeout_s``."""
        # Not halted first: the peers would wait in vain for the rest of this rank's last copy.
        with self.undo.between.resting():
            ended = self._background.wait(timeout_s)
            self._halted = True
            ended = self._background.close(timeout_s if ended else 0.0) and ended
        self.undo.close()
        return ended

    # -- messages, in the thread of the exchange ---------------------------------------------------

    def content_tag(self, tag: int, number: int) -> int:
        """The tag of a message that holds content, the ``number``-th of its kind; ``tag`` where nothing is paced."""
        return tag if self.pacing is None else self.pacing.first_tag + number % STREAMS

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work | None:
        """None if there is nothing to send."""
        self.check()
        return self._group.send([tensor], rank, tag) if tensor.numel() else None

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work | None:
        """None if there is nothing to receive."""
        self.check()
        return self._group.recv([tensor], rank, tag) if tensor.numel() else None

    def wait_for(self, work: dist.Work | None) -> None:
        """Raises StepInterrupted if the exchange has been cut off."""
        if work is not None:
            work.wait()
        # Without this check an operation on a group that is already detached would pass for a received copy.
        self.check()

    def check(self) -> None:
        """Raises StepInterrupted from :meth:`halt` to :meth:`reset`."""
        if self._halted:
            raise StepInterrupted


@dataclass(frozen=True)
class CopyHolding:
    """One shard of another rank that this rank holds whole at ``version``. ``nbytes`` of payload. ``early``: a
    rank-local state that is not final."""

    shard: str
    version: int
    nbytes: int
    early: bool = False


class PeerCopies(Protocol):
    """What other ranks hold for a rank: copies or parity of some of its shards, and its rank-local state."""

    undo: PreStepCopy

    def commit(self, version: int, local_state: bytes | None, *, early: bool = False, beside: Beside = ...) -> None:
        """The live state is ``version``: begin the exchange."""

    def before_mutation(self) -> None:
        """Returns when the live tensors may be changed."""

    def wait(self) -> None:
        """Returns when the exchange of the last commit is complete."""

    def settle(self, given_up: Callable[[], bool]) -> None:
        """Returns when the exchange has ended, or ``given_up()``."""

    def halt(self, timeout_s: float) -> None:
        """End the exchange under way."""

    def reset(self, generation: int, version: int) -> None:
        """All ranks are at ``version`` in a new generation."""

    def holdings(self) -> Sequence[CopyHolding]:
        """What this rank holds whole for others, and can be taken as it is."""

    def source(self, shard: str, version: int) -> ShardSource:
        """What is held in the form of a transfer's source. Raises RestoreError if it is not held."""

    def describe(self) -> str:
        """One line: memory cost, bytes a step, what is survived."""

    def close(self, timeout_s: float = ...) -> bool:
        """The job is over, on every rank."""


def plain_source(shard: str, plain: bytes) -> ShardSource:
    """Plain bytes in the form of a transfer's source."""
    data = byte_tensor(plain)
    return ShardSource(shard, ShardSpec({"bytes": TensorSpec((len(data),), torch.uint8)}), [data])


def byte_tensor(data: bytes) -> torch.Tensor:
    """uint8, with its own memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
