"""A new controller finds a running job: what it hears before it takes over, and what is no beginning."""

from __future__ import annotations

import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.outbox import Emit, Send
from flashrecovery.controller.state.rank_record import ENDLESS, Place
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

STEP = 7


def found(node: str, *ranks: int, stepping: bool = True) -> pb.Register:
    """An agent with these ranks, which have committed STEP."""
    register = pb.Register(node=node, host=node, slots=2, node_rank=-1, peer_port=1, incarnation=node, generation=3)
    for rank in ranks:
        worker = register.workers.add(rank=rank, pid=100 + rank, local_rank=rank % 2, resumed=True, committed=STEP)
        worker.stepping = stepping
        worker.joined.CopyFrom(pb.Joined(rank=rank, steps=30, needs=[pb.ShardNeed(name="w", nbytes=8)]))
    return register


def controller() -> Machine:
    return Machine(RunConfig.model_validate({"nproc_per_node": 2, "nnodes": 2, "controller": "h:1"}))


def failure(rank: int) -> pb.Failure:
    return pb.Failure(rank=rank, pid=100 + rank, kind="killed", evidence="x", signal=9)


def notices(machine: Machine) -> list[str]:
    events = [a.event for a in machine.job.take_actions() if isinstance(a, Emit)]
    return [e.kind for e in events if isinstance(e, ev.Notice)]


def test_all_are_found_and_train() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 2, 3), 0.1)
    assert machine.job.state is State.RUNNING and machine.job.generation == 3 and machine.job.recovery is None


def test_a_failure_before_the_take_over_is_a_victim_of_its_recovery() -> None:
    """And no reason to begin everything again: the others hold everything."""
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_failure(failure(1), 0.1)
    machine.on_register(found("b", 2, 3), 0.2)
    assert (
        machine.job.state is State.QUIESCING
        and machine.job.recovery is not None
        and machine.job.recovery.victims == [1]
    )
    assert notices(machine) == ["taken_over"]


def test_a_node_that_is_lost_before_the_take_over_has_no_ranks() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_node_lost("a", "silent", 1.0, 0.1)
    machine.on_register(found("b", 2, 3), 0.2)
    machine.on_tick(11.0)
    assert (
        machine.job.state is State.QUIESCING
        and machine.job.recovery is not None
        and machine.job.recovery.victims == [0, 1]
    )
    assert "waiting_for_node" in notices(machine)


@pytest.mark.parametrize("stepping", [True, False])
def test_what_was_trained_under_the_last_controller_counts(stepping: bool) -> None:
    """It has heard no heartbeat in which a version was committed, but the agents have said which ones were."""
    machine = controller()
    machine.on_register(found("a", 0, 1, stepping=stepping), 0.0)
    machine.on_register(found("b", 2), 0.2)
    machine.on_tick(11.0)
    assert machine.job.state is State.QUIESCING
    for rank in (0, 1, 2):
        machine.on_failure(failure(rank), 12.0)
    assert machine.job.state is State.FAILED and "no survivor" in machine.job.failure_reason
    assert "start_again" not in notices(machine)


def told(machine: Machine) -> list[tuple[str | None, int, str]]:
    """What agents are asked to remember: node (None: all), version, path."""
    sent = [a for a in machine.job.take_actions() if isinstance(a, Send)]
    return [(a.node, c.version, c.path) for a in sent if a.command.HasField("saved") and (c := a.command.saved)]


def remembering(register: pb.Register, version: int) -> pb.Register:
    register.checkpoint.CopyFrom(pb.CheckpointSaved(version=version, path=f"/c/{version}"))
    return register


def test_all_agents_are_told_of_a_checkpoint() -> None:
    """The node of rank 0, which has published it, may be lost together with this controller."""
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 2, 3), 0.1)
    machine.on_checkpoint(5, "/c/5")
    machine.on_checkpoint(5, "/c/5")
    machine.on_checkpoint(4, "/c/4")
    assert told(machine) == [(None, 5, "/c/5")]


@pytest.mark.parametrize("first", ["spare", "holder"])
def test_a_checkpoint_that_only_a_spare_node_remembers_is_known(first: str) -> None:
    machine = controller()
    registers = [found("a", 0, 1), remembering(found("s"), 6)]
    for register in registers if first == "holder" else reversed(registers):
        machine.on_register(register, 0.0)
    machine.on_tick(11.0)
    assert machine.job.checkpoint == (6, "/c/6") and told(machine) == [(None, 6, "/c/6")]


