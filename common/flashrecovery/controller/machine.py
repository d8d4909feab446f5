"""The controller's decisions: events in, actions out, no I/O.

Everything that happens to the job comes in through one ``on_*`` method, on one thread; what is to be done comes out as
:class:`Send` and :class:`Emit` actions. So every path, second failures at any point included, can be tested without
a process. This file says what each event means; :mod:`.recovery` has the way of a recovery through the states of
:mod:`.states`; what is known is in :mod:`.job_state` and :mod:`.records`.

Every command has a serial number, an acknowledgement and a deadline. A rank that does not acknowledge in time is a
victim like any other. A further failure at any point re-enters QUIESCING with the next generation; whatever is older
than the current generation is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.controller.crashes import cause_of, limit_of, option_of
from flashrecovery.controller.history import Recovery
from flashrecovery.controller.job_state import AGENT
from flashrecovery.controller.nodes import NodeRecord, NodeState, launch_order
from flashrecovery.controller.records import HeldAt, Place, RankRecord, unequal_claims, unequal_steps
from flashrecovery.controller.restore import RestoreRound
from flashrecovery.controller.standstill import Kind, victims_of
from flashrecovery.controller.states import RECOVERY_STATES, State
from flashrecovery.controller.takeover import TakeOver
from flashrecovery.controller.watching import Watching
from flashrecovery.errors import ConfigError
from flashrecovery.plan.placement import neighbour_stride
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_RETRY_AFTER_S = 1.0
_ELSEWHERE = -1
"""Generation of a process that another controller has ordered."""
_HOW_TO_PROTECT = (
    "take its steps in recovery.steps() (plain PyTorch, DeepSpeed's three calls), set flash_recovery.enabled in the "
    "configuration of DeepSpeed, or give Megatron-LM --flash-recovery; if its first step takes longer than that, set "
    "timeouts.startup_s"
)


@dataclass
class Machine(Watching, TakeOver):
    """What each event means for the job."""

    def on_register(self, message: pb.Register, now: float) -> None:
        """A node has come, or its agent has connected again."""
        known = self.nodes.get(message.node)
        if known is not None and known.incarnation == message.incarnation:
            if not known.alive:
                self._fence(known, "it was taken for lost, and its ranks were given away")
            return
        if known is not None and known.alive:
            self.on_node_lost(known.name, "its agent has ended and was started anew", 0.0, now)
        node = self.nodes[message.node] = NodeRecord.of(message)
        node.suspect = message.suspect or (known.suspect if known is not None else "")
        self._emit(
            ev.NodeJoined(
                generation=self.generation, node=node.name, host=node.host, domain=node.domain, slots=node.slots
            )
        )
        self._compare_command(message)
        if message.HasField("checkpoint"):
            self._hear_of_checkpoint(node, message.checkpoint)
        had_ranks = bool(message.workers or message.pages)
        if had_ranks and not self._launched:
            self._find(node, message, now)
        elif had_ranks:
            self._fence(node, "its ranks belong to others")
        elif self._launched:
            node.state = NodeState.SPARE
            self._settle_homeless(now)
            self._publish_others()
        elif self._found_since is None and message.stride:
            self._found_since = self._started_at = now  # it has a rank table: the job runs already, on other nodes
        elif self._found_since is None and (
            len(self.nodes) >= self.config.nnodes or node.slots < self.config.nproc_per_node
        ):
            self._launch(now)

    def _launch(self, now: float) -> None:
        """Once all nodes are there, start every rank."""
        try:
            order = launch_order(self.nodes.values(), self.config.nnodes, self.config.nproc_per_node)
        except ConfigError as e:
            self._fail(str(e))
            return
        if order is None:
            return
        self._launched, self._started_at = True, now
        if self.checkpoint is not None:  # what an agent remembers is of a job that it has served before
            self.checkpoint = None
            self._command(AGENT, self.saved())
        chosen = {node.name for node in order}
        for node in self.nodes.values():
            node.state = NodeState.ACTIVE if node.name in chosen else NodeState.SPARE
        nproc = self.config.nproc_per_node
        self.stride = neighbour_stride([n.domain for n in order], nproc)
        for record in self.ranks.values():
            record.home, record.local_rank = order[record.rank // nproc].name, record.rank % nproc
        for record in self.ranks.values():
            self._fill(record, now, detached=False, reason="launch")

    def on_node_lost(self, name: str, evidence: str, silent_s: float, now: float) -> None:
        """A node does not answer any more, and no other node reaches it: its ranks are given away as a whole."""
        node = self.nodes[name]
        if self.state in (State.FAILED, State.FINISHED) or not node.alive:
            return
        node.state = NodeState.LOST
        lost = [r for r in self.ranks.values() if r.home == name]
        self._emit(
            ev.NodeLost(
                generation=self.generation,
                node=name,
                ranks=[r.rank for r in lost],
                evidence=evidence,
                detect_s=silent_s,
            )
        )
        for record in self.ranks.values():
            record.page_on = "" if record.page_on == name else record.page_on
        if not self._launched:
            for record in lost:  # found, but not taken over yet
                if record.place is not Place.FINISHED:
                    record.vacate()
                    record.home, record.capsules = "", ()
            return
        if all(r.place is Place.FINISHED for r in lost):
            self._publish_others()
            return
        self.last_failure = f"node {name}: {evidence}"
        released = [r.rank for r in lost if r.place is Place.RELEASED]
        for record in lost:
            self._emit_failure(record, "node_lost", self.last_failure, silent_s)
            record.vacate()
            record.home, record.capsules = "", ()
        if released:
            self._fail(f"{self.last_failure}, after the last step of ranks {released}: their end state is lost")
            return
        self._settle([r.rank for r in lost], now, node.domain)
        if self.state is State.STARTING:
            self._start_again(f"{self.last_failure}, before the first step", now)
        else:
            self._recover([r.rank for r in lost], "node_lost", now - silent_s, silent_s, now)

    def _settle_homeless(self, now: float) -> None:
        """A node has come; ranks that wait for one may get it."""
        homeless = self._homeless()
        if self.state in (State.FAILED, State.FINISHED) or not homeless or not self._settle(homeless, now):
            return
        for rank in homeless:
            self._fill(self.ranks[rank], now, detached=self.state is not State.STARTING, reason=self.last_failure)

    def on_started(self, message: pb.WorkerStarted, node: str, host: str) -> None:
        record = self.ranks[message.rank]
        if record.filled not in (_ELSEWHERE, message.generation) or not (
            record.place is Place.EMPTY or (record.place is Place.STARTING and record.pid == message.pid)
        ):
            return  # of a process that has been replaced since
        record.place, record.pid, record.node, record.host = Place.STARTING, message.pid, node, host
        record.page_on = record.home
        record.joined_generation = self.generation
        record.from_standby = message.standby
        record.capsules, record.early = tuple(message.capsules), frozenset(message.early)
        if not self.places[Place.EMPTY]:
            self._publish_rank_table()

    def on_joined(self, message: pb.Joined, now: float) -> None:
        """A worker has come to its first step and says which shards it needs and holds."""
        record = self.ranks[message.rank]
        if record.place is not Place.STARTING or record.filled not in (_ELSEWHERE, message.generation):
            return  # of a process that has been replaced since
        known, steps = dict(record.needs), record.steps
        record.joined(message)
        self.outbox.forget("replace", record.rank)
        if known and set(known) != set(record.needs):
            odd = sorted(set(known) ^ set(record.needs))[:3]
            self._fail(
                f"rank {record.rank}: the replacement registered other state than the process it replaces: {odd}"
            )
        elif self.state is not State.STARTING and record.steps != steps and unequal_steps(self.ranks.values()):
            self._fail(unequal_steps(self.ranks.values()))
        elif self.state is State.STARTING:
            if self._unprotected:
                self._await_the_others(now)
            self._try_start(now)
        else:
            self._advance(now)

    def on_failure(self, message: pb.Failure, now: float) -> None:
        """The process of a rank is dead, hung, or cannot go on."""
        self._on_failures([message], now)

    def _on_failures(self, messages: Sequence[pb.Failure], now: float) -> None:
        """What is found at one moment is one recovery."""
        lost = [message for message in messages if self._is_lost(message, now)]
        if lost and self.state not in (State.FAILED, State.FINISHED):
            first = lost[0]
            self._recover([m.rank for m in lost], first.kind, first.failed_at or now, first.detect_s, now)

    def _is_lost(self, message: pb.Failure, now: float) -> bool:
        """Note a failure; returns whether the rank is to be filled anew for that."""
        record = self.ranks[message.rank]
        if self.state in (State.FAILED, State.FINISHED) or record.pid != message.pid or record.place is Place.EMPTY:
            return False
        step = max(message.step, record.committed, 0)
        record.committed = max(record.committed, message.step)
        self.last_failure = f"rank {record.rank}: {message.kind}: {message.evidence}"
        self._emit_failure(record, message.kind, message.evidence, message.detect_s, step, message.last_words)
        if message.kind == "device" and record.home:
            self.nodes[record.home].suspect = message.evidence
        was = record.place
        record.vacate()
        if message.last_words.fatal:
            self._fail(f"rank {record.rank}: {message.last_words.exception}: {message.last_words.message}")
        elif was is Place.RELEASED:
            self._fail(f"{self.last_failure}, after its last step: its end state is lost")
        elif not self._launched:
            return False  # found, but not taken over yet: then it will be missing
        elif self.state is State.STARTING:
            self._restart(record, message, now)
        else:
            self._failures.append(message)
            return not self._is_crash_loop(record, message, step)
        return False

    def _is_crash_loop(self, record: RankRecord, message: pb.Failure, step: int) -> bool:
        """Whether the rank has failed so often that the job ends for it."""
        cause = cause_of(message.kind, message.signal)
        count = record.crashes.count(cause, None if record.on_its_way else step)
        if count < limit_of(cause, self.config):
            return False
        who, where = f"rank {record.rank}", f"at step {step}"
        if record.on_its_way:
            who, where = f"the replacement of rank {record.rank}", "before its first step"
        self._fail(
            f"{who} failed {count} times {where} ({option_of(cause)}); "
            f"the last time: {message.kind}: {message.evidence}"
        )
        return True

    def on_reply(self, message: pb.Reply, now: float) -> None:
        """Workers have carried out a command, or say why they could not."""
        if message.generation != self.generation:
            return  # perhaps to another controller, whose serial numbers were the same
        if message.outside:
            limit = now + self.config.timeouts.outside_s
            self.outbox.prolong(message.serial, (message.rank, *message.also), limit)
            return
        what, ranks = self.outbox.acknowledge(message.serial, (message.rank, *message.also))
        if not ranks:
            return
        if message.error_type:
            self._refused(self.ranks[ranks[0]], what, message, now)
            return
        self._carried_out([self.ranks[rank] for rank in ranks], what, message)
        self._advance(now)

    def _refused(self, record: RankRecord, what: str, message: pb.Reply, now: float) -> None:
        why = f"{message.error_type}: {message.error}"
        self._emit(ev.Notice(generation=self.generation, rank=record.rank, kind=f"{what}_failed", text=why))
        if message.fatal:
            self._fail(f"rank {record.rank}: {why}")
        else:
            self._command_failed(record, what, why, now)

    def _carried_out(self, records: Sequence[RankRecord], what: str, message: pb.Reply) -> None:
        """These ranks answer the same."""
        if what == "hold":
            position = message.position
            held_at = HeldAt(position.settled, position.mutating, position.version)
            for record in records:
                record.held_at, record.committed = held_at, max(record.committed, held_at.version)
        elif what == "stop":
            needs = {n.name: n.nbytes for n in message.needs}
            for record in records:
                record.place = Place.STOPPED
                record.needs = needs or record.needs
                record.take_inventory(message.live_version, message.held)
                record.late = frozenset(message.late)
                record.capsules = ()  # as its page was when it started; the process knows what is in it now
        elif what == "restore" and self._round is not None:
            for record in records:
                self._round.report(record.rank, message)
        elif what == "resume":
            for record in records:
                record.place, record.on_its_way = Place.RUNNING, False
                record.live = -1

    def on_done(self, message: pb.Done, now: float) -> None:
        """A worker has taken all its steps; it is let go when every rank has."""
        record = self.ranks[message.rank]
        if message.generation != self.generation or record.place is Place.EMPTY:
            return
        record.place, record.committed = Place.DONE, message.version
        self._confirm(now)

    def on_exited(self, message: pb.Exited, now: float) -> None:
        """A process ended with code 0."""
        record = self.ranks[message.rank]
        if record.pid != message.pid or self.state in (State.FAILED, State.FINISHED):
            return
        finished = record.place in (Place.RELEASED, Place.DONE) or (
            self.state is State.STARTING and record.place in (Place.STARTING, Place.FINISHED)
        )
        if not finished:
            evidence = "the process ended with code 0 in the middle of the training"
            self.on_failure(self._found(record, "exit", evidence, now), now)
            return
        record.place = Place.FINISHED
        if self._all(Place.FINISHED) and self.state is State.STARTING and not self._unprotected:
            text = f"the script has ended without a protected step: {_HOW_TO_PROTECT}"
            self._emit(ev.Notice(generation=self.generation, kind="unprotected", text=text))
        self._finish_if_all_have(now)

    @property
    def wants_every_heartbeat(self) -> bool:
        """Whether something waits for the next committed step; else the ranks' health is for those who look."""
        first_steps = self.ranks[0].committed <= self._start_version + 1
        return self.state is State.RUNNING and (self.recovery is not None or first_steps)

    def on_heartbeat(self, message: pb.Heartbeat, now: float) -> None:
        """What the ranks of one node are doing. A datagram may be older than what has come on the stream meanwhile, or
        newer: what a rank has committed counts if it is of this generation."""
        counts = (Place.RUNNING, Place.RECOVERING) if message.generation == self.generation else ()
        for health in message.ranks:
            record = self.ranks.get(health.rank)
            if record is None or record.pid != health.pid:
                continue
            record.heard(health, now)
            if record.place in counts:
                record.committed = max(record.committed, health.committed)
        self._confirm(now)

    def on_checkpoint(self, version: int, path: str) -> None:
        """A complete checkpoint exists. Every agent keeps that in mind for the controller that may come after this
        one: the node that has published it may be lost together with this controller's."""
        newest = self.checkpoint is None or version >= self.checkpoint[0]
        if newest and self.checkpoint != (version, path):
            self.checkpoint = (version, path)
            if self._launched:
                self._command(AGENT, self.saved())

    def _hear_of_checkpoint(self, node: NodeRecord, saved: pb.CheckpointSaved) -> None:
        """An agent that has come remembers one: of this job, if this controller is about to take that over."""
        if self._launched:
            self.outbox.send(node.name, self.saved())
        else:
            self.on_checkpoint(saved.version, saved.path)

    def on_tick(self, now: float) -> None:
        """Look at the deadlines; call a few times a second."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry(now)
        self._take_over_if_late(now)
        if self._homeless_since is not None and now - self._homeless_since >= self.config.timeouts.node_wait_s:
            self._fail(
                f"{self.last_failure}; no node with room for ranks {self._homeless()} has come within "
                f"{self.config.timeouts.node_wait_s:g} s"
            )
        late = {rank: what for what, rank in self.outbox.expired(now)}
        if late and self.state not in (State.FINISHED, State.FAILED):
            self._are_late(late, now)
        found = self._find_hung(now)
        if found is not None:
            self._on_failures([self._hung(rank, evidence, now) for rank, evidence in victims_of(found)], now)
            if found.kind is Kind.UNLIKE and self.recovery is not None:
                self._void(self.recovery, found.text)
            elif found.kind in (Kind.STUCK, Kind.UNLIKE):
                self._all_again(found.text, now)
        self._report_stragglers(now)

    def _are_late(self, late: Mapping[int, str], now: float) -> None:
        """These ranks, each with what it was asked, have missed a deadline: all of them are victims, of one recovery.

        Where nobody at all has answered, it may not be the ranks' fault, and to replace all of them would lose
        everything: they are asked once more.
        """
        empty = sorted(rank for rank in late if self.ranks[rank].place is Place.EMPTY)
        survivors = {r.rank for r in self._survivors()}
        if empty:
            self._fail(f"{ranks_text(empty)} could not be filled again within the deadline")
        elif self.state is State.STARTING and not self.places[Place.JOINED]:
            self._let_run_unprotected()
        elif survivors and survivors <= late.keys() and not self._asked_again:
            self._asked_again = True
            self.last_failure = f"no rank has answered {late[min(survivors)]!r} within its deadline"
            self._emit(ev.Notice(generation=self.generation, kind="all_asked_again", text=self.last_failure))
            self._recover([], "unresponsive", now, 0.0, now)
        else:
            asked = sorted(late.items())
            why = "no answer to {!r} within its deadline"
            self._on_failures(
                [self._found(self.ranks[r], "unresponsive", why.format(what), now) for r, what in asked], now
            )

    def _let_run_unprotected(self) -> None:
        """No rank has come to a protected step in all the time for it. It looks as if none ever will, and what runs
        may be hours of training."""
        self._unprotected = True
        self._emit(
            ev.Notice(
                generation=self.generation,
                kind="unprotected",
                text=f"no rank has come to a protected step within {self.config.timeouts.startup_s:g} s "
                f"(timeouts.startup_s), so the script runs on without recovery, as under torchrun: {_HOW_TO_PROTECT}",
            )
        )

    def _hung(self, rank: int, evidence: str, now: float) -> pb.Failure:
        record = self.ranks[rank]
        return self._found(record, "hang", evidence, now, late_s=record.progress_age_s + now - record.heard_at)

    def _void(self, recovery: Recovery, text: str) -> None:
        """The ranks do not run the same code since they have gone on. What decides on it is in the memory of some and
        was not brought to the others, so no further attempt would be right, even one that went through."""
        who = f" of {ranks_text(recovery.victims)}" if recovery.victims else ""
        self._fail(
            f"the recovery{who} is void, at step {recovery.resume_step}: {text}. The script, or a framework, decides "
            "on its collectives by state that is not registered, so the ranks have come apart. Register it, or start "
            "the job again from its last checkpoint; docs/limits.md says what is brought back"
        )

    def _all_again(self, why: str, now: float) -> None:
        """Nobody is to blame: no rank is replaced, but all groups are formed anew, and the step runs again."""
        self.last_failure, step = why, max(r.committed for r in self.ranks.values())
        self._stuck_at = {step: self._stuck_at.get(step, 0) + 1}
        if self._stuck_at[step] >= self.config.max_failures_per_step:
            self._fail(f"{why}; so it was {self._stuck_at[step]} times at step {step} (max_failures_per_step)")
        else:
            self._recover([], "standstill", now, 0.0, now)

    def on_stop_request(self, reason: str) -> None:
        """The user or the scheduler wants the job to end."""
        if self.state not in (State.FINISHED, State.FAILED):
            self._fail(reason)

    def _await_the_others(self, now: float) -> None:
        """A first rank has come to a protected step after all; the others have as long for it once more."""
        if self.places[Place.JOINED] == 1:
            for record in self.ranks.values():
                if record.place is Place.STARTING:
                    self.outbox.expect(record.rank, "replace", now + self.config.timeouts.startup_s)

    def _try_start(self, now: float) -> None:
        """STARTING is over when every rank has come to its first step."""
        if not self._all(Place.JOINED):
            return
        self._unprotected = False
        uneven = unequal_steps(self.ranks.values())
        if uneven:
            self._fail(uneven)
            return
        wrong = unequal_claims(self.ranks.values())
        if wrong:
            self._fail(
                "state registered as replicated is not equal on all ranks at the start: "
                + "; ".join(wrong[:5])
                + ". Initialise it alike (DDP broadcasts it) before registering it."
            )
            return
        self._emit(
            ev.JobStarted(generation=self.generation, world_size=len(self.ranks), seconds=now - self._started_at)
        )
        if self.config.resume and self.checkpoint is not None:
            version, self._restore_from = self.checkpoint
            self._start_version = version
            self._round = RestoreRound.from_checkpoint(version, self.ranks)
            self._to(State.RESTORING)
            self._send_restore(now)
        else:
            self._to(State.RUNNING)
            self._send_resume(0, now)

    def _restart(self, failed: RankRecord, message: pb.Failure, now: float) -> None:
        """A failure before the first step: nothing is lost yet, so everything starts again, unless it is the script."""
        if message.kind == "exception":
            words = message.last_words
            self._fail(
                f"rank {failed.rank} raised {words.exception} before its first step: {words.message}\n{words.traceback}"
            )
        else:
            self._start_again(f"{self.last_failure}, before the first step", now)

    def _recover(self, victims: list[int], kind: str, failed_at: float, detect_s: float, now: float) -> None:
        """Ranks have lost their processes: replace these, and bring everybody back to one consistent version."""
        joins = self._joins(victims)
        if self.recovery is None:
            self.recovery = Recovery(self.generation, failed_at, detect_s)
        self.recovery.cause = self.recovery.cause or kind
        for victim in victims:
            self.recovery.add_victim(victim, kind, self.generation + (not joins))
        if joins:
            self._join_recovery(kind, now, victims)
        else:
            self._enter_recovery(kind, now, victims)

    def _emit_failure(
        self,
        record: RankRecord,
        kind: str,
        evidence: str,
        detect_s: float,
        step: int = -1,
        words: pb.LastWords | None = None,
    ) -> None:
        words = words or pb.LastWords()
        self._emit(
            ev.FailureDetected(
                generation=self.generation,
                rank=record.rank,
                kind=kind,
                evidence=evidence,
                detect_s=detect_s,
                step=step if step >= 0 else max(record.committed, 0),
                exception=words.exception,
                message=words.message,
                traceback=words.traceback,
            )
        )

    def _command_failed(self, record: RankRecord, what: str, error: str, now: float) -> None:
        """A rank could not regroup or restore. Mostly its peer has just died, which is about to be reported; if
        nothing is reported within a second, everybody tries again in the next generation."""
        if what in ("regroup", "restore") and self.state in RECOVERY_STATES:
            if self._retry_at is None:
                self._retry_at = now + _RETRY_AFTER_S
            return
        self.on_failure(self._found(record, "command", f"{what}: {error}", now), now)

    def _found(self, record: RankRecord, kind: str, evidence: str, now: float, late_s: float = 0.0) -> pb.Failure:
        """A failure that the controller itself has found, ``late_s`` seconds after it happened."""
        return pb.Failure(
            rank=record.rank,
            pid=record.pid,
            generation=self.generation,
            kind=kind,
            evidence=evidence,
            detect_s=late_s,
            failed_at=now - late_s,
        )
