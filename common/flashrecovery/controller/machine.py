"""The controller's decisions: events in, actions out, no I/O.

Everything that happens to the job comes in through one ``on_*`` method, on one thread; what is to be done comes out as
:class:`Send` and :class:`Emit` actions. So every path, second failures at any point included, can be tested without
a process. This file says what each event means. What is known is data (:mod:`.state.job_state`,
:mod:`.state.rank_record`); what is
done with it is in stateless objects:

==================  ==========================================================================
:mod:`.membership.launch`    the way to the first step
:mod:`.recovery`    the way of a recovery through the states of :mod:`flashrecovery.plan.transitions`
:mod:`.takeover`    a controller that is started while its job runs
:mod:`.membership.node_health_policy`    warned nodes are replaced with the next failure
:mod:`.watching`    hangs and slow ranks
:mod:`.last_save`   what is kept when the job ends before its last step
:mod:`.elastic.resizing`    of an elastic job, which ranks leave and when
:mod:`.elastic.growing`     of an elastic job, which ranks come and when
:mod:`.relayout.relayout`  in which other parallel layout the job goes on, and when
:mod:`.elastic.drain`     nodes that are to leave hand their ranks over
:mod:`.membership.joining_processes`   processes that are built up beside training, and ..
:mod:`.elastic.join`   .. how they become members
:mod:`.membership.placement`    for all of them: which process fills a rank, on which node
==================  ==========================================================================

Every command has a serial number, an acknowledgement and a deadline. A rank that does not acknowledge in time is a
victim like any other. A further failure at any point re-enters QUIESCING with the next generation; whatever is older
than the current generation is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.divergence_advice import way_on
from flashrecovery.controller.elastic.drain import Drain
from flashrecovery.controller.elastic.growing import Growing
from flashrecovery.controller.elastic.join import Joining
from flashrecovery.controller.elastic.resizing import Resizing
from flashrecovery.controller.hang import HangWatch
from flashrecovery.controller.last_save import LastSave
from flashrecovery.controller.membership.launch import LaunchSequence
from flashrecovery.controller.membership.node_health_policy import NodePolicy, ProactiveReplacement
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.membership.smaller_layout import fits_without
from flashrecovery.controller.parallelism import Parallelism
from flashrecovery.controller.recovery import RecoverySteps
from flashrecovery.controller.state.crashes import cause_of, limit_of, option_of, taken_along
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.loss_policy import allowed_sizes, leaving_without, never_replaced
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.rank_inventory import StopAnswer
from flashrecovery.controller.state.rank_record import (
    HeldAt,
    Place,
    RankProcess,
    RankRecord,
    left_behind,
    registration_differs,
    told_of,
    unequal_ends,
    unequal_steps,
    who_has_left,
)
from flashrecovery.controller.state.self_check import SelfCheck
from flashrecovery.controller.takeover import TakeOver
from flashrecovery.errors import DamagedCheckpointError, DivergedError
from flashrecovery.kinds import FailureKind, NoticeKind, Ordered, failed
from flashrecovery.plan.elastic.resize import why_too_few
from flashrecovery.plan.hang import VerdictKind, victims_of
from flashrecovery.plan.ownership import turned_out_own
from flashrecovery.plan.transitions import RECOVERY_STATES, ChangeState, State, at_rest
from flashrecovery.plan.words import HOW_TO_PROTECT, failed_text, raised_text, ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_RETRY_AFTER_S = 1.0
_ELSEWHERE = -1
"""Generation of a process that another controller has ordered."""


class Machine:
    """What each event means for the job."""

    def __init__(self, config: RunConfig, *, launch: str = "", where: str = "") -> None:
        """``launch``, ``where``: see :class:`.state.job_state.JobState`."""
        self.job = JobState(config, launch=launch, where=where)
        self._placement = RankPlacement(self.job)
        self._starting = LaunchSequence(self.job, self._placement)
        self._coming = Joining(self.job)
        self._joining_processes = self._coming.joining_processes
        self._growing = Growing(self.job, self._placement, self._coming)
        self._resizing = Resizing(self.job, self._growing, self._coming)
        self.drain = Drain(self.job, self._placement, self._coming, self._resizing)
        proactive = ProactiveReplacement(self.job, self._placement)
        self._parallelism = self._parallelism_of_job()
        self._steps = RecoverySteps(
            self.job, self._placement, proactive, self._starting, self._resizing, self._parallelism
        )
        self._last_save = LastSave(self.job, self._steps.stop_held)
        self.takeover = TakeOver(self.job, self._placement, self._starting, self._steps, self._parallelism)
        self.watch = HangWatch(self.job)
        self.conduct = NodePolicy(self.job)
        self._self_check = SelfCheck(self.job)

    def _parallelism_of_job(self) -> Parallelism:
        if self.job.config.parallelism is None:
            return Parallelism()
        from flashrecovery.controller.relayout.relayout import ParallelismChange

        return ParallelismChange(self.job, self._placement, self._resizing)

    def under_way(self) -> dict[str, ChangeState]:
        """Where each change of size, members, nodes and parallel layout is that is under way."""
        found: dict[str, ChangeState] = {
            "size": self._resizing.state,
            "join": self._coming.state,
            "relayout": self._parallelism.state,
        }
        changing = {name: state for name, state in found.items() if state is not at_rest(state)}
        return {**changing, **{f"drain of {name}": state for name, state in self.drain.states().items()}}

    def validate(self) -> None:
        """Call after an event, and never amid one: see :meth:`.state.self_check.SelfCheck.validate`."""
        self._self_check.validate(self.under_way())

    def check_before_acting(self) -> None:
        """Call before the actions are taken: see :meth:`.state.self_check.SelfCheck.before_acting`."""
        self._self_check.before_acting()

    def on_register(self, message: pb.Register, now: float) -> None:
        """A node has come, or its agent has connected again."""
        known = self.job.nodes.get(message.node)
        if known is not None and known.incarnation == message.incarnation:
            if not known.alive:
                self._placement.fence(known, "it was declared dead, and its ranks moved to other nodes")
            return
        if known is not None and known.alive:
            self.on_node_lost(known.name, "its agent has ended and was started again", 0.0, now)
        node = self.job.nodes[message.node] = NodeRecord.of(message, known)
        self.job.emit(
            ev.NodeJoined(
                generation=self.job.generation, node=node.name, host=node.host, domain=node.domain, slots=node.slots
            )
        )
        if self.job.state is State.FAILED and not self.job.ending.saving:  # the others got the command before
            over = pb.Shutdown(reason=self.job.failure_reason)
            self.job.outbox.send(node.name, pb.Command(generation=self.job.generation, rank=AGENT, shutdown=over))
            return
        self.conduct.judge(node)
        for rank in message.joining:  # for the controller before this one, which knew what for
            self.job.tell_to_leave(rank, node.name)
        self._starting.compare_command(message)
        if message.HasField("checkpoint"):
            self._hear_of_checkpoint(node, message.checkpoint)
        had_ranks = bool(message.workers or message.pages)
        if not self.job.launched:
            self.takeover.hear_of_staging(message)
        if not self.job.launched and (had_ranks or message.stride):
            self.takeover.hear_of_launch(message)
        if had_ranks and not self.job.launched:
            self.takeover.find(node, message, now)
        elif had_ranks:
            self._placement.fence(node, "its ranks belong to others")
        elif self.job.launched:
            node.make_spare()
            # It was away when that was to be dropped; this is another process.
            if self.job.config.parallelism is not None:
                self.job.outbox.send(
                    node.name, pb.Command(generation=self.job.generation, rank=AGENT, drop_staging=pb.DropStaging())
                )
            self._settle_homeless(now)
            self._placement.publish_others()
            self._growing.on_node(node.name)
        elif self.job.found_since is None and message.stride:
            self.job.found_running(now)  # it has a rank table: the job runs already, on other nodes
        elif self.job.found_since is None and (
            len(self.job.nodes) >= self.job.config.nnodes or node.slots < self.job.config.nproc_per_node
        ):
            self._starting.launch(now)

    def on_node_lost(self, name: str, evidence: str, silent_s: float, now: float) -> None:
        """A node does not answer any more, and no other node reaches it: its ranks are given away as a whole."""
        node = self.job.nodes[name]
        if self.job.ending.saving and node.alive:
            node.declare_lost()
            self._last_save.lost([r.rank for r in self.job.ranks.values() if r.home == name])
        if self.job.state in (State.FAILED, State.FINISHED) or not node.alive:
            return
        node.declare_lost()
        lost = [r for r in self.job.ranks.values() if r.home == name]
        self.job.emit(
            ev.NodeLost(
                generation=self.job.generation,
                node=name,
                ranks=[r.rank for r in lost],
                evidence=evidence,
                detect_s=silent_s,
            )
        )
        self.job.blame(name, FailureKind.NODE_LOST, evidence)
        self.drain.on_node_lost(name)
        self._coming.relieved.on_node_lost(name)
        self._resizing.last_resort.on_node_lost(name)
        self._joining_processes.on_node_lost(name)
        for record in self.job.ranks.values():
            record.lose_page_on(name)
        if not self.job.launched:
            for record in lost:  # found, but not taken over yet
                if record.place is not Place.FINISHED:
                    self.job.vacate(record.rank)
                    record.lose_home()
            return
        if not lost and self._parallelism.on_node_lost((), now):
            return
        if all(r.place is Place.FINISHED for r in lost):
            self._placement.publish_others()
            return
        self.job.remember_failure(f"node {name}: {evidence}")
        released = [r.rank for r in lost if r.place is Place.RELEASED]
        for record in lost:
            self._emit_failure(record, FailureKind.NODE_LOST, self.job.last_failure, silent_s)
            self.job.vacate(record.rank)
            record.lose_home()
        if released:
            self.job.fail(f"{self.job.last_failure}, after the last step of ranks {released}: their end state is lost")
            return
        if self._parallelism.on_node_lost([r.rank for r in lost], now):
            return
        self._placement.settle([r.rank for r in lost], now, node.domain)
        if self.job.state is State.STARTING:
            self._starting.start_again(f"{self.job.last_failure}, before the first step", now)
        else:
            self._steps.recover([r.rank for r in lost], FailureKind.NODE_LOST, now - silent_s, silent_s, now)

    def on_node_stuck(self, name: str, evidence: str, now: float) -> None:
        """A process on a node never ends. What it still does cannot be known, so the node is given up for this job."""
        node = self.job.nodes[name]
        why = f"{evidence}; the node is given up for this job"
        if name in self.job.given_up or not node.alive:
            return
        self.job.given_up[name] = why
        if not self.job.config.several_nodes:
            self.job.fail(f"node {name}: {evidence}; there is no other node for its ranks (--spare-nodes)")
            return
        self.on_node_lost(name, why, 0.0, now)
        self._placement.fence(node, why)

    def _settle_homeless(self, now: float, *, excluded: bool = False) -> None:
        """A node has come; ranks that wait for one may get it. ``excluded``: any is better than none now."""
        if self.job.state in (State.FAILED, State.FINISHED) or not self._placement.house(now, excluded=excluded):
            return
        rest = self._placement.homeless()
        if rest:  # there is room for some
            self._steps.go_on_without(rest, now)

    def on_started(self, message: pb.WorkerStarted, node: str, host: str) -> None:
        if self._joining_processes.on_started(message, node, host):
            return
        record = self.job.ranks.get(message.rank)
        if (
            record is None
            or record.filled not in (_ELSEWHERE, message.generation)
            or not (
                record.place is Place.EMPTY or (record.place is Place.STARTING and record.process.pid == message.pid)
            )
        ):
            return  # of a process that has been replaced since
        self.job.move(record.rank, Place.STARTING)
        process = RankProcess(message.pid, node, host, self.job.generation)
        record.process_started(process, message.local_states, message.early)
        if not self.job.places[Place.EMPTY]:
            self._placement.publish_rank_table()

    def on_joined(self, message: pb.Joined, now: float, node: str = "") -> None:
        """A worker has come to its first step and says which shards it needs and holds. ``node``, here and below: whose
        agent says so; "": not known."""
        if self._joining_processes.on_joined(message, node):
            self._coming.call_in()
            return
        record = self.job.ranks.get(message.rank)
        if (
            record is None
            or record.place is not Place.STARTING
            or record.filled not in (_ELSEWHERE, message.generation)
        ):
            return  # of a process that has been replaced since
        if node not in ("", record.home):
            return  # from a process that was to take the rank over, and has been dropped
        known, sharded, steps = dict(record.inventory.needs), record.inventory.sharded, record.steps
        sure = not record.inventory.as_launched
        before = record.registration(known if sure else record.inventory.common_needs(), steps=False)
        self.job.move(record.rank, Place.JOINED)
        record.joined(message, as_launched=not known or not sure)
        record.inventory.rename_own(turned_out_own(known))
        another = self._parallelism.another_job(message)
        if another:
            why = f"rank {record.rank}: {another}"
            if self.job.state is State.STARTING and not self._parallelism.begin_otherwise(why, now):
                self.job.fail(why)
            return
        self.job.parallel.hear_facts(message.facts)
        self.job.outbox.forget(Ordered.REPLACE, record.rank)
        if known and sure and not self.job.begins_as_sharded(record.rank):
            # its state is sharded as at the launch; it switches to the other ranks' sharding if it has a part in that
            record.inventory.need_as_sharded(known, sharded)
        now_said = record.registration(record.inventory.needs if sure else record.inventory.common_needs(), steps=False)
        differs = registration_differs(before, now_said, "the process that it replaces") if known else ""
        if differs:
            self.job.fail(f"rank {record.rank}: the replacement is another one: {differs}")
        elif self.job.state is not State.STARTING and record.steps != steps and unequal_steps(self.job.ranks.values()):
            self.job.fail(unequal_steps(self.job.ranks.values()))
        elif self.job.state is State.STARTING:
            if self.job.unprotected:
                self._starting.await_the_others(now)
            self._steps.begin(now)
        else:
            self._steps.advance(now)

    def on_failure(self, message: pb.Failure, now: float, node: str = "") -> None:
        """The process of a rank is dead, hung, or cannot go on."""
        if self._joining_processes.on_failure(message, node) or self._resizing.given_up_ended(message, node):
            return
        self._on_failures([message], now, node)

    def _on_failures(self, messages: Sequence[pb.Failure], now: float, node: str = "") -> None:
        """Take failures that are found at one moment together, as one recovery."""
        found = [taken_along(m, self.job.last_failure) if self._is_taken_along(m) else m for m in messages]
        lost = [message for message in found if self._is_lost(message, now, node)]
        if lost and self.job.state not in (State.FAILED, State.FINISHED):
            first = lost[0]
            kind, failed_at = FailureKind(first.kind), first.failed_at or now
            self._steps.recover([m.rank for m in lost], kind, failed_at, first.detect_s, now)

    def _is_lost(self, message: pb.Failure, now: float, node: str) -> bool:
        """Note a failure; returns whether the rank is to be filled again for that."""
        record = self.job.ranks.get(message.rank)
        if record is not None and record.process.pid == message.pid and self.job.ending.saving:
            self._last_save.lost([record.rank])
        if (
            record is None
            or self.job.state in (State.FAILED, State.FINISHED)
            or record.process.pid != message.pid
            or record.place is Place.EMPTY
            or node not in ("", record.home)
        ):
            return False
        step = max(message.step, record.committed, 0)
        self.job.counting.hear(message.counted)
        record.has_committed(message.step)
        self.job.remember_failure(f"rank {record.rank}: {failed_text(message.kind, message.evidence)}")
        kind = FailureKind(message.kind)
        self._emit_failure(record, kind, message.evidence, message.detect_s, step, message.last_words)
        if kind in (FailureKind.DEVICE, FailureKind.CONTEXT_LOST) and record.home:
            self.job.nodes[record.home].suspect_of(message.evidence)
        was = record.place
        self.job.vacate(record.rank)
        if self.job.ending.asked_by:
            self.job.fail(self.job.ending.asked_by)  # it is not replaced for the few seconds that are left
        elif message.last_words.fatal:
            words = message.last_words
            said = f"rank {record.rank}: {words.exception.rpartition('.')[2]}: {words.message.rstrip('.')}"
            if words.refused:  # its data has ended, or its set-up differs: what the ranks hold is right, and is kept
                self.job.fail(said)
            else:
                self.job.fail(f"{said}{way_on(self.job, words)}", void=True)
        elif was is Place.RELEASED:
            self.job.fail(f"{self.job.last_failure}, after its last step: its end state is lost")
        elif not self.job.launched:
            return False  # found, but not taken over yet: then it will be missing
        elif self.job.state is State.STARTING:
            self._restart(record, message, now)
        elif message.last_words.refused and not record.on_its_way:
            # A replacement might get past it, with other numbers: it has not done what the script did before.
            self.job.fail(self._steps.raised(message, [record.rank]))
        else:
            self.job.tries.failures.append(message)
            return kind is FailureKind.CONTEXT_LOST or not self._is_crash_loop(record, message, step)
        return False

    def _is_taken_along(self, message: pb.Failure) -> bool:
        """Whether the rank has lost its device's context because of the failure for which all are being recovered. A
        rank that has been replaced for that failure has not: what it meets is its own."""
        record, recovery = self.job.ranks.get(message.rank), self.job.recovery
        if record is None or recovery is None or record.place is Place.STARTING:
            return False
        return bool(message.last_words.device) and message.rank not in recovery.victims

    def _is_crash_loop(self, record: RankRecord, message: pb.Failure, step: int) -> bool:
        """Whether the rank has failed so often that the job ends for it."""
        cause = cause_of(FailureKind(message.kind), message.signal)
        crashes = self.job.crashes if never_replaced(self.job) else record.crashes
        count = crashes.count(cause, None if record.on_its_way else step)
        if count < limit_of(cause, self.job.config):
            return False
        who, where = f"rank {record.rank}", f"at {self.job.counting.text(step)}"
        if record.on_its_way and (leaving_without(self.job, [record.rank]) or fits_without(self.job, [record.rank])):
            record.stop_replacing()
            return False
        if record.on_its_way:
            who, where = f"the replacement of rank {record.rank}", "before its first step"
        self.job.fail(
            f"{who} failed {count} times {where} ({option_of(cause)}); "
            f"the last time: {failed_text(message.kind, message.evidence)}"
        )
        return True

    def on_reply(self, message: pb.Reply, now: float) -> None:
        """Workers have carried out a command, or say why they could not."""
        if message.generation != self.job.generation:
            return  # perhaps to another controller, whose serial numbers were the same
        if message.outside:
            limit = now + self.job.config.timeouts.between_steps_s
            self.job.outbox.prolong(message.serial, (message.rank, *message.also), limit)
            return
        what, ranks = self.job.outbox.acknowledge(message.serial, (message.rank, *message.also))
        if what is None or not ranks:
            return
        if what is Ordered.KEEP_LAST:
            self._last_save.kept(ranks, message)
            return
        if self.job.ending.saving and message.error_type:
            self._last_save.lost(ranks)
            return
        if message.error_type:
            self._refused(self.job.ranks[ranks[0]], what, message, now)
            return
        odd = self._parallelism.wrote(ranks[0], message) if what is Ordered.STAGING else ""
        if odd:
            self._could_not_write(self.job.ranks[ranks[0]], odd, now, differs=True)
            return
        self._carried_out([self.job.ranks[rank] for rank in ranks], what, message)
        self._steps.advance(now)

    def _refused(self, record: RankRecord, what: Ordered, message: pb.Reply, now: float) -> None:
        why = f"{message.error_type}: {message.error}"
        self.job.notice(failed(what), why, rank=record.rank)
        if message.fatal:
            void = message.error_type == DivergedError.__name__
            self.job.fail(f"rank {record.rank}: {why}{way_on(self.job, pb.LastWords()) if void else ''}", void=void)
            return
        if message.error_type == DamagedCheckpointError.__name__ and self.job.round.checkpoint:
            self._give_up_checkpoint(self.job.round.checkpoint, why)
        self._command_failed(record, what, why, now)

    def _give_up_checkpoint(self, path: str, why: str) -> None:
        """It is damaged: the one before it is the newest from now on."""
        if not self.job.give_up_checkpoint(path):
            return  # another rank has said so already
        other = self.job.checkpoint
        if other is None:
            self.job.remember_failure(why)
        instead = f"; {other[1]} is used instead" if other is not None else ", and there is no other one"
        self.job.notice(NoticeKind.CHECKPOINT_DAMAGED, f"{why}{instead}")
        self.job.command(AGENT, self.job.saved_as(None))  # of two, agents remember the newer one
        self.job.command(AGENT, self.job.saved())

    def _carried_out(self, records: Sequence[RankRecord], what: Ordered, message: pb.Reply) -> None:
        """``ranks`` have carried out a command, or have failed in it, with the same answer."""
        if what is Ordered.HOLD:
            position = message.position
            held_at = HeldAt(position.settled, position.mutating, position.version)
            for record in records:
                record.note_hold(held_at)
        elif what is Ordered.STOP:
            self._stopped(records, message)
        elif what is Ordered.RESTORE and (restoring := self.job.round.restoring) is not None:
            for record in records:
                restoring.report(record.rank, message)
        elif what is Ordered.RESUME:
            for record in records:
                self.job.move(record.rank, Place.RUNNING)
                record.process_resumed()

    def _stopped(self, records: Sequence[RankRecord], message: pb.Reply) -> None:
        answer, own = StopAnswer.of(message), {state.rank: state for state in message.own}
        for record in records:
            self.job.move(record.rank, Place.STOPPED)
            said = own.get(record.rank, message)
            if said.needs and self.job.membership.has_part(record.rank):  # else it has no part of what is sharded yet
                record.inventory.take_needs(said.needs)
            record.inventory.process_stopped(answer, said.held)

    def on_done(self, message: pb.Done, now: float) -> None:
        """A worker has taken all its steps; it may end when every rank has."""
        record = self.job.ranks.get(message.rank)
        if record is None or message.generation != self.job.generation or record.place is Place.EMPTY:
            return
        self.job.move(record.rank, Place.DONE)
        record.done(message, now)
        uneven = unequal_ends(self.job.ranks.values())
        if uneven and self.job.state is not State.FAILED:
            self.job.fail(uneven)
            return
        self._steps.confirm(now)

    def on_paused(self, message: pb.Paused, now: float) -> None:
        """A worker has reached the step at which the job is to change. The other ranks can get there, too, but no
        further, because this one takes no part in it: so the first one's word is enough."""
        if message.generation != self.job.generation or message.rank not in self.job.ranks:
            return
        if self.job.state is State.VERIFYING:  # it pauses as soon as it goes on; others have not said yet that they do
            self._resizing.paused(message.rank, now)
        if self.job.state is not State.RUNNING:
            return
        for_all = self._coming.waits_for_all
        enough = self._coming.on_paused(message, now) if for_all else self._resizing.paused(message.rank, now)
        if enough:
            self._change(message.version, now)

    def _change(self, version: int, now: float) -> None:
        """All ranks wait before this version, or will: go on with others."""
        if self._parallelism.under_way:
            self.job.remember_failure(self._parallelism.why_paused(version))
            self._steps.recover([], FailureKind.REPLAN, now, 0.0, now)
            return
        if self.job.config.parallelism is not None and self.job.config.elastic is None:
            text = "the layout does not change: the command to an earlier controller is no longer known"
            self.job.notice(NoticeKind.NOT_REPLANNED, text)
        self.job.remember_failure(self._resizing.why_paused(version))
        self._steps.recover([], self._coming.cause, self._resizing.paused_since(now), 0.0, now)

    def replan(self, layout: str, step: int) -> tuple[str, str, tuple[str, ...]]:
        """See :meth:`.parallelism.Parallelism.ask`."""
        return self._parallelism.ask(layout, step)

    def resize(self, replicas: int, step: int, now: float) -> str:
        """See :meth:`.elastic.resizing.Resizing.ask`."""
        if self._parallelism.under_way:
            return "the job is about to change its parallel layout; ask again when it has"
        return self._resizing.ask(replicas, step, now)

    def on_exited(self, message: pb.Exited, now: float, node: str = "") -> None:
        """A process ended with code 0."""
        if self._joining_processes.on_exited(message, node) or self._resizing.given_up_ended(message, node):
            return
        record = self.job.ranks.get(message.rank)
        if record is not None and node not in ("", record.home):
            return
        if record is not None and record.process.pid == message.pid and self.job.ending.saving:
            self._last_save.lost([record.rank])
        if record is None or record.process.pid != message.pid or self.job.state in (State.FAILED, State.FINISHED):
            return
        finished = record.place in (Place.RELEASED, Place.DONE) or (
            self.job.state is State.STARTING
            and record.place in (Place.STARTING, Place.FINISHED)
            and self._parallelism.restored_from() is None  # else it has been training before
        )
        if not finished:
            evidence = "the process ended with code 0 in the middle of the training"
            self.on_failure(self._found(record, FailureKind.EXIT, evidence, now), now)
            return
        self.job.move(record.rank, Place.FINISHED)
        no_step = self.job.all_in(Place.FINISHED) and self.job.state is State.STARTING
        if no_step and not (self.job.unprotected or self.job.config.auto == "print"):
            text = f"the script has ended without a protected step: {HOW_TO_PROTECT}"
            self.job.notice(NoticeKind.UNPROTECTED, text)
        self._steps.finish_if_all_have(now)

    @property
    def wants_every_heartbeat(self) -> bool:
        """Whether something waits for the next committed step; else the ranks' health is for those who look."""
        first_steps = self.job.in_order[0].committed <= self.job.start_version + 1
        return self.job.state is State.RUNNING and (
            self.job.recovery is not None or first_steps or self._some_have_left
        )

    def on_heartbeat(self, message: pb.Heartbeat, now: float, node: str = "") -> None:
        """What the ranks of one node are doing. A datagram may be older than what has come on the stream meanwhile, or
        newer: what a rank has committed counts if it is of this generation."""
        self.job.hear_tokens(message.tokens_per_step)
        self.job.counting.hear(message.counted)
        counts = (Place.RUNNING, Place.RECOVERING) if message.generation == self.job.generation else ()
        for health in message.ranks:
            record = self.job.ranks.get(health.rank)
            if record is None or record.process.pid != health.pid or node not in ("", record.home):
                continue
            count = record.place in counts
            record.health.heard(health, now, counts=count)
            if count:
                record.has_committed(health.committed)
        self._replace_left_behind(now)
        self._steps.confirm(now)

    @property
    def _some_have_left(self) -> bool:
        return bool(self.job.places[Place.DONE] or self.job.places[Place.FINISHED])

    def _replace_left_behind(self, now: float) -> None:
        """Replace ranks whose scripts have ended early, before the other ranks wait for them so long that it looks like
        a hang."""
        if self.job.state is State.RUNNING and self._some_have_left:
            found = left_behind(self.job.in_order, now)
            failures = [self._found(self.job.ranks[r], FailureKind.EXIT, why, now) for r, why in found.items()]
            self._on_failures(failures, now)

    def on_checkpoint(self, version: int, path: str) -> None:
        """A complete checkpoint exists. Every agent keeps that in mind for the controller that may come after this
        one: the node that has published it may be lost together with this controller's."""
        job = self.job
        if job.launched and job.parallel.text and job.config.elastic is not None and job.state is State.STARTING:
            job.command(AGENT, job.saved())  # it is of the layout before, and comes late: no rank of this one could
            return
        newest = self.job.checkpoint is None or version >= self.job.checkpoint[0]
        if newest and self.job.checkpoint != (version, path):
            self.job.checkpoints.append((version, path))
            if self.job.launched:
                self.job.command(AGENT, self.job.saved())

    def _hear_of_checkpoint(self, node: NodeRecord, saved: pb.CheckpointSaved) -> None:
        """An agent that has come remembers one: of this job, if this controller is about to take that over."""
        if self.job.launched:
            self.job.outbox.send(node.name, self.job.saved())
        else:
            self.on_checkpoint(saved.version, saved.path)

    def on_tick(self, now: float) -> None:
        """Look at the deadlines; call a few times a second."""
        if self.job.state in (State.FAILED, State.FINISHED):
            self.job.stop_awaiting_node()  # the job waits for no node any more
        if self.job.state is State.STARTING:
            self._resizing.begins_again()
        if self.job.round.retry_at is not None and now >= self.job.round.retry_at:
            self._steps.retry(now)
        self.takeover.take_over_if_late(now)
        self._starting.launch_if_late(now)
        if (
            self.job.homeless_since is not None
            and now - self.job.homeless_since >= self.job.config.timeouts.node_wait_s
        ):
            self._settle_homeless(now, excluded=True)
        if (
            self.job.homeless_since is not None
            and now - self.job.homeless_since >= self.job.config.timeouts.node_wait_s
        ):
            self.job.fail(
                f"{self.job.last_failure}; no node with room for ranks {self._placement.homeless()} has come within "
                f"{self.job.config.timeouts.node_wait_s:g} s{self._too_few()}"
            )
        if self._resizing.overdue(now):
            self._steps.recover([], FailureKind.RESIZE, self._resizing.paused_since(now), 0.0, now)
        late = {rank: what for what, rank in self.job.outbox.expired(now)}
        if (
            self.job.ending.asked_by
            and now >= self.job.ending.until
            and self.job.state not in (State.FINISHED, State.FAILED)
        ):
            self.job.fail(self.job.ending.asked_by)
        if self.job.ending.saving:
            self._last_save.late(late)
        self._last_save.tick(now)
        if late and self.job.state not in (State.FINISHED, State.FAILED):
            self._are_late(late, now)
        found = self.watch.find_hung(now)
        if found is not None and (why := self.watch.end_of_data(found)):
            self.job.fail(why)
            return
        if found is not None:
            self._on_failures([self._hung(rank, evidence, now) for rank, evidence in victims_of(found)], now)
            if found.kind is VerdictKind.UNLIKE and self.job.recovery is not None:
                self._void(self.job.recovery, found.text)
            elif found.kind in (VerdictKind.STUCK, VerdictKind.UNLIKE):
                self._all_again(found.text, now)
        self._handle_plans(now)
        self.watch.report_stragglers(now)

    def _handle_plans(self, now: float) -> None:
        """Planned changes: drains, resizes and changes of parallelism."""
        self.drain.tick(now)
        if not self._parallelism.under_way:
            self._growing.grow_by_itself(now)
        if self._coming.tick(now):
            self._change(self.job.committed, now)

    def _too_few(self) -> str:
        """Why an elastic job has waited."""
        elastic = self.job.config.elastic
        if elastic is None or self.job.state is State.STARTING:  # all are needed at the start
            return ""
        homeless = self._placement.homeless()
        left = len(self.job.shape.whole(rank for rank in self.job.ranks if rank not in homeless))
        never = "no rank is replaced (elastic.replace: never)" if elastic.replace == "never" else "no node was left"
        return f"; {never}, and {why_too_few(allowed_sizes(self.job), left)}"

    def _are_late(self, late: Mapping[int, Ordered], now: float) -> None:
        """These ranks, each with what it was asked, have missed a deadline: all of them are victims, of one recovery.

        If no rank has answered at all, it may not be the ranks' fault, and replacing all of them would lose all state:
        they are asked again.
        """
        empty = sorted(rank for rank in late if self.job.ranks[rank].place is Place.EMPTY)
        survivors = {r.rank for r in self._steps.survivors()}
        if empty and (self._steps.go_on_without(empty, now) or self.job.state is State.FAILED):
            return
        if empty:
            self.job.fail(f"{ranks_text(empty)} could not be filled again within the deadline")
        elif (
            self.job.state is State.STARTING
            and not self.job.places[Place.JOINED]
            and self._parallelism.restored_from() is None  # else it has come to one before
        ):
            self._starting.let_run_unprotected()
        elif survivors and survivors <= late.keys() and not self.job.tries.asked_again:
            self.job.tries.ask_again()
            self.job.remember_failure(f"no rank has answered '{late[min(survivors)]}' within its deadline")
            self.job.notice(NoticeKind.ALL_ASKED_AGAIN, self.job.last_failure)
            self._steps.recover([], FailureKind.UNRESPONSIVE, now, 0.0, now)
        else:
            asked = sorted(late.items())
            why = "no answer to {!r} within its deadline"
            self._on_failures(
                [
                    self._found(self.job.ranks[r], FailureKind.UNRESPONSIVE, why.format(str(what)), now)
                    for r, what in asked
                ],
                now,
            )

    def _hung(self, rank: int, evidence: str, now: float) -> pb.Failure:
        record = self.job.ranks[rank]
        left = who_has_left(self.job.in_order, record)
        if left:
            first, end, stack = evidence.partition("\n")
            evidence = f"{first}; {left}{end}{stack}"
        return self._found(record, FailureKind.HANG, evidence, now, late_s=record.health.idle_s(now))

    def _void(self, recovery: HistoryEntry, text: str) -> None:
        """The ranks do not run the same code since they have gone on. What decides on it is in the memory of some and
        was not passed to the other ranks, so any further attempt would be wrong, even one that succeeds."""
        who = f" of {ranks_text(recovery.victims)}" if recovery.victims else ""
        self.job.fail(
            f"the recovery{who} is void, at {self.job.counting.text(recovery.resume_step)}: {text}. The script, or a "
            "framework, decides on its collectives by state that is not registered, so the ranks have come apart. "
            "Register it, or start the job again from its last checkpoint; docs/limits.md says what is brought back"
        )

    def _all_again(self, why: str, now: float) -> None:
        """No rank is to blame: none is replaced, but all groups are formed again, and the step runs again."""
        self.job.remember_failure(why)
        step = max(r.committed for r in self.job.ranks.values())
        times = self.job.count_stuck(step)
        if times >= self.job.config.max_failures_per_step:
            where = self.job.counting.text(step)
            self.job.fail(f"{why}; so it was {times} times at {where} (max_failures_per_step)")
        else:
            self._steps.recover([], FailureKind.DEADLOCK_SUSPECTED, now, 0.0, now)

    def on_stop_request(self, reason: str, now: float, *, by_itself: bool = False, at_once: bool = False) -> None:
        """The user or the scheduler wants the job to end. ``by_itself``: the script has got the signal, too, and may
        end by itself within ``timeouts.signal_grace_s``; ``at_once``: nothing that takes time is done any more."""
        job = self.job
        if job.state in (State.FINISHED, State.FAILED):
            if at_once and job.ending.saving:
                job.shut_down()
        elif by_itself and not job.ending.asked_by and job.state is State.RUNNING:
            job.ending.await_script(reason, now + job.config.timeouts.signal_grace_s)
        elif not by_itself or not job.ending.asked_by:
            job.fail(reason)

    def _restart(self, failed: RankRecord, message: pb.Failure, now: float) -> None:
        """A failure before the first step: nothing is lost yet, so everything starts again, unless it is the script."""
        if message.kind == FailureKind.EXCEPTION:
            words = message.last_words
            why = raised_text(f"rank {failed.rank} raised {words.exception} before its first step", words.message)
            if not self._parallelism.begin_otherwise(why, now):
                self.job.fail(f"{why}{told_of(words, self.job.config, [failed.rank])}")
        else:
            self._starting.start_again(f"{self.job.last_failure}, before the first step", now)

    def _emit_failure(
        self,
        record: RankRecord,
        kind: FailureKind,
        evidence: str,
        detect_s: float,
        step: int = -1,
        words: pb.LastWords | None = None,
    ) -> None:
        words = words or pb.LastWords()
        step = step if step >= 0 else max(record.committed, 0)
        drill = self.job.asked.take(record.rank, kind, step, words.exception)  # which says nothing of the node
        if not drill and kind is not FailureKind.NODE_LOST:  # a lost node is to blame once, for all of its ranks
            self.job.blame(record.home, kind, f"rank {record.rank}: {evidence}")
        self.job.emit(
            ev.FailureDetected(
                generation=self.job.generation,
                rank=record.rank,
                kind=kind,
                evidence=evidence,
                detect_s=detect_s,
                step=step,
                exception=words.exception,
                message=words.message,
                traceback=words.traceback,
            )
        )

    def _command_failed(self, record: RankRecord, what: Ordered, error: str, now: float) -> None:
        """A rank could not regroup or restore. Mostly its peer has just died, which is about to be reported; if
        nothing is reported within a second, everybody tries again in the next generation."""
        if what in (Ordered.REGROUP, Ordered.RESTORE) and self.job.state in RECOVERY_STATES:
            self.job.round.retry_later(f"rank {record.rank}: {error}", now + _RETRY_AFTER_S)
            return
        if what is Ordered.STAGING:
            self._could_not_write(record, error, now, differs=False)
            return
        self.on_failure(self._found(record, FailureKind.COMMAND, f"{what}: {error}", now), now)

    def _could_not_write(self, record: RankRecord, why: str, now: float, *, differs: bool) -> None:
        """For another layout."""
        if self._parallelism.could_not(record.rank, why, now, differs=differs):
            self._steps.enter("retry", now)

    def _found(
        self, record: RankRecord, kind: FailureKind, evidence: str, now: float, late_s: float = 0.0
    ) -> pb.Failure:
        """A failure that the controller itself has found, ``late_s`` seconds after it happened."""
        return pb.Failure(
            rank=record.rank,
            pid=record.process.pid,
            kind=kind,
            evidence=evidence,
            detect_s=late_s,
            failed_at=now - late_s,
        )
