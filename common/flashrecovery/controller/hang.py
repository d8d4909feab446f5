"""When ranks stand still, have every agent look at its workers, and find the culprit.

A rank is suspected when its progress counter has stood still for longer than what it does may take
(:class:`flashrecovery.plan.hang.Deadlines`).
Then all agents are asked at once, and :mod:`flashrecovery.plan.hang` judges. Only a verdict that a second look
repeats, with the same ranks accused and no progress of theirs in between, has consequences.

Slow ranks are reported (:class:`Stragglers`); nothing else is done about them.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from flashrecovery.config import Timeouts
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.hang import (
    Deadlines,
    Group,
    Operation,
    Progress,
    RankPosition,
    Verdict,
    VerdictKind,
    Work,
    judge,
)
from flashrecovery.plan.membership.node_failures import SLOW
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

FACTOR = 1.5
CLEAR = 1.25
SHARE = 0.1
"""Less than this part of a step is not worth speaking of."""
_PERIOD_S = 2.0


@dataclass(frozen=True)
class OwnWork:
    """Own work of one rank in a step: usual, and the least of its last steps (0: too few steps yet)."""

    rank: int
    own_s: float
    least_s: float
    step_s: float


def usual_of(paces: Collection[OwnWork]) -> float:
    """The usual own work: the median; of two middle ranks the faster one, so that one of two ranks can be slow. 0 if
    too few are known."""
    known = [p.own_s for p in paces if p.least_s > 0]
    return statistics.median_low(known) if len(known) > 1 and 2 * len(known) > len(paces) else 0.0


def slow(pace: OwnWork, usual_s: float, factor: float = FACTOR) -> bool:
    """Whether the rank is slow where ``usual_s`` is usual."""
    return usual_s > 0 and pace.least_s > factor * usual_s and pace.least_s - usual_s > SHARE * pace.step_s


class Stragglers:
    """Which ranks are slow now; each one is reported once. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self.slow: frozenset[int] = frozenset()
        self._next_at = 0.0

    def forget(self) -> None:
        """The job is not in its loop; its steps are counted from zero again."""
        self.slow = frozenset()

    def due(self, now: float) -> bool:
        """Whether it is time for the next :meth:`check`."""
        return now >= self._next_at

    def check(self, ranks: Collection[RankRecord], now: float) -> list[tuple[int, str]]:
        """Ranks that have become slow, each with what to say of it."""
        if not self.due(now):
            return []
        self._next_at = now + _PERIOD_S
        paces = [OwnWork(r.rank, r.health.own_s, r.health.own_least_s, r.health.step_s) for r in ranks]
        usual_s = usual_of(paces)
        found = {p.rank: p for p in paces if slow(p, usual_s, CLEAR if p.rank in self.slow else FACTOR)}
        new = [p for rank, p in found.items() if rank not in self.slow]
        self.slow = frozenset(found)
        return [(p.rank, _words(p, usual_s)) for p in new]


def _words(pace: OwnWork, usual_s: float) -> str:
    own_ms, usual_ms = 1e3 * pace.own_s, 1e3 * usual_s
    return f"rank {pace.rank} is slow: {own_ms:.0f} ms of own work a step, the median of all ranks is {usual_ms:.0f} ms"


_PACE_S = 0.25
"""Between two looks at the ranks' ages, and from the first look of the agents to the second."""
_ON_THE_WAY_S = 0.5
"""An agent's answer may take this long besides the time that it has for asking."""
_ENDED_S = 3.0
"""So long nothing has moved when a deadlock is looked for after the data of a rank has ended. Ranks that wait for each
other do so for ever; this only leaves time for what is under way."""
_LONGEST_PAUSE_S = 30.0
"""The longest pause, in seconds, between two looks at a standstill for which no rank can be accused; pauses grow up to
this."""

_Key = tuple[VerdictKind, frozenset[tuple[int, int]]]


@dataclass
class _Look:
    number: int
    began: float
    deadline: float
    missing: set[str]
    answers: list[pb.HangReport] = field(default_factory=list)


