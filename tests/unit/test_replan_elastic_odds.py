"""Jobs that are elastic and whose parallel layout may change: what goes wrong only where both are in one job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrecovery import events as ev
from flashrecovery.config import run_config
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.staged_layout import StagedLayout
from flashrecovery.errors import ConfigError
from flashrecovery.plan.strategy.relayout import LayoutFacts, StayingFacts
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.parallel_layout import layout_sizes
from tests.unit.test_found_layout import PLAN, came, found
from tests.unit.test_replan import FACTS
from tests.unit.test_replan_elastic import Both
from tests.unit.test_replan_elastic_histories import Histories
from tests.unit.test_replan_known import KEPT, WORDS, sent, told


def test_such_a_job_does_not_grow_beyond_its_launch() -> None:
    """A layout that it has changed to has at most as many ranks as the launch, so there is nothing to go back to."""
    values = {"nproc_per_node": 2, "parallelism": {"min": 1}}
    with pytest.raises(
        ConfigError, match=r"elastic = 1:4 with parallelism: .* does not grow beyond its launch; .* 2 ranks"
    ):
        run_config({**values, "elastic": {"min": 1, "max": 4}}, "test")
    assert run_config({**values, "elastic": {"min": 1, "max": 2}}, "test").elastic is not None


EIGHT = replace(FACTS, global_batch=8, layout={"tp": 1, "pp": 2, "cp": 1, "ep": 1, "dp": 1})
THREE = StagedLayout(KEPT, StayingFacts(EIGHT, '{"seed": 3}', 100), "tp=1,pp=1,dp=3", 1)
"""One of four replicas had been lost, and eight micro-batches cannot be divided among three."""


def on_its_way() -> Machine:
    """A controller is started again while the ranks of a new layout are on their way."""
    machine = found(elastic={"min": 1, "max": 4})
    message = told(came("a", [0, 1], resumed=False), THREE)
    message.slots = 4
    for worker in message.workers:
        worker.joined.facts = EIGHT.text()
    machine.on_register(message, 0.0)
    return machine


def test_another_controller_is_told_of_a_number_of_replicas_that_is_not_allowed() -> None:
    job = on_its_way().job
    assert job.state is State.STARTING and job.parallel.text == PLAN, job.failure_reason


def test_nor_does_the_script_begin_in_that_layout_when_it_cannot_in_the_next_one() -> None:
    machine = on_its_way()
    job = machine.job
    sent(machine)
    machine.on_started(pb.WorkerStarted(rank=0, generation=job.generation, pid=100), "a", "a")
    words = pb.LastWords(exception="ValueError", message="no")
    machine.on_failure(pb.Failure(rank=0, pid=100, kind="exception", evidence="it raised", last_words=words), 1.0)
    orders = [command.replace.layout for command in sent(machine) if command.HasField("replace")]
    assert job.state is State.STARTING and orders and {*orders} != {"tp=1,pp=1,dp=3"}, job.failure_reason


@pytest.mark.parametrize("before", ["", "tp=1,pp=1,dp=x", "xx=1,pp=1,dp=1"])
def test_words_of_no_layout_are_named(before: str) -> None:
    machine = found()
    machine.on_register(told(came("a", [0, 1]), replace(WORDS, before=before)), 0.0)
    assert [command for command in sent(machine) if command.HasField("drop_staging")]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_who_leaves_by_command_comes_back_before_the_layout_changes(checkpoint: bool) -> None:
    """Of three replicas the last one leaves, and keeps the copies of the second one's parts, of which a rank dies:
    with fewer than two (MIN) there is another layout, for three ranks. It begins with what all five have."""
    elastic, replan = {"min": 2, "max": 3, "replace": "never"}, {"min": 1, "replace": "never"}
    world = Histories(
        {"tp": 2, "pp": 1, "dp": 3}, sharded=True, seed=1, single=False, elastic=elastic, parallelism=replan
    )
    world.launch()
    world.go_on()
    job = world.machine.job
    if checkpoint:
        world.machine.on_checkpoint(0, "/checkpoints/0")
    assert world.machine.resize(2, -1, world.now) == ""
    world.collect()
    while job.state is not State.REGROUPING:
        assert world.step()
    assert list(job.ranks) == [0, 1, 2, 3]
    (victim,) = [world.kept[rank][0] for rank in (4,)]
    assert victim in job.ranks
    world.kill(victim)
    while job.state not in (State.STARTING, State.FAILED):
        assert world.step()
    assert job.state is State.STARTING, job.failure_reason
    (changed,) = [event for event in world.events if isinstance(event, ev.JobReplanned)]
    assert changed.ranks == 3, changed
    assert world.run() is State.FINISHED and not world.odd, (job.failure_reason, world.odd)
    assert not [event for event in world.events if isinstance(event, ev.FallbackStarted)]


class Eight(Both):
    """Eight micro-batches, which one, two and four replicas can divide among themselves."""

    def joined(self, rank: int, command: pb.Command, steps: int, facts: LayoutFacts) -> pb.Joined:
        found = super().joined(rank, command, steps, replace(facts, global_batch=8))
        del found.sizes[:]
        found.sizes.extend(size for size in (1, 2, 4) if size <= facts.layout["dp"])
        return found


class WithExperts(Both):
    """In a layout with two expert-parallel ranks, two data-parallel ranks have all experts together."""

    def joined(self, rank: int, command: pb.Command, steps: int, facts: LayoutFacts) -> pb.Joined:
        experts = replace(facts, experts=4, chosen=2, expert_inner=256, takes="cp,ep", elastic=True)
        found = super().joined(rank, command, steps, experts)
        if (each := facts.layout["ep"]) > 1:
            del found.sizes[:]
            found.sizes.extend((1, 2))
            found.replicas, found.each, found.inner = facts.layout["dp"] // each, each, each
        return found


@pytest.mark.parametrize(
    ("kind", "text", "then"),
    [(Eight, "tp=1,pp=1,dp=4", "tp=1,pp=1,dp=2"), (WithExperts, "tp=1,pp=1,ep=2,dp=4", "tp=1,pp=1,ep=2,dp=2")],
    ids=["dense", "experts"],
)
def test_a_layout_that_begins_once_more_has_a_number_of_replicas_that_is_allowed(
    kind: type[Both], text: str, then: str
) -> None:
    """One of four is lost while they read the state, so that no rank has it."""
    world = kind()
    world.command(text)
    world.reply("staging")
    world.start(replace(FACTS, layout={"cp": 1, "ep": 1, **layout_sizes(text)}))
    assert world.job.state is State.RESTORING
    world.kill(3)
    world.reply("hold")
    for rank, command in world.of("stop"):
        world.machine.on_reply(
            pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=-1), 4.0
        )
    world.collect()
    assert world.job.state is State.STARTING, world.job.failure_reason
    assert [event.layout for event in world.replanned()] == [text, then]
