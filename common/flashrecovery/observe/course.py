"""The course of a job: its speed and size over time, its recoveries, and where its time went; the one thing that the
page, the terminal and the report draw. It is made by a live controller, or from what a run directory has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flashrecovery import events as ev
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import NoticeKind
from flashrecovery.observe.goodput import Goodput, LastSeen, Ledger
from flashrecovery.observe.incident import Incident, Incidents
from flashrecovery.observe.timeline import Columns, SeenBy, Series, Timeline, TimelineFile, short
from flashrecovery.runtime.parallel_layout import layout_replicas

LATEST = 200
"""Recoveries that are drawn; all are counted."""
SLOWEST = 8
RATE_S = 30.0
"""A rate is measured over this many seconds."""
_STEPS_A_COLUMN = 4.0
HOUR_S = 3600.0


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RecoveryMark(_Fact):
    """A recovery. Times are seconds: ``at_s`` of the job's clock, when the failure was. ``resume_step`` -1: it is not
    finished. ``failed``: the job has ended in it."""

    at_s: float
    total_s: float
    victims: list[int]
    cause: str
    resume_step: int = -1
    iteration: int = -1
    failed: bool = False


class Idle(_Fact):
    """A time without training, in seconds of the job's clock. ``kind``: launch or down."""

    kind: str
    begin_s: float
    end_s: float


class Slow(_Fact):
    """A rank that works long itself in a step, without waiting. Seconds; 0: not known."""

    rank: int
    own_s: float
    step_s: float


class Size(_Fact):
    """How many data-parallel replicas an elastic job has had from ``at_s`` (of the job's clock) on, first in ``step``:
    of its launch (step -1), or since it has gone on without the ranks ``left`` and with those that ``came``."""

    at_s: float
    replicas: int
    step: int = -1
    left: list[int] = []
    came: list[int] = []


class Coming(_Fact):
    """A rank that is built up beside training to come in. ``here``: it waits for the others; until then, it has
    ``left_s`` seconds."""

    rank: int
    node: str
    here: bool
    left_s: float


class Wait(_Fact):
    """Something that takes long: ``what``, of how many ranks, where the one that ``rank`` names is, and since when."""

    what: str
    seconds: float
    ranks: int = 0
    rank: int = -1
    where: str = ""


class Course(_Fact):
    """See the module.

    Attributes:
        started: Unix seconds of the launch; ``seconds``: since then, by the job's clock.
        state: as the controller says; of an ended job finished, failed, or lost (without a word).
        calls: its steps are calls of a framework's loop. What is counted are its iterations then, but for ``version``.
        goodput: see :meth:`.Goodput.as_dict`.
        recoveries: the newest :data:`LATEST` of ``recovered``, oldest first.
        step_s: of a step now, or when it was seen last; tokens_per_step: of the whole job. 0: not known.
        whole, recent: see :mod:`.timeline`.
        sizes: of the job, oldest first, the newest :data:`LATEST`; one for a job that has kept its size.
        coming: ranks that are on the way into an elastic job.
        slowest: ranks with the most own work, slowest first.
    """

    started: float = 0.0
    seconds: float = 0.0
    state: str = ""
    world_size: int = 0
    version: int = -1
    calls: bool = False
    goodput: dict[str, float | int | None] = {}
    recovered: int = 0
    recoveries: list[RecoveryMark] = []
    idle: list[Idle] = []
    step_s: float = 0.0
    tokens_per_step: int = 0
    whole: Columns = Columns(width_s=1.0)
    recent: Columns = Columns(width_s=1.0)
    sizes: list[Size] = []
    coming: list[Coming] = []
    slowest: list[Slow] = []
    waiting: list[Wait] = []

    @property
    def step_word(self) -> str:
        """What a version is one more of."""
        return "call" if self.calls else "step"

    @property
    def unit(self) -> str:
        """What is counted by the time."""
        return "iteration" if self.calls else "step"

    @property
    def steps_per_s(self) -> float:
        """Steps that were committed in the last :data:`RATE_S` seconds that were looked at, by the seconds that passed:
        with what lies between two steps, and with recoveries. 0: not known."""
        return self._per_second("steps")

    @property
    def tokens_per_s(self) -> float:
        """As :attr:`steps_per_s`, in tokens of the whole job."""
        return self._per_second("tokens")

    def _per_second(self, what: Literal["steps", "tokens"]) -> float:
        columns = self.whole if self.whole.width_s < self.recent.width_s else self.recent
        trained = [i for i, steps in enumerate(columns.steps) if steps]
        if not trained:
            return 0.0
        last = trained[-1] if self.state in ("finished", "failed", "lost") else len(columns.steps) - 1
        count, seconds = 0, 0.0
        for i in range(last, trained[0] - 1, -1):
            count += getattr(columns, what)[i]
            seconds += columns.seconds[i]
            if seconds >= RATE_S:
                break
        return count / seconds if seconds > 0 else 0.0


