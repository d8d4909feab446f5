"""The way of a recovery through the states: who is told what, and when the next state is reached.

QUIESCING: hold, then stop. REPLACING: wait for the replacements, then decide the version and the sources. REGROUPING,
RESTORING, VERIFYING, and back to RUNNING. Each function here belongs to one of these; the table of transitions is in
:mod:`.states`, the decision about versions and sources in :mod:`flashrecovery.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.controller.evacuate import Evacuation
from flashrecovery.controller.records import THROUGH, Place, RankRecord
from flashrecovery.controller.restore import Decision, decide
from flashrecovery.controller.states import State
from flashrecovery.errors import JobFailedError
from flashrecovery.plan import NoSourceError
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_MAX_RETRIES = 3


@dataclass
class RecoverySteps(Evacuation):
    """Transitions between the states of a recovery."""

    def _enter_recovery(self, cause: str, now: float, victims: Sequence[int] = ()) -> None:
        """Enter QUIESCING with the next generation; also from the middle of a recovery."""
        self.generation += 1
        victims = [*victims, *(rank for rank in self._stranded() if rank not in victims)]
        # replacements that are still on their way keep their deadline; every other command is void
        self.outbox.keep(lambda what, rank: what == "replace" and rank not in victims)
        self._round, self._restore_from, self._retry_at = None, "", None
        self._to(State.QUIESCING, now)
        of_all = self.recovery.victims if self.recovery is not None else []
        self._emit(ev.RecoveryStarted(generation=self.generation, victims=list(of_all), cause=cause))
        limit = self.config.timeouts
        survivors = self._survivors()
        for record in survivors:
            record.place = Place.STOPPING
        self._command_all(survivors, pb.Command(hold=pb.Hold()), now + limit.stop_ack_s, "hold")
        self._replace(victims, now)

    def _joins(self, victims: Sequence[int]) -> bool:
        """Whether further victims can be taken into the recovery under way, in its generation.

        Until the version is decided on, nothing depends on who is alive: a survivor's hold and stop are its own, and
        what it has reported stays true whoever else dies. From then on the plan counts on everybody. And a rank that
        has been filled in this generation must not be filled in it again: its two processes could not be told apart.
        """
        if self.state not in (State.QUIESCING, State.REPLACING) or self.recovery is None or not victims:
            return False
        return all(self.ranks[rank].filled != self.generation for rank in (*victims, *self._stranded()))

    def _join_recovery(self, cause: str, now: float, victims: Sequence[int]) -> None:
        """These, too, have lost their processes."""
        victims = [*victims, *(rank for rank in self._stranded() if rank not in victims)]
        self.outbox.keep(lambda _, rank: rank not in victims)
        of_all = self.recovery.victims if self.recovery is not None else []
        self._emit(ev.RecoveryStarted(generation=self.generation, victims=list(of_all), cause=cause))
        self._replace(victims, now)

    def _replace(self, victims: Sequence[int], now: float) -> None:
        """Fill these ranks anew, and go on if there is somebody to go on from."""
        for victim in victims:
            if self.ranks[victim].home:
                self.ranks[victim].vacate()
                self._fill(self.ranks[victim], now, detached=True, reason=self.last_failure)
        if not self._survivors() and self.checkpoint is None:
            why = f"no survivor holds any state and there is no checkpoint; the last failure: {self.last_failure}"
            self._nothing_to_go_on_from(why, now)
        else:
            self._advance(now)

    def _survivors(self) -> list[RankRecord]:
        """The ranks whose processes were in their loop."""
        return [r for r in self.ranks.values() if r.place not in (Place.EMPTY, Place.STARTING, Place.JOINED)]

    def _stranded(self) -> list[int]:
        """Ranks whose replacement is on its way, but was told to use a TCPStore that is lost with its node, and would
        wait for it in vain."""
        living = {node.store for node in self.nodes.values() if node.alive}
        waiting = (r for r in self.ranks.values() if r.home and r.place in (Place.EMPTY, Place.STARTING))
        return [r.rank for r in waiting if r.store not in living]

    def _advance(self, now: float) -> None:
        """Move on from the current recovery state if all that it waits for is there."""
        if self.state is State.QUIESCING:
            if self.places[Place.STOPPING]:
                self._stop_survivors(now)
                return
            self._to(State.REPLACING, now)
            self._evacuate(now)
        if self.state is State.REPLACING and self._all(Place.STOPPED, Place.JOINED):
            self._decide(now)
            return
        if self._retry_at is not None:
            return
        if self.state is State.REGROUPING and not self.outbox.waits_for("regroup"):
            self._to(State.RESTORING, now)
            self._send_restore(now)
        if self.state is State.RESTORING and not self.outbox.pending:
            self._to(State.VERIFYING, now)
            self._verify(now)
        elif self.state is State.VERIFYING and not self.outbox.pending:
            self._to(State.RUNNING, now)
            self._confirm(now)

    def _stop_survivors(self, now: float) -> None:
        """Once every survivor is held: first those that may finish their step stop, then the others.

        Whoever has reached a version has synchronised its gradients with all others, so these can reach it, too (unless
        the dead rank still had to send them something; where that matters, a barrier comes before the mutation). The
        others wait meanwhile, because closing their connections could cut off what they had sent.
        """
        if self.outbox.waits_for("hold") or self.outbox.waits_for("stop"):
            return
        limit = self.config.timeouts
        known = [r for r in self.ranks.values() if r.place in (Place.STOPPING, Place.STOPPED)]
        newest = max((at.version + at.mutating for at in (r.held_at for r in known) if at.settled), default=-1)
        held = [r for r in known if r.place is Place.STOPPING]
        behind = [r for r in held if r.held_at.settled and (r.held_at.mutating or r.held_at.version < newest)]
        chosen = behind or held
        for settled in (True, False):
            stop = pb.Stop(
                reason=self.last_failure,
                mutation_grace_s=limit.mutation_grace_s,
                finish_to=newest if settled else -1,
                needs_known=self._needs_known,
            )
            told = [r for r in chosen if r.held_at.settled is settled]
            deadline = now + limit.mutation_grace_s + limit.stop_ack_s
            self._command_all(told, pb.Command(stop=stop), deadline, "stop")

    def _decide(self, now: float) -> None:
        """Everybody is quiet: which version, from whom?"""
        self._needs_known = self.generation
        try:
            decision = decide(self.ranks, self.checkpoint)
        except JobFailedError as e:
            self._nothing_to_go_on_from(str(e), now)
            return
        self._adopt(decision, now)
        self._to(State.REGROUPING, now)
        stores = self._stores()
        limit = self.config.timeouts.regroup_s
        for record in self.ranks.values():
            record.place = Place.RECOVERING
        command = pb.Command(regroup=pb.Regroup(stores=stores, deadline_s=limit))
        self._command_all(self.ranks.values(), command, now + 2 * limit, "regroup")
        if not decision.checkpoint:
            self._restore_idle(now + 2 * limit)

    def _adopt(self, decision: Decision, now: float) -> None:
        self._round, self._restore_from = decision.round, decision.checkpoint
        version, reason = decision.round.version, decision.round.reason
        if decision.checkpoint:
            self._to(State.FALLBACK, now)
            self._emit(
                ev.FallbackStarted(generation=self.generation, version=version, path=decision.checkpoint, reason=reason)
            )
        if self.recovery is not None:
            self.recovery.resume_step, self.recovery.reason = version, reason
            self._tell_of_cut_short(self.recovery.victims, version)

    def _tell_of_cut_short(self, victims: Sequence[int], version: int) -> None:
        """Ranks that had committed ``version``, and died before they came to its hand-out: nobody can tell what their
        script had still to do there. It is not silently left out."""
        for record in (self.ranks[rank] for rank in victims):
            if record.committed >= version and version in record.early and version in record.capsules:
                text = (
                    f"rank {record.rank} died between the block of step {version - 1} and the next one; what only this "
                    "rank does there (an evaluation, say) is not done again, and random numbers that it has drawn "
                    "there are drawn once more"
                )
                self._emit(ev.Notice(generation=self.generation, rank=record.rank, kind="below_cut_short", text=text))

    def _restore_idle(self, regrouped_by: float) -> None:
        """Whoever has nothing to transfer goes on from its own state as soon as it has regrouped: mostly all ranks but
        a few, which saves a message to each of them and its answer."""
        assert self._round is not None
        busy, limit = self._round.busy, self.config.timeouts.restore_s
        idle = [self.ranks[rank] for rank in self._round.ranks if rank not in busy]
        command = pb.Command(restore=self._round.command(None, "", limit))
        self._command_all(idle, command, regrouped_by + 1.5 * limit, "restore")

    def _send_restore(self, now: float) -> None:
        """The transfers; from a checkpoint, every rank reads its own part."""
        assert self._round is not None
        limit = self.config.timeouts.restore_s
        if self._restore_from:
            command = pb.Command(restore=self._round.command(None, self._restore_from, limit))
            self._command_all(self.ranks.values(), command, now + 1.5 * limit, "restore")
        for rank in self._round.busy:
            command = pb.Command(restore=self._round.command(rank, "", limit))
            self._command(rank, command, now + 1.5 * limit, "restore")

    def _verify(self, now: float) -> None:
        """Every restored shard must have its source's digest; if not, it is taken from the next source."""
        assert self._round is not None
        wrong = self._round.mismatches() if self.config.verify else []
        if not wrong:
            if self.recovery is not None:
                self.recovery.add_round(self._round)
            self._send_resume(self._round.version, now)
            return
        for shard, source in wrong:
            self._emit(
                ev.Notice(
                    generation=self.generation,
                    rank=source,
                    kind="digest_mismatch",
                    text=f"shard {shard!r} from rank {source} did not arrive with its digest; the next source is used",
                )
            )
        try:
            self._round = self._round.retry(wrong)
        except NoSourceError as e:
            if self.checkpoint is None:
                self._fail(f"{e}; and there is no checkpoint")
                return
            self._adopt(Decision.from_checkpoint(self.checkpoint, self.ranks, str(e)), now)
        self._to(State.RESTORING, now)
        self._send_restore(now)

    def _send_resume(self, version: int, now: float) -> None:
        limit = self.config.timeouts.resume_ack_s
        self._confirmed = 0
        for record in self.ranks.values():
            record.committed = version
            if self.state is State.RUNNING:
                record.place = Place.RUNNING
        self._command_all(self.ranks.values(), pb.Command(resume=pb.Resume(version=version)), now + limit, "resume")

    def _confirm(self, now: float) -> None:
        """A recovery is over when every rank has committed one more real step (or has no step left); so is the job."""
        if self.state is not State.RUNNING:
            return
        recovery = self.recovery
        if recovery is not None and self._all_have_gone_on(recovery.resume_step):
            recovery.finish(now)
            self._recovered()
            self.history.append(recovery)
            self.recovery = None
            self._emit(recovery.finished_event(self.generation))
        if self.places[Place.DONE] and self._all(*THROUGH):
            for r in self.ranks.values():
                if r.place is Place.DONE:
                    r.place = Place.RELEASED
                    self._command(r.rank, pb.Command(release=pb.Release()))

    def _finish_if_all_have(self, now: float) -> None:
        """The job has ended well once every rank's process has."""
        if self._all(Place.FINISHED):
            self._to(State.FINISHED)
            self._emit(ev.JobFinished(generation=self.generation, exit_code=0, seconds=now - self._started_at))

    def _recovered(self) -> None:
        """What counts within one recovery begins anew with the next one."""
        self._retries, self._asked_again = 0, False
        self._failures.clear()
        for record in self.ranks.values():
            record.crashes.arrived()

    def _all_have_gone_on(self, resume_step: int) -> bool:
        """Whether every rank has committed a step after ``resume_step`` or has none left. Who has, has for good; so
        each rank is asked about only until then, however many heartbeats come."""
        while self._confirmed < len(self.ranks):
            record = self.ranks[self._confirmed]
            if record.place not in THROUGH and record.committed <= resume_step:
                return False
            self._confirmed += 1
        return True

    def _retry(self, now: float) -> None:
        self._retries += 1
        if self._retries > _MAX_RETRIES:
            self._fail(f"regrouping or restoring failed {self._retries} times in a row; see the events")
        else:
            self._enter_recovery("retry", now)

    def _nothing_to_go_on_from(self, why: str, now: float) -> None:
        """No state is left in memory, and there is no checkpoint."""
        raised = self._raised_first()
        if raised:
            why = f"{raised}\n{why}"
        if raised and len({f.rank for f in self._failures if f.last_words.exception}) == len(self.ranks):
            self._fail(why)  # a script that does so on all ranks will do so again
        elif max(r.committed for r in self.ranks.values()) <= self._start_version + 1:
            self._start_again(f"{why}; only the first step is lost", now)
        else:
            self._fail(why)

    def _raised_first(self) -> str:
        """The script's own exception, if this recovery has begun with one; else ""."""
        if not self._failures or not self._failures[0].last_words.exception:
            return ""
        if self._failures[0].last_words.communication:
            return ""
        first = self._failures[0].last_words
        alike = sorted({f.rank for f in self._failures if f.last_words.exception == first.exception})
        said = f"the script raised {first.exception} on {ranks_text(alike)}, at step {self._failures[0].step}"
        return f"{said}: {first.message}\n{first.traceback}".rstrip()

    def _start_again(self, why: str, now: float) -> None:
        """Every rank from the script's first line, because no step that counts has been taken."""
        if self._unprotected:
            self._fail(
                f"{why}. The script had run for longer than timeouts.startup_s without a protected step, so there is "
                "nothing to recover it from, and it is not started from its beginning again: start it yourself, from "
                "its own checkpoint if it has one"
            )
            return
        self._restarts += 1
        if self._restarts > self.config.max_restarts:
            self._fail(f"{why}, {self._restarts} times (max_restarts)")
            return
        self._emit(ev.Notice(generation=self.generation, kind="start_again", text=why))
        self._to(State.STARTING)
        self.generation += 1
        self.recovery, self._retry_at = None, None
        self._failures.clear()
        self.outbox.clear()
        self._start_stores, self._needs_known = [], 0
        for record in self.ranks.values():
            record.vacate()
            record.needs, record.committed = {}, -1
            if record.home:
                self._fill(record, now, detached=False, reason=why)