def test_the_newest_of_the_remembered_checkpoints_counts() -> None:
    machine = controller()
    machine.on_register(remembering(found("a", 0, 1), 4), 0.0)
    machine.on_register(remembering(found("b", 2, 3), 2), 0.1)
    assert machine.job.checkpoint == (4, "/c/4")


def test_a_job_that_is_launched_knows_no_checkpoint_of_another_one() -> None:
    """Agents that have served a job before, of which nothing is left, must not bring its checkpoint into this one."""
    machine = controller()
    machine.on_register(remembering(found("a"), 900), 0.0)
    machine.on_register(found("b"), 0.1)
    assert machine.job.launched and machine.job.checkpoint is None and told(machine) == [(None, -1, "")]
    machine.on_register(remembering(found("late"), 900), 0.2)
    assert machine.job.checkpoint is None and told(machine) == [("late", -1, "")]


def fenced(machine: Machine) -> list[tuple[str | None, str]]:
    sent = [a for a in machine.job.take_actions() if isinstance(a, Send) and a.command.HasField("fence")]
    return [(a.node, a.command.fence.reason) for a in sent]


def of_generation(register: pb.Register, generation: int) -> pb.Register:
    register.generation = generation
    return register


@pytest.mark.parametrize("first", ["newer", "older"])
def test_ranks_that_train_in_different_generations_are_brought_together(first: str) -> None:
    """One node has not heard of the last recovery. The newest generation counts, no matter which comes first."""
    machine = controller()
    registers = [of_generation(found("a", 0, 1), 3), of_generation(found("b", 2, 3), 2)]
    for register in registers if first == "newer" else reversed(registers):
        machine.on_register(register, 0.0)
    assert machine.job.state is State.QUIESCING and machine.job.generation == 4 and machine.job.recovery is not None


@pytest.mark.parametrize("first", ["newer", "older"])
def test_of_two_nodes_with_the_same_rank_the_one_of_the_newer_generation_has_it(first: str) -> None:
    """The other one was lost, its ranks were given away, and it has not been told."""
    machine = controller()
    registers = [of_generation(found("a", 0, 1), 3), of_generation(found("lost", 0, 1), 2)]
    for register in registers if first == "newer" else reversed(registers):
        machine.on_register(register, 0.0)
    assert [machine.job.ranks[r].home for r in (0, 1)] == ["a", "a"]
    assert {node for node, _ in fenced(machine)} == {"lost"}


def with_page(register: pb.Register, rank: int, committed: int = STEP) -> pb.Register:
    """Its process has died, and the controller that was to hear of it is gone."""
    register.pages.add(rank=rank, local_rank=rank % 2, local_states=[committed, committed + 1], committed=committed)
    return register


def test_a_rank_whose_process_has_died_is_filled_again_where_its_page_is() -> None:
    """No node is waited for: every rank is accounted for."""
    machine = controller()
    machine.on_register(found("s"), 0.0)
    machine.on_register(found("a", 0, 1), 0.1)
    machine.on_register(with_page(found("b", 2), 3), 0.2)
    assert (
        machine.job.state is State.QUIESCING
        and machine.job.recovery is not None
        and machine.job.recovery.victims == [3]
    )
    sent = [a for a in machine.job.take_actions() if isinstance(a, Send) and a.command.HasField("replace")]
    assert [(a.node, a.command.rank, a.command.replace.local_rank) for a in sent] == [("b", 3, 1)]


@pytest.mark.parametrize("first", ["alive", "page"])
def test_a_rank_that_lives_elsewhere_since_is_not_filled_where_its_old_page_is(first: str) -> None:
    machine = controller()
    registers = [of_generation(found("a", 0, 1), 3), of_generation(with_page(found("old"), 1), 2)]
    for register in registers if first == "alive" else reversed(registers):
        machine.on_register(register, 0.0)
    machine.on_register(found("b", 2, 3), 0.1)
    assert machine.job.state is State.RUNNING and machine.job.ranks[1].home == "a"


