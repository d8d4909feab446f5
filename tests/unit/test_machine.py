"""The controller's machine against a simulated world: no process, every path, failures at any point."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.agent.monitoring.reply_batching import singly
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.outbox import Emit, Publish, Send
from flashrecovery.controller.state.rank_record import JoiningProcess, Place, RankRecord
from flashrecovery.controller.state.rank_table import RankTable
from flashrecovery.controller.state.self_check import change_laws, job_laws
from flashrecovery.errors import ProtocolError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.transitions import (
    CHANGES,
    RECOVERY_STATES,
    TRANSITIONS,
    ChangeState,
    DrainState,
    JoinState,
    RelayoutState,
    SizeState,
    State,
    at_rest,
    check_transition,
    wrong_change,
)
from flashrecovery.proto import flashrecovery_pb2 as pb


class World:
    """Workers that do what they are told, one message at a time, in an order that the test can choose."""

    def __init__(self, size: int, *, steps: int = 3, seed: int | None = None, **config: object) -> None:
        self.config = RunConfig.model_validate({"nproc_per_node": size, **config})
        self.machine = Machine(self.config)
        self.steps = steps
        self.now = 0.0
        self.random = random.Random(seed) if seed is not None else None
        self.inbox: list[tuple[int, pb.Command]] = []
        self.events: list[ev.Event] = []
        self.tables: list[RankTable] = []
        self.version = dict.fromkeys(range(self.config.world_size), -1)
        self.pids: dict[int, int] = {}
        self.inherited: dict[int, list[int]] = {}  # rank-local states in the page of a replacement, until it goes on
        self.next_pid = 100
        self.trace: list[State] = []
        self.digest_errors = 0
        self.step_s = 0.0
        self.stops: list[tuple[int, int]] = []

    def launch(self) -> None:
        for node in range(self.config.nnodes):
            self.join(f"node{node}")

    def join(self, name: str, **fields: object) -> None:
        """A node comes."""
        slots = self.config.nproc_per_node
        register = pb.Register(node=name, host=name, slots=slots, node_rank=-1, peer_port=1, incarnation=name)
        register.MergeFrom(pb.Register(**fields))
        self.machine.on_register(register, self.now)
        self.collect()

    def collect(self) -> None:
        self.trace.append(self.machine.job.state)
        for action in self.machine.job.take_actions():
            if isinstance(action, Emit):
                self.events.append(action.event)
            elif isinstance(action, Publish):
                self.tables.append(action.table)
            elif isinstance(action, Send):
                commands = singly(action.command) if action.command.ranks else [action.command]
                self.inbox += [(command.rank, command) for command in commands]

    def of(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [e for e in self.events if isinstance(e, kind)]

    def run(self, limit: int = 5000) -> State:
        """Deliver commands until nothing is left to do."""
        for _ in range(limit):
            if self.machine.job.state in (State.FINISHED, State.FAILED):
                break
            if not self.step():
                break
        return self.machine.job.state

    def step(self) -> bool:
        self.now += 0.01
        if self.inbox:
            index = self.random.randrange(len(self.inbox)) if self.random else 0
            # a channel keeps its order: take the first command of that rank
            rank = self.inbox[index][0]
            index = next(i for i, (r, _) in enumerate(self.inbox) if r == rank)
            rank, command = self.inbox.pop(index)
            self.answer(rank, command)
        elif not self.train():
            return False
        self.machine.on_tick(self.now)
        self.collect()
        return True

    def train(self) -> bool:
        """Everybody commits one step; True if anybody moved."""
        running = [r for r in self.machine.job.ranks.values() if r.place is Place.RUNNING]
        if self.machine.job.state is not State.RUNNING or not running:
            return False
        for record in running:
            self.version[record.rank] += 1
        health = [
            pb.RankHealth(
                rank=r.rank, pid=r.process.pid, committed=self.version[r.rank], step_s=self.step_s * (1 + r.rank)
            )
            for r in running
        ]
        self.machine.on_heartbeat(pb.Heartbeat(generation=self.machine.job.generation, ranks=health), self.now)
        for record in running:
            if self.version[record.rank] >= self.steps:
                done = pb.Done(
                    rank=record.rank, generation=self.machine.job.generation, version=self.version[record.rank]
                )
                self.machine.on_done(done, self.now)
        return True

    def kill(self, rank: int, kind: str = "killed", signal: int = 0) -> None:
        record = self.machine.job.ranks[rank]
        self.inbox = [(r, c) for r, c in self.inbox if r != rank or c.HasField("replace")]
        if record.process.pid and record.place is not Place.EMPTY:
            self.machine.on_failure(
                pb.Failure(
                    rank=rank,
                    pid=record.process.pid,
                    kind=kind,
                    evidence="test",
                    failed_at=self.now,
                    signal=signal,
                    step=0,
                ),
                self.now,
            )
        self.collect()

    def answer(self, rank: int, command: pb.Command) -> None:
        m = self.machine
        body = command.WhichOneof("body")
        if rank < 0:
            return
        if body == "replace":
            self.next_pid += 1
            old = max(self.version[rank], 0)
            started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=self.next_pid)
            if command.replace.detached:
                started.local_states.extend([old, old + 1])
                self.inherited[rank] = [old, old + 1]
            self.pids[rank] = self.next_pid
            m.on_started(started, m.job.ranks[rank].home, "host")
            self.version[rank] = -1 if command.replace.detached else 0
            needs = [
                pb.ShardNeed(name="param/w", nbytes=100),
                pb.ShardNeed(name="common", nbytes=10),
                pb.ShardNeed(name=f"capsule@{rank}", nbytes=5),
            ]
            m.on_joined(pb.Joined(rank=rank, generation=command.generation, steps=self.steps, needs=needs), self.now)
            return
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
        if body == "hold":
            settled = m.job.ranks[rank].place is Place.STOPPING and m.job.state is State.QUIESCING
            reply.position.CopyFrom(pb.Position(settled=settled, version=self.version[rank]))
        elif body == "stop":
            self.stops.append((rank, command.stop.finish_to))
            reply.live_version = self.version[rank]
            for version in {self.version[rank] + 1, *self.inherited.get(rank, ())}:
                reply.held.add(kind="page", version=version, shards=[f"capsule@{rank}"], nbytes=[5])
        elif body == "restore":
            for item in command.restore.transfers:
                if item.source == rank:
                    reply.sent_digests[item.shard] = "same"
                else:
                    reply.received_digests[item.shard] = "other" if self.digest_errors > 0 else "same"
                    self.digest_errors -= 1
            self.version[rank] = command.restore.version
        elif body == "resume":
            self.version[rank] = command.resume.version
            self.inherited.pop(rank, None)
        elif body == "release":
            m.on_exited(pb.Exited(rank=rank, pid=self.pids[rank]), self.now)
            return
        elif body != "regroup":
            return
        m.on_reply(reply, self.now)


def test_a_job_without_failure_finishes() -> None:
    world = World(4)
    world.launch()
    world.step_s = 1.0
    assert world.run() is State.FINISHED
    (finished,) = world.of(ev.JobFinished)
    assert finished.step_s == 4.0, "the slowest rank's"
    assert world.machine.job.generation == 0


def test_one_failure_goes_through_every_state_and_is_reported_after_a_new_step() -> None:
    world = World(4, steps=6)
    world.launch()
    while world.version[0] < 2:
        world.step()
    world.kill(2)
    assert world.machine.job.state is State.QUIESCING
    assert world.run() is State.FINISHED
    seen = list(dict.fromkeys(world.trace))
    assert [s for s in seen if s in RECOVERY_STATES] == [
        State.QUIESCING,  # REPLACING is passed at once: the replacement was there before the last survivor had stopped
        State.REGROUPING,
        State.RESTORING,
        State.VERIFYING,
    ]
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished)
    assert finished.victims == [2] and finished.resume_step == 2 and finished.generation == 1
    assert set(finished.phases) == {"detect", "quiesce", "replace", "regroup", "restore", "verify", "redo"}


def resumed_at(world: World, version: int) -> None:
    """Rank 2 has died and been replaced; all have been asked to go on, and no rank has taken a step."""
    world.launch()
    while world.version[0] < version:
        world.step()
    world.kill(2)
    while world.inbox:
        world.step()
    assert world.machine.job.state is State.RUNNING and world.machine.job.recovery is not None


def test_a_heartbeat_of_the_last_generation_confirms_no_recovery() -> None:
    """It is a datagram that was on its way: the ranks had come further than where they have resumed."""
    world = World(4, steps=9)
    resumed_at(world, 2)
    for generation, ranks in ((0, (0, 1, 3)), (1, (2,))):
        health = [pb.RankHealth(rank=r, pid=world.machine.job.ranks[r].process.pid, committed=3) for r in ranks]
        world.machine.on_heartbeat(pb.Heartbeat(generation=generation, ranks=health), world.now)
        world.collect()
    assert not world.of(ev.RecoveryFinished)
    world.train()
    world.collect()
    assert len(world.of(ev.RecoveryFinished)) == 1


def test_a_heartbeat_of_a_process_that_has_been_replaced_counts_for_nothing() -> None:
    """Its agent has sent it before it knew of the death, in the generation that goes on if no other rank had
    stopped."""
    world = World(4, steps=9)
    resumed_at(world, 2)
    machine = world.machine
    health = [pb.RankHealth(rank=r, pid=machine.job.ranks[r].process.pid, committed=3) for r in (0, 1, 3)]
    health.append(pb.RankHealth(rank=2, pid=machine.job.ranks[2].process.pid - 1, committed=3))
    machine.on_heartbeat(pb.Heartbeat(generation=1, ranks=health), world.now)
    world.collect()
    assert not world.of(ev.RecoveryFinished) and machine.job.ranks[2].committed < 3


def test_the_end_of_a_process_that_has_been_replaced_is_nobodys_failure() -> None:
    world = World(4, steps=9)
    resumed_at(world, 2)
    machine = world.machine
    machine.on_exited(pb.Exited(rank=2, pid=machine.job.ranks[2].process.pid - 1), world.now)
    world.collect()
    assert machine.job.state is State.RUNNING and machine.job.ranks[2].place is Place.RUNNING
    assert world.run() is State.FINISHED and len(world.of(ev.RecoveryStarted)) == 1


def test_what_a_page_held_when_its_process_started_is_not_what_it_holds_now() -> None:
    world = World(4, steps=9)
    resumed_at(world, 2)
    assert world.machine.job.ranks[2].inventory.local_states
    world.train()
    world.collect()
    world.kill(1)
    while any(c.HasField("hold") or c.HasField("stop") for _, c in world.inbox):
        world.step()
    versions = {h.version for h in world.machine.job.ranks[2].inventory.holdings() if h.shard == "capsule@2"}
    assert versions == {world.version[2], world.version[2] + 1}


def stops_after(world: World, positions: dict[int, tuple[bool, bool, int]]) -> list[tuple[int, int]]:
    """All have been asked to hold and say where they are: by rank whether settled, whether mutating, and the version.
    Which rank is asked to stop first, and how far each may still go."""
    for rank, command in [(r, c) for r, c in world.inbox if c.HasField("hold")]:
        settled, mutating, version = positions[rank]
        reply = pb.Reply(serial=command.serial, generation=1, rank=rank)
        reply.position.CopyFrom(pb.Position(settled=settled, mutating=mutating, version=version))
        world.machine.on_reply(reply, world.now)
    world.inbox = [(r, c) for r, c in world.inbox if not c.HasField("hold")]
    world.collect()
    return [(r, c.stop.finish_to) for r, c in world.inbox if c.HasField("stop")]


def test_ranks_that_are_behind_finish_first() -> None:
    """Rank 3 is at version 3 already, rank 2 is changing to it, rank 1 is about to."""
    world = World(4, steps=6)
    world.launch()
    while world.version[0] < 2:
        world.step()
    world.kill(0)
    assert stops_after(world, {1: (True, False, 2), 2: (True, True, 2), 3: (True, False, 3)}) == [(1, 3), (2, 3)]
    world.version.update({1: 3, 2: 3, 3: 3})
    assert world.run() is State.FINISHED
    assert world.stops == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("positions", "stops"),
    [
        ({1: (True, False, 2), 2: (True, True, 2), 3: (True, False, 2)}, [(1, 3), (2, 3), (3, 3)]),
        ({1: (True, True, 2), 2: (True, True, 2), 3: (True, True, 2)}, [(1, 3), (2, 3), (3, 3)]),
        ({1: (True, False, 2), 2: (True, False, 2), 3: (True, False, 2)}, [(1, 2), (2, 2), (3, 2)]),
        ({1: (False, False, 2), 2: (True, False, 2), 3: (True, False, 2)}, [(2, 2), (3, 2), (1, -1)]),
        ({1: (False, True, 4), 2: (True, False, 2), 3: (True, False, 2)}, [(2, 2), (3, 2), (1, -1)]),
        ({1: (False, False, 2), 2: (False, False, 2), 3: (False, False, 2)}, [(1, -1), (2, -1), (3, -1)]),
    ],
)
def test_who_is_in_a_step_may_come_as_far_as_any_other_can(
    positions: dict[int, tuple[bool, bool, int]], stops: list[tuple[int, int]]
) -> None:
    """A rank that begins to change its state has all gradients, so the others can have them, too. Where a rank that is
    in a recovery has been counts for no one."""
    world = World(4, steps=6)
    world.launch()
    while world.version[0] < 2:
        world.step()
    world.kill(0)
    assert stops_after(world, positions) == stops


def test_a_wrong_digest_takes_the_next_source() -> None:
    world = World(3, steps=4)
    world.launch()
    while world.version[0] < 1:
        world.step()
    world.digest_errors = 1
    world.kill(1)
    assert world.run() is State.FINISHED
    notices = [e for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "digest_mismatch"]
    assert len(notices) == 1


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_wrong_digest_without_another_source_takes_the_checkpoint(checkpoint: bool) -> None:
    world = World(2, steps=4)
    world.launch()
    while world.version[0] < 2:
        world.step()
    if checkpoint:
        world.machine.on_checkpoint(1, "/checkpoints/1")
    world.digest_errors = 1
    world.kill(1)
    assert world.run() is (State.FINISHED if checkpoint else State.FAILED)
    if checkpoint:
        (fallback,) = world.of(ev.FallbackStarted)
        assert isinstance(fallback, ev.FallbackStarted) and fallback.version == 1
    else:
        assert "there is no checkpoint" in world.machine.job.failure_reason


def test_all_ranks_lost_without_checkpoint_is_a_clear_failure() -> None:
    world = World(2, steps=6)
    world.launch()
    while world.version[0] < 3:
        world.step()
    world.kill(0)
    world.kill(1)
    assert world.run() is State.FAILED
    assert "no survivor" in world.machine.job.failure_reason


def test_all_ranks_lost_in_the_first_step_start_again() -> None:
    world = World(2, steps=6)
    world.launch()
    while world.version[0] < 1:
        world.step()
    world.kill(0)
    world.kill(1)
    assert world.run() is State.FINISHED
    assert [e for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "start_again"]


def test_what_was_tried_before_all_ranks_start_again_does_not_count_against_a_later_recovery() -> None:
    world = World(2, steps=6)
    world.launch()
    while world.version[0] < 1:
        world.step()
    world.kill(0)
    world.machine.job.tries.retries, world.machine.job.tries.asked_again = 3, True
    world.kill(1)
    assert world.machine.job.state is State.STARTING
    assert world.machine.job.tries.retries == 0 and not world.machine.job.tries.asked_again


def test_script_error_before_the_first_step_fails_at_once() -> None:
    world = World(2)
    world.launch()
    message = pb.Failure(rank=0, pid=101, kind="exception", evidence="ValueError: no")
    message.last_words.exception = "ValueError"
    world.answer(*next(x for x in world.inbox if x[0] == 0))
    world.machine.job.move(0, Place.STARTING)
    world.machine.on_failure(message, 0.0)
    assert world.machine.job.state is State.FAILED and "ValueError" in world.machine.job.failure_reason


def test_a_crash_loop_ends() -> None:
    world = World(3, steps=50, max_failures_per_step=3)
    world.launch()
    while world.version[0] < 1:
        world.step()
    for _ in range(3):
        world.machine.job.ranks[1].committed = 1
        world.kill(1, "exit")
        for _ in range(200):
            if world.machine.job.state in (State.RUNNING, State.FAILED):
                break
            world.step()
        for r in world.version:
            world.version[r] = 1
    assert world.machine.job.state is State.FAILED
    assert "3 times" in world.machine.job.failure_reason


def test_missed_deadlines_make_victims() -> None:
    world = World(3, steps=5)
    world.launch()
    while world.version[0] < 1:
        world.step()
    world.kill(0)
    world.inbox = [(r, c) for r, c in world.inbox if r != 2]  # rank 2 never hears the stop
    while world.inbox:
        world.step()
    world.now += 45  # past mutation_grace_s + stop_ack_s
    world.machine.on_tick(world.now)
    world.collect()
    failures = [e for e in world.of(ev.FailureDetected) if isinstance(e, ev.FailureDetected)]
    assert any(f.rank == 2 and f.kind == "unresponsive" for f in failures)
    assert world.run() is State.FINISHED


def test_a_rank_in_the_scripts_own_code_may_take_longer_to_stop() -> None:
    """It has heard of the stop; an evaluation below the block can take minutes, and no one may be killed for it."""
    world = World(3, steps=5)
    world.launch()
    while world.version[0] < 1:
        world.step()
    world.kill(0)
    kept = []
    while world.inbox:
        rank, command = world.inbox[0]
        if rank == 2 and command.HasField("stop"):
            kept.append(world.inbox.pop(0))
            heard = pb.Reply(serial=command.serial, generation=command.generation, rank=2, outside=True)
            world.machine.on_reply(heard, world.now)
            world.collect()
        else:
            world.step()
    limits = world.machine.job.config.timeouts
    world.now += limits.between_steps_s - 1
    world.machine.on_tick(world.now)
    world.collect()
    assert kept and [e.rank for e in world.of(ev.FailureDetected) if isinstance(e, ev.FailureDetected)] == [0]
    world.now += 2  # but not for ever
    world.machine.on_tick(world.now)
    world.collect()
    assert [e.rank for e in world.of(ev.FailureDetected) if isinstance(e, ev.FailureDetected)] == [0, 2]


@pytest.mark.parametrize("seed", range(60))
def test_random_failures_in_any_order_never_hang(seed: int) -> None:
    rng = random.Random(seed)
    world = World(4, steps=12, seed=seed, max_failures_per_step=1000)
    world.launch()
    kills = 0
    for _ in range(20000):
        if world.machine.job.state in (State.FINISHED, State.FAILED):
            break
        started = world.machine.job.state is not State.STARTING
        alive = [r.rank for r in world.machine.job.ranks.values() if r.place not in (Place.EMPTY, Place.RELEASED)]
        if started and kills < 8 and rng.random() < 0.05 and len(alive) == 4:
            kills += 1
            world.kill(rng.choice(alive))
        if not world.step() and world.machine.job.state not in (State.FINISHED, State.FAILED):
            raise AssertionError(f"hang in {world.machine.job.state} with {world.machine.job.ranks}")
    assert world.machine.job.state in (State.FINISHED, State.FAILED)
    if world.machine.job.state is State.FAILED:
        assert (
            "cannot be recovered" in world.machine.job.failure_reason or "survivor" in world.machine.job.failure_reason
        )


def test_the_table_names_every_state_and_refuses_the_rest() -> None:
    assert set(TRANSITIONS) == set(State)
    check_transition(State.RUNNING, State.QUIESCING)
    with pytest.raises(ProtocolError):
        check_transition(State.FINISHED, State.RUNNING)


def test_the_tables_of_changes_name_every_state_and_refuse_the_rest() -> None:
    kinds: tuple[type[ChangeState], ...] = (SizeState, JoinState, DrainState, RelayoutState)
    assert set(CHANGES) == {state for kind in kinds for state in kind}
    for state, following in CHANGES.items():
        assert all(type(other) is type(state) and other is not state for other in following)
        assert wrong_change(state, state) == ""
    assert wrong_change(JoinState.NONE, JoinState.TAKING_OVER) == "JoinState: none -> taking over is not a transition"
    assert [at_rest(next(iter(kind))) for kind in kinds] == [next(iter(kind)) for kind in kinds]
    assert list(change_laws({}, {"drain of a": DrainState.MOVING, "size": SizeState.ORDERED})) == []
    assert len(list(change_laws({"join": JoinState.PAUSING}, {"join": JoinState.TAKING_OVER}))) == 1
    assert len(list(change_laws({"size": SizeState.PUT_ASIDE}, {"relayout": RelayoutState.WRITING}))) == 1


CONTRADICTIONS: dict[str, Callable[[JobState], object]] = {
    "ranks are in": lambda job: setattr(job.ranks[0], "place", Place.DONE),
    "not in order": lambda job: job.in_order.reverse(),
    "comes after": lambda job: setattr(job, "generation", -1),
    "of a later generation": lambda job: setattr(job.ranks[0], "filled", 99),
    "on no node": lambda job: setattr(job.ranks[0], "home", ""),
    "have left": lambda job: job.membership.removed.update({0: {}}),
    "state is sharded among": lambda job: job.membership.resharded((0, 1, 2)),
    "have come to their loop": lambda job: job.membership.joining.update(
        {2: JoiningProcess(RankRecord(2, place=Place.RUNNING), 1, 0.0)}
    ),
    "without a recovery": lambda job: setattr(job, "state", State.REPLACING),
    "not decided what is restored": lambda job: setattr(job, "state", State.RESTORING),
    "to be tried again": lambda job: setattr(job.round, "retry_at", 1.0),
    "because of ''": lambda job: setattr(job, "state", State.FAILED),
}


@pytest.mark.parametrize("said", CONTRADICTIONS)
def test_a_state_that_contradicts_itself_is_seen_after_the_event(said: str) -> None:
    world = World(2)
    world.launch()
    while world.machine.job.state is not State.RUNNING:
        world.step()
    world.machine.validate()
    CONTRADICTIONS[said](world.machine.job)
    with pytest.raises(ProtocolError, match=f"job state: .*{said}"):
        world.machine.validate()


def training(size: int = 2) -> World:
    world = World(size)
    world.launch()
    while world.machine.job.state is not State.RUNNING or world.inbox:
        world.step()
    world.machine.check_before_acting()
    assert not world.machine.job.outbox.actions
    return world


def told_of_contradictions(job: JobState) -> list[str]:
    events = [action.event for action in job.outbox.actions if isinstance(action, Emit)]
    return [e.text for e in events if isinstance(e, ev.Notice) and e.kind == NoticeKind.INTERNAL_INCONSISTENCY]


def test_a_job_that_trains_does_not_end_because_of_a_contradiction() -> None:
    world = training()
    job = world.machine.job
    job.places[Place.RUNNING] += 1
    for _ in range(3):
        world.machine.check_before_acting()
    (text,) = told_of_contradictions(job)
    assert text.startswith("2 ranks, of which 2 are in order, are counted as") and job.state is State.RUNNING
    job.places[Place.RUNNING] -= 1
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("said", ["ranks are in", "of a later generation", "have left", "state is sharded among"])
def test_no_recovery_is_decided_on_a_contradiction(said: str) -> None:
    world = training(3)
    job = world.machine.job
    CONTRADICTIONS[said](job)
    if said == "state is sharded among":
        job.membership.resharded((0, 1, 2, 3))
    failure = pb.Failure(rank=1, pid=job.ranks[1].process.pid, kind="killed", evidence="test")
    with pytest.raises(ProtocolError, match=said):  # only in tests
        world.machine.on_failure(failure, world.now)
    assert job.state is State.QUIESCING
    world.machine.check_before_acting()
    assert job.state is State.FAILED and said in job.failure_reason and len(told_of_contradictions(job)) <= 1
    assert job.failure_reason.startswith(
        "an error in the controller: no recovery is decided on what contradicts itself"
    )
    sent = [action.command for action in job.take_actions() if isinstance(action, Send)]
    assert sent and not any(command.HasField("hold") for command in sent), "nothing that was decided goes out"


@pytest.mark.parametrize("said", ["without a recovery", "not decided what is restored"])
def test_a_recovery_that_contradicts_itself_fails(said: str) -> None:
    world = training()
    job = world.machine.job
    CONTRADICTIONS[said](job)
    world.machine.check_before_acting()
    assert job.state is State.FAILED and said in job.failure_reason
    world.machine.check_before_acting()
    assert job.state is State.FAILED


def test_a_start_from_a_damaged_checkpoint_goes_on_from_the_one_before() -> None:
    """Nothing has been lost, so there is no recovery, and all ranks are stopped and regrouped once more."""
    world = training()
    job = world.machine.job
    job.start_version = 7
    for state in (State.QUIESCING, State.REPLACING):
        job.state = state
        assert not list(job_laws(job, job.generation))
    job.start_version = 0
    assert any("without a recovery" in law for law in job_laws(job, job.generation))


def test_an_answer_of_an_older_generation_acknowledges_nothing() -> None:
    """A controller that was restarted counts its commands from one again."""
    world = World(2)
    world.launch()
    while world.machine.job.state is not State.RUNNING or world.inbox:
        world.step()
    world.kill(1)
    hold = next(c for _, c in world.inbox if c.HasField("hold"))
    stale = pb.Reply(serial=hold.serial, generation=world.machine.job.generation - 1, rank=hold.rank)
    world.machine.on_reply(stale, world.now)
    assert hold.serial in world.machine.job.outbox.pending
    assert world.run() is State.FINISHED


def test_a_collective_that_does_not_end_is_begun_again_with_the_same_ranks() -> None:
    """All have come to it, so no rank is replaced; the third time at the same step the job gives up."""
    world = World(4, steps=4)
    world.launch()
    while world.machine.job.state is not State.RUNNING:
        world.step()
    pids = {r.rank: r.process.pid for r in world.machine.job.ranks.values()}
    world.machine._all_again("every rank has come to all_reduce #5", world.now)
    assert world.machine.job.state is State.QUIESCING
    assert world.run() is State.FINISHED
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and (finished.victims, finished.cause) == (
        [],
        "deadlock_suspected",
    )
    assert {r.rank: r.process.pid for r in world.machine.job.ranks.values()} == pids

    world = World(2, steps=4)
    world.launch()
    while world.machine.job.state is not State.RUNNING:
        world.step()
    for _ in range(3):
        world.machine._all_again("every rank has come to all_reduce #5", world.now)
    assert world.machine.job.state is State.FAILED and "max_failures_per_step" in world.machine.job.failure_reason


def told(world: World, body: str) -> set[int]:
    """The ranks that have such a command before them."""
    return {rank for rank, command in world.inbox if command.WhichOneof("body") == body}


def in_recovery(world: World, victim: int) -> None:
    """Up to the moment at which everybody is asked to regroup."""
    while world.version[0] < 2:
        world.step()
    world.kill(victim)
    while not told(world, "regroup"):
        world.step()


def test_who_has_nothing_to_transfer_restores_as_soon_as_it_has_regrouped() -> None:
    world = World(6, steps=6)
    world.launch()
    in_recovery(world, 2)
    assert told(world, "regroup") == set(range(6))
    idle = told(world, "restore")
    assert 2 not in idle and len(idle) >= 3
    assert all(not c.restore.transfers for _, c in world.inbox if c.HasField("restore"))
    while told(world, "regroup"):
        assert world.machine.job.state is State.REGROUPING and not told(world, "restore") - idle
        world.step()
    assert world.machine.job.state is State.RESTORING, "the idle ones' answers are not waited for"
    assert told(world, "restore") | idle == set(range(6)) and 2 in told(world, "restore")
    assert world.run() is State.FINISHED


def test_a_failure_while_some_restore_and_others_regroup() -> None:
    world = World(6, steps=6)
    world.launch()
    in_recovery(world, 2)
    idle = min(told(world, "restore"))
    mine = [c for r, c in world.inbox if r == idle]
    world.inbox = [(r, c) for r, c in world.inbox if r != idle]
    for command in mine:
        world.answer(idle, command)
    assert world.machine.job.state is State.REGROUPING
    world.kill(max(told(world, "regroup")))
    assert world.machine.job.state is State.QUIESCING and world.machine.job.generation == 2
    assert world.run() is State.FINISHED


def test_needs_that_are_known_need_not_be_told_again() -> None:
    """Known is what everybody has told with the answers to one stop."""
    world = World(4, steps=30)
    world.launch()
    known = []
    for victim in (1, 2, 3):
        world.step()
        while world.machine.job.recovery is not None or world.machine.job.state is not State.RUNNING or world.inbox:
            world.step()
        world.kill(victim)
        while not told(world, "stop"):
            world.step()
        known += list({c.stop.needs_known for _, c in world.inbox if c.HasField("stop")})
        if victim == 2:  # and another one before all have answered: it joins, and what is known is as old
            world.kill(0)
            while not told(world, "stop"):
                world.step()
            known += list({c.stop.needs_known for _, c in world.inbox if c.HasField("stop")})
    assert known == [0, 1, 1, 2]
    assert world.run() is State.FINISHED


class Refusing(World):
    """Of rank 1's regroupings the next ``refused`` fail, and no one has died."""

    refused = 0

    def answer(self, rank: int, command: pb.Command) -> None:
        if command.HasField("regroup") and rank == 1 and self.refused > 0:
            self.refused -= 1
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
            reply.error_type, reply.error = "RegroupError", "no connection"
            self.machine.on_reply(reply, self.now)
        else:
            super().answer(rank, command)

    def recover(self) -> None:
        """Kill rank 0, and go on until that is behind, or the job has ended."""
        known = len(self.machine.job.history)
        self.kill(0)
        while self.machine.job.state is not State.FAILED and len(self.machine.job.history) == known:
            if not self.step():
                self.now += 1.0  # in which a failure could be reported
                self.machine.on_tick(self.now)
                self.collect()