class HangDetector:
    """One for the job. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, limits: Timeouts) -> None:
        self._limits = limits
        self._deadlines = Deadlines(
            step_s=limits.hang_step_s,
            first_step_s=limits.hang_first_step_s,
            evaluation_s=limits.hang_evaluation_s,
            save_s=limits.hang_save_s,
            factor=limits.hang_factor,
        )
        self._number = 0
        self._look: _Look | None = None
        self._next_at = 0.0
        self._pause_s = _PACE_S
        self._last: _Key | None = None
        self._told = ""
        self.ended: dict[int, str] = {}
        """Ranks whose data has ended: a deadlock is looked for early."""

    @property
    def answer_s(self) -> float:
        """What an agent has for asking its workers: two looks take no longer than ``ping_s``."""
        return self._limits.ping_s / 2

    def due(self, ranks: Collection[RankRecord], now: float) -> bool:
        """Whether the agents are to be asked now."""
        if self._look is not None or now < self._next_at:
            return False
        self._next_at = now + _PACE_S
        if any(self._suspected(r, now) for r in ranks):
            return True
        if self.ended:
            return any(r.place is Place.RUNNING and r.health.idle_s(now) >= _ENDED_S for r in ranks)
        self.forget()
        return False

    def forget(self) -> None:
        """No rank stands still any more, or the job is not in its loop."""
        self._look, self._last, self._pause_s, self._told = None, None, _PACE_S, ""

    def begin(self, nodes: Iterable[str], now: float) -> int:
        """The agents of ``nodes`` are being asked; returns the number of the look."""
        self._number += 1
        self._look = _Look(self._number, now, now + self.answer_s + _ON_THE_WAY_S, set(nodes))
        return self._number

    def answered(self, node: str, message: pb.HangReports) -> None:
        """An agent's answer. Late ones count for nothing."""
        if self._look is not None and message.look == self._look.number and node in self._look.missing:
            self._look.missing.remove(node)
            self._look.answers.extend(message.ranks)

    def verdict(self, ranks: Collection[RankRecord], now: float) -> Verdict | None:
        """Once all agents have answered or have had the time: what two looks say alike. None: nothing to be done."""
        look = self._look
        if look is None or (look.missing and now < look.deadline):
            return None
        self._look = None
        running = {r.rank: r for r in ranks if r.place is Place.RUNNING}
        positions = [
            self._position(running[a.rank], a)
            for a in look.answers
            if a.rank in running and running[a.rank].process.pid == a.pid
        ]
        done = len(ranks) - len(running)
        absent = len(running) - len(positions)
        found = judge(positions, absent=absent, done=done)
        if not any(self._suspected(r, now) for r in ranks):  # only a deadlock is reported this early
            positions = [replace(s, limit_s=min(s.limit_s, _ENDED_S)) for s in positions]
            soon = judge(positions, absent=absent, done=done)
            found = soon if soon.kind is VerdictKind.DEADLOCK else Verdict(VerdictKind.LATER)
        progress = {s.rank: s.progress for s in positions}
        key = (found.kind, frozenset((r, progress[r]) for r in found.accused))
        repeated, self._last = key == self._last, key
        if found.kind is VerdictKind.LATER or repeated:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_at = look.began + self._pause_s
        if not repeated or found.kind is VerdictKind.LATER:
            return None
        if found.kind is VerdictKind.NO_CULPRIT:
            told, self._told = self._told, found.text
            return found if told != found.text else None
        return found

    def _suspected(self, record: RankRecord, now: float) -> bool:
        if record.place is not Place.RUNNING or not record.health.progress_age_s:
            return False
        age_s = record.health.idle_s(now)
        return age_s >= self._deadlines.limit_s(record.health.work, record.health.step_s, record.hang_step_s)

    def _position(self, record: RankRecord, answer: pb.HangReport) -> RankPosition:
        groups = {Group(g.group, g.members): _progress(g) for g in answer.groups}
        return RankPosition(
            rank=answer.rank,
            age_s=answer.age_s,
            limit_s=self._deadlines.limit_s(Work(answer.work), answer.step_s, record.hang_step_s),
            work=Work(answer.work),
            progress=answer.progress,
            answered=answer.answered,
            stopped=answer.stopped,
            operations=tuple(
                Operation(Group(o.group, o.members), o.op, o.number, o.peer, o.certain) for o in answer.operations
            ),
            groups=groups,
            stack=answer.stack,
        )


class HangWatch:
    """What follows from the ranks' progress, or the lack of it."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.stragglers = Stragglers()
        self._lookout = HangDetector(job.config.timeouts)

    def on_hang_reports(self, node: str, message: pb.HangReports) -> None:
        """An agent says where its workers are."""
        self._lookout.answered(node, message)

    def data_ended(self, rank: int, text: str) -> None:
        """``rank`` has run out of data in this step and did not train in it; the other ranks may wait for it."""
        self._lookout.ended[rank] = text

    def end_of_data(self, found: Verdict) -> str:
        """Why the job cannot go on, if ``found`` follows from the end of a rank's data; else ""."""
        if found.kind is not VerdictKind.DEADLOCK or not self._lookout.ended:
            return ""
        return (
            f"{'; '.join(text for _, text in sorted(self._lookout.ended.items()))}, while the other ranks still have "
            f"data ({found.text}): give recovery.data() a loader, which begins its next epoch by itself, or have all "
            f"ranks "
            "agree on the end (all_reduce a flag in the block) and leave the loop in the same step"
        )

    def find_hung(self, now: float) -> Verdict | None:
        """The verdict on ranks that hang, None if there is none now. Asks the agents for reports if ranks stand
        still."""
        if self._job.state is not State.RUNNING:
            self._lookout.forget()
            self._lookout.ended.clear()
            return None
        ranks = self._job.ranks.values()
        if self._lookout.due(ranks, now):
            nodes = {r.home for r in ranks if r.place is Place.RUNNING}
            number = self._lookout.begin(nodes, now)
            for node in sorted(nodes):
                look = pb.Look(number=number, answer_s=self._lookout.answer_s)
                self._job.outbox.send(node, pb.Command(generation=self._job.generation, rank=AGENT, look=look))
        found = self._lookout.verdict(ranks, now)
        if found is not None and found.kind is not VerdictKind.CULPRITS:
            kind = NoticeKind.DEADLOCK if found.kind is VerdictKind.DEADLOCK else NoticeKind.DEADLOCK_SUSPECTED
            self._job.notice(kind, found.text)
        return found

    def report_stragglers(self, now: float) -> None:
        if self._job.state is not State.RUNNING:
            self.stragglers.forget()
            return
        if not self.stragglers.due(now):
            return
        running = [r for r in self._job.ranks.values() if r.place is Place.RUNNING]
        for rank, text in self.stragglers.check(running, now):
            self._job.notice(NoticeKind.STRAGGLER, text, rank=rank)
            self._job.blame(self._job.ranks[rank].home, SLOW, text)


def _progress(group: pb.GroupProgress) -> Progress:
    pairs = {p.peer: (p.sent, p.received) for p in group.pairs}
    return Progress(group.size, group.collectives, pairs, group.ahead)
