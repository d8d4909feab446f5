"""Which rank causes a hang. Pure: the ranks' answers in, a verdict out.

When one rank hangs, soon all ranks stop: the others wait for it in a collective, or for a rank that does. Every rank
reports the operations it has under way, and how many it has started in each of its groups. So for each operation that a
rank waits in, it is known which ranks have not started it. Such a rank may itself wait elsewhere. A rank that others
wait for and that waits for none is the culprit. If there is none, the ranks wait for each other: a deadlock. If all
ranks have started the operation, none of them is at fault, and there is no culprit.

A rank that does not answer takes an unknown part in every group whose other members have all answered.

With NCCL the host runs ahead of its device. There a rank has come to what its device has come to: one whose device is
kept by something else is a culprit, like one whose host is, and one whose device waits in an operation is none.

Operations whose end cannot be seen (NCCL's, and gloo's sends and receives) count as waited in only while a rank has not
started them. If no rank is seen to wait, the counts alone tell which rank is behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property

from flashrecovery.plan.words import ranks_text, shortened

EVERYBODY = -1
"""Peer of a collective."""
OWN_GROUP = "flashrecovery"
"""The package's own group: its collectives come before an optimizer step, or at the end of the block."""
UNKNOWN = -2
"""Peer of an operation that any rank may complete."""

_SHOWN_LINKS = 4
_SHOWN_OPERATIONS = 3


class Work(IntEnum):
    """What a training thread does. Each kind has a deadline of its own."""

    STEP = 0
    """A step, or the fetch of its batch."""
    FIRST_STEP = 1
    """The first step of a process, or a compilation in any step."""
    EVALUATION = 2
    """The script's own code between two steps."""
    SAVE = 3
    """A checkpoint that the script writes."""


_WORK_TEXTS = {
    Work.STEP: "a step (hang_step_s)",
    Work.FIRST_STEP: "its first step, or a compilation (hang_first_step_s)",
    Work.EVALUATION: "the script's code between two steps (hang_evaluation_s)",
    Work.SAVE: "a save (hang_save_s)",
}


@dataclass(frozen=True)
class Deadlines:
    """After how many seconds without progress a rank is suspected, by what it does. ``factor``: never before so many of
    its usual steps."""

    step_s: float
    first_step_s: float
    evaluation_s: float
    save_s: float
    factor: float

    def limit_s(self, work: Work, usual_step_s: float, step_s: float = 0.0) -> float:
        """Of a rank whose steps usually take ``usual_step_s``. ``step_s``: in place of that for a step; 0: not set. No
        kind of work has less time than a step."""
        allowed = {
            Work.STEP: 0.0,
            Work.FIRST_STEP: self.first_step_s,
            Work.EVALUATION: self.evaluation_s,
            Work.SAVE: self.save_s,
        }
        return max(step_s or self.step_s, allowed[work], self.factor * usual_step_s)


@dataclass(frozen=True)
class Group:
    """A process group. ``members``: digest of its ranks, since groups of disjoint ranks may share a name."""

    name: str
    members: int = 0


@dataclass(frozen=True)
class Operation:
    """An operation under way. ``number``: of a collective, among those of the group; of a send or receive, among those
    with this peer. ``certain``: its end would be seen."""

    group: Group
    op: str
    number: int
    peer: int = EVERYBODY
    certain: bool = True

    def __str__(self) -> str:
        to = f" with rank {self.peer}" if self.peer >= 0 else ""
        if self.group.name == OWN_GROUP:
            return f"flashrecovery's own {self.op} #{self.number}{to}, before an optimizer step or at the block's end"
        return f"group {self.group.name}, {self.op} #{self.number}{to}"


@dataclass(frozen=True)
class Progress:
    """One rank's progress in one group: collectives that it has come to; (sends, receives) by peer. ``size``: ranks in
    the group. ``ahead``: so many operations more its host has launched, and its device has not come to them."""

    size: int
    collectives: int
    pairs: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    ahead: int = 0