def refusing() -> Refusing:
    world = Refusing(3, steps=40, max_failures_per_step=100)
    world.launch()
    while world.version[0] < 2:
        world.step()
    return world


def test_three_retries_are_enough_or_the_job_ends() -> None:
    world = refusing()
    for _ in range(2):  # each recovery has three
        world.refused = 3
        world.recover()
        assert world.machine.job.state is State.RUNNING and world.refused == 0
    world.refused = 4
    world.recover()
    assert world.machine.job.state is State.FAILED
    assert world.machine.job.failure_reason.startswith("regrouping or restoring failed 4 times in a row")


def test_a_job_that_is_told_to_end_retries_nothing() -> None:
    world = refusing()
    world.refused = 1
    world.kill(0)
    while world.machine.job.round.retry_at is None:
        assert world.step()
    world.machine.on_stop_request("stopped", world.now)
    assert world.machine.job.state is State.FAILED and world.machine.job.ending.saving
    world.machine.on_tick(world.now + 2.0)
    assert world.machine.job.state is State.FAILED and world.machine.job.failure_reason == "stopped"


def test_each_recovery_may_ask_all_again_once() -> None:
    world = refusing()
    for _ in range(2):
        world.kill(0)
        world.inbox = [(r, c) for r, c in world.inbox if c.HasField("replace")]
        world.now += world.config.timeouts.stop_ack_s + 1.0
        world.machine.on_tick(world.now)
        world.collect()
        assert [e.kind for e in world.of(ev.Notice) if isinstance(e, ev.Notice)].count("all_asked_again") == 1
        world.events.clear()
        while world.machine.job.recovery is not None:
            assert world.step()
        assert world.machine.job.state is State.RUNNING


