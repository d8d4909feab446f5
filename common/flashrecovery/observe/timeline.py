"""A job's steps over time, in a bounded number of buckets however long it trains. Pure.

Two series: the *whole* job, whose buckets become twice as wide whenever there would be more than :data:`LIMIT`, and the
*recent* hour, whose buckets keep their width and are dropped when they are older. A month in 512 buckets is 2.3 hours
each. Time is that of the job's clock (:class:`~.goodput.JobClock`), which never goes back.

What a bucket says of thousands of ranks is a band: the mean of the samples' quantiles, and the largest value with its
rank. With up to :data:`ONE_BY_ONE` ranks each rank has its own line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

LIMIT = 512
"""Buckets of the whole job: half of this number to this number, once the job is longer than this many seconds."""
RECENT_S, RECENT_LIMIT = 10.0, 360
"""Width and number of the buckets of the last hour."""
ONE_BY_ONE = 16
_LAUNCHES = 1000


@dataclass(frozen=True, slots=True)
class Band:
    """How a time (seconds) is spread over the ranks: 10 %, half and 90 % of them need at most so long, ``rank`` the
    longest. ``count`` samples; of several, ``low``, ``middle`` and ``high`` are means."""

    low: float
    middle: float
    high: float
    most: float
    rank: int
    count: int = 1

    def with_(self, other: Band | None) -> Band:
        """Both together."""
        if other is None:
            return self
        count = self.count + other.count

        slower = self if self.most >= other.most else other

        def mean(a: float, b: float) -> float:
            return min((a * self.count + b * other.count) / count, slower.most)  # rounded, it may be a little more

        return Band(
            mean(self.low, other.low),
            mean(self.middle, other.middle),
            mean(self.high, other.high),
            slower.most,
            slower.rank,
            count,
        )


def band_of(seconds: Mapping[int, float]) -> Band | None:
    """The band of one sample: seconds by rank; those of 0 are not known. None if none is."""
    known = sorted((s, rank) for rank, s in seconds.items() if s > 0)
    if not known:
        return None
    last = len(known) - 1
    low, middle, high = (known[round(share * last)][0] for share in (0.1, 0.5, 0.9))
    return Band(low, middle, high, *known[-1])


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. ``at``: seconds of the job's clock; ``passed``: since the look before, 0: there was none; ``version``:
    newest that every rank has committed, -1: not known; ``iteration``: that of this version where steps are calls of a
    framework's loop, else -1; ``tokens``: of a step of the whole job, or of an iteration, 0: not known; ``step`` and
    ``own``: of a step, and of its part that is the rank's own work; ``ranks``: the latter of each rank, where there are
    few; 0: it is not in the job now."""

    at: float
    passed: float = 0.0
    version: int = -1
    tokens: int = 0
    step: Band | None = None
    own: Band | None = None
    ranks: tuple[float, ...] = ()
    iteration: int = -1


