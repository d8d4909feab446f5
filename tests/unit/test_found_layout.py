"""Another controller takes over a job whose parallel layout has changed: agents say which one it has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrecovery.config import RunConfig, validate
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_replan import FACTS

PLAN = "tp=1,pp=2,dp=1"


def found(nodes: int = 2, **settings: object) -> Machine:
    given = {"nnodes": nodes, "nproc_per_node": 2, "controller": "h:1", "parallelism": {"min": 1}}
    return Machine(validate(RunConfig, {**given, **settings}, "test"))


def came(
    name: str, ranks: list[int], *, plan: str = PLAN, attempt: int = 1, generation: int = 5, resumed: bool = True
) -> pb.Register:
    message = pb.Register(
        node=name, host=name, slots=2, node_rank=-1, peer_port=7, incarnation="i", generation=generation
    )
    message.layout, message.attempt, message.stride = plan, attempt, 1
    facts = replace(FACTS, layout={"tp": 1, "pp": 2, "cp": 1, "ep": 1, "dp": 1})
    for rank in ranks:
        joined = pb.Joined(
            rank=rank, generation=generation, steps=100, needs=[pb.ShardNeed(name=f"s{rank}")], facts=facts.text()
        )
        state = pb.WorkerState(rank=rank, pid=10 + rank, resumed=resumed, stepping=resumed, joined=joined, committed=7)
        message.workers.append(state)
    return message


def test_the_layout_that_the_job_has_goes_on() -> None:
    machine = found()
    machine.on_register(came("a", [0, 1]), 0.0)
    assert machine.job.state is State.RUNNING and machine.job.parallel.text == PLAN
    assert list(machine.job.ranks) == [0, 1] and machine.job.world_size == 2 and machine.job.whole
    machine.job.take_actions()
    assert machine.replan("tp=1,pp=1,dp=2", -1)[0] == ""  # and can be changed again
    assert machine.job.parallel.changes >= 1


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_node_that_was_cut_off_while_the_layout_changed(first: str) -> None:
    """Any process that comes first: its ranks are none of the job's any more."""
    machine = found()
    old = came("b", [2, 3], plan="", attempt=0, generation=3)
    new = came("a", [0], generation=5)
    for message in (old, new) if first == "old" else (new, old):
        machine.on_register(message, 0.0)
    assert machine.job.parallel.text == PLAN and list(machine.job.ranks) == [0, 1]
    assert machine.job.nodes["b"].state is NodeState.LOST and machine.job.nodes["a"].alive
    machine.on_register(came("c", [1]), 0.0)
    assert machine.job.state is State.RUNNING
    assert [record.home for record in machine.job.in_order] == ["a", "c"]


def launched(name: str, ranks: list[int], attempt: int) -> pb.Register:
    """From before the layout changed, with two nodes in domains that are shared."""
    message = came(name, ranks, plan="", attempt=attempt, generation=3)
    message.domains.extend((4, 5))
    message.stride = 2
    return message


@pytest.mark.parametrize("first", ["old", "new"])
def test_attempts_go_on_as_they_were(first: str) -> None:
    """What ranks keep of their set-up is given back to a process of the same attempt only; and of a node that was cut
    off nothing else counts either."""
    machine = found()
    messages = [launched("b", [2, 3], attempt=2), came("a", [0], attempt=4)]
    for message in messages if first == "old" else messages[::-1]:
        machine.on_register(message, 0.0)
    machine.on_register(came("c", [1], attempt=4), 0.0)
    assert machine.job.state is State.RUNNING
    assert machine.job.restarts + machine.job.parallel.changes == 4
    assert (machine.job.stride, machine.job.domains) == (1, ())


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_layout_that_the_job_has_had_before_is_another_one(first: str) -> None:
    machine = found(nodes=3)
    old = came("b", [1], attempt=1, generation=3)
    old.domains.extend((0, 1))
    new = came("a", [0], attempt=3, generation=7)
    for message in (old, new) if first == "old" else (new, old):
        machine.on_register(message, 0.0)
    assert machine.job.nodes["b"].state is NodeState.LOST and not machine.job.ranks[1].home
    machine.on_register(came("c", [1], attempt=3, generation=7), 0.0)
    assert machine.job.state is State.RUNNING and machine.job.domains == ()
    assert [record.home for record in machine.job.in_order] == ["a", "c"]


def test_as_long_as_nobody_is_in_the_loop_of_the_new_layout_the_state_is_not_known() -> None:
    """A script that has just begun has a version 0, which is not the job's."""
    machine = found()
    machine.on_register(came("a", [0, 1], resumed=False), 0.0)
    assert machine.job.state is State.FAILED
    assert f"lost while the job changed its parallel layout to {PLAN}" in machine.job.failure_reason


def test_a_rank_that_is_missing_is_filled_in_that_layout() -> None:
    machine = found()
    machine.on_register(came("a", [1]), 0.0)
    assert machine.takeover.gathering
    machine.on_tick(1000.0)
    assert machine.job.state is State.QUIESCING and machine.job.parallel.text == PLAN
    machine.job.take_actions()
    assert list(machine.job.ranks) == [0, 1]


def test_what_was_launched_is_found_as_before() -> None:
    machine = found()
    machine.on_register(came("a", [0, 1], plan="", attempt=2), 0.0)
    machine.on_register(came("b", [2, 3], plan="", attempt=2), 0.0)
    assert machine.job.state is State.RUNNING and machine.job.parallel.text == ""
    assert machine.job.restarts == 2 and machine.job.parallel.changes == 0 and len(machine.job.ranks) == 4
