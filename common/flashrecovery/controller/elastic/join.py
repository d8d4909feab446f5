"""How joining processes become members: all are ready, the ranks pause, and a recovery without a victim follows.

Ranks that are new to an elastic job join at any step boundary: they need what the members hold. A process that takes
over the rank of a live process needs what only that one has. So the members pause at a step of which all can still be
informed of in time, and report the pause once the copies of its version are complete. The state of the processes that
leave is then held by others, as if their node were lost, and no step is repeated.

The same is done if state is sharded among the members. A joining process gets its part when the state is resharded
(:mod:`flashrecovery.contract.shard_layout`), and a member that dies meanwhile must not take the version with it.
:class:`PauseBarrier` tells whether all members have reached that step.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

from flashrecovery.controller.elastic.released_processes import RelievedProcesses
from flashrecovery.controller.membership.joining_processes import JoiningProcesses, give_up, give_up_all
from flashrecovery.controller.state.custody import of_their_own, sharded
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.loss_policy import allowed_sizes
from flashrecovery.controller.state.rank_record import THROUGH
from flashrecovery.controller.state.restore_plan import Decision, decide
from flashrecovery.errors import JobFailedError
from flashrecovery.kinds import FailureKind
from flashrecovery.plan.transitions import JoinState, State
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb


class PauseBarrier:
    """The state of one pause. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        self.since: float | None = None
        """When the first one arrived; None: none has."""

    def come(self, rank: int, now: float) -> None:
        """This one waits from now on."""
        if self.since is None:
            self.since = now
        self._there.add(rank)

    def has(self, rank: int) -> bool:
        """Whether this one waits."""
        return rank in self._there

    def complete(self, members: Set[int]) -> bool:
        """Whether all of them wait."""
        return self._there >= members

    def overdue(self, now: float, patience_s: float) -> bool:
        """Whether the other ranks have been waited for that long."""
        return self.since is not None and now - self.since >= patience_s

    def dissolve(self) -> None:
        """No rank waits any more."""
        self._there.clear()
        self.since = None


_AHEAD_S = 0.3
"""For so long a word to all ranks may be on its way."""
_ALL_S = 2.0
"""Seconds, and steps, that ranks wait for each other's copies when they pause."""
_TRIES = 3


def commanded_pause(job: JobState) -> pb.Pause:
    """Where ranks are to pause for a number of replicas that is commanded; nowhere if none is."""
    wanted = job.membership.size.wanted
    return pb.Pause(step=-1) if wanted is None else wanted.pause(copies=of_their_own(job.in_order))


@dataclass
class JoinRound:
    """Processes that are started beside training at one time. The next ones get a new object.

    Attributes:
        step: the first step that they are to take part in; -1: the next one.
        taking_over: they take over ranks of live processes.
        called_in: the generation in which the members were asked to pause for them; -1: they were not.
        before: the step before which the members are to pause with their copies made.
        waiting: the members that have paused.
        tries: how often they could not join because no other rank could give them their state.
        called_off: the previous round, if it was cancelled after members were asked to pause for it.
    """

    step: int = -1
    taking_over: bool = False
    called_in: int = -1
    before: int = 0
    waiting: PauseBarrier = field(default_factory=PauseBarrier)
    tries: int = 0
    called_off: JoinRound | None = None

    def forget_called_off(self) -> None:
        """The members have been told that the previous round is cancelled."""
        self.called_off = None

    def call_members(self, generation: int) -> None:
        """The members are told to pause, and none of them has."""
        self.called_in = generation
        self.waiting.dissolve()

    def pause_before(self, step: int) -> None:
        """All of them are to hear of it before they come to this step."""
        self.before = step

    def count_try(self) -> int:
        """They could not join. Returns how often that was."""
        self.tries += 1
        return self.tries


