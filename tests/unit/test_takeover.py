"""A new controller finds a running job: what it hears before it takes over, and what is no beginning."""

from __future__ import annotations

import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.outbox import Emit
from flashrecovery.controller.states import State
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
    events = [a.event for a in machine.take_actions() if isinstance(a, Emit)]
    return [e.kind for e in events if isinstance(e, ev.Notice)]


def test_all_are_found_and_train() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 2, 3), 0.1)
    assert machine.state is State.RUNNING and machine.generation == 3 and machine.recovery is None


def test_a_failure_before_the_take_over_is_a_victim_of_its_recovery() -> None:
    """And no reason to begin everything anew: the others hold everything."""
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_failure(failure(1), 0.1)
    machine.on_register(found("b", 2, 3), 0.2)
    machine.on_tick(11.0)
    assert machine.state is State.QUIESCING and machine.recovery is not None and machine.recovery.victims == [1]
    assert notices(machine) == ["taken_over"]


def test_a_node_that_is_lost_before_the_take_over_has_no_ranks() -> None:
    machine = controller()
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_node_lost("a", "silent", 1.0, 0.1)
    machine.on_register(found("b", 2, 3), 0.2)
    machine.on_tick(11.0)
    assert machine.state is State.QUIESCING and machine.recovery is not None and machine.recovery.victims == [0, 1]
    assert "waiting_for_node" in notices(machine)


@pytest.mark.parametrize("stepping", [True, False])
def test_what_was_trained_under_the_last_controller_counts(stepping: bool) -> None:
    """It has heard no heartbeat in which a version was committed, but the agents have said which ones were."""
    machine = controller()
    machine.on_register(found("a", 0, 1, stepping=stepping), 0.0)
    machine.on_register(found("b", 2), 0.2)
    machine.on_tick(11.0)
    assert machine.state is State.QUIESCING
    for rank in (0, 1, 2):
        machine.on_failure(failure(rank), 12.0)
    assert machine.state is State.FAILED and "no survivor" in machine.failure_reason
    assert "start_again" not in notices(machine)
