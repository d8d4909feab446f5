"""What there is to show of a job, as plain data. Durations are seconds, ``*_at`` Unix seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass(frozen=True)
class NodeFacts:
    """One node. ``heartbeat_age_s``: since the last message of its agent; ``suspect``: what a device plugin has said of
    it."""

    node_rank: int
    name: str
    host: str
    ranks: tuple[int, ...]
    heartbeat_age_s: float
    suspect: str = ""


@dataclass(frozen=True)
class RecoveryFacts:
    """The recovery in progress. ``phases`` are over; ``phase`` has lasted ``phase_s``, all of it ``seconds``."""

    generation: int
    victims: tuple[int, ...]
    cause: str
    seconds: float
    phases: Mapping[str, float]
    phase: str
    phase_s: float


@dataclass(frozen=True)
class CheckpointFacts:
    """The newest complete fallback checkpoint. ``saved_at`` is None for one that an earlier launch has saved."""

    version: int
    saved_at: float | None


@dataclass(frozen=True)
class FailureFacts:
    """One detected failure."""

    rank: int
    kind: str
    evidence: str
    step: int
    iteration: int = -1


@dataclass(frozen=True)
class StartFacts:
    """A line of the script, see :class:`~flashrecovery.events.StartLine`."""

    where: str
    text: str
    seconds: float


@dataclass(frozen=True)
class RestoreSpeed:
    """How fast the rank that got the most state in a recovery got it, and what bounds that. In bytes a second.

    Attributes:
        copy_speed: one thread of the slowest host involved copies memory; 0.0: not known.
        link_speed: the slowest network link involved is made for; 0.0: not known, or all was on one host.
    """

    speed: float
    copy_speed: float
    link_speed: float

    @property
    def bound(self) -> float:
        """The slower of the two; 0.0: neither is known."""
        return min((s for s in (self.copy_speed, self.link_speed) if s), default=0.0)

    def as_dict(self) -> dict[str, float | str]:
        """For JSON: the facts, what bounds it, and which of the two that is."""
        return dataclasses.asdict(self) | {"bound": self.bound, "bounded_by": self.bounded_by}

    @property
    def bounded_by(self) -> str:
        """What the bound is: "link", "copy", or "" if neither is known."""
        return "" if not self.bound else "link" if self.bound == self.link_speed else "copy"


@dataclass(frozen=True)
class PastRecovery:
    """A recovery that is over. ``finished`` is False if the job has ended in the middle of it. ``start``: lines of the
    script in which a replacement spent most time before its first step."""

    finished_at: float
    finished: bool
    generation: int
    victims: tuple[int, ...]
    cause: str
    resume_step: int
    bytes: int
    phases: Mapping[str, float]
    total_s: float
    reason: str
    fallback: bool
    failures: tuple[FailureFacts, ...]
    start: tuple[StartFacts, ...] = ()
    iteration: int = -1
    restore: RestoreSpeed | None = None


@dataclass(frozen=True)
class Durations:
    """A histogram: ``counts[i]`` durations of at most ``tally.BOUNDS_S[i]`` (not cumulative; the last has no bound)."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True)
class Counts:
    """What the events of this launch add up to; counters begin at 0 with the process."""

    failures: Mapping[str, int] = field(default_factory=dict)
    recoveries: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, Durations] = field(default_factory=dict)
    recovery: Durations | None = None
    bytes: int = 0
    fallbacks: int = 0
    checkpoints: int = 0
    faults_injected: int = 0
    checkpoint_saved_at: float | None = None
    latest: tuple[PastRecovery, ...] = ()


@dataclass(frozen=True)
class JobFacts:
    """The controller's view. ``status`` is what its Status rpc answers; it is not changed any more."""

    status: pb.JobStatus
    nodes: tuple[NodeFacts, ...]
    recovery: RecoveryFacts | None
    checkpoint: CheckpointFacts | None
    counts: Counts


@dataclass(frozen=True)
class WorkerFacts:
    """One living worker as its own page says, at this moment. ``progress_age_s`` is None before any progress;
    ``overhead_s``: what recovery takes of a step, 0: unknown; ``kept``: the newest version of which it keeps a whole
    copy for another rank (-1: none), for ``kept_age_s``."""

    rank: int
    pid: int
    generation: int
    tag: int
    committed: int
    progress: int
    progress_age_s: float | None
    step_s: float
    overhead_s: float = 0.0
    kept: int = -1
    kept_age_s: float = 0.0


@dataclass(frozen=True)
class NodeWorkers:
    """The agent's view of its own node."""

    node: str
    node_rank: int
    workers: tuple[WorkerFacts, ...]
    standby_ready: int
    standby_starting: int


ControllerFacts = Callable[[], JobFacts]
"""Called on the event loop; what it returns is formatted in another thread."""

AgentFacts = Callable[[], NodeWorkers]
"""As :data:`ControllerFacts`."""