class Joining:
    """The way of the joining processes of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.joining_processes = JoiningProcesses(job)
        self.relieved = RelievedProcesses(job)
        self._round = JoinRound()
        self.came_to_nothing = False
        """They were to take ranks over, and something else has failed before they had all that they needed."""

    def try_again(self) -> None:
        """They are to take ranks over once more."""
        self.came_to_nothing = False

    def has_come_to_nothing(self) -> None:
        """The ranks are those again that they were before."""
        self.came_to_nothing = True

    def expect(self, step: int, *, taking_over: bool = False) -> None:
        """Processes that join are being built up. They come in before ``step`` (-1: before the next one)."""
        called_off = self._round if self._round.called_in == self._job.generation else None
        self._round = JoinRound(step, taking_over, called_off=called_off)

    @property
    def state(self) -> JoinState:
        """Where those are that are to come."""
        if self.relieved:
            return JoinState.TAKING_OVER
        if not self._job.membership.joining:
            return JoinState.NONE
        return JoinState.PAUSING if self._round.called_in == self._job.generation else JoinState.STARTING

    @property
    def cause(self) -> FailureKind:
        """Why the members pause."""
        handoff = self._round.taking_over and self._job.membership.joining
        return FailureKind.HANDOFF if handoff else FailureKind.RESIZE

    @property
    def in_last_step(self) -> bool:
        """Whether ranks have taken all their steps: no process can join any more."""
        return any(record.place in THROUGH for record in self._job.ranks.values())

    def tick(self, now: float) -> bool:
        """Look at deadlines, and whether the joining processes can come in. Returns whether members have paused for
        long enough, or for nothing."""
        job = self._job
        if job.state in (State.FINISHED, State.FAILED):
            job.membership.joining.clear()  # their processes end with all others
            return False
        if job.state is State.STARTING:
            for record in self.relieved.let_go():
                job.tell_to_leave(record.rank, record.home)
        if job.membership.joining and job.state is State.RUNNING and self.in_last_step:
            give_up_all(job, "ranks have taken their last step")
        self.joining_processes.give_up_late(now)
        if not job.membership.joining and self._round.called_in == job.generation:
            self._round = JoinRound(self._round.step, self._round.taking_over, called_off=self._round)
        if self._round.called_off is not None and job.state is State.RUNNING:
            return self._call_off(self._round.called_off)
        self.call_in()
        late = self._round.waiting.overdue(now, _ALL_S + _ALL_S * job.step_s)
        called_in = job.state is State.RUNNING and self._round.called_in == job.generation
        return late and called_in and not self._on_their_way

    def _call_off(self, before: JoinRound) -> bool:
        """Withdraw the pause for a round that was cancelled. Returns whether a member has already paused for it."""
        self._round.forget_called_off()
        if before.called_in != self._job.generation:
            return False
        self._call(commanded_pause(self._job))
        return before.waiting.since is not None  # the others may have begun a step without it

    @property
    def _on_their_way(self) -> bool:
        """Whether some have not come to that step yet: they will, and cannot be stopped in whatever they do alone, as
        one rank writes a checkpoint. A rank that is there and does not pause has begun it before it heard of the
        pause."""
        return any(r.committed < self._round.before for r in self._job.in_order if not self._round.waiting.has(r.rank))

    def call_in(self) -> None:
        """If all joining processes are there, have the members pause before the step at which these are to come in."""
        job = self._job
        ready = self.joining_processes.all_here and job.state is State.RUNNING and job.recovery is None
        if ready and self._round.called_off is None and self._round.called_in != job.generation:
            self._call(self._pause())

    def _call(self, pause: pb.Pause) -> None:
        for record in self._job.in_order:
            self._job.command(record.rank, pb.Command(pause=pause))

    @property
    def _awaits_all(self) -> bool:
        """Whether the members pause with their copies made, all of them."""
        return self._round.taking_over or of_their_own(self._job.in_order)

    def _pause(self) -> pb.Pause:
        self._round.call_members(self._job.generation)
        step = max(self._round.step, 0)
        if not self._awaits_all:
            return pb.Pause(step=step)
        newest = max(record.committed for record in self._job.in_order)
        step_s = self._job.step_s
        ahead = 2 + (math.ceil(_AHEAD_S / step_s) if step_s > 0 else 0)
        self._round.pause_before(max(step, newest + ahead * 2**self._round.tries))
        return pb.Pause(step=self._round.before, copies=True)

    def pause(self) -> pb.Pause | None:
        """The command for members that continue after a recovery; if all of them have to hear of it in time, they get
        it later."""
        return None if self._awaits_all or not self.joining_processes.all_here else self._pause()

    @property
    def paused_since(self) -> float | None:
        """When the first member paused; None: none has, or there is nothing to pause for."""
        return self._round.waiting.since

    def on_paused(self, message: pb.Paused, now: float) -> bool:
        """A member has paused, where all are waited for, and with them their copies. Returns whether all have."""
        self._round.waiting.come(message.rank, now)
        return self._round.waiting.complete(self._job.ranks.keys())

    @property
    def waits_for_all(self) -> bool:
        """Members have been asked to pause with their copies made, and all of them are waited for."""
        return self._awaits_all and bool(self._job.membership.joining) and self._round.called_in == self._job.generation

    def why_paused(self, version: int) -> str:
        """The reason as text; "" if no process is to join."""
        if not self._job.membership.joining:
            return ""
        how = "are filled by other processes" if self._round.taking_over else "come in"
        return f"{ranks_text(list(self._job.membership.joining))} {how} from step {version} on"

    def take_back(self) -> list[int]:
        """Something has failed before the new ones could go on: the processes whose ranks they were to take over have
        them again. Returns these ranks."""
        back = self.relieved.take_back()
        self.came_to_nothing |= bool(back)
        return back

    def _give_up_who_has_left(self) -> None:
        """Give up the takeover of ranks that have left the job meanwhile (with others of their replica, or because this
        many are not allowed): alone they would be a part of a replica, or one too many."""
        if self._round.taking_over:
            for rank in [rank for rank in self._job.membership.joining if rank not in self._job.ranks]:
                give_up(self._job, rank, "it has left the job meanwhile")

    def _give_up_who_would_be_too_many(self) -> None:
        """Members may have left since the joining processes were ordered, so that no allowed number would have all of
        them: the last ones do not come then."""
        job = self._job
        new = job.shape.by_replica(rank for rank in job.membership.joining if rank not in job.ranks)
        if not new:
            return
        most = job.replicas + len(new)
        fitting = allowed_sizes(job).largest(most)
        for ranks in list(new.values())[max(fitting - job.replicas, 0) :]:
            give_up(job, ranks[0], f"the job has {job.replicas} replicas now, and {most} are not allowed")

    def come_in(self, decision: Decision) -> tuple[Decision, list[int]]:
        """All members are stopped and are to go on as in ``decision``. If all joining processes are there, and it is
        time, they are members from now on. Returns what is decided with them, and which ranks they are."""
        job = self._job
        self._round.waiting.dissolve()
        self._give_up_who_has_left()
        if not self.joining_processes.all_here or decision.round.version < self._round.step:
            return decision, []
        if decision.checkpoint and sharded(job.in_order):
            return decision, []  # joining processes do not take part in an aborted recovery; they join later
        self._give_up_who_would_be_too_many()
        if not job.membership.joining:
            return decision, []
        coming = {rank: joining.record for rank, joining in job.membership.joining.items()}
        for rank, record in coming.items():
            if rank in job.ranks:
                record.inventory.need_as(job.ranks[rank].inventory)
            else:
                record.inventory.need_no_part()
        everybody = dict(sorted({**job.ranks, **coming}.items()))
        found: Decision | None = None
        try:
            found = decide(everybody, job.checkpoint, job.elastic_layout(), job.membership.removed)
            why_not = found.round.reason
        except JobFailedError as e:
            why_not = str(e)
        if found is None or (found.round.version, found.checkpoint) != (decision.round.version, decision.checkpoint):
            tries = self._round.count_try()
            if not self._round.taking_over or tries >= _TRIES:
                version = decision.round.version
                give_up_all(job, f"no other rank could give it its state at version {version}: {why_not}")
            return decision, []
        for rank, record in coming.items():
            del job.membership.joining[rank]
            record.become_member(job.generation)
            if rank in job.ranks:
                self.relieved.keep(job.remove_member(rank))
            job.enrol(record)
            job.nodes[record.home].activate()
        return found, sorted(coming)
