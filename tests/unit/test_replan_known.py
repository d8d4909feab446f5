"""What is known of a layout change when the controller is lost in it, and when something in memory is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashrecovery.config import RunConfig, validate
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.outbox import Send
from flashrecovery.controller.state.saved_state import SavedState
from flashrecovery.controller.state.staged_layout import StagedLayout
from flashrecovery.controller.storage.generation_file import Numbers, newest_numbers, write_numbers
from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.strategy.relayout import StayingFacts
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.staged_files import StagedFiles, write
from tests.unit.test_found_layout import PLAN, came, found
from tests.unit.test_logical import shard, whole
from tests.unit.test_replan import FACTS, World

# -- where the state is -----------------------------------------------------------------------------

HOMES = {0: ("a", "i"), 1: ("a", "i")}
KEPT = SavedState(7, pb.StagingPlace(directory="3-1-7", ranks=[0, 1]), "", 90, {"x": (0,), "y": (0, 1)}, HOMES)
WORDS = StagedLayout(KEPT, StayingFacts(FACTS, '{"seed": 3}', 100), "tp=2,pp=2,dp=1", 1)


def test_the_words_say_all_of_it() -> None:
    assert StagedLayout.parse(WORDS.text()) == WORDS


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": 2}), WORDS.text().replace('"homes"', '"x"')])
def test_other_words_are_named(text: str) -> None:
    with pytest.raises(ProtocolError, match="where state is kept"):
        StagedLayout.parse(text)


def told(message: pb.Register, words: StagedLayout = WORDS, generation: int = 5) -> pb.Register:
    message.staging.CopyFrom(pb.StagingKept(generation=generation, content=words.text()))
    return message


def sent(machine: Machine) -> list[pb.Command]:
    return [action.command for action in machine.job.take_actions() if isinstance(action, Send)]


def test_the_layout_begins_again_with_it() -> None:
    machine = found()
    machine.on_register(told(came("a", [0, 1], resumed=False)), 0.0)
    job = machine.job
    assert job.state is State.STARTING and job.parallel.text == PLAN, job.failure_reason
    commands = sent(machine)
    assert {(c.replace.attempt, c.replace.layout) for c in commands if c.HasField("replace")} == {(2, PLAN)}
    assert not [c for c in commands if c.HasField("drop_staging")]
    (kept,) = [c.staging_kept for c in commands if c.HasField("staging_kept")]
    assert StagedLayout.parse(kept.content).attempt == 2 and kept.generation == job.generation
    for rank, record in job.ranks.items():
        machine.on_started(pb.WorkerStarted(rank=rank, generation=job.generation, pid=100 + rank), "a", "a")
        facts = replace(FACTS, layout={"tp": 1, "pp": 2, "cp": 1, "ep": 1, "dp": 1})
        joined = pb.Joined(rank=rank, generation=job.generation, steps=100, facts=facts.text(), batches='{"seed": 3}')
        machine.on_joined(joined, 1.0)
        assert record.rank == rank
    restores = [c.restore for c in sent(machine) if c.HasField("restore")]
    assert {(r.version, r.staging.directory, tuple(r.staging.ranks)) for r in restores} == {(7, "3-1-7", (0, 1))}


@pytest.mark.parametrize("kind", ["another start", "its memory is gone", "damaged"])
def test_what_is_not_of_these_ranks_is_not_taken(kind: str) -> None:
    machine = found()
    message = came("a", [0, 1], resumed=False)
    if kind == "another start":
        told(message, replace(WORDS, attempt=2))
    elif kind == "its memory is gone":
        told(message, replace(WORDS, kept=replace(KEPT, homes={0: ("a", "another"), 1: ("a", "another")})))
    else:
        message.staging.CopyFrom(pb.StagingKept(generation=5, content="{}"))
    machine.on_register(message, 0.0)
    assert machine.job.state is State.FAILED
    expected = "was in the memory of a alone" if kind == "its memory is gone" else "no node that is left has heard"
    assert expected in machine.job.failure_reason


def test_the_newest_words_count() -> None:
    machine = found()
    older = replace(WORDS, kept=replace(KEPT, version=3), attempt=1)
    machine.on_register(told(came("a", [0], resumed=False), older, generation=4), 0.0)
    machine.on_register(told(came("c", [1], resumed=False)), 0.0)
    assert machine.job.state is State.STARTING and {r.committed for r in machine.job.in_order} == {7}


def test_it_is_needed_until_every_rank_has_taken_a_step() -> None:
    """All are in their loop: the next controller gives the memory back only then."""
    machine = found()
    message = told(came("a", [0, 1]))
    for worker in message.workers:
        worker.committed = 7
    machine.on_register(message, 0.0)
    assert machine.job.state is State.RUNNING
    assert not [c for c in sent(machine) if c.HasField("drop_staging")]
    ranks = [pb.RankHealth(rank=rank, pid=10 + rank, committed=8) for rank in (0, 1)]
    machine.on_heartbeat(pb.Heartbeat(generation=machine.job.generation, ranks=ranks), 1.0)
    assert [c for c in sent(machine) if c.HasField("drop_staging")]


def test_a_node_that_has_not_heard_that_all_have_had_it() -> None:
    """No one goes back to what the layout had begun with."""
    machine = found()
    message = told(came("a", [0, 1]))
    for worker in message.workers:
        worker.committed = 9
    machine.on_register(message, 0.0)
    assert [c for c in sent(machine) if c.HasField("drop_staging")] and machine.job.recovery is None


def test_one_of_those_that_are_let_in_has_not_come() -> None:
    """It had not read what it needs, and no rank has copies: all begin again."""
    machine = found()
    message = told(came("a", [0, 1]))
    message.workers[1].resumed = message.workers[1].stepping = False
    message.workers[1].local_rank = 1
    message.workers[0].committed, message.workers[1].committed = 7, -1
    machine.on_register(message, 0.0)
    job = machine.job
    assert job.state is State.QUIESCING
    for body in ("hold", "stop"):
        commands = [c for c in sent(machine) if c.WhichOneof("body") == body]
        for command in commands:
            for rank in list(command.ranks) or [command.rank]:
                reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=7)
                reply.position.CopyFrom(pb.Position(settled=True, version=7))
                machine.on_reply(reply, 1.0)
    assert job.state is State.STARTING, (job.state, job.failure_reason)
    assert {c.replace.layout for c in sent(machine) if c.HasField("replace")} == {PLAN}


def test_agents_are_told_before_ranks_are_started() -> None:
    world = World()
    world.kill(1)
    world.stop()
    world.reply("staging", staged_bytes=10)
    bodies = [c.WhichOneof("body") for c in world.sent]
    assert bodies.index("staging_kept") < bodies.index("replace")
    ((_, told_),) = world.of("staging_kept")
    words = StagedLayout.parse(told_.staging_kept.content)
    assert words.kept.version == 7 and words.before == "tp=2,pp=2,dp=1" and words.attempt == 1
    assert words.kept.homes == dict.fromkeys((0, 2, 3), ("n", "i"))


# -- numbers of starts ------------------------------------------------------------------------------


def test_how_often_the_layout_has_changed_is_written_down(tmp_path: Path) -> None:
    write_numbers(tmp_path, "launch", Numbers(9, 1, 3))
    assert newest_numbers(tmp_path, pytest.fail) == {"launch": Numbers(9, 1, 3)}
    (tmp_path / "generation.json").write_text('{"launch": "old", "generation": 4, "restarts": 1}')
    assert newest_numbers(tmp_path, pytest.fail) == {"old": Numbers(4, 1, 0)}


def test_a_number_of_a_start_is_not_used_again() -> None:
    """Those that knew of two more changes are lost; one that was cut off before them returns."""
    machine = found(nodes=1)
    machine.takeover.written_down = {"": Numbers(9, 0, 4)}
    machine.on_register(came("a", [0, 1], attempt=2, generation=5), 0.0)
    machine.on_tick(1000.0)
    job = machine.job
    assert job.restarts + job.parallel.changes == 2 and job.attempts == 4  # one filled again is of the same start
    job.lay_out("tp=1,pp=1,dp=1", [])
    assert job.restarts + job.parallel.changes == 5
    job.restarts += 1
    job.begin_attempt()
    assert job.restarts + job.parallel.changes == 6 == job.attempts


def test_numbers_go_on_by_one_otherwise() -> None:
    job = JobState(validate(RunConfig, {"nproc_per_node": 2, "parallelism": {"min": 1}}, "test"))
    job.restarts += 1
    job.begin_attempt()
    job.lay_out("tp=1,pp=1,dp=1", [])
    assert (job.restarts, job.parallel.changes, job.attempts) == (1, 1, 2)


# -- an index that is damaged -----------------------------------------------------------------------


def written(folder: Path, ranks: dict[int, list[str]]) -> None:
    for rank, names in ranks.items():
        made = [shard(name, 0, 1, 0, whole()) for name in names]
        described = {source.name: parts for source, parts in made}
        write(folder, rank, 3, [source for source, _ in made], described, b"common" if rank == 0 else b"")


@pytest.mark.parametrize("how", ["damaged", "missing", "of another version"])
def test_another_rank_that_has_written_the_same_stands_in(how: str, tmp_path: Path) -> None:
    written(tmp_path, {0: ["rows", "columns"], 1: ["rows"]})
    path = tmp_path / "rank1.index"
    if how == "damaged":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "missing":
        path.unlink()
    else:
        made = shard("rows", 0, 1, 0, whole())
        write(tmp_path, 1, 4, [made[0]], {made[0].name: made[1]}, b"")
    staging = StagedFiles(tmp_path, [0, 1], 3)
    assert {*staging.indexes} == {0} and staging.common == b"common"
    intact = tmp_path / "intact"
    written(intact, {0: ["rows", "columns"], 1: ["rows"]})
    assert staging.names() == StagedFiles(intact, [0, 1], 3).names()


def test_what_only_that_rank_had_is_missing_by_name(tmp_path: Path) -> None:
    written(tmp_path, {0: ["rows"], 1: ["columns"]})
    (tmp_path / "rank0.index").write_bytes(b"nothing")
    staging = StagedFiles(tmp_path, [0, 1], 3)
    with pytest.raises(RestoreError, match=r"no rank has written the state that is no tensor; .*rank0\.index"):
        _ = staging.common
    (tmp_path / "rank1.index").unlink()
    with pytest.raises(RestoreError, match=r"rank0\.index.*rank1\.index"):
        StagedFiles(tmp_path, [0, 1], 3)
