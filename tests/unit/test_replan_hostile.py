"""What a change of the parallel layout must not do: leave processes or memory behind, go back to old state, or take
another job or one rank's state for that of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig, run_config, validate
from flashrecovery.controller.machine import Machine
from flashrecovery.errors import ConfigError
from flashrecovery.plan.strategy.relayout import LayoutFacts
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_replan import FACTS, World


def three(**changes: object) -> LayoutFacts:
    """What three ranks say in the layout that is chosen for them."""
    return replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3}, **changes)


def changed(world: World, *lost: int) -> None:
    for rank in lost:
        world.kill(rank)
    world.stop()
    world.reply("staging")


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (0, 2)], ids=str)
def test_no_process_of_the_old_layout_is_left(lost: tuple[int, ...]) -> None:
    """Ranks have other numbers then: an agent ends what fills a rank only if that rank is filled again, or leaves."""
    world = World()
    changed(world, *lost)
    assert world.replanned()
    living = {0, 1, 2, 3}.difference(lost)
    filled = {rank for rank, _ in world.of("replace")}
    left = {rank for rank, _ in world.of("leave")}
    assert living <= filled | left, f"no process ends the processes of ranks {sorted(living - filled - left)}"
    assert not filled & (left - set(lost))


def died_before_its_first_step(world: World) -> None:
    """Of the new layout."""
    for rank, command in world.of("replace"):
        started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=next(world.pids))
        world.machine.on_started(started, "n", "h")
    world.kill(0)


def test_a_death_on_the_way_to_the_new_layouts_first_step() -> None:
    """All begin again from what is in memory; and then that is given back, and the recovery is over."""
    world = World()
    changed(world, 1)
    died_before_its_first_step(world)
    assert world.job.state is State.STARTING
    world.start(three())
    assert world.reply("restore") == [0, 1, 2]
    assert world.reply("resume") == [0, 1, 2] and world.job.state is State.RUNNING
    health = [pb.RankHealth(rank=r, pid=world.job.ranks[r].process.pid, committed=8) for r in range(3)]
    world.machine.on_heartbeat(pb.Heartbeat(generation=world.job.generation, ranks=health), 4.0)
    world.collect()
    assert world.of("drop_staging")
    assert [e for e in world.events if isinstance(e, ev.RecoveryFinished)]


OTHERS = [
    ({"global_batch": 24}, "global_batch is 24, and was 12"),
    ({"micro_batch": 2}, "micro_batch is 2, and was 1"),
    ({"layers": 8}, "layers is 8, and was 4"),
    ({"sharded": True}, "sharded is True, and was False"),
    ({"layout": FACTS.layout}, "has made the layout tp=2,pp=2,dp=1 of it"),
]


def planned(world: World, **changes: object) -> LayoutFacts:
    """What a script says that does as it is told, but for these changes."""
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in world.job.parallel.text.split(","))}
    return replace(FACTS, **{"layout": {**FACTS.layout, **sizes}, **changes})


@pytest.mark.parametrize(("changes", "reason"), OTHERS)
def test_a_script_that_makes_another_job_of_it(changes: dict[str, object], reason: str) -> None:
    """It is not taken for the same; where it does so in every layout, the job ends."""
    world = World()
    changed(world, 1)
    for _ in range(5):
        assert not world.of("restore")
        if world.job.state is State.FAILED:
            break
        world.start(planned(world, **changes))
    assert world.job.state is State.FAILED and reason in world.job.failure_reason


def commanded(world: World, layout: str = "tp=1,pp=2,dp=1") -> None:
    world.command(layout)
    world.reply("staging")


def begins(world: World) -> list[int]:
    """It has come to its first step, and gets the state from the memory."""
    world.start(planned(world))
    ranks = world.reply("restore")
    assert world.reply("resume") == ranks and world.job.state is State.RUNNING
    health = [pb.RankHealth(rank=r, pid=world.job.ranks[r].process.pid, committed=8) for r in ranks]
    world.machine.on_heartbeat(pb.Heartbeat(generation=world.job.generation, ranks=health), 4.0)
    world.collect()
    assert world.of("drop_staging") and [e for e in world.events if isinstance(e, ev.RecoveryFinished)]
    return ranks


def test_a_command_for_another_job_is_taken_back() -> None:
    """The layout before is one that the script can have: the job goes on in that."""
    world = World()
    commanded(world)
    world.start(planned(world, global_batch=6))
    assert world.job.state is State.STARTING and world.job.parallel.text == "tp=2,pp=2,dp=1"
    assert [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"]
    assert begins(world) == [0, 1, 2, 3]


def raises(world: World, rank: int = 0) -> None:
    """The script, on its way to its first step."""
    for place, command in world.of("replace"):
        started = pb.WorkerStarted(rank=place, generation=command.generation, pid=next(world.pids))
        world.machine.on_started(started, "n", "h")
    words = pb.LastWords(exception="ValueError", message="sequence parallelism without tensor parallelism")
    failure = pb.Failure(
        rank=rank, pid=world.job.ranks[rank].process.pid, kind="exception", evidence="it", last_words=words
    )
    world.machine.on_failure(failure, 4.0)
    world.collect()


def test_a_layout_that_the_script_cannot_make_does_not_end_the_job() -> None:
    world = World()
    commanded(world)
    raises(world)
    assert world.job.state is State.STARTING and world.job.parallel.text == "tp=2,pp=2,dp=1"
    assert begins(world) == [0, 1, 2, 3]
    assert world.machine.replan("tp=1", -1)[0] == ""  # it is forgotten, too


def test_after_a_loss_other_layouts_are_tried_and_not_for_ever() -> None:
    world = World()
    changed(world, 1)
    tried = []
    while world.job.state is State.STARTING:
        tried.append(world.job.parallel.text)
        raises(world)
    assert len(tried) == len({*tried}) == 3 and "sequence parallelism" in world.job.failure_reason
    assert all(event.ranks <= 3 for event in world.replanned())


def test_a_script_with_other_samples_in_the_new_layout() -> None:
    world = World()
    for record in world.job.in_order:
        record.batches = '{"seed": 3}'
    commanded(world)
    ((rank, command), *_) = world.of("replace")
    world.machine.on_started(pb.WorkerStarted(rank=rank, generation=command.generation, pid=900), "n", "h")
    said = {"needs": World.needs(rank), "facts": planned(world).text(), "batches": '{"seed": 4}'}
    world.machine.on_joined(pb.Joined(rank=rank, generation=command.generation, steps=100, **said), 2.0)
    world.collect()
    (notice,) = [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"]
    assert "seed is 4, and was 3" in notice


def test_a_script_with_another_number_of_steps_in_the_new_layout() -> None:
    world = World()
    commanded(world)
    world.start(planned(world), steps=50)
    (notice,) = [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"]
    assert "steps is 50, and was 100" in notice


def test_a_command_that_is_given_up_leaves_no_memory_behind() -> None:
    world = World()
    world.command("tp=1,pp=2,dp=1")
    world.has_no_room()
    world.stop()
    assert world.job.state is State.REGROUPING
    assert world.of("drop_staging")


def test_who_has_another_state_of_what_all_should_have_alike() -> None:
    """A registered object that has come to differ, or a parameter that has taken fewer steps."""
    world = World()
    world.kill(1)
    world.stop()
    for rank, command in world.of("staging"):
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
        reply.sent_digests["the registered object 'history'"] = f"of rank {rank}"
        world.machine.on_reply(reply, 3.0)
    world.collect()
    assert not world.replanned()
    assert world.job.state is State.FAILED and "'history'" in world.job.failure_reason


def workers(facts: str = "") -> list[pb.WorkerState]:
    return [
        pb.WorkerState(
            rank=rank,
            local_rank=rank,
            pid=10 + rank,
            resumed=True,
            stepping=True,
            committed=7,
            joined=pb.Joined(rank=rank, generation=1, needs=World.needs(rank), steps=100, facts=facts),
        )
        for rank in range(4)
    ]


def taken_over(found: list[pb.WorkerState], **settings: object) -> Machine:
    config = {"nproc_per_node": 4, "parallelism": {"min": 1, "replace": "never", **settings}}
    machine = Machine(validate(RunConfig, config, "test"))
    register = pb.Register(node="n", host="h", slots=4, incarnation="i", generation=3, stride=1, workers=found)
    machine.on_register(register, 0.0)
    return machine


def took_over(found: list[pb.WorkerState]) -> World:
    world = World.__new__(World)
    world.machine, world.events, world.sent, world.pids = taken_over(found), [], [], iter(range(100, 200))
    world.machine.on_tick(10_000.0)
    world.collect()
    assert world.of("drop_staging")  # what the controller before had written, if anything
    return world


def test_a_controller_that_takes_over_can_change_the_layout() -> None:
    world = took_over(workers(FACTS.text()))
    assert world.job.state is State.RUNNING
    assert world.machine.replan("tp=1,pp=2,dp=1", -1)[0] == ""


def test_a_command_to_the_controller_before_is_not_forgotten_without_a_word() -> None:
    world = took_over(workers(FACTS.text()))
    world.machine.on_paused(pb.Paused(rank=0, generation=world.job.generation, version=9), 3.0)
    world.collect()
    (notice,) = [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"]
    assert "an earlier controller" in notice
    world.stop()
    assert world.job.state is State.REGROUPING


@pytest.mark.parametrize(("survivors", "copied"), [((0, 1, 2), False), ((1, 2, 3), True)])
def test_a_controller_that_takes_over_without_a_rank(survivors: tuple[int, ...], copied: bool) -> None:
    """What it has needed only those say who keep copies of it. Without them no one can say that all of it is there."""
    found = [worker for worker in workers(FACTS.text()) if worker.rank in survivors]
    world = took_over(found)
    (lost,) = {0, 1, 2, 3}.difference(survivors)
    world.reply("hold")
    for rank, command in world.of("stop"):
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=7)
        if copied and rank == (lost + 1) % 4:
            reply.held.add(kind="copy", version=7, shards=[f"part{lost}", f"capsule@{lost}"], nbytes=[8, 8])
        world.machine.on_reply(reply, 10_001.0)
    world.collect()
    if not copied:
        assert world.job.state is State.FAILED and f"what rank {lost} had" in world.job.failure_reason
        return
    items = {(rank, item.shard) for rank, c in world.of("staging") for item in c.staging.items}
    assert items == {*((rank, f"part{rank}") for rank in survivors), ((lost + 1) % 4, f"part{lost}")}


def test_a_damaged_checkpoint_is_not_read_again_and_again() -> None:
    """Whoever cannot read the newest one reads the one before it, in the new layout, too."""
    world = World()
    world.machine.on_checkpoint(2, "/old")
    world.machine.on_checkpoint(4, "/new")
    for rank in (1, 2):  # 2 keeps the copies of 1
        world.kill(rank)
    world.stop()
    assert [e.path for e in world.events if isinstance(e, ev.FallbackStarted)] == ["/new"]
    ranks = world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": len(world.job.ranks)}))
    assert ranks
    for rank, command in world.of("restore"):
        fields = {"serial": command.serial, "generation": command.generation, "rank": rank}
        world.machine.on_reply(pb.Reply(error_type="DamagedCheckpointError", error="cut short", **fields), 4.0)
    world.machine.on_tick(10.0)
    world.collect()
    assert [e.path for e in world.events if isinstance(e, ev.FallbackStarted)] == ["/new", "/old"]


@pytest.mark.parametrize(("redundancy", "least"), [("neighbor", 1), ("replica", 2), ("parity", 2)])
def test_copies_that_not_every_layout_has_room_for(redundancy: str, least: int) -> None:
    """A layout without them would end the job, whose state no process would have then."""
    with pytest.raises(ConfigError, match=f"redundancy: '{redundancy}' with parallelism"):
        run_config({"nproc_per_node": 4, "parallelism": {"min": least}, "redundancy": redundancy}, "test")


def test_a_script_that_ends_before_the_new_layouts_first_step() -> None:
    """With exit code 0, as one does that finds its work done: the job is not done."""
    world = World()
    changed(world, 1)
    for turn in range(world.job.config.max_restarts + 1):
        for rank, command in world.of("replace"):
            pid = 1000 * turn + rank + 1
            started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=pid)
            world.machine.on_started(started, "n", "h")
        for record in list(world.job.in_order):
            world.machine.on_exited(pb.Exited(rank=record.rank, pid=record.process.pid), 5.0)
        world.collect()
    assert world.job.state is State.FAILED and "ended with code 0" in world.job.failure_reason


def test_a_second_loss_while_the_state_is_written_leaves_no_memory_behind() -> None:
    world = World()
    world.kill(0)
    world.stop()
    assert not world.of("drop_staging")
    world.kill(2)
    order = [c.WhichOneof("body") for c in world.sent if c.WhichOneof("body") in ("staging", "drop_staging")]
    assert order == ["staging", "staging", "staging", "drop_staging", "staging", "staging"]