def test_a_process_of_an_older_generation_than_the_page_is_fenced() -> None:
    machine = controller()
    machine.on_register(of_generation(with_page(found("b", 2), 3), 3), 0.0)
    machine.on_register(of_generation(found("lost", 3), 2), 0.1)
    assert machine.job.ranks[3].home == "b"
    assert [node for node, _ in fenced(machine)] == ["lost"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_where_all_processes_have_died_nothing_begins_from_zero(checkpoint: bool) -> None:
    """The agents live, and say how far their ranks had come."""
    machine = controller()
    registers = [found("a"), found("b")]
    for i, register in enumerate(registers):
        with_page(with_page(register, 2 * i), 2 * i + 1)
        machine.on_register(remembering(register, 6) if checkpoint else register, 0.0)
    kinds = notices(machine)
    assert "start_again" not in kinds
    if checkpoint:
        assert machine.job.state is State.REPLACING and "taken_over" in kinds
    else:
        assert machine.job.state is State.FAILED and "no rank holds any state" in machine.job.failure_reason


def all_dead_beyond_the_launch(world: int, most: int, ranks: int) -> Machine:
    """Launched with that many ranks, grown to ``ranks``; there is a checkpoint, and no process is left."""
    config = {"nproc_per_node": world, "controller": "h:1", "elastic": {"min": 1, "max": most}}
    machine = Machine(RunConfig.model_validate(config))
    register = remembering(found("a"), 6)
    register.members.extend(range(ranks))
    for rank in range(ranks):
        with_page(register, rank)
    machine.on_register(register, 0.0)
    return machine


def test_ranks_beyond_the_launch_do_not_begin_where_nobody_knows_their_replicas() -> None:
    """Of a job launched with four, six may be three replicas of two ranks, whose last one stands where rank 3 does, or
    six replicas, where it may stand anywhere."""
    machine = all_dead_beyond_the_launch(4, 6, 6)
    assert machine.job.state is State.FAILED
    assert "ranks [4, 5], which the launch did not have" in machine.job.failure_reason


@pytest.mark.parametrize(("world", "most", "ranks"), [(2, 4, 4), (4, 6, 5)])
def test_of_replicas_that_can_only_have_one_rank_each_they_do(world: int, most: int, ranks: int) -> None:
    assert all_dead_beyond_the_launch(world, most, ranks).job.state is State.REPLACING


def test_a_done_of_a_rank_that_nobody_has_come_with_is_not_believed() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 2), 0.1)
    machine.on_done(pb.Done(rank=3, generation=3, version=30), 0.2)
    machine.on_tick(11.0)
    assert machine.job.recovery is not None and machine.job.recovery.victims == [3]


def ended(register: pb.Register, *, exited: bool) -> pb.Register:
    """All its ranks have been let out of their loops, and have come to the end of their scripts, or not yet."""
    for worker in register.workers:
        worker.stepping, worker.released, worker.exited = False, True, exited
        worker.done.CopyFrom(pb.Done(rank=worker.rank, generation=3, version=30))
    return register


def exits(rank: int) -> pb.Exited:
    return pb.Exited(rank=rank, pid=100 + rank)


def test_a_job_whose_ranks_had_all_ended_has_finished() -> None:
    machine = controller()
    machine.on_register(ended(found("a", 0, 1), exited=True), 0.0)
    machine.on_register(ended(found("b", 2, 3), exited=True), 0.1)
    assert machine.job.state is State.FINISHED


def test_ranks_that_were_let_go_are_waited_for() -> None:
    machine = controller()
    machine.on_register(ended(found("a", 0, 1), exited=True), 0.0)
    machine.on_register(ended(found("b", 2, 3), exited=False), 0.1)
    assert machine.job.state is State.RUNNING and machine.job.recovery is None
    machine.on_exited(exits(2), 0.2)
    assert machine.job.state is State.RUNNING
    machine.on_exited(exits(3), 0.3)
    assert machine.job.state is State.FINISHED


def test_a_rank_that_has_not_heard_that_it_may_go_is_told_again() -> None:
    machine = controller()
    late = ended(found("b", 2, 3), exited=False)
    late.workers[1].released = False
    machine.on_register(ended(found("a", 0, 1), exited=True), 0.0)
    machine.on_register(late, 0.1)
    sent = [a.command for a in machine.job.take_actions() if isinstance(a, Send)]
    assert [c.rank for c in sent if c.HasField("release")] == [3]
    for rank in (2, 3):
        machine.on_exited(exits(rank), 0.2)
    assert machine.job.state is State.FINISHED


@pytest.mark.parametrize("exited", [True, False])
def test_a_rank_that_has_ended_nobody_knows_how_ends_the_job(exited: bool) -> None:
    """Nothing can be done again: its peers are gone. But it is not called well, either."""
    machine = controller()
    machine.on_register(ended(found("a", 0, 1), exited=exited), 0.0)
    machine.on_tick(11.0)
    assert machine.job.state is State.FAILED
    assert "taken their last step, but how ranks [2, 3] have ended" in machine.job.failure_reason