class Record:
    """What events and samples add up to. Takes events in order."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self.ledger = Ledger({s.controller: _last_seen(s) for s in self.timeline.controllers})
        self.state = "starting"
        self.world_size = 0
        self._of_replicas = False  # sizes are numbers of replicas, which may have several ranks
        self._started: float | None = None
        self._incidents = Incidents()
        self._recoveries: deque[RecoveryMark] = deque(maxlen=LATEST)
        self._recovered = 0
        self._sizes: deque[Size] = deque(maxlen=LATEST)
        self._calls = False

    def take(self, event: ev.Event) -> None:
        """One event."""
        at = self.ledger.take(event)
        if self._started is None:
            self._started = event.time - at
        if isinstance(event, ev.ControllerStarted):
            self.world_size = self.world_size or event.world_size  # one that takes over knows the launch's only
        if isinstance(event, ev.JobStarted):
            self.state = "running"
            self._began(event, at)
        elif isinstance(event, ev.Notice) and event.kind == NoticeKind.STEPS_ARE_CALLS:
            self._calls = True
        elif isinstance(event, ev.JobResized):
            self._resized(event, at)
        elif isinstance(event, ev.JobReplanned):
            replicas = layout_replicas(event.layout) if self._of_replicas else event.ranks
            self._sizes.append(Size(at_s=at, replicas=replicas, step=event.step))
            self.world_size = event.ranks
        elif isinstance(event, (ev.JobFinished, ev.JobFailed)):
            self.state = "finished" if isinstance(event, ev.JobFinished) else "failed"
        elif isinstance(event, ev.ControllerStarted):
            self.state = "starting"
        over = self._incidents.take(event)
        if over is not None:
            self._recovered += over.finished is not None
            self._recoveries.append(_mark(over, at))

    def _began(self, event: ev.JobStarted, at: float) -> None:
        """A launch, which may be another one in the same directory, with more ranks or fewer."""
        self.world_size = event.world_size or self.world_size
        self._of_replicas = self._of_replicas or event.replicas > 0
        replicas = event.replicas or self.world_size
        if not self._sizes or self._sizes[-1].replicas != replicas:
            self._sizes.append(Size(at_s=at if self._sizes else 0.0, replicas=replicas))

    def _resized(self, event: ev.JobResized, at: float) -> None:
        self.world_size, self._of_replicas = len(event.ranks), True
        if not self._sizes:
            self._sizes.append(Size(at_s=0.0, replicas=event.before))
        if event.only_step and self._sizes[-1].replicas == event.replicas:
            self._sizes[-1] = self._sizes[-1].model_copy(update={"step": event.step})
            return
        self._sizes.append(Size(at_s=at, replicas=event.replicas, step=event.step, left=event.left, came=event.came))

    @property
    def seen_s(self) -> float:
        """When a controller has looked last, in seconds of the job's clock."""
        return max((s.at_s for s in self.timeline.controllers), default=0.0)

    def course(self, now: float, state: str = "") -> Course:
        """Up to ``now``, by the job's clock."""
        goodput: Goodput = self.ledger.look(now)
        found = self._recoveries
        marks = list(found)
        if self._incidents.open is not None:
            marks.append(_mark(self._incidents.open, now, began=self.ledger.recovering_s))
        newest = [b for b in self.timeline.recent.buckets.values() if b.step is not None]
        versions = [b.version for b in self.timeline.whole.buckets.values() if b.version >= 0]
        steps = [b for b in self.timeline.recent.buckets.values() if b.steps]
        return Course(
            started=self._started or 0.0,
            seconds=goodput.wall_s,
            state=state or self.state,
            world_size=self.world_size,
            version=versions[-1] if versions else -1,
            calls=self._calls,
            goodput=goodput.as_dict(),
            recovered=self._recovered,
            recoveries=marks,
            idle=[Idle(kind=s.kind, begin_s=s.begin_s, end_s=s.end_s) for s in self.ledger.spans(now)],
            step_s=short(newest[-1].step.middle) if newest and newest[-1].step is not None else 0.0,
            tokens_per_step=steps[-1].tokens // steps[-1].steps if steps else 0,
            whole=self.timeline.whole.columns(),
            recent=self.timeline.recent.columns(),
            sizes=list(self._sizes),
        )


