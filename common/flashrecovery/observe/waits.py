"""What a job that does not train waits for, and for how long. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.nodes import is_spare
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.observe.course import Wait
from flashrecovery.plan.transitions import State
from flashrecovery.plan.words import shortened

SHOWN_S = 3.0
"""What takes less is not worth a word."""
STEPS = 5.0
"""A step counts as a wait if it takes this many times as long as the ones before, and longer than :data:`LONG_S`."""
LONG_S = 10.0
_SAID = 4
_ON_ITS_WAY = frozenset({Place.EMPTY, Place.STARTING})


@dataclass(frozen=True)
class SaidLine:
    """What a rank has said of itself by a notice ``waiting``: the line where it is; ``at``: CLOCK_MONOTONIC seconds."""

    text: str
    seconds: float
    at: float


def waits(job: JobState, told: Mapping[int, SaidLine], began: float, now: float) -> list[Wait]:
    """``told``: by rank, since the job trained last; ``began``: when the present launch or recovery did, in
    CLOCK_MONOTONIC seconds as ``now``."""
    since = now - began
    missing = [r.rank for r in job.ranks.values() if r.place in _ON_ITS_WAY]
    found: list[Wait] = []
    if job.state is State.STARTING and not job.launched:
        found.append(Wait(what=_nodes(job), seconds=since))
    elif job.state is State.STARTING:
        found.append(_of("first step", missing, told, since, now, len(job.ranks)))
    elif job.state is State.REPLACING:
        found.append(_of("first step after a failure", missing, told, since, now, len(job.ranks)))
    elif job.state is State.FALLBACK or (
        job.state is State.RESTORING and (job.recovery is None or job.round.checkpoint)
    ):
        found.append(Wait(what=_loading(job), seconds=since))
    elif job.state is State.RUNNING and job.recovery is None:
        slow = _in_a_long_step(job.ranks.values(), job.start_version, now)
        if slow is not None:
            record, seconds, first = slow
            what = job.counting.text(record.health.tag) + (
                ", the first one (models are compiled in it)" if first else ""
            )
            where = told.get(record.rank) or (told.get(0) if first else None)
            found.append(Wait(what=what, seconds=seconds, rank=record.rank, where=where.text if where else ""))
    return [wait for wait in found if wait.seconds >= SHOWN_S]


def _nodes(job: JobState) -> str:
    """Which have come, and until when the others may."""
    wanted = job.config.nnodes
    here = [node.name for node in job.nodes.values() if node.alive and not is_spare(node, wanted)]
    limit = f"for at most {job.config.timeouts.rendezvous_s:g} s (timeouts.rendezvous_s)"
    come = shortened(here, _SAID) if here else "none"
    return f"{max(wanted - len(here), 0)} of {wanted} nodes to come, {limit}; here: {come}"


def _loading(job: JobState) -> str:
    where = f" from {job.round.checkpoint}" if job.round.checkpoint else ""
    version = job.start_version if job.recovery is None else job.recovery.resume_step
    return f"the state of {job.counting.text(version)}{where}" if version >= 0 else f"a checkpoint{where}"


def _of(what: str, missing: list[int], told: Mapping[int, SaidLine], since: float, now: float, world_size: int) -> Wait:
    """``missing`` ranks have yet to come to it."""
    ranks = f"{len(missing)} of {world_size} ranks to come to their {what}"
    if not missing:
        return Wait(what="all ranks to begin", seconds=since)
    named = next((r for r in missing if r in told), missing[0])
    said = told.get(named)
    where = f"{said.text} (for {said.seconds + now - said.at:.0f} s)" if said is not None else ""
    return Wait(what=ranks, seconds=since, ranks=len(missing), rank=named, where=where)


def _in_a_long_step(
    records: Iterable[RankRecord], start_version: int, now: float
) -> tuple[RankRecord, float, bool] | None:
    """The rank that has made no progress for longest, if that is long; whether no step was committed yet."""
    longest: tuple[RankRecord, float] | None = None
    for record in records:
        age = record.health.progress_age_s + max(now - record.health.heard_at, 0.0)
        if record.place is Place.RUNNING and (longest is None or age > longest[1]):
            longest = (record, age)
    if longest is None or longest[0].health.heard_at == 0.0:
        return None
    record, age = longest
    first = record.committed <= start_version
    return (record, age, first) if age > max(SHOWN_S if first else LONG_S, STEPS * record.health.step_s) else None