@pytest.mark.parametrize("others", [STEP, STEP + 2])
@pytest.mark.parametrize("through", [True, False])
def test_scripts_that_have_ended_after_other_numbers_of_calls_fail_the_job(others: int, through: bool) -> None:
    """The controller before this one has been lost before it could say so."""
    machine = controller()
    registers = [found("a", 0, 1), found("b", 2, 3)]
    for worker in [worker for register in registers for worker in register.workers]:
        worker.joined.steps = ENDLESS
        version = others if worker.rank == 2 else STEP
        worker.committed = version
        if through or worker.rank == 0:
            worker.done.CopyFrom(pb.Done(rank=worker.rank, generation=3, version=version))
    for register in registers:
        machine.on_register(register, 0.0)
    if others == STEP:
        assert machine.job.state is State.RUNNING and not machine.job.failure_reason
    else:
        assert machine.job.state is State.FAILED and "different numbers of calls" in machine.job.failure_reason


def test_a_node_that_goes_after_its_ranks_have_ended_is_not_missed() -> None:
    machine = controller()
    machine.on_register(ended(found("a", 0, 1), exited=True), 0.0)
    machine.on_node_lost("a", "silent", 1.0, 0.1)
    machine.on_register(ended(found("b", 2, 3), exited=True), 0.2)
    assert machine.job.state is State.FINISHED


def test_of_two_nodes_with_the_same_rank_in_one_generation_the_first_keeps_it() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("other", 1), 0.1)
    assert machine.job.ranks[1].home == "a"
    ((node, reason),) = fenced(machine)
    assert node == "other" and "rank 1 lives on node a" in reason


def test_a_process_counts_more_than_a_page_of_its_own_generation() -> None:
    machine = controller()
    machine.on_register(with_page(found("old"), 1), 0.0)
    machine.on_register(found("a", 0, 1), 0.1)
    assert machine.job.ranks[1].home == "a" and not fenced(machine)
    machine.on_register(with_page(found("late"), 1), 0.2)
    assert machine.job.ranks[1].home == "a" and machine.job.ranks[1].process.pid == 101


def test_the_first_page_of_a_generation_counts() -> None:
    machine = controller()
    machine.on_register(with_page(found("a"), 1, committed=7), 0.0)
    machine.on_register(with_page(found("b"), 1, committed=9), 0.1)
    assert (machine.job.ranks[1].home, machine.job.ranks[1].committed) == ("a", 7)


def test_what_the_nodes_remember_of_the_job_goes_on() -> None:
    machine = controller()
    registers = [found("a", 0, 1), found("b", 2, 3)]
    registers[0].stride, registers[0].attempt, registers[1].attempt = 2, 4, 3
    for register in registers:
        machine.on_register(register, 0.0)
    assert machine.job.stride == 2 and machine.job.restarts == 4


def test_nodes_without_ranks_are_spare() -> None:
    machine = controller()
    for register in (found("s"), found("a", 0, 1), found("b", 2, 3)):
        machine.on_register(register, 0.0)
    assert {name: node.state.value for name, node in machine.job.nodes.items()} == {
        "s": "spare",
        "a": "active",
        "b": "active",
    }


def starting(register: pb.Register) -> pb.Register:
    """Its processes have not been let into their loops yet."""
    for worker in register.workers:
        worker.stepping = worker.resumed = False
        worker.committed = -1
        worker.ClearField("joined")
    return register


def test_before_the_first_step_everything_is_started_again() -> None:
    machine = controller()
    for register in (starting(found("a", 0, 1)), starting(found("b", 2, 3))):
        register.generation = register.attempt = 1  # it was a start
        machine.on_register(register, 0.0)
    assert machine.job.state is State.STARTING and machine.job.recovery is None
    events = [a.event for a in machine.job.take_actions() if isinstance(a, Emit) and isinstance(a.event, ev.Notice)]
    texts = {e.kind: e.text for e in events}
    assert texts["taken_over"] == "a new controller has found 4 of 4 ranks"
    assert texts["start_again"].startswith("a new controller has found 4 of 4 ranks, before the first step")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_after_a_recovery_nothing_begins_from_zero_though_nobody_who_is_left_has_trained(checkpoint: bool) -> None:
    """They came into an elastic job, or took ranks over; the ranks that had the state were lost with the controller
    before."""
    machine = controller()
    register = starting(found("b", 2, 3))
    register.attempt = register.generation - 1
    machine.on_register(remembering(register, 6) if checkpoint else register, 0.0)
    machine.on_register(pb.Register(node="a", host="a", slots=2, node_rank=-1, peer_port=1, incarnation="a"), 0.1)
    machine.on_tick(11.0)
    kinds = notices(machine)
    assert "start_again" not in kinds and machine.job.state is not State.STARTING
    if not checkpoint:
        assert machine.job.state in (State.FAILED, State.REPLACING, State.QUIESCING)


