"""Goodput: how much of a job's time led to steps that count, and where the rest went.

One fold of the job's events, so that the report, which has all of them, and a live controller, which gets them as they
come, say the same. Each moment of the job belongs to exactly one part; whole microseconds, so the parts add up to the
whole exactly.

=========== =========================================================================================================
trained     what is left: it led to committed steps
launch      from the start of a controller that launches the job to the first step of every rank
recovery    from a failure to the first new step of every rank; where two overlap, once
checkpoint  checkpoints have held training up
repeated    steps that were repeated, because the job went back to a checkpoint
down        from one launch's end to the next launch in the same directory
=========== =========================================================================================================

The interrupted attempt of a step lies before its failure and counts as trained, and the whole step that follows the
recovery belongs to the recovery; one of both has led to the committed step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from flashrecovery import events as ev
from flashrecovery.kinds import NoticeKind

PARTS = ("trained", "launch", "recovery", "checkpoint", "repeated", "down")


@dataclass(frozen=True)
class Goodput:
    """How the whole time of a job was spent. ``parts``: microseconds by name, for each of :data:`PARTS`.

    Attributes:
        repeated_steps: steps that were done again because the job went back to a checkpoint.
        repeated_known: whether it is known what a step takes; if not, their time is still in ``trained``.
    """

    parts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    repeated_steps: int = 0
    repeated_known: bool = True

    @property
    def wall_us(self) -> int:
        return sum(self.parts.values())

    @property
    def wall_s(self) -> float:
        return self.wall_us / 1e6

    def seconds(self, part: str) -> float:
        return self.parts[part] / 1e6

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.parts["trained"] / self.wall_us if self.wall_us else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """As JSON says it: seconds, by ``<part>_s``; ``repeated_s`` is null if it is not known."""
        found: dict[str, float | int | None] = {"wall_s": self.wall_s, "share": self.share}
        found |= {f"{part}_s": self.seconds(part) for part in PARTS}
        if not self.repeated_known:
            found["repeated_s"] = None
        return found | {"repeated_steps": self.repeated_steps}


class JobClock:
    """Seconds since the job's first launch, for the events of successive controllers.

    Within one controller CLOCK_MONOTONIC counts, so that setting the host's clock changes nothing. The next controller
    may be on another machine, with another such clock: between the two the time of day counts, and never goes back.
    """

    def __init__(self) -> None:
        self._last: tuple[float, ev.Event] | None = None

    def take(self, event: ev.Event) -> float:
        """When this event, the next one, has happened."""
        if self._last is None:
            at = event.seconds if isinstance(event, ev.JobStarted) else 0.0
        else:
            before, last = self._last
            passed = event.monotonic - last.monotonic
            if isinstance(event, ev.ControllerStarted) or passed < 0:
                passed = max(event.time - last.time, 0.0)
            at = before + passed
        self._last = (at, event)
        return at

    def at(self, monotonic: float) -> float:
        """When it is ``monotonic`` by the clock of the controller of the newest event."""
        if self._last is None:
            return 0.0
        before, last = self._last
        return before + max(monotonic - last.monotonic, 0.0)


def on_one_clock(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """The events with times of day that the job's clock gives, from that of the first one on."""
    clock, began = JobClock(), None
    for event in events:
        at = clock.take(event)
        if began is None:
            began = event.time - at  # of the launch
        yield event.model_copy(update={"time": began + at})


@dataclass(frozen=True)
class LastSeen:
    """The last sign of a launch that may have ended without a final event: when its controller was last seen, as
    seconds of the job's clock, the newest version committed there (-1: none), and what a step took (0: not known)."""

    at: float
    committed: int
    step_s: float


SPANS = 200


@dataclass(frozen=True)
class IdleSpan:
    """A time in which the job did not train, in seconds of its clock. ``kind``: launch or down."""

    kind: str
    begin_s: float
    end_s: float


_OF_RECOVERIES = (ev.FailureDetected, ev.RecoveryStarted, ev.FallbackStarted, ev.RecoveryFinished)


