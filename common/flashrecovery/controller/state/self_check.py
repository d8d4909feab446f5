"""Whether what the controller knows of a job contradicts itself: that is a bug, or damaged memory.

* In tests everything is looked at after each event, and a contradiction raises.
* In production it is looked at before commands go out. Laws of the job as a whole cost the same for any number of
  ranks. Laws of each rank are looked at when the state, the generation or the members have changed.

A contradiction does not end a job that trains: it becomes a notice. But no recovery is decided on one:
then the job fails by name, as after any other error in the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_record import BUILT_UP, Place
from flashrecovery.errors import ProtocolError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.transitions import RECOVERY_STATES, ChangeState, State, at_rest, wrong_change

_OVER = (State.FINISHED, State.FAILED)


class SelfCheck:
    """The self-check of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._seen = _Seen(job)
        self._validated = _Seen(job)
        self._under_way: Mapping[str, ChangeState] = {}
        self._told_in = -1

    def validate(self, under_way: Mapping[str, ChangeState]) -> None:
        """Look at everything. ``under_way``: changes of size, members, nodes and parallel layout, each with its state.

        Raises ProtocolError: what is known contradicts itself, or an event has led from one state of a change to
        another that is not in the table.
        """
        for text in chain(job_laws(self._job, self._validated.generation), rank_laws(self._job)):
            raise ProtocolError(f"job state: {text}")
        for text in change_laws(self._under_way, under_way):
            raise ProtocolError(text)
        self._validated, self._under_way = _Seen(self._job), under_way

    def before_acting(self) -> None:
        """Look at what is cheap, before what was decided is carried out. A contradiction is reported once in a
        generation. If something was decided on it, the job fails."""
        job, seen = self._job, self._seen
        if job.state in _OVER:
            return
        decided = seen.decides(job)
        laws = job_laws(job, seen.generation)
        wrong = next(chain(laws, rank_laws(job)) if decided or job.in_order is not seen.members else laws, "")
        if decided or wrong or job.in_order is not seen.members:
            self._seen = _Seen(job)
        if wrong and self._told_in != job.generation:
            self._told_in = job.generation
            job.notice(NoticeKind.INTERNAL_INCONSISTENCY, wrong)
        if wrong and (decided or job.state is not State.RUNNING):
            job.outbox.drop_commands()
            job.fail(f"an error in the controller: no recovery is decided on what contradicts itself: {wrong}")


class _Seen:
    """What a job was at the last look."""

    def __init__(self, job: JobState) -> None:
        self.generation, self._state, self.members = job.generation, job.state, job.in_order

    def decides(self, job: JobState) -> bool:
        """Whether something has been decided since then."""
        return job.state is not self._state or job.generation != self.generation


def job_laws(job: JobState, generation: int) -> Iterator[str]:
    """What cannot be true of a job at the same time, each as text; of the job as a whole. ``generation``: that was true
    of it before."""
    state = job.state
    if not sum(job.places.values()) == len(job.ranks) == len(job.in_order):
        yield f"{len(job.ranks)} ranks, of which {len(job.in_order)} are in order, are counted as {job.places}"
    if job.generation < generation:
        yield f"generation {job.generation} comes after {generation}"
    restarts = job.start_version > 0  # a start from what was kept may be tried again, and nothing is lost in it
    if state in (State.QUIESCING, State.REPLACING, State.REGROUPING) and job.recovery is None and not restarts:
        yield f"the job is {state.value} without a recovery"
    if state in (State.REGROUPING, State.RESTORING, State.VERIFYING) and job.round.restoring is None:
        yield f"the job is {state.value}, and it is not decided what is restored"
    if job.round.retry_at is not None and state not in RECOVERY_STATES:
        yield f"the job is {state.value}, and something is to be tried again"
    if (state is State.FAILED) != bool(job.failure_reason) or (job.ending.saving and state is not State.FAILED):
        yield f"the job is {state.value}, because of {job.failure_reason!r}; saving: {job.ending.saving}"


def rank_laws(job: JobState) -> Iterator[str]:
    """The same, of its ranks. In a large job this is what costs: it goes through them once."""
    places, members, generation = Counter[Place](), job.membership, job.generation
    before = -1
    for (rank, record), other in zip(job.ranks.items(), job.in_order, strict=False):
        place = record.place
        places[place] += 1
        if record is not other or record.rank != rank or rank <= before:
            yield f"ranks {list(job.ranks)} are not in order: {[record.rank for record in job.in_order]}"
        before = rank
        if record.filled > generation or record.process.joined_generation > generation:
            yield f"rank {rank} is of a later generation than {generation}"
        if not record.home and place is not Place.EMPTY:
            yield f"rank {rank} is {place.value} on no node"
    if places != +job.places:
        yield f"ranks are in {places}, and counted as {job.places}"
    if not members.removed.keys().isdisjoint(job.ranks):
        yield f"of ranks {list(job.ranks)} have left {list(members.removed)}"
    if not all(rank in job.ranks or rank in members.removed for rank in members.sharded_among):
        yield f"state is sharded among {members.sharded_among}, and the ranks are {list(job.ranks)}"
    if any(rank != one.record.rank or one.record.place not in BUILT_UP for rank, one in members.joining.items()):
        yield f"{members.joining} have come to their loop, and are no members yet"


def change_laws(before: Mapping[str, ChangeState], now: Mapping[str, ChangeState]) -> Iterator[str]:
    """Changes that have come from one state to another to which no event leads, each as text. One that is missing was,
    or is, at rest."""
    for name in sorted(before.keys() | now.keys()):
        rest = at_rest(before.get(name) or now[name])
        wrong = wrong_change(before.get(name, rest), now.get(name, rest))
        if wrong:
            yield f"{name}: {wrong}"