@dataclass(frozen=True)
class RankPosition:
    """Where one rank is. ``limit_s``: a rank without progress for this long is suspected."""

    rank: int
    age_s: float
    limit_s: float
    progress: int = 0
    answered: bool = True
    stopped: bool = False
    operations: tuple[Operation, ...] = ()
    groups: Mapping[Group, Progress] = field(default_factory=dict)
    stack: str = ""
    work: Work = Work.STEP

    @property
    def late(self) -> bool:
        return self.age_s >= self.limit_s

    @property
    def moving(self) -> bool:
        """Certainly not standing still like the others."""
        return self.age_s < self.limit_s / 2


class VerdictKind(str, Enum):
    """What the ranks' answers say together."""

    CULPRITS = "culprits"
    DEADLOCK = "deadlock"
    STUCK = "stuck"
    """All have come to the operation in which they wait, and it does not end; ``text`` names it."""
    UNLIKE = "unlike"
    """All ranks are in an operation with the same number, but not in the same one; ``text`` lists their calls."""
    NO_CULPRIT = "no_culprit"
    """No rank can be blamed; ``text`` says why."""
    LATER = "later"
    """Not known yet: a rank has not answered, or has not been stuck for long enough."""


@dataclass(frozen=True)
class Verdict:
    """``accused``: the evidence by rank; of a deadlock by each of its members, the one to replace first."""

    kind: VerdictKind
    accused: Mapping[int, str] = field(default_factory=dict)
    text: str = ""


def judge(positions: Collection[RankPosition], *, absent: int = 0, done: int = 0) -> Verdict:
    """The verdict on the ranks that are in their loop. ``absent``: how many of these have not been heard of; ``done``:
    how many others have taken all their steps."""
    return _Case(positions, absent, done).verdict()