class Ledger:
    """Takes every event in order; keeps no more than sums.

    Args:
        seen: by the time of day of each ``controller_started``, as far as it is known: what no event tells of a launch
            that was killed.
    """

    def __init__(self, seen: Mapping[float, LastSeen] = MappingProxyType({})) -> None:
        self.clock = JobClock()
        self._seen = seen
        self._spent = dict.fromkeys(("launch", "train", "recovery", "down"), 0)
        self._spans: deque[IdleSpan] = deque(maxlen=SPANS)
        self._since = 0  # everything before is accounted for
        self._now = 0
        self._doing = "launch"
        self._failed_at: int | None = None
        self._recovering_at: int | None = None
        self._controller_at: int | None = None  # of a controller that has yet to say whether it launches or takes over
        self._controller_key: float | None = None  # of the one that serves the launch; ``_newest_key``: of that one
        self._newest_key = 0.0
        self._heard = 0  # the newest event of a controller that is known to serve this launch
        self._position = -1
        self._step_s = 0.0
        self._checkpoint_us = 0
        self._repeated_us = 0
        self._repeated_steps = 0
        self._unknown_steps = 0
        self._went_back = False

    @property
    def doing(self) -> str:
        """launch, train, recovery, or down after the end."""
        if self._controller_at is not None:
            return "launch"
        return "recovery" if self._recovering_at is not None else self._doing

    @property
    def recovering_s(self) -> float | None:
        """When what is being recovered from has failed; None: nothing is."""
        return None if self._recovering_at is None else self._recovering_at / 1e6

    def spans(self, now: float) -> tuple[IdleSpan, ...]:
        """When the job was launched, or down; the newest :data:`SPANS`. ``now``: for the one that is not over."""
        spans = list(self._spans)
        if self._controller_at is not None:
            spans.append(IdleSpan("launch", self._controller_at / 1e6, now))
        elif self._doing == "launch":
            spans.append(IdleSpan("launch", self._since / 1e6, now))
        return tuple(spans)

    def take(self, event: ev.Event) -> float:
        """Account for everything up to this event; returns its time on the job's clock."""
        at = self.clock.take(event)
        self._now = max(_us(at), self._now)
        if isinstance(event, ev.ControllerStarted):
            self._controller(event)
        elif isinstance(event, ev.JobStarted):
            self._begin(event)
        elif isinstance(event, ev.Notice):
            if event.kind in (NoticeKind.TAKEN_OVER, NoticeKind.CONTROLLER_ELECTED):
                self._taken_over()
            elif event.kind == NoticeKind.START_AGAIN:
                self._launched(self._controller_at)
                self._close(self._now, "launch")
        elif isinstance(event, (ev.JobFinished, ev.JobFailed)):
            self._launched(self._controller_at)
            self._step_s = event.step_s or self._step_s
            self._position = max(self._position, event.step)
            if self._doing != "down":
                self._close(self._now, "down")
        elif isinstance(event, ev.CheckpointSaved):
            self._step_s = event.step_s or self._step_s
            self._position = max(self._position, event.version)
            self._checkpoint_us += _us(event.k0_s)
        elif isinstance(event, _OF_RECOVERIES) and self._doing != "down":
            self._recovery(event)
        if self._controller_at is None:
            self._heard = self._now
        return at

    def look(self, now: float | None = None) -> Goodput:
        """Up to ``now`` by the job's clock, or to the newest event."""
        spent = dict(self._spent)
        now_us = self._now if now is None else max(_us(now), self._now)
        if self._controller_at is None and self._doing != "down":
            self._add(spent, now_us)
        elif self._controller_at is not None:  # as if it launched the job
            last = self._last_seen()
            end = max(self._heard, self._since, 0 if last is None else _us(last.at))
            end = self._since if self._doing == "down" else min(end, self._controller_at)
            self._add(spent, end)
            spent["down"] += self._controller_at - end
            spent["launch"] += now_us - self._controller_at
        trained = spent["train"]
        repeated = min(self._repeated_us, trained)
        checkpoint = min(self._checkpoint_us, trained - repeated)
        parts = {
            "trained": trained - repeated - checkpoint,
            "launch": spent["launch"],
            "recovery": spent["recovery"],
            "checkpoint": checkpoint,
            "repeated": repeated,
            "down": spent["down"],
        }
        return Goodput(parts, self._repeated_steps + self._unknown_steps, self._unknown_steps == 0)

    # -- one kind of event ------------------------------------------------------------------------

    def _controller(self, event: ev.ControllerStarted) -> None:
        """Whether it launches the job or takes over a running one, it will say."""
        if self._controller_key is not None or self._doing != "launch":
            self._controller_at, self._newest_key = self._now, event.time
        else:
            self._controller_key = event.time

    def _begin(self, event: ev.JobStarted) -> None:
        """A launch has come to its first step."""
        launched = self._controller_at
        if launched is None and self._doing != "launch":  # an older log
            launched = max(self._now - _us(event.seconds), self._since)
        if launched is not None:
            self._launched(launched)
            self._repeat(event.step)
        self._close(self._now, "train")
        self._position, self._went_back = event.step, False

    def _launched(self, at: int | None) -> None:
        """Another launch has begun; None: no."""
        if at is not None:
            self._end_without_a_word(at)
            self._close(at, "launch")
            self._accept()

    def _end_without_a_word(self, launched: int) -> None:
        """The launch before has perhaps been killed; then it has gone on for as long as it was seen."""
        if self._doing == "down":
            return
        last = self._last_seen()
        end = max(self._heard, self._since)
        if last is not None:
            end = max(end, _us(last.at))
            self._position = max(self._position, last.committed)
            self._step_s = last.step_s or self._step_s
        self._close(min(end, launched), "down")

    def _last_seen(self) -> LastSeen | None:
        return self._seen.get(self._controller_key) if self._controller_key is not None else None

    def _accept(self) -> None:
        """It is known what the newest controller does."""
        if self._controller_at is not None:
            self._controller_at, self._controller_key = None, self._newest_key

    def _taken_over(self) -> None:
        """It was running all the while, without a controller."""
        self._accept()
        if self._doing == "launch":
            self._close(self._since, "train")

    def _recovery(self, event: ev.Event) -> None:
        if self._controller_at is not None:
            if isinstance(event, ev.FailureDetected):
                return  # of a start
            self._taken_over()
        if isinstance(event, ev.FailureDetected):
            if self._doing == "train" and self._failed_at is None:
                self._failed_at = max(self._now - _us(event.detect_s), self._since)
            self._position = max(self._position, event.step)
        elif isinstance(event, ev.RecoveryStarted):
            if self._recovering_at is None:
                self._recovering_at = self._now if self._failed_at is None else self._failed_at
        elif isinstance(event, ev.FallbackStarted):
            self._went_back = True
        elif isinstance(event, ev.RecoveryFinished):
            began = max(self._now - _us(event.total_s), self._since)
            self._recovering_at = began if self._recovering_at is None else min(began, self._recovering_at)
            self._close(self._now, "train")
            if self._went_back:
                self._repeat(event.resume_step)
            self._position, self._went_back = event.resume_step, False

    # -- sums -------------------------------------------------------------------------------------

    def _repeat(self, step: int) -> None:
        """The steps from this one to the newest known one are repeated."""
        steps = max(self._position - step, 0)
        if self._step_s:
            self._repeated_steps += steps
            self._repeated_us += _us(steps * self._step_s)
        else:
            self._unknown_steps += steps

    def _close(self, until: int, then: str) -> None:
        """What has been done so far is over, and ``then`` begins."""
        self._add(self._spent, until)
        if self._doing in ("launch", "down") and until > self._since:
            self._spans.append(IdleSpan(self._doing, self._since / 1e6, until / 1e6))
        self._since, self._doing = until, then
        self._failed_at = self._recovering_at = None

    def _add(self, spent: dict[str, int], until: int) -> None:
        if self._recovering_at is None:
            spent[self._doing] += until - self._since
        else:
            began = min(max(self._recovering_at, self._since), until)
            spent[self._doing] += began - self._since
            spent["recovery"] += until - began


def goodput(events: Iterable[ev.Event], seen: Mapping[float, LastSeen] = MappingProxyType({})) -> Goodput:
    """The goodput of all ``events``, in order; and of the time in which the newest launch was seen after them."""
    ledger = Ledger(seen)
    for event in events:
        ledger.take(event)
    return ledger.look(max((last.at for last in seen.values()), default=None))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