def read_timeline(path: Path) -> Timeline:
    """What a controller has written there; an empty one if none has.

    Raises:
        ConfigError: it is not what a controller writes.
    """
    timeline = Timeline()
    try:
        timeline.load(TimelineFile.model_validate_json(path.read_bytes()))
    except FileNotFoundError:
        return timeline
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is not a timeline: {where}: {first['msg']}") from e
    return timeline


def record_of(files: ev.RunFiles) -> Record:
    """All that a run directory says.

    Raises:
        ConfigError: this is no run directory, or its timeline is damaged.
    """
    record = Record(read_timeline(files.timeline_path))
    for event in files.events():
        record.take(event)
    return record


def course_of(files: ev.RunFiles, record: Record | None = None) -> Course:
    """The course of a job that has ended, or runs elsewhere, as far as its run directory says. Raises as
    :func:`record_of`."""
    record = record or record_of(files)
    ended = record.state in ("finished", "failed")
    return record.course(record.seen_s, record.state if ended or files.is_live() else "lost")


def shows_last_hour(course: Course) -> bool:
    """Whether a job is so long that its last hour is shown apart."""
    return course.seconds > 2 * HOUR_S


def coarser(columns: Columns, most: int, step_s: float = 0.0) -> Columns:
    """With at most this many buckets, of several steps each; the number of steps in a bucket shows their speed."""
    series = Series()
    series.load(columns)
    return series.widened(most=most, least_s=_STEPS_A_COLUMN * step_s).columns()


def slowest_of(own: dict[int, float], steps: dict[int, float]) -> Sequence[Slow]:
    """The ranks with the most own work. Seconds by rank."""
    known = sorted(((s, -r) for r, s in own.items() if s > 0), reverse=True)[:SLOWEST]
    return [Slow(rank=-r, own_s=s, step_s=steps.get(-r, 0.0)) for s, r in known]


def _last_seen(seen: SeenBy) -> LastSeen:
    return LastSeen(seen.at_s, seen.version, seen.step_s)


def _mark(incident: Incident, at: float, began: float | None = None) -> RecoveryMark:
    end = incident.finished
    begin = at - incident.total_s if began is None else began
    return RecoveryMark(
        at_s=begin,
        total_s=incident.total_s if began is None else at - began,
        victims=list(incident.victims)[:LATEST],
        cause=incident.cause,
        resume_step=incident.resume_step if end is not None else -1,
        iteration=end.iteration if end is not None else -1,
        failed=isinstance(incident.end, ev.JobFailed),
    )
