"""What a run directory says about a job's pace and failures, for ``flashrecovery plan --run``. Pure functions of its
events."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.cli.history import read_history
from flashrecovery.kinds import FailureKind

_DAY_S = 86_400.0
NONE_SEEN = 3.0
"""If something was never seen in t days, there are (with 95 %) at most 3 / t of it a day."""


@dataclass(frozen=True)
class Measured:
    """The measured values of all launches in one run directory. 0: not known.

    Attributes:
        ranks: in the job; ``slots`` of them on a node.
        days: in which the job ran.
        nodes: that held ranks at the launch.
        step_s: of a step; k0_s: by which the newest checkpoint held training up.
        checkpoint_s: until that was on storage.
        recovery_s: median of the recoveries from memory, without the transfer and the step that was done again.
        node_failures, process_failures: how often nodes and processes failed; what was injected on purpose is not
            counted.
        injected: how often something was.
        fallbacks: recoveries that went back to a checkpoint.
    """

    ranks: int = 0
    nodes: int = 0
    slots: int = 0
    days: float = 0.0
    step_s: float = 0.0
    k0_s: float | None = None
    checkpoint_s: float = 0.0
    recovery_s: float = 0.0
    recoveries: int = 0
    fallbacks: int = 0
    node_failures: int = 0
    process_failures: int = 0
    injected: int = 0

    @property
    def node_rate(self) -> float | None:
        """Failures a day of one node; None if none was seen."""
        return self.node_failures / (self.nodes * self.days) if self.node_failures and self.days > 0 else None

    @property
    def process_rate(self) -> float | None:
        """Failures a day of one process; None if none was seen."""
        return self.process_failures / (self.ranks * self.days) if self.process_failures and self.days > 0 else None


def measure(events: Sequence[ev.Event], now: float | None = None) -> Measured:
    """``now``: Unix seconds, if the job still runs: that nothing has happened since the last event counts, too."""
    history = read_history(events)
    saved = [e for e in events if isinstance(e, ev.CheckpointSaved)]
    steps = [e.step_s for e in events if isinstance(e, (ev.CheckpointSaved, ev.JobFinished)) and e.step_s > 0]
    joined = {e.node: e.slots for e in events if isinstance(e, ev.NodeJoined)}
    slots = max(joined.values(), default=0)
    finished = [r for r in history.recoveries if r.finished]
    apart = ("restore", "redo")  # the plan computes these for its own model
    quick = [r.total_s - sum(r.phases.get(name, 0.0) for name in apart) for r in finished if not r.fallback]
    causes = _causes(events)
    return Measured(
        ranks=history.world_size,
        nodes=max(1, -(-history.world_size // slots)) if slots and history.world_size else 1,
        slots=slots,
        days=_running_s(events, now) / _DAY_S,
        step_s=steps[-1] if steps else 0.0,
        k0_s=saved[-1].k0_s if saved and saved[-1].step_s > 0 else None,  # older logs do not say
        checkpoint_s=saved[-1].seconds if saved else 0.0,
        recovery_s=statistics.median(quick) if quick else 0.0,
        recoveries=len(finished),
        fallbacks=sum(1 for r in finished if r.fallback),
        node_failures=causes.count("node"),
        process_failures=causes.count("process"),
        injected=causes.count("injected"),
    )


def _running_s(events: Sequence[ev.Event], now: float | None) -> float:
    """Seconds from the first step of each launch to its end, as far as that is known."""
    total, since, last = 0.0, None, 0.0
    for event in events:
        if isinstance(event, ev.JobStarted):
            if since is not None:  # the launch before it ended without a word
                total += max(0.0, last - since)
            since = event.time
        elif isinstance(event, (ev.JobFinished, ev.JobFailed)) and since is not None:
            total, since = total + event.time - since, None
        if since is not None:
            last = event.time
    if since is not None:
        total += max(last, now or 0.0) - since
    return total


def _causes(events: Sequence[ev.Event]) -> list[str]:
    """The cause of each failure while the job ran: node, process, or injected. What comes of one node's loss, or of one
    recovery's first failure, is one thing."""
    found: list[str] = []
    injected: set[int] = set()
    running, counted = False, -1
    for event in events:
        if isinstance(event, ev.JobStarted):
            running, counted = True, -1
        elif isinstance(event, (ev.JobFinished, ev.JobFailed)):
            running = False
            injected.clear()
        elif isinstance(event, ev.FaultInjected):
            injected.add(event.rank)
        elif not running:
            continue
        elif isinstance(event, ev.NodeLost):
            if event.ranks:  # an idle spare node takes nothing with it
                found.append("injected" if injected.intersection(event.ranks) else "node")
                injected.difference_update(event.ranks)
        elif isinstance(event, ev.FailureDetected) and event.kind not in _WITH_NODES:
            if event.rank in injected:
                injected.discard(event.rank)
                found.append("injected")
                counted = event.generation
            elif event.generation != counted:
                counted = event.generation
                found.append("process")
    return found


_WITH_NODES = (FailureKind.NODE_LOST, FailureKind.CONTROLLER, FailureKind.WARNING)
"""Kinds that say nothing of a process: its node has gone, or was given up."""
