"""In which order ranks whose GPUs read each other's memory let go of it, and how long each waits for the others. Pure.

A process that ends takes its GPU's memory away from kernels on other GPUs that read it, and an abort amid a transfer
has cost whole nodes (public reports: ai2cm/ace#1398, #1425, #1438). So, of a node's ranks with NCCL communicators:

1. each launches nothing any more (STILL);
2. its kernels drain, or are found to wait for a peer: they have not ended for :data:`TRANSFER_S` (QUIET);
3. one whose kernels have drained aborts at once; one whose kernels wait does when all others are quiet;
4. a process is killed only when all others have aborted, and it itself.

The agent sees in its page how far each one is (:mod:`flashrecovery.agent.processes.quiet_fence`). Each wait has a
bound: what does not answer (a hang, a process that is stopped) is passed over. Without NCCL nothing of this waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

TRANSFER_S = 0.1
"""A collective that all its ranks have launched has ended by then, counted from when a rank launches no more."""
AGREE_S = 0.5
"""So long a rank whose kernels wait lets the others become quiet before it aborts all the same."""
ANSWER_S = 1.5
"""A process that is to be killed has so long to abort; NCCL's own threads look every 0.5 s whether they should."""
FENCE_S = 2.0
"""In all; then it is killed, whatever the others do. With ``timeouts.shutdown_grace_s`` a job ends within 5 s."""


class Communicators(IntEnum):
    """How far a process is with its NCCL communicators."""

    NONE = 0
    """It has none, or has aborted all of them."""
    OPEN = 1
    STILL = 2
    """It launches nothing any more."""
    QUIET = 3
    """Its kernels have drained, or only wait."""


@dataclass(frozen=True, slots=True)
class NodeRank:
    """One rank of a node.

    Attributes:
        generation: in which its communicators were made; -1: it has never had any.
        stopped: a signal has stopped it: it launches nothing, and cannot answer.
    """

    state: Communicators
    generation: int = -1
    stopped: bool = False


def may_abort(others: Iterable[NodeRank], waited_s: float) -> bool:
    """Whether a rank whose kernels wait may abort. ``waited_s``: since it is quiet."""
    unquiet = (Communicators.OPEN, Communicators.STILL)
    return waited_s >= AGREE_S or not any(one.state in unquiet and not one.stopped for one in others)


def may_kill(victim: NodeRank, others: Iterable[NodeRank], waited_s: float) -> bool:
    """Whether a living process may be killed. ``others``: also those that are killed with it; one whose
    communicators are of a later generation shares none with it. ``waited_s``: since it was told to abort."""
    if waited_s >= FENCE_S:
        return True
    shared = (one for one in others if one.generation <= victim.generation and not one.stopped)
    if any(one.state is not Communicators.NONE for one in shared):
        return False
    return victim.state is Communicators.NONE or victim.stopped or waited_s >= ANSWER_S