class OfCalls(World):
    """The script's end is the end of the steps, after ``ends`` of them by rank."""

    def __init__(self, *ends: int, **config: Any) -> None:
        super().__init__(len(ends), steps=-1, **config)
        self.ends, self.told_end = tuple(ends), dict[int, int]()

    def train(self) -> bool:
        running = [r for r in self.machine.job.ranks.values() if r.place is Place.RUNNING]
        if self.machine.job.state is not State.RUNNING or not running:
            return False
        for record in running:
            rank, generation = record.rank, self.machine.job.generation
            if self.version[rank] < self.ends[rank]:
                self.version[rank] += 1
                health = pb.RankHealth(rank=rank, pid=record.process.pid, committed=self.version[rank])
                self.machine.on_heartbeat(pb.Heartbeat(generation=generation, ranks=[health]), self.now)
            if self.version[rank] >= self.ends[rank]:
                done = pb.Done(rank=rank, generation=generation, version=self.version[rank])
                self.machine.on_done(done, self.now)
        return True

    def answer(self, rank: int, command: pb.Command) -> None:
        if command.HasField("resume"):
            self.told_end[rank] = command.resume.ended
        super().answer(rank, command)


def test_scripts_that_end_after_as_many_calls() -> None:
    world = OfCalls(5, 5, 5)
    world.launch()
    assert world.run() is State.FINISHED and set(world.told_end.values()) == {0}


@pytest.mark.parametrize("ends", [(5, 6, 5), (6, 5, 6), (4, 9, 9), (9, 9, 4)])
def test_scripts_that_end_after_other_numbers_of_calls(ends: tuple[int, ...]) -> None:
    """A rank that makes more waits for ever; that is said, and of which rank."""
    world = OfCalls(*ends)
    world.launch()
    assert world.run() is State.FAILED
    assert "different numbers of calls: of rank" in world.machine.job.failure_reason
    assert f"after {min(ends)}" in world.machine.job.failure_reason


def test_who_is_replaced_is_told_where_the_others_have_ended() -> None:
    """Its process knows nothing of what has ended their loops, and must not make another call."""
    world = OfCalls(5, 7, 5)
    world.launch()
    while world.version[1] < 4:
        world.step()
    world.ends = (5, 6, 5)
    while world.machine.job.ranks[0].place is not Place.DONE:
        assert world.step()
    world.kill(1)
    while world.inbox:
        world.step()
    assert world.told_end == {0: 5, 1: 5, 2: 5}
    world.ends = (5, 5, 5)
    assert world.run() is State.FINISHED
    assert [record.ended for record in world.machine.job.in_order] == [5, 5, 5]