@dataclass(frozen=True, slots=True)
class Bucket:
    """What several samples say together. ``seconds`` lie between them, in which ``steps`` of ``tokens`` were committed.
    ``count`` of ``ranks`` as in :class:`Band`."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    version: int = -1
    step: Band | None = None
    own: Band | None = None
    ranks: tuple[float, ...] = ()
    count: int = 0

    def with_(self, later: Bucket) -> Bucket:
        """Both together."""
        count = self.count + later.count
        if len(self.ranks) == len(later.ranks):
            ranks = tuple(
                (a * self.count + b * later.count) / count if a and b else a or b
                for a, b in zip(self.ranks, later.ranks, strict=True)
            )
        else:
            ranks, count = (later.ranks, later.count) if later.ranks else (self.ranks, self.count)
        return Bucket(
            self.seconds + later.seconds,
            self.steps + later.steps,
            self.tokens + later.tokens,
            later.version if later.version >= 0 else self.version,
            later.step if self.step is None else self.step.with_(later.step),
            later.own if self.own is None else self.own.with_(later.own),
            ranks,
            count,
        )


class Columns(BaseModel):
    """A series as JSON: lists of equal length, with one value for each time bucket; null: unknown.

    ``at_s``: the bucket's start, in seconds since the job's launch; ``width_s``: its width; ``seconds``: how much of
    it was observed. ``steps``, ``tokens``: those committed in it; ``version``: the newest at its end. ``step_s`` and
    ``own_s``: duration of a step, and of a rank's own work in it, as medians over ranks; ``*_low_s``, ``*_high_s``: the
    10th and 90th percentiles; ``*_most_s``: the maximum, reached by ``*_most_rank``. ``ranks``: in a small job, the own
    work of each rank. ``counts``: numbers of samples of step, own work and ranks, for merging buckets.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    width_s: float = Field(gt=0)
    at_s: list[float] = []
    seconds: list[float] = []
    steps: list[int] = []
    tokens: list[int] = []
    version: list[int] = []
    step_s: list[float | None] = []
    step_low_s: list[float | None] = []
    step_high_s: list[float | None] = []
    step_most_s: list[float | None] = []
    step_most_rank: list[int | None] = []
    own_s: list[float | None] = []
    own_low_s: list[float | None] = []
    own_high_s: list[float | None] = []
    own_most_s: list[float | None] = []
    own_most_rank: list[int | None] = []
    ranks: list[list[float | None]] = []
    counts: list[tuple[int, int, int]] = []

    @model_validator(mode="after")
    def _equally_long(self) -> Columns:
        lengths = {name: len(v) for name, v in self if isinstance(v, list) and name != "ranks"}
        lengths |= {f"ranks[{i}]": len(v) for i, v in enumerate(self.ranks)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns are not equally long: {lengths}")
        return self

    @property
    def empty(self) -> bool:
        return not self.at_s


@dataclass
class Series:
    """Buckets by their number: bucket i begins at ``i * width``. ``slides``: old ones are dropped, instead of all
    becoming wider."""

    width: float = 1.0
    limit: int = LIMIT
    slides: bool = False
    buckets: dict[int, Bucket] = field(default_factory=dict)

    def add(self, at: float, found: Bucket) -> None:
        """Times are never before those of the bucket before, and not below 0."""
        index = int(max(at, 0.0) // self.width)
        if self.slides:
            for old in [i for i in self.buckets if i <= index - self.limit]:
                del self.buckets[old]
        else:
            while index >= self.limit:
                self.widen()
                index //= 2
        known = self.buckets.get(index)
        self.buckets[index] = found if known is None else known.with_(found)

    def widen(self) -> None:
        """Every two buckets become one."""
        self.width *= 2
        merged: dict[int, Bucket] = {}
        for index, bucket in self.buckets.items():
            known = merged.get(index // 2)
            merged[index // 2] = bucket if known is None else known.with_(bucket)
        self.buckets = merged

    def widened(self, *, most: int = LIMIT, least_s: float = 0.0) -> Series:
        """A copy with at most ``most`` buckets between its first and last one, of at least ``least_s`` each."""
        found = replace(self, buckets=dict(self.buckets))
        while found.buckets and (found.width < least_s or max(found.buckets) - min(found.buckets) >= most):
            found.widen()
        return found

    def columns(self) -> Columns:
        """For JSON."""
        rows = list(self.buckets.items())
        values = [bucket for _, bucket in rows]
        width = max((len(b.ranks) for b in values), default=0)
        return Columns(
            width_s=self.width,
            at_s=[short(i * self.width) for i, _ in rows],
            seconds=[short(b.seconds) for b in values],
            steps=[b.steps for b in values],
            tokens=[b.tokens for b in values],
            version=[b.version for b in values],
            **_band_columns("step", [b.step for b in values]),
            **_band_columns("own", [b.own for b in values]),
            ranks=[[short(b.ranks[r]) if b.ranks[r : r + 1] > (0.0,) else None for b in values] for r in range(width)],
            counts=[(b.step.count if b.step else 0, b.own.count if b.own else 0, b.count) for b in values],
        )

    def load(self, columns: Columns) -> None:
        """What :meth:`columns` has said."""
        self.width, self.buckets = columns.width_s, {}
        for i, (step_count, own_count, count) in enumerate(columns.counts):
            ranks = [column[i] for column in columns.ranks]
            self.buckets[round(columns.at_s[i] / self.width)] = Bucket(
                columns.seconds[i],
                columns.steps[i],
                columns.tokens[i],
                columns.version[i],
                _band(columns, "step", i, step_count),
                _band(columns, "own", i, own_count),
                tuple(r or 0.0 for r in ranks) if any(ranks) else (),
                count,
            )


class SeenBy(BaseModel):
    """The last look of one controller, by the time of day of its ``controller_started``: when it looked last (seconds
    of the job's clock), the newest version then, and what a step took (0: not known)."""

    model_config = ConfigDict(extra="ignore")

    controller: float
    at_s: float
    version: int = -1
    step_s: float = 0.0

    def look(self, sample: Sample) -> None:
        """It has looked once more."""
        self.at_s = sample.at
        self.version = sample.version if sample.version >= 0 else self.version
        self.step_s = sample.step.middle if sample.step is not None else self.step_s


class TimelineFile(BaseModel):
    """``timeline.json`` of a run directory."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    whole: Columns
    recent: Columns
    controllers: list[SeenBy] = []


class Timeline:
    """Both series, and which controllers have made them."""

    def __init__(self) -> None:
        self.whole = Series()
        self.recent = Series(RECENT_S, RECENT_LIMIT, slides=True)
        self.controllers: list[SeenBy] = []
        self._version: int | None = None
        self._iteration: int | None = None

    def serve(self, controller: float, at: float) -> None:
        """Another controller looks from now on. ``controller``: see :class:`SeenBy`."""
        self.controllers = [*self.controllers[1 - _LAUNCHES :], SeenBy(controller=controller, at_s=at)]

    def went_to(self, version: int, iteration: int = -1) -> None:
        """Training goes on from this version, which is of this iteration, if it is of one."""
        self._version = version
        self._iteration = iteration if iteration >= 0 else None

    def add(self, sample: Sample) -> None:
        """Take in one look; in the order of their times."""
        steps = self._steps(sample)
        found = Bucket(
            sample.passed,
            steps,
            steps * sample.tokens,
            sample.version,
            sample.step,
            sample.own,
            sample.ranks,
            1 if sample.ranks else 0,
        )
        self.whole.add(sample.at, found)
        self.recent.add(sample.at, found)
        if self.controllers:
            self.controllers[-1].look(sample)

    def _steps(self, sample: Sample) -> int:
        """How many have been committed since the sample before: iterations where there are some."""
        if sample.version < 0:
            return 0
        version, self._version = self._version, sample.version
        if sample.iteration < 0:
            return 0 if version is None else max(sample.version - version, 0)
        iteration, self._iteration = self._iteration, sample.iteration
        return 0 if iteration is None else max(sample.iteration - iteration, 0)

    def file(self) -> TimelineFile:
        """To be written down."""
        seen = [s.model_copy() for s in self.controllers]
        return TimelineFile(whole=self.whole.columns(), recent=self.recent.columns(), controllers=seen)

    def load(self, file: TimelineFile) -> None:
        """Go on from what was written down."""
        self.whole.load(file.whole)
        self.recent.load(file.recent)
        self.controllers = list(file.controllers)
        versions = [b.version for b in self.whole.buckets.values() if b.version >= 0]
        self._version = versions[-1] if versions else None


_ENDS = ("_low_s", "_s", "_high_s", "_most_s", "_most_rank")


def _band_columns(name: str, bands: Sequence[Band | None]) -> dict[str, list[float | int | None]]:
    return {
        f"{name}_s": [None if b is None else short(b.middle) for b in bands],
        f"{name}_low_s": [None if b is None else short(b.low) for b in bands],
        f"{name}_high_s": [None if b is None else short(b.high) for b in bands],
        f"{name}_most_s": [None if b is None else short(b.most) for b in bands],
        f"{name}_most_rank": [None if b is None else b.rank for b in bands],
    }


def _band(columns: Columns, name: str, i: int, count: int) -> Band | None:
    low, middle, high, most, rank = (getattr(columns, name + end)[i] for end in _ENDS)
    if count == 0 or None in (low, middle, high, most, rank):
        return None
    return Band(low, middle, high, most, rank, count)


def short(seconds: float) -> float:
    """Six digits are enough for a picture. Times that are whole widths stay exact."""
    return seconds if seconds == int(seconds) else float(f"{seconds:.6g}")
