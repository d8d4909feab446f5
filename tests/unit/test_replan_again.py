"""Jobs that are elastic and change their layout: what the next controller must not forget, and which rank keeps copies
for which. Without processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.staged_layout import StagedLayout
from flashrecovery.controller.storage.generation_file import Numbers, write_numbers
from flashrecovery.plan.strategy.relayout import StayingFacts, why_another_job
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_found_layout import came, found
from tests.unit.test_generation_file import LAUNCH, a_service, numbers_in, of_launch
from tests.unit.test_replan import World
from tests.unit.test_replan_elastic import FACTS, Both
from tests.unit.test_takeover import found as found_ranks


def test_starts_that_only_the_disk_knew_stay_written_down(tmp_path: Path) -> None:
    """The next controller's file has a newer generation, and is the one that counts for those after it."""
    (tmp_path / "run").mkdir()
    write_numbers(tmp_path / "run", LAUNCH, Numbers(8, 0, 3))

    async def go() -> None:
        with a_service(tmp_path / "run") as service:
            await service.start("127.0.0.1", 0)
            service.machine.on_register(of_launch(LAUNCH, found_ranks("a", 0, 1)), 0.0)
            service.machine.on_tick(1000.0)
            with patch.object(service._agents, "post_batches", lambda *_: None):
                service.act()
            while numbers_in(tmp_path / "run")[LAUNCH].generation < 9:  # a thread writes it
                await asyncio.sleep(0.01)
            assert numbers_in(tmp_path / "run")[LAUNCH].attempts == 3
            await service.stop()

    asyncio.run(go())


def test_agents_are_told_again_when_all_start_again_in_the_new_layout() -> None:
    """One is killed on its way to the first step there: the next start has another number."""
    world = World()
    world.kill(1)
    world.stop()
    world.reply("staging")
    ((_, first),) = world.of("staging_kept")
    for rank, command in world.of("replace"):
        started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=next(world.pids))
        world.machine.on_started(started, "n", "h")
    world.kill(0)
    assert world.job.state is State.STARTING and world.job.restarts == 1
    bodies = [c.WhichOneof("body") for c in world.sent]
    assert bodies.index("staging_kept") < bodies.index("replace")
    ((_, told),) = world.of("staging_kept")
    words = StagedLayout.parse(told.staging_kept.content)
    (attempt,) = {c.replace.attempt for _, c in world.of("replace")}
    assert words == replace(StagedLayout.parse(first.staging_kept.content), attempt=attempt) and attempt == 2


def test_the_ranks_of_the_last_replica_keep_each_others_copies() -> None:
    """And so the controller places them; where several replicas are left, the rank that stands at the same place
    does."""
    world = Both()
    job = world.job
    for record in job.in_order:
        record.inventory.sharded = frozenset({"part"})
    assert job.keepers_of_copies() == {0: 2, 1: 3, 2: 0, 3: 1}
    job.remove_member(2)
    job.remove_member(3)
    job.settle_layout()
    assert job.keepers_of_copies() == {0: 1, 1: 0}


@pytest.mark.parametrize("silent", [{0}, {0, 1, 2}, {0, 1, 2, 3}])
def test_what_a_rank_has_not_told_yet_is_not_what_the_job_was(silent: set[int]) -> None:
    """A controller that is started again has the word of those that live. One of the others is on its way to its first
    step when the layout changes: of it neither steps nor batches are known."""
    world = World()
    for record in world.job.in_order:
        record.batches = "" if record.rank in silent else '{"global_batch": 12}'
        record.steps = None if record.rank in silent else 100
    world.command("tp=1,pp=1,dp=4")
    world.reply("staging")
    (told,) = {command.staging_kept.content for _, command in world.of("staging_kept")}
    staying = StagedLayout.parse(told).staying
    assert (staying.batches, staying.steps) == (("", None) if len(silent) == 4 else ('{"global_batch": 12}', 100))
    told_alike = replace(staying, batches="")
    now = replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 4})
    assert why_another_job(told_alike, StayingFacts(now, "", 100), "tp=1,pp=1,dp=4") == ""
    other = why_another_job(told_alike, StayingFacts(now, "", 90), "tp=1,pp=1,dp=4")
    assert ("steps is 90, and was 100" in other) is (len(silent) < 4)


def one_is_missing(*, sharded: bool) -> Machine:
    """A controller is started again; of two replicas of two ranks (and at least two of them) one rank has died."""
    settings = {"elastic": {"min": 2, "max": 2, "replace": "never"}, "parallelism": {"min": 1, "replace": "never"}}
    machine = found(**settings)
    facts = replace(FACTS, layout={"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 2}, sharded=sharded)
    for name, ranks in (("a", [0, 1]), ("b", [3])):
        message = came(name, ranks, plan="", attempt=0)
        for worker in message.workers:
            worker.joined.facts = facts.text()
            worker.joined.replicas, worker.joined.each, worker.joined.inner = 2, 2, 2
            del worker.joined.needs[:]
            worker.joined.needs.add(name=f"stand{worker.rank % 2}", nbytes=8)
        machine.on_register(message, 0.0)
    machine.on_tick(1000.0)
    assert machine.job.state is State.QUIESCING, machine.job.failure_reason
    return machine


@pytest.mark.parametrize("sharded", [False, True])
def test_who_stands_at_the_same_place_has_what_a_rank_had_of_which_nothing_is_known(sharded: bool) -> None:
    machine = one_is_missing(sharded=sharded)
    for body in ("hold", "stop"):
        commands = [a.command for a in machine.job.take_actions() if getattr(a, "command", None) is not None]
        for command in [c for c in commands if c.WhichOneof("body") == body]:
            for rank in list(command.ranks) or [command.rank]:
                reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=7)
                reply.position.CopyFrom(pb.Position(settled=True, version=7))
                machine.on_reply(reply, 1.0)
    assert (machine.job.state is State.FAILED) is sharded, machine.job.failure_reason
    stagings = [
        a.command for a in machine.job.take_actions() if hasattr(a, "command") and a.command.HasField("staging")
    ]
    assert bool(stagings) is not sharded


def test_a_checkpoint_that_comes_late_is_of_the_layout_before() -> None:
    """Its ranks had begun to write it. No rank of the new one has a state yet."""
    world = Both()
    world.command("tp=1,pp=1,dp=4")
    world.machine.on_checkpoint(5, "/checkpoints/5")
    assert world.job.checkpoint == (5, "/checkpoints/5")
    world.reply("staging")
    assert world.job.state is State.STARTING and world.job.checkpoint is None
    world.sent.clear()
    world.machine.on_checkpoint(6, "/checkpoints/6")
    world.collect()
    assert world.job.checkpoint is None
    assert [c.saved.version for _, c in world.of("saved")] == [-1]
