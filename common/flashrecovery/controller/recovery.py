"""The way of a recovery through the states: which rank gets which command, and when the next state is reached.

QUIESCING: hold, then stop. REPLACING: wait for the replacements, then decide the version and the sources. REGROUPING,
RESTORING, VERIFYING, and back to RUNNING. Each function here belongs to one of these; the table of transitions is in
:mod:`flashrecovery.plan.transitions`, the decision about versions and sources in :mod:`flashrecovery.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashrecovery import events as ev
from flashrecovery.controller.elastic.resizing import Resizing
from flashrecovery.controller.membership.launch import LaunchSequence
from flashrecovery.controller.membership.node_health_policy import ProactiveReplacement
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.next_move import (
    BeginAgainOrFail,
    Move,
    Relayout,
    Restore,
    Settle,
    StoppedFacts,
    TakeBack,
    next_move,
)
from flashrecovery.controller.parallelism import Parallelism
from flashrecovery.controller.state.custody import ready_for, sharding_of, take_on_parts
from flashrecovery.controller.state.history import group_backends, start_lines
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.parity import other_groups
from flashrecovery.controller.state.rank_record import (
    BUILT_UP,
    THROUGH,
    Place,
    RankRecord,
    slowest_start,
    told_of,
    unequal_claims,
    unequal_steps,
)
from flashrecovery.controller.state.relayout_outcome import KeepLayout
from flashrecovery.controller.state.restore_plan import (
    Decision,
    NothingLeft,
    RestoreRound,
    decide,
    from_snapshots,
)
from flashrecovery.errors import JobFailedError, ProtocolError
from flashrecovery.kinds import FailureKind, NoticeKind, Ordered
from flashrecovery.plan import NoCut, NoSourceError
from flashrecovery.plan.transitions import State
from flashrecovery.plan.words import raised_text, ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_MAX_RETRIES = 3


class RecoverySteps:
    """Transitions between the states of a recovery."""

    def __init__(
        self,
        job: JobState,
        placement: RankPlacement,
        proactive: ProactiveReplacement,
        starting: LaunchSequence,
        resizing: Resizing,
        parallelism: Parallelism,
    ) -> None:
        self._job = job
        self._parallelism = parallelism
        self._resizing = resizing
        self._placement = placement
        self._proactive = proactive
        self._starting = starting

    def begin(self, now: float) -> None:
        """STARTING is over when every rank has come to its first step."""
        if not self._job.all_in(Place.JOINED):
            return
        self._job.run_protected()
        uneven = unequal_steps(self._job.ranks.values())
        if uneven:
            self._job.fail(uneven)
            return
        wrong = unequal_claims(self._job.ranks.values())
        if wrong:
            self._job.fail(
                "state registered as replicated is not equal on all ranks at the start: "
                + "; ".join(wrong[:5])
                + ". Initialise it equally on all ranks (DDP broadcasts it) before you register it."
            )
            return
        again = self._parallelism.restored_from()
        found = again or (self._saved_state() if self._job.config.resume else None)
        if self._job.state is State.FAILED:
            return
        if again is None:
            self._job.emit(
                ev.JobStarted(
                    generation=self._job.generation,
                    world_size=len(self._job.ranks),
                    replicas=self._job.replicas if self._job.config.elastic is not None else 0,
                    seconds=now - self._job.started_at,
                    step=found.round.version if found is not None else 0,
                    start=start_lines(slowest_start(self._job.ranks.values())),
                    backends=group_backends(self._job.ranks.values()),
                )
            )
        else:
            self._job.continue_recovery(self._parallelism.change)
            if self._job.recovery is not None:
                self._job.recovery.resume_at(again.round.version)
        if found is None:
            self._job.to(State.RUNNING)
            self.send_resume(0, now)
            return
        self._job.begin_from(found)
        self._job.to(State.RESTORING, now)
        if not found.checkpoint:
            self._restore_idle(now)
        self.send_restore(now)

    def _saved_state(self) -> Decision | None:
        """The newest state that an earlier launch left, in memory or on disk. None if there is none, or if it cannot
        be used; then the job has failed, because a requested resume must not silently start from scratch."""
        found = self._job.checkpoints
        found += [last for last in self._job.earlier.left_last if not found or last[0] >= found[-1][0]]
        checkpoint = self._job.checkpoint
        in_memory = from_snapshots(self._job.ranks)
        if isinstance(in_memory, NoCut):
            why = f"there are snapshots of an earlier launch, but {in_memory.reason}"
            if checkpoint is None:
                self._job.fail(f"{why}; and there is no checkpoint. Without --resume the job starts from scratch")
                return None
            self._job.notice(NoticeKind.SNAPSHOTS, f"{why}; the newest checkpoint is used")
        elif in_memory is not None and (checkpoint is None or in_memory.round.version >= checkpoint[0]):
            text = f"goes on from version {in_memory.round.version}, of which the nodes hold snapshots"
            if checkpoint is not None:
                text += f"; the newest checkpoint is of version {checkpoint[0]}"
            self._job.notice(NoticeKind.SNAPSHOTS, text)
            self._tell_resumed(in_memory.round.version, f"the snapshots of {self._job.where}")
            return in_memory
        if checkpoint is None:
            self._nothing_to_resume()
            return None
        version, path = checkpoint
        self._tell_resumed(version, f"checkpoint {path}")
        return Decision(RestoreRound.from_checkpoint(version, self._job.ranks), path)

    def _tell_resumed(self, version: int, found: str) -> None:
        lost = self._job.earlier.step - version
        again = f"; the launch before had come to step {self._job.earlier.step}" if lost > 1 else ""
        self._job.notice(NoticeKind.RESUMED, f"resumed at step {version} from {found}{again}")

    def _nothing_to_resume(self) -> None:
        """The job begins at its first step, unless an earlier launch had come further: then that is lost, which is not
        passed over."""
        job = self._job
        folder = job.config.checkpoint.dir
        places = job.where if folder is None else f"{job.where}, {folder}"
        if job.earlier.step == 0:
            job.notice(NoticeKind.RESUMED, f"nothing to resume in {places}: starts at step 0")
            return
        hint = "" if folder is not None else " (--checkpoint-dir and --snapshots auto or always leave something)"
        job.fail(
            f"--resume: an earlier launch in {job.where} had come to step {job.earlier.step}, and in {places} there is "
            f"nothing to resume from{hint}; without --resume the job starts from scratch"
        )

    def recover(self, victims: list[int], kind: FailureKind, failed_at: float, detect_s: float, now: float) -> None:
        """Ranks have lost their processes: replace these, and bring everybody back to one consistent version."""
        joins = self._joins(victims)
        recovery = self._job.recovery or self._job.open_recovery(failed_at, detect_s)
        recovery.caused_by(kind)
        for victim in victims:
            recovery.add_victim(victim, kind, self._job.generation + (not joins))
        if joins:
            self._join_recovery(kind, now, victims)
        else:
            self.enter(kind, now, victims)

    def enter(self, cause: str, now: float, victims: Sequence[int] = ()) -> None:
        """Enter QUIESCING with the next generation; also from the middle of a recovery."""
        self._job.next_generation()
        self._resizing.resumed()
        self._parallelism.interrupted()
        back = self._resizing.take_back()
        victims = [rank for rank in victims if rank not in back]
        victims += [rank for rank in self._placement.stranded() if rank not in victims]
        # replacements that are still on their way keep their deadline; every other command is void
        self._job.outbox.keep(lambda what, rank: what is Ordered.REPLACE and rank not in victims)
        self._job.to(State.QUIESCING, now)
        of_all = self._job.recovery.victims if self._job.recovery is not None else []
        self._job.emit(ev.RecoveryStarted(generation=self._job.generation, victims=list(of_all), cause=cause))
        limit = self._job.config.timeouts
        survivors = self.survivors()
        for record in survivors:
            self._job.move(record.rank, Place.STOPPING)
        self._job.command_all(survivors, pb.Command(hold=pb.Hold()), now + limit.stop_ack_s, Ordered.HOLD)
        self._replace(victims, now)

    def _joins(self, victims: Sequence[int]) -> bool:
        """Whether further victims can be taken into the recovery under way, in its generation.

        Until the version is decided on, nothing depends on which ranks are alive: each survivor holds and stops
        independently, and its report stays true when another rank dies. From then on the plan counts on every rank. And
        a rank that was filled in this generation must not be filled in it again: its two processes could not be told
        apart.
        """
        if self._job.state not in (State.QUIESCING, State.REPLACING) or self._job.recovery is None or not victims:
            return False
        return all(
            self._job.ranks[rank].filled != self._job.generation for rank in (*victims, *self._placement.stranded())
        )

    def _join_recovery(self, cause: str, now: float, victims: Sequence[int]) -> None:
        """Take further ranks that have lost their processes into the recovery under way."""
        victims = [*victims, *(rank for rank in self._placement.stranded() if rank not in victims)]
        self._parallelism.interrupted()
        self._job.outbox.keep(lambda _, rank: rank not in victims)
        of_all = self._job.recovery.victims if self._job.recovery is not None else []
        self._job.emit(ev.RecoveryStarted(generation=self._job.generation, victims=list(of_all), cause=cause))
        self._replace(victims, now)

    def _replace(self, victims: Sequence[int], now: float) -> None:
        """Fill these ranks again, and continue if a survivor has state to continue from."""
        lost = self._resizing.without_replacement(victims)
        if lost and not self._do_without(lost):
            if self._job.state is State.FAILED:
                return
            self._await_nodes(lost, now)
            others = [rank for rank in self._placement.homeless() if rank in lost]  # some may have a node now
            self._resizing.lose(others)
        for victim in victims:
            record = self._job.ranks.get(victim)
            if record is not None and record.home:
                self._job.vacate(victim)
                self._placement.fill(record, now, detached=True)
        nothing = not self.survivors() and self._job.checkpoint is None and not self._in_snapshots()
        if nothing and self._with_those_who_left(now):
            return
        if nothing and self._parallelism.restored_from() is None:
            why = (
                "no survivor holds any state and there is no checkpoint (what would survive that: --snapshots auto or "
                f"always, --checkpoint-dir); the last failure: {self._job.last_failure}"
            )
            self._nothing_to_go_on_from(why, now)
        else:
            self.advance(now)

    def _await_nodes(self, ranks: Sequence[int], now: float) -> None:
        """Ranks that cannot be replaced now, and without which an elastic job would be too small."""
        for rank in ranks:
            if self._job.ranks[rank].home:
                self._resizing.end_process(rank)
        self._placement.settle(list(ranks), now)

    def go_on_without(self, ranks: Sequence[int], now: float) -> bool:
        """Whether the job can do without these ranks, which could not be filled again; if so, it does."""
        if not self._do_without(ranks):
            return False
        self.advance(now)
        return True

    def _do_without(self, lost: Sequence[int]) -> bool:
        """Whether the job goes on without these ranks: with fewer replicas, which keep their processes, or else in
        another layout. Where only another layout could, and none fits, it fails."""
        try:
            if self._parallelism.has_to:
                return self._parallelism.lose(lost)
            self._parallelism.may_lose(lost)
            return self._resizing.lose(lost) or self._parallelism.lose(lost)
        except JobFailedError as e:
            self._job.fail(str(e))
            return False

    def _in_snapshots(self) -> bool:
        """Whether the state can be there although no process is: their nodes hold copies. Not if all ranks have raised
        the same, which they would do again."""
        raised = {f.rank for f in self._job.tries.failures if f.last_words.exception and not f.last_words.communication}
        return any(r.in_snapshots for r in self._job.ranks.values()) and len(raised) < len(self._job.ranks)

    def survivors(self) -> list[RankRecord]:
        """The ranks whose processes were in their loop."""
        return [r for r in self._job.ranks.values() if r.place not in BUILT_UP]

    def advance(self, now: float) -> None:
        """Move on from the current recovery state if all that it waits for is there."""
        if self._job.state is State.QUIESCING:
            if self._job.places[Place.STOPPING]:
                self._stop_survivors(now)
                return
            self._job.to(State.REPLACING, now)
            self._proactive.replace_ahead(now)
        if self._job.state is State.REPLACING and self._job.all_in(Place.STOPPED, Place.JOINED):
            if self._parallelism.writing:
                self._parallelism.go_on(now)
            else:
                self._decide(now)
            return
        if self._job.round.retry_at is not None:
            return
        if self._job.state is State.REGROUPING and not self._job.outbox.waits_for(Ordered.REGROUP):
            self._job.to(State.RESTORING, now)
            self.send_restore(now)
        if self._job.state is State.RESTORING and not self._job.outbox.pending:
            self._job.to(State.VERIFYING, now)
            self._verify(now)
        elif self._job.state is State.VERIFYING and not self._job.outbox.pending:
            self._job.to(State.RUNNING, now)
            self.confirm(now)

    def _stop_survivors(self, now: float) -> None:
        """See :meth:`stop_held`, in a recovery."""
        self.stop_held(now, self._job.config.timeouts.mutation_grace_s)

    def stop_held(self, now: float, grace_s: float) -> None:
        """Once every survivor is paused: first stop those that may finish their step, in ``grace_s``, then the others.

        A rank that has reached a version has synchronised its gradients with all others, so these can reach it, too
        (unless the dead rank still had to send them something; where that matters, a barrier comes before the
        mutation). The others wait meanwhile, because closing their connections could cut off what they had sent.
        """
        if self._job.outbox.waits_for(Ordered.HOLD) or self._job.outbox.waits_for(Ordered.STOP):
            return
        limit = self._job.config.timeouts
        known = [r for r in self._job.ranks.values() if r.place in (Place.STOPPING, Place.STOPPED)]
        newest = max((at.version + at.mutating for at in (r.held_at for r in known) if at.settled), default=-1)
        held = [r for r in known if r.place is Place.STOPPING]
        behind = [r for r in held if r.held_at.settled and (r.held_at.mutating or r.held_at.version < newest)]
        chosen = behind or held
        for settled in (True, False):
            stop = pb.Stop(
                reason=self._job.failure_reason or self._job.last_failure,
                mutation_grace_s=grace_s,
                finish_to=newest if settled else -1,
                needs_known=self._job.start.needs_known,
                layout=self._job.elastic_layout(),
                unsure=self._job.membership.unsure,
            )
            told = [r for r in chosen if r.held_at.settled is settled]
            deadline = now + grace_s + limit.stop_ack_s
            self._job.command_all(told, pb.Command(stop=stop), deadline, Ordered.STOP)

    def _decide(self, now: float) -> None:
        """All ranks are stopped: decide which version they go to, and from which ranks they get it."""
        if self._job.membership.unsure and self._another_sharding():
            self.enter(FailureKind.CONTROLLER, now)
            return
        self._job.start.needs_told(self._job.generation)
        own = self._job.name_own()
        if not self._as_launched:
            take_on_parts(self._job.in_order, self._job.membership.sharded_among)
        if self._parallelism.under_way:
            # A rank that is left of a replica has a part in that, and what it has is needed.
            move = self._next_move(self._found(), now, settled=False)
            if not isinstance(move, Settle):
                self._make(move, own, now)
                return
        back = self._resizing.take_back_needed()
        if back:
            self.enter("retry", now, back)
            return
        self._resizing.dissolve_replicas()
        move = self._next_move(self._found(), now)
        if isinstance(move, Restore):
            move = self._without_those_who_leave(move, now)
        self._make(move, own, now)

    def _next_move(self, found: Decision | NothingLeft, now: float, *, settled: bool = True) -> Move:
        """See :func:`.next_move.next_move`. A change of the parallel layout that fails may be dropped here."""
        relayout = self._parallelism.next_step(found)
        why = self._parallelism.why_not_written(relayout)
        if why:
            found = NothingLeft(why)
            relayout = self._parallelism.next_step(found)
        move = next_move(StoppedFacts(found, relayout, self._resizing.can_take_back, settled))
        undecided = isinstance(move, TakeBack) or (isinstance(move, Settle) and isinstance(found, NothingLeft))
        if isinstance(relayout, KeepLayout) and not undecided:
            self._parallelism.carry_out(relayout, now)
        return move

    def _without_those_who_leave(self, move: Restore, now: float) -> Move:
        """The ranks that have to leave the job do so now."""
        version, checkpoint = move.decision.round.version, move.decision.checkpoint
        try:
            if not self._resizing.leave_at(version, on_disk=bool(checkpoint)):
                return move
        except JobFailedError as e:
            return self._next_move(NothingLeft(str(e)), now)
        found = self._found()
        return Restore(found) if isinstance(found, Decision) else self._next_move(found, now)

    def _make(self, move: Move, own: Sequence[str], now: float) -> None:
        """Carry it out. ``own``: names of shards that have turned out to be each rank's own."""
        match move:
            case Restore():
                self._regroup(move.decision, own, now)
            case Relayout():
                self._parallelism.carry_out(move.step, now)
            case TakeBack():
                self._with_those_who_left(now)
            case BeginAgainOrFail():
                self._nothing_to_go_on_from(move.reason, now)
            case Settle():
                raise ProtocolError("all members are settled, and it is not decided what happens next")

    def _regroup(self, decision: Decision, own: Sequence[str], now: float) -> None:
        """All ranks form new process groups, and then go to the decided version."""
        decision = self._resizing.come_at(decision)
        self._adopt(decision, now)
        if self._resizing.tell(decision.round.version):
            self._placement.publish_rank_table()
        self._job.to(State.REGROUPING, now)
        stores = self._placement.stores()
        limit = self._job.config.timeouts.regroup_s
        for rank in self._job.ranks:
            self._job.move(rank, Place.RECOVERING)
        parity = [pb.ParityRanks(ranks=ranks) for ranks in self._parity_groups()]
        members = self._resizing.members()
        regroup = pb.Regroup(stores=stores, deadline_s=limit, parity=parity, members=members, own=own)
        regroup.layout.extend(self._job.elastic_layout())
        command = pb.Command(regroup=regroup)
        self._job.command_all(self._job.ranks.values(), command, now + 2 * limit, Ordered.REGROUP)
        if not decision.checkpoint:
            self._restore_idle(now + 2 * limit)

    def _with_those_who_left(self, now: float) -> bool:
        """There is no version of which the ranks that go on have everything. If processes are still there that were
        given up, all begin again with them."""
        if not self._resizing.take_back_last():
            return False
        self.enter("retry", now)
        return True

    @property
    def _as_launched(self) -> bool:
        """Whether the state of every rank is sharded as in the launch's size."""
        return self._job.begins_as_sharded(self._job.in_order[-1].rank)

    def _another_sharding(self) -> bool:
        """The ranks have said how their state is sharded. Returns whether that is sent to them, and all are asked
        again what they need and hold: it is not as this controller has thought, or not yet the same on all."""
        self._job.membership.doubt_members(unsure=False)
        layout = sharding_of(self._job.in_order)
        as_thought = layout == self._job.elastic_layout() and all(
            r.inventory.layout in ((), layout) for r in self._job.in_order
        )
        if not layout or (as_thought and not any(r.inventory.ready for r in self._job.in_order)):
            return False
        self._job.sharded_among(layout)
        other = ready_for(self._job.in_order)
        if other and set(other) < set(layout) and not self._all_there():
            self._job.sharded_among(other)  # which takes nothing away: they could not go on from the old one
        self._job.start.needs_told(0)
        return True

    def _all_there(self) -> bool:
        """Whether all can go on from somewhere, other than a checkpoint."""
        take_on_parts(self._job.in_order, self._job.membership.sharded_among)
        found = self._found()
        return isinstance(found, Decision) and not found.checkpoint

    def _found(self) -> Decision | NothingLeft:
        """What all could go on from."""
        job = self._job
        try:
            return decide(job.ranks, job.checkpoint, job.elastic_layout(), job.membership.removed)
        except JobFailedError as e:
            return NothingLeft(str(e))

    def _parity_groups(self) -> Sequence[Sequence[int]]:
        """See :func:`.state.parity.other_groups`."""
        job = self._job
        told = [record.inventory.parity for record in job.ranks.values() if record.inventory.parity is not None]
        nodes = [job.nodes.get(record.home) for record in job.ranks.values()] if told else []
        if any(node is None for node in nodes):
            return ()
        domains = [node.domain for node in nodes if node is not None]
        return other_groups(told, domains, job.config.nnodes, job.domains)

    def _adopt(self, decision: Decision, now: float) -> None:
        self._job.round.restore_from(decision)
        version, reason = decision.round.version, decision.round.reason
        if decision.checkpoint:
            self._job.to(State.FALLBACK, now)
            self._job.emit(
                ev.FallbackStarted(
                    generation=self._job.generation, version=version, path=decision.checkpoint, reason=reason
                )
            )
        if self._job.recovery is not None:
            self._job.recovery.resume_at(version, reason)
            self._tell_of_cut_short(self._job.recovery.victims, version)

    def _tell_of_cut_short(self, victims: Sequence[int], version: int) -> None:
        """Ranks that had committed ``version``, and died before they came to its yield: no rank can tell what their
        script had still to do there. It is not silently left out."""
        for record in (self._job.ranks[rank] for rank in victims if rank in self._job.ranks):
            if (
                record.committed >= version
                and version in record.inventory.early
                and version in record.inventory.local_states
            ):
                text = (
                    f"rank {record.rank} died between the block of step {version - 1} and the next one; code that "
                    f"only this rank runs there (an evaluation, say) is not run again, and random numbers that it "
                    f"drew there are drawn again"
                )
                self._job.notice(NoticeKind.POST_STEP_CODE_SKIPPED, text, rank=record.rank)

    def _restore_idle(self, regrouped_by: float) -> None:
        """A rank that has nothing to transfer goes on from its own state as soon as it has regrouped: mostly all ranks
        but a few, which saves a message to each of them and its answer."""
        restoring = self._job.round.decided
        busy, limit = restoring.busy, self._job.config.timeouts.restore_s
        idle = [self._job.ranks[rank] for rank in restoring.ranks if rank not in busy]
        command = pb.Command(restore=restoring.command(None, "", limit))
        self._job.command_all(idle, command, regrouped_by + 1.5 * limit, Ordered.RESTORE)

    def send_restore(self, now: float) -> None:
        """The transfers; from a checkpoint, every rank reads its own part."""
        restoring, checkpoint = self._job.round.decided, self._job.round.checkpoint
        limit = self._job.config.timeouts.restore_s
        if checkpoint:
            command = pb.Command(restore=restoring.command(None, checkpoint, limit))
            self._job.command_all(self._job.ranks.values(), command, now + 1.5 * limit, Ordered.RESTORE)
        for rank in restoring.busy:
            command = pb.Command(restore=restoring.command(rank, "", limit))
            self._job.order(rank, command, now + 1.5 * limit, Ordered.RESTORE)

    def _verify(self, now: float) -> None:
        """Every restored shard must have its source's digest; if not, it is taken from the next source."""
        restored = self._job.round.decided
        wrong = restored.mismatches() if self._job.config.verify else []
        if self._job.recovery is not None:
            self._job.recovery.add_round(restored, self._nodes_of(restored))
        if not wrong:
            # From here on every rank goes over to what has been made ready, whatever else happens.
            for rank, needs in restored.next_needs().items():
                self._job.ranks[rank].inventory.take_needs(needs)
            self._job.settle_layout()
            self._resizing.all_have_what_they_need()
            self._resizing.goes_on_at(restored.version)
            self.send_resume(restored.version, now)
            return
        for shard, source in wrong:
            self._job.notice(
                NoticeKind.DIGEST_MISMATCH,
                f"shard {shard!r} from rank {source} did not arrive with its digest; one rank sends it again",
                rank=source,
            )
        try:
            self._job.round.restore_again(restored.retry(wrong))
        except NoSourceError as e:
            if self._job.checkpoint is None:
                self._job.fail(f"{e}; and there is no checkpoint")
                return
            self._adopt(Decision.from_checkpoint(self._job.checkpoint, self._job.ranks, str(e)), now)
        self._job.to(State.RESTORING, now)
        self.send_restore(now)

    def _nodes_of(self, restored: RestoreRound) -> dict[int, NodeRecord]:
        """The nodes of the ranks between which state was transferred."""
        ranks = {rank for t in restored.plan.transfers for rank in (t.dest, *restored.senders(t))}
        ranks &= self._job.ranks.keys()
        names = {rank: self._job.ranks[rank].process.node for rank in ranks}
        return {rank: self._job.nodes[name] for rank, name in names.items() if name in self._job.nodes}

    def send_resume(self, version: int, now: float) -> None:
        limit = self._job.config.timeouts.resume_ack_s
        self._job.round.confirm(0)
        for record in self._job.ranks.values():
            record.begin_at(version)
            if self._job.state is State.RUNNING:
                self._job.move(record.rank, Place.RUNNING)
        ended = max(record.ended for record in self._job.ranks.values())
        resume = pb.Resume(version=version, pause=self._parallelism.pause() or self._resizing.pause(), ended=ended)
        self._job.command_all(self._job.ranks.values(), pb.Command(resume=resume), now + limit, Ordered.RESUME)

    def confirm(self, now: float) -> None:
        """A recovery is over when every rank has committed one more real step (or has no step left); so is the job."""
        if self._job.state is not State.RUNNING:
            return
        recovery = self._job.recovery
        if recovery is not None and self._all_have_gone_on(recovery.resume_step):
            recovery.finish(now, self._job.counting.iteration(recovery.resume_step))
            self._resizing.all_have_gone_on()
            restarted = self._parallelism.restored_from() is not None
            self._recovered()
            self._job.close_recovery(recovery)
            slowest = slowest_start(self._job.ranks[rank] for rank in recovery.victims if rank in self._job.ranks)
            staying = () if restarted else self._job.ranks  # in another layout no process replaces a particular one
            self._job.emit(recovery.finished_event(self._job.generation, staying, slowest))
        if self._job.places[Place.DONE] and self._job.all_in(*THROUGH):
            for r in self._job.ranks.values():
                if r.place is Place.DONE:
                    self._job.move(r.rank, Place.RELEASED)
                    self._job.command(r.rank, pb.Command(release=pb.Release()))

    def finish_if_all_have(self, now: float) -> None:
        """The job has ended well once every rank's process has."""
        if self._job.all_in(Place.FINISHED) and self._job.ending.asked_by:
            self._job.fail(f"{self._job.ending.asked_by}; all ranks have ended by themselves")
        elif self._job.all_in(Place.FINISHED):
            for drill in self._job.asked.missed():
                when = "" if drill.step < 0 else f", step {drill.step:,}"
                text = f"{drill.fault} at {drill.phase or 'once'}{when}: the job ended before this fault took place"
                self._job.notice(NoticeKind.FAULT_NOT_FIRED, text, rank=drill.rank)
            self._job.to(State.FINISHED)
            self._job.emit(
                ev.JobFinished(
                    generation=self._job.generation,
                    exit_code=0,
                    seconds=now - self._job.started_at,
                    step=self._job.committed,
                    step_s=self._job.step_s,
                )
            )

    def _recovered(self) -> None:
        """Set back what is counted within one recovery."""
        self._parallelism.confirmed()
        self._job.new_tries()
        for record in self._job.ranks.values():
            record.crashes.arrived()

    def _all_have_gone_on(self, resume_step: int) -> bool:
        """Whether every rank has committed a step after ``resume_step`` or has none left. One that has, has for good;
        so each rank is asked about only until then, however many heartbeats come."""
        in_order, confirmed = self._job.in_order, self._job.round.confirmed
        while confirmed < len(in_order):
            record = in_order[confirmed]
            if record.place not in THROUGH and record.committed <= resume_step:
                break
            confirmed += 1
        self._job.round.confirm(confirmed)
        return confirmed >= len(in_order)

    def retry(self, now: float) -> None:
        round_ = self._job.round
        round_.stop_waiting()
        retries = self._job.tries.count_retry()
        if retries > _MAX_RETRIES:
            self._job.fail(f"regrouping or restoring failed {retries} times in a row, at last {round_.retry_for}")
        else:
            self.enter("retry", now)

    def _nothing_to_go_on_from(self, why: str, now: float) -> None:
        """No state is left in memory, and there is no checkpoint."""
        raised, failures = self._raised_first(), self._job.tries.failures
        if raised and len({f.rank for f in failures if f.last_words.exception}) == len(self._job.ranks):
            self._job.fail(raised)  # a script that does so on all ranks will do so again
            return
        if raised:
            why = f"{raised}\n{why}"
        if self._job.start_version > 0 and not self._job.parallel.changes:
            self._job.fail(f"{why}; without --resume the job starts from scratch")
        elif self._only_first_step_is_lost:
            self._resizing.take_back_all()
            self._starting.start_again(f"{why}; only the first step is lost", now)
            if self._job.state is State.STARTING:  # some may have left with their node
                self._placement.house(now)
        else:
            self._job.fail(why)

    @property
    def _only_first_step_is_lost(self) -> bool:
        """Whether the job can start from scratch without losing more than its first step."""
        newest = self._resizing.newest_of_all()
        return newest is not None and newest <= 1 and not self._job.recovered_before

    def _raised_first(self) -> str:
        """The script's own exception, if this recovery has begun with one; else ""."""
        failures = self._job.tries.failures
        if not failures or not failures[0].last_words.exception or failures[0].last_words.communication:
            return ""
        like = failures[0].last_words.exception
        return self.raised(failures[0], sorted({f.rank for f in failures if f.last_words.exception == like}))

    def raised(self, failure: pb.Failure, ranks: Sequence[int]) -> str:
        """The exception by which the script has ended on these ranks."""
        words = failure.last_words
        said = f"the script raised {words.exception} on {ranks_text(ranks)}, at {self._job.counting.text(failure.step)}"
        return f"{raised_text(said, words.message)}{told_of(words, self._job.config, ranks)}"
