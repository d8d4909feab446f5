"""A rank whose script leaves its loop alone is replaced as soon as another one goes on; one that all leave is not."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_machine import World
from tests.unit.test_machine_failures import running


def beat(world: World, entered: dict[int, int], generation: int = 0) -> None:
    """``entered``: by rank, the newest step whose block it has entered."""
    ranks = [
        pb.RankHealth(rank=r, pid=world.pids[r], committed=world.version[r], tag=step, entered=step + 1)
        for r, step in entered.items()
    ]
    world.machine.on_heartbeat(pb.Heartbeat(generation=generation, ranks=ranks), world.now)


def leaves(world: World, rank: int, version: int, *, ends: bool = False) -> None:
    world.machine.on_done(pb.Done(rank=rank, generation=0, version=version), world.now)
    if ends:
        world.machine.on_exited(pb.Exited(rank=rank, pid=world.pids[rank]), world.now)


def failures(world: World) -> list[tuple[int, str]]:
    world.collect()
    return [(e.rank, e.evidence) for e in world.of(ev.FailureDetected) if isinstance(e, ev.FailureDetected)]


def test_one_that_leaves_alone_is_named_when_another_enters_the_next_step() -> None:
    world = running(3, version=5)
    leaves(world, 2, 5)
    beat(world, {0: 4, 1: 4})
    assert not failures(world), "they may leave, too"
    beat(world, {0: 5})
    assert not failures(world), "it may have raised, which is heard next"
    world.now += 2
    beat(world, {0: 5})
    ((rank, why),) = failures(world)
    assert rank == 2 and "left its loop after step 4 of 30, and rank 0 goes on" in why


def test_one_whose_script_has_ended_is_named_so() -> None:
    world = running(3, version=5)
    leaves(world, 2, 5, ends=True)
    assert world.machine.job.ranks[2].place is Place.FINISHED
    beat(world, {0: 5, 1: 5})
    ((rank, why),) = failures(world)
    assert rank == 2 and "ended (exit code 0) after step 4 of 30, and ranks 0 and 1 go on" in why


def test_who_leave_together_are_not() -> None:
    world = running(3, version=5)
    for rank in range(3):
        beat(world, dict.fromkeys(range(rank, 3), 4))
        world.now += 2
        leaves(world, rank, 5, ends=True)
    assert not failures(world)


def test_what_was_entered_in_another_generation_says_nothing() -> None:
    world = running(3, version=5)
    leaves(world, 2, 5)
    world.now += 2
    beat(world, {0: 7}, generation=7)
    assert not failures(world)