def test_where_one_rank_has_trained_nothing_begins_from_zero() -> None:
    """All processes are replacements that were on their way; whoever held the state is gone."""
    machine = controller()
    first = starting(found("a", 0, 1))
    first.workers[0].committed = STEP
    machine.on_register(first, 0.0)
    machine.on_register(starting(found("b", 2, 3)), 0.1)
    assert machine.job.state is State.FAILED and "no survivor holds any state" in machine.job.failure_reason
    assert "start_again" not in notices(machine)


def test_a_replacement_that_was_on_its_way_has_its_time_and_no_longer() -> None:
    machine = controller()
    other = found("b", 2)
    other.workers.extend(starting(found("b", 3)).workers)
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(other, 0.1)
    assert machine.job.recovery is not None
    waiting = {
        (order.what, rank): order.deadline for order in machine.job.outbox.pending.values() for rank in order.waiting
    }
    limits = machine.job.config.timeouts
    assert 0.0 <= waiting["replace", 3] - limits.replacement_s <= 1.0 + limits.fence_s
    assert not {("replace", rank) for rank in (0, 1, 2)} & waiting.keys()


def test_an_elected_controller_waits_until_no_other_agent_comes() -> None:
    machine = controller()
    quiet_s = 3 * machine.job.config.timeouts.node_silence_s
    machine.takeover.inherit(0.0)
    machine.on_register(found("a", 0, 1), quiet_s - 0.1)
    machine.on_tick(quiet_s + 0.1)
    assert machine.takeover.gathering, "one has come lately"
    machine.on_tick(2 * quiet_s)
    assert (
        not machine.takeover.gathering and machine.job.recovery is not None and machine.job.recovery.victims == [2, 3]
    )


def test_one_that_was_started_again_waits_longer() -> None:
    """It may be the agents, not the nodes, that are late."""
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_tick(machine.job.config.timeouts.takeover_s - 0.1)
    assert machine.takeover.gathering
    machine.on_tick(machine.job.config.timeouts.takeover_s)
    assert not machine.takeover.gathering


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_rank_that_was_being_handed_over_stays_where_it_was(first: str) -> None:
    """Two nodes have a process of it. The new one has no state yet; its node keeps the ranks that it has besides."""
    machine = controller()
    old, new = (of_generation(found(node, *ranks, stepping=False), 4) for node, *ranks in (("a", 2, 3), ("b", 0, 1, 2)))
    coming = new.workers[2]
    coming.resumed, coming.pid, coming.committed = False, 999, -1
    for register in (old, new) if first == "old" else (new, old):
        machine.on_register(register, 0.0)
    machine.on_tick(11.0)
    assert [r.home for r in machine.job.in_order] == ["b", "b", "a", "a"]
    assert [r.place for r in machine.job.in_order] == [Place.STOPPING] * 4
    sent = [a for a in machine.job.take_actions() if isinstance(a, Send)]
    assert [(a.node, a.command.rank) for a in sent if a.command.HasField("leave")] == [("b", 2)]
    assert not any(a.command.HasField("fence") for a in sent)


@pytest.mark.parametrize("first", ["old", "new"])
@pytest.mark.parametrize("stepping", [True, False])
def test_a_rank_that_has_just_been_handed_over_stays_where_it_is(first: str, stepping: bool) -> None:
    """The old process is there until all have taken a step. Its node keeps the ranks that it has besides."""
    machine = controller()
    old = of_generation(found("a", 2, 3, stepping=False), 4)
    new = of_generation(found("b", 0, 1, 2, stepping=stepping), 4)
    if not stepping:
        new.workers[2].committed = STEP + 1
    for register in (old, new) if first == "old" else (new, old):
        machine.on_register(register, 0.0)
    machine.on_tick(11.0)
    assert [r.home for r in machine.job.in_order] == ["b", "b", "b", "a"]
    sent = [a for a in machine.job.take_actions() if isinstance(a, Send)]
    assert [(a.node, a.command.rank) for a in sent if a.command.HasField("leave")] == [("a", 2)]
    assert not any(a.command.HasField("fence") for a in sent)


def test_of_two_processes_that_have_been_in_their_loop_one_node_is_fenced() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 1, 2), 0.1)
    assert [node for node, _ in fenced(machine)] == ["b"]