class _Case:
    """One look at all ranks."""

    def __init__(self, positions: Collection[RankPosition], absent: int, done: int) -> None:
        self._by_rank = {s.rank: s for s in positions}
        self._absent = absent
        self._done = done
        self._mute = frozenset(s.rank for s in positions if not s.answered)
        self._reported: dict[Group, dict[int, Progress]] = defaultdict(dict)
        for position in positions:
            for group, progress in position.groups.items():
                self._reported[group][position.rank] = progress
        self._missing_of: dict[Operation, frozenset[int]] = {}

    def verdict(self) -> Verdict:
        awaited = frozenset[int]().union(*{missing for waits in self._waits.values() for _, missing in waits})
        last = {r for r in awaited if r not in self._waits and not self._stuck(self._by_rank[r])}
        if last:
            return self._accuse({r: self._evidence_against(r) for r in last})
        if self._mute:
            return self._accuse({r: self._state_of(self._by_rank[r]) for r in self._mute})
        if self._incomplete:
            return Verdict(VerdictKind.LATER)
        if self._waits:
            return self._mutual() or self._nobody()
        if any(self._stuck(s) for s in self._by_rank.values()):
            return self._nobody()
        return self._by_counts()

    # -- which rank waits -------------------------------------------------------------------------

    @cached_property
    def _waits(self) -> dict[int, list[tuple[Operation, frozenset[int]]]]:
        """By rank: operations that cannot end yet, with the ranks that have not come to them."""
        found = {}
        for position in self._by_rank.values():
            waits = [(op, missing) for op in position.operations if (missing := self._missing(op, position.rank))]
            if waits:
                found[position.rank] = waits
        return found

    @cached_property
    def _waiting_for(self) -> dict[int, Counter[Operation]]:
        """By rank: how many wait for it, and in what."""
        ranks_in = Counter((op, missing) for waits in self._waits.values() for op, missing in waits)
        found: dict[int, Counter[Operation]] = defaultdict(Counter)
        for (op, missing), n in ranks_in.items():
            for rank in missing:
                found[rank][op] += n
        return found

    def _missing(self, op: Operation, rank: int) -> frozenset[int]:
        """Which ranks have not come to the operation ``op`` of ``rank``."""
        if op.peer == EVERYBODY:
            if op not in self._missing_of:
                known = self._reported[op.group]
                behind = {r for r, progress in known.items() if progress.collectives <= op.number}
                unseen = self._mute if len(known) < self._size(op.group) else frozenset()
                self._missing_of[op] = frozenset(behind | unseen)
            return self._missing_of[op]
        if op.peer == UNKNOWN or op.peer not in self._by_rank:
            return frozenset()
        theirs = self._reported[op.group].get(op.peer)
        if theirs is None:
            return self._mute & {op.peer}
        sent, received = theirs.pairs.get(rank, (0, 0))
        come = received if op.op == "send" else sent
        return frozenset({op.peer}) if come <= op.number else frozenset()

    def _size(self, group: Group) -> int:
        return max((p.size for p in self._reported[group].values()), default=0)

    @property
    def _incomplete(self) -> bool:
        """Whether a rank that has not answered belongs to a group in which others wait."""
        if not self._absent:
            return False
        groups = {op.group for s in self._by_rank.values() for op in s.operations if op.certain}
        return not groups or any(len(self._reported[g]) < self._size(g) for g in groups)

    @staticmethod
    def _stuck(position: RankPosition) -> bool:
        """Whether the rank waits in an operation that all ranks have started, or for a message from any rank. (For
        operations that a rank has not started, see ``_waits``.)"""
        return any(op.certain or op.peer == UNKNOWN for op in position.operations)

    # -- verdicts ---------------------------------------------------------------------------------

    def _accuse(self, accused: Mapping[int, str]) -> Verdict:
        late = {r: text for r, text in accused.items() if self._by_rank[r].late}
        return Verdict(VerdictKind.CULPRITS, late) if late else Verdict(VerdictKind.LATER)

    def _evidence_against(self, rank: int) -> str:
        waiting = self._waiting_for[rank].most_common(_SHOWN_OPERATIONS)
        said = [f"{n} rank{'s wait' if n > 1 else ' waits'} for it in {op}" for op, n in waiting]
        position = self._by_rank[rank]
        stack = f"\n{position.stack}" if position.stack else ""
        return f"{self._state_of(position)}; {'; '.join(said)}{stack}"

    @staticmethod
    def _state_of(position: RankPosition) -> str:
        if position.stopped:
            return f"stopped (process state T), no progress for {position.age_s:.1f} s"
        if not position.answered:
            where = _WORK_TEXTS[position.work]
            return f"no progress for {position.age_s:.1f} s in {where}, and its control thread does not answer"
        stands = f"no progress for {position.age_s:.1f} s in {_WORK_TEXTS[position.work]}"
        ahead = [(group.name, progress.ahead) for group, progress in position.groups.items() if progress.ahead]
        if not ahead:
            return f"in no collective, {stands}"
        launched = ", ".join(f"{count} in group {name}" for name, count in ahead[:_SHOWN_OPERATIONS])
        return f"its device does not come to operations that it has launched ({launched}), {stands}"

    def _mutual(self) -> Verdict | None:
        """The ranks wait for each other."""
        cycle = self._cycle()
        if not cycle:
            return None
        if not all(self._by_rank[r].late for r in cycle):
            return Verdict(VerdictKind.LATER)
        links = [f"rank {r} waits for {self._link(r, cycle[(i + 1) % len(cycle)])}" for i, r in enumerate(cycle)]
        text = f"deadlock of {ranks_text(cycle)}: {shortened(links, _SHOWN_LINKS)}"
        ahead = {r for r in cycle if any(op.group.name == OWN_GROUP for op, _ in self._waits[r])}
        if ahead and ahead != {*cycle}:
            rest = ranks_text({*cycle} - ahead)
            verb = "waits" if len(cycle) - len(ahead) == 1 else "wait"
            text += f"; {ranks_text(ahead)} came there without what {rest} {verb} in: skip or retry a step on all ranks"
        # One that has only sent something, and is not seen to wait for its receipt, may be doing something else.
        order = sorted(cycle, key=lambda r: (any(op.certain for op, _ in self._waits[r]), r))
        return Verdict(VerdictKind.DEADLOCK, dict.fromkeys(order, text), text)

    def _cycle(self) -> list[int]:
        """Ranks each of which waits for the next, and the last one for the first; none if there is no such ring."""
        distinct = {missing for waits in self._waits.values() for _, missing in waits}
        nearest = {missing: min(missing & self._waits.keys(), default=-1) for missing in distinct}
        following = {r: next((n for _, m in w if (n := nearest[m]) >= 0), -1) for r, w in self._waits.items()}
        seen: set[int] = set()
        for start in sorted(following):
            path: dict[int, int] = {}
            rank = start
            while rank >= 0 and rank not in seen:
                seen.add(rank)
                path[rank] = len(path)
                rank = following[rank]
            if rank in path:
                return list(path)[path[rank] :]
        return []

    def _link(self, rank: int, other: int) -> str:
        op = next(op for op, missing in self._waits[rank] if other in missing)
        return f"rank {other} in {op}"

    def _nobody(self) -> Verdict:
        """All have come to what they wait in."""
        inside: dict[tuple[Group, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for position in self._by_rank.values():
            for op in position.operations:
                if op.certain and op.peer == EVERYBODY:
                    inside[op.group, op.number][op.op].append(position.rank)
        unlike = [(where, ops) for where, ops in inside.items() if len(ops) > 1]
        for (group, number), ops in unlike[:1]:
            said = "; ".join(f"{ranks_text(ranks)}: {op}" for op, ranks in sorted(ops.items()))
            text = f"#{number} in group {group.name} is not the same on all ranks: {said}"
            return Verdict(self._if_all_late(VerdictKind.UNLIKE), text=text)
        where = [f"{op} #{n} in group {g.name}" for (g, n), ops in inside.items() for op in ops]
        if not where or any(op.peer == UNKNOWN for s in self._by_rank.values() for op in s.operations):
            return Verdict(
                VerdictKind.NO_CULPRIT, text="ranks wait for a message from any rank; no particular one is late"
            )
        text = f"every rank has come to {', '.join(where[:3])}, and it does not end; the network, or its library?"
        return Verdict(self._if_all_late(VerdictKind.STUCK), text=text)

    def _if_all_late(self, kind: VerdictKind) -> VerdictKind:
        return kind if all(s.late for s in self._by_rank.values()) else VerdictKind.LATER

    def _by_counts(self) -> Verdict:
        """The verdict when no rank is seen to wait: which rank is behind, or at least the only one that is stuck?"""
        behind: dict[int, list[str]] = defaultdict(list)
        ahead: set[int] = set()
        for group, reported in self._reported.items():
            newest = max((p.collectives for p in reported.values()), default=0)
            late = [r for r, p in reported.items() if p.collectives < newest]
            if late:
                ahead.update(r for r, p in reported.items() if p.collectives == newest)
            for rank in late:
                count = reported[rank].collectives
                behind[rank].append(f"{count} of {newest} collectives in group {group.name}")
        last = set(behind) - ahead
        if last:
            return self._accuse(
                {r: self._with_stack(r, f"behind the others: {', '.join(behind[r][:3])}") for r in last}
            )
        if any(not s.late and not s.moving for s in self._by_rank.values()):
            return Verdict(VerdictKind.LATER)
        still = [r for r, s in self._by_rank.items() if s.late]
        if len(still) > 1 and len(still) == len(self._by_rank) and not self._done:
            text = "every rank stands still outside of collectives; a shared resource, or the accelerators' network?"
            return Verdict(VerdictKind.NO_CULPRIT, text=text)
        return self._accuse({r: self._with_stack(r, "no rank waits for it") for r in still})

    def _with_stack(self, rank: int, what: str) -> str:
        position = self._by_rank[rank]
        return f"{self._state_of(position)}; {what}" + (f"\n{position.stack}" if position.stack else "")


def victims_of(verdict: Verdict) -> Iterable[tuple[int, str]]:
    """Which ranks are to be replaced, with the evidence. Of a deadlock one is enough: all take the step again."""
    accused = list(verdict.accused.items())
    return accused[:1] if verdict.kind is VerdictKind.DEADLOCK else sorted(accused)
