"""A job that ends before its last step: which version is kept, which rank keeps it, and when no one could."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flashrecovery import events as ev
from flashrecovery.agent.processes.snapshots import newest_of_all, saved_text
from flashrecovery.cli.closing import closing_line
from flashrecovery.controller.last_save import newest_whole, writers
from flashrecovery.controller.service.console import Console
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.controller.storage.earlier_launch import step_of
from flashrecovery.errors import (
    DataEndedError,
    DataSourceError,
    DivergedError,
    FlashRecoveryError,
    SetupDiffersError,
    UnsupportedError,
)
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.snapshot.client import HeldMemory
from flashrecovery.worker.session import failed_text
from flashrecovery.worker.startup import bootstrap
from tests.unit.test_machine import World


def record(rank: int, live: int, *held: tuple[int, str]) -> RankRecord:
    found = RankRecord(rank)
    found.inventory.needs = {"param/w": 100, "common": 10, f"capsule@{rank}": 5}
    found.inventory.take(live, [pb.Held(kind="undo", version=v, shards=[name], nbytes=[1]) for v, name in held])
    return found


def test_the_newest_version_of_which_everything_is_there() -> None:
    assert newest_whole([record(0, 7), record(1, 7)]) == 7
    assert newest_whole([record(0, 8), record(1, 7)]) == -1, "rank 1 has no own state of 8, and rank 0 none of 7"
    assert newest_whole([record(0, 8), record(1, -1, (8, "capsule@1"))]) == 8, "its tensors are those of rank 0"
    assert newest_whole([record(0, 8, (7, "capsule@0")), record(1, 7)]) == 7
    assert newest_whole([record(0, -1)]) == -1


def test_a_rank_that_is_gone_is_written_by_one_that_has_all_that_it_had() -> None:
    """Also what only it had, if a neighbour keeps copies of that; not its own state, which comes from its page."""
    gone = RankRecord(2)
    gone.inventory.needs = {"param/w": 100, "common": 10, "capsule@2": 5}
    assert writers([record(0, 7), record(1, 7)], [gone], 7) == {2: 0}
    assert writers([record(0, 8), record(1, 7)], [gone], 7) == {2: 1}
    assert writers([record(0, 8)], [gone], 7) == {}
    gone.inventory.needs["part/w#2"] = 50
    neighbour = record(1, 7, (7, "part/w#2"))
    assert writers([record(0, 7), neighbour], [gone], 7) == {2: 1}
    assert newest_whole([record(0, 7), neighbour], [gone]) == 7
    assert newest_whole([record(0, 7), record(1, 7)], [gone]) == -1
    third = RankRecord(3)
    third.inventory.needs = {"param/w": 100, "common": 10, "capsule@3": 5}
    del gone.inventory.needs["part/w#2"]
    assert writers([record(0, 7), record(1, 7)], [gone, third], 7) == {2: 0, 3: 1}, "the work is shared"


class Ending(World):
    """Its ranks have trained to version 2, and can keep what they hold."""

    def __init__(self, size: int = 2, **config: object) -> None:
        super().__init__(size, steps=9, **config)
        self.kept: dict[int, pb.KeepLast] = {}
        self.written: dict[int, pb.KeepLast] = {}
        self.refused = ""
        self.refused_restore: type[FlashRecoveryError] | None = None
        self.local_state = b""
        self.told: list[pb.Shutdown] = []
        self.silent: set[int] = set()
        self.error = ""
        self.launch()
        while self.version[0] < 2:
            self.step()

    def answer(self, rank: int, command: pb.Command) -> None:
        body = command.WhichOneof("body")
        if body == "shutdown":
            self.told.append(command.shutdown)
        elif body == "keep_last":
            order = command.keep_last
            (self.written if order.directory else self.kept)[rank] = order
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
            if order.gone and order.send:
                reply.local_state = self.local_state
            if order.directory and self.refused:
                reply.error_type, reply.error = "RestoreError", self.refused
            elif order.directory and len(self.written) == sum(
                r.inventory.live >= 0 for r in self.machine.job.ranks.values()
            ):
                self.machine.on_checkpoint(order.version, f"{order.directory}/step-{order.version}")
            if self.error and command.keep_last.gone:
                reply.error_type, reply.error = "RestoreError", self.error
            self.machine.on_reply(reply, self.now)
        elif body == "restore" and self.refused_restore is not None:
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, fatal=True)
            reply.error_type, reply.error = self.refused_restore.__name__, "the buffers"
            self.machine.on_reply(reply, self.now)
        elif not (body in ("hold", "stop") and rank in self.silent):
            super().answer(rank, command)

    def end(self, seconds: float = 30.0) -> pb.Shutdown:
        """To the last word."""
        until = self.now + seconds
        while not self.told and self.now < until:
            self.step()
            self.now += 0.05
            self.machine.on_tick(self.now)
            self.collect()
        (last,) = self.told
        assert self.machine.job.state is State.FAILED
        return last


def test_a_job_that_is_told_to_end_keeps_what_its_ranks_hold() -> None:
    world = Ending()
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    world.collect()
    assert not world.told, "not before it is kept"
    last = world.end()
    assert (last.version, last.whole) == (2, True)
    assert {rank: list(order.holders) for rank, order in world.kept.items()} == {0: [0, 1], 1: [0, 1]}


def test_what_a_dead_rank_had_is_taken_from_its_page() -> None:
    world = Ending()
    for _ in range(3):
        world.kill(1, kind="exception")
        while world.machine.job.state not in (State.RUNNING, State.FAILED):
            world.step()
    assert world.machine.job.state is State.FAILED
    last = world.end()
    assert (last.version, last.whole) == (2, True)
    assert world.kept[1].gone and not world.kept[1].tensors and list(world.kept[0].holders) == [0]


def test_what_is_lost_is_said() -> None:
    world = Ending()
    world.error = "its own state of step 2 is lost with its process"
    world.machine.job.vacate(1)
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    last = world.end()
    assert (last.version, last.whole) == (2, False)
    (said,) = [e.text for e in world.events if getattr(e, "kind", "") == "last_save"]
    assert "rank 1: its own state of step 2 is lost" in said


def test_a_rank_that_does_not_answer_is_not_waited_for_longer_than_said() -> None:
    world = Ending(timeouts={"last_save_s": 4.0})
    world.silent = {1}
    began = world.now
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    last = world.end()
    assert last.whole and world.kept[1].gone, "its page has what it had for itself"
    assert world.now - began < 4.0


def test_a_rank_that_dies_meanwhile_is_not_waited_for() -> None:
    world = Ending()
    world.silent = {1}
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    world.machine.on_tick(world.now)
    world.collect()
    began = world.now
    world.kill(1)
    last = world.end()
    assert last.version == 2 and world.kept[1].gone and world.now - began < 2.0


def test_a_script_that_handles_the_signal_has_the_time_to_end_by_itself() -> None:
    world = Ending(timeouts={"signal_grace_s": 5.0})
    world.machine.on_stop_request("stopped by SIGTERM", world.now, by_itself=True)
    assert world.machine.job.state is State.RUNNING
    began = world.now
    world.steps = 10**6
    while world.machine.job.state is State.RUNNING:
        world.step()
    assert 5.0 <= world.now - began < 5.1
    assert world.end().whole


def test_a_script_that_ends_by_itself_when_told_has_not_finished() -> None:
    world = Ending(timeouts={"signal_grace_s": 500.0})
    world.machine.on_stop_request("stopped by SIGTERM", world.now, by_itself=True)
    world.run()
    assert world.machine.job.state is State.FAILED
    assert world.machine.job.failure_reason == "stopped by SIGTERM; all ranks have ended by themselves"


def test_a_rank_that_ends_in_its_handler_is_not_replaced() -> None:
    world = Ending()
    world.machine.on_stop_request("stopped by SIGTERM", world.now, by_itself=True)
    world.kill(1, kind="exit")
    assert world.machine.job.state is State.FAILED
    last = world.end()
    assert last.version == 2 and world.kept[1].gone


def test_whoever_presses_ctrl_c_twice_waits_for_nothing() -> None:
    world = Ending()
    world.silent = {0, 1}
    world.machine.on_stop_request("stopped by SIGINT", world.now)
    assert world.machine.job.ending.saving
    world.machine.on_stop_request("stopped by SIGINT", world.now, at_once=True)
    assert not world.machine.job.ending.saving
    assert world.end().version == 0


def test_a_rank_whose_data_has_ended_leaves_what_the_others_hold() -> None:
    """It would end there again, so it is not replaced; but nothing is wrong with what the ranks have."""
    world = Ending()
    error = "flashrecovery.errors.DataEndedError"
    words = pb.LastWords(exception=error, message="the data of rank 1 has ended.", fatal=True, refused=True)
    record = world.machine.job.ranks[1]
    failure = pb.Failure(rank=1, pid=record.process.pid, kind="exception", evidence="x", last_words=words, step=2)
    world.machine.on_failure(failure, world.now)
    world.collect()
    last = world.end()
    assert not last.void and last.version == 2 and world.kept[1].gone
    assert world.machine.job.failure_reason == "rank 1: DataEndedError: the data of rank 1 has ended"


def raised_in(error: FlashRecoveryError, handled: BaseException | None) -> pb.LastWords:
    """What a process says that ends with ``error``, raised while ``handled`` was being handled."""
    heard: list[pb.FromWorker] = []
    error.__context__ = handled
    bootstrap._last_words(SimpleNamespace(send=heard.append), error)  # type: ignore[arg-type]
    return heard[0].last_words


@pytest.mark.parametrize("error", [DataEndedError, SetupDiffersError, DataSourceError, UnsupportedError])
def test_what_is_raised_where_a_peers_end_was_handled_follows_from_that(
    error: type[FlashRecoveryError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is replaced, as for the end of a peer; above all, the ranks do not differ for that."""
    monkeypatch.setattr(bootstrap, "_may_differ_by_files", lambda: False)
    world = Ending()
    words = raised_in(error("x"), dist.DistBackendError("Connection closed by peer"))
    record = world.machine.job.ranks[1]
    failure = pb.Failure(rank=1, pid=record.process.pid, kind="exception", evidence="x", last_words=words, step=2)
    world.machine.on_failure(failure, world.now)
    assert world.machine.job.state is State.QUIESCING and not world.machine.job.ending.void
    alone = raised_in(error("x"), None)
    assert alone.refused and alone.fatal == (error in (DataEndedError, SetupDiffersError))


def test_ranks_that_differ_do_so_whatever_was_handled() -> None:
    words = raised_in(DivergedError("x"), dist.DistBackendError("Connection closed by peer"))
    assert words.fatal and not words.refused


@pytest.mark.parametrize(("error", "void"), [(DivergedError, True), (UnsupportedError, False)])
def test_a_rank_that_finds_in_a_restore_that_it_differs(error: type[FlashRecoveryError], void: bool) -> None:
    """The job ends with either; from ranks that differ, nothing is kept."""
    world = Ending()
    job = world.machine.job
    world.refused_restore = error
    record = job.ranks[1]
    world.machine.on_failure(pb.Failure(rank=1, pid=record.process.pid, kind="killed", evidence="x"), world.now)
    last = world.end()
    assert job.failure_reason.startswith(f"rank 0: {error.__name__}: the buffers")
    assert job.ending.void is last.void is void and ("fix it" in job.failure_reason) is void


def come_apart(world: Ending, diverged: pb.Diverged | None = None) -> str:
    """The reason with which the job ends."""
    record = world.machine.job.ranks[1]
    words = pb.LastWords(
        exception="flashrecovery.errors.DivergedError", message="the ranks do not agree", fatal=True, diverged=diverged
    )
    failure = pb.Failure(rank=1, pid=record.process.pid, kind="exception", evidence="x", last_words=words, step=2)
    world.machine.on_failure(failure, world.now)
    world.collect()
    assert not world.machine.job.ending.saving
    assert world.end().void
    return world.machine.job.failure_reason


def test_ranks_that_have_come_apart_leave_nothing_to_go_on_from() -> None:
    world = Ending()
    world.machine.job.where = "runs/a"
    world.machine.on_checkpoint(1, "ck/step-1")
    world.machine.job.not_registered = "train.py:7: count"
    assert come_apart(world) == (
        "rank 1: DivergedError: the ranks do not agree. Said before: train.py:7: count. Fix it; the same command line "
        "with `--run-dir runs/a --resume` goes on from the newest checkpoint, of step 1 (ck/step-1)"
    )


def test_the_node_of_who_differs_is_suspect_and_checkpoints_from_before_are_told_from_others() -> None:
    world = Ending(size=3)
    world.machine.job.where = "runs/a"
    for version in (1, 2):
        world.machine.on_checkpoint(version, f"ck/step-{version}")
    node = world.machine.job.ranks[2].home
    assert come_apart(world, pb.Diverged(suspects=[2], alike=1)) == (
        f"rank 1: DivergedError: the ranks do not agree. If it is not the script, suspect node {node} (rank 2). "
        "Checkpoints that may hold what differs: step 2 (ck/step-2); remove it. Fix it; the same command line with "
        "`--run-dir runs/a --resume` goes on from the newest checkpoint from before, of step 1 (ck/step-1)"
    )


def test_a_checkpoint_that_may_hold_what_differs_is_none_to_go_on_from() -> None:
    world = Ending(size=3)
    world.machine.on_checkpoint(2, "ck/step-2")
    said = come_apart(world, pb.Diverged(alike=1))
    assert "No checkpoint from before is left. Fix it, and start again without --resume" in said
    assert said.endswith("goes on from step 2 (ck/step-2), which may hold what differs") and "suspect" not in said


def test_it_is_said_where_only_a_part_of_each_tensor_was_compared() -> None:
    world = Ending(size=3)
    world.machine.on_checkpoint(2, "ck/step-2")
    said = come_apart(world, pb.Diverged(alike=64, partly=True))
    assert said.endswith("checkpoint from before (a part of each tensor was compared then), of step 2 (ck/step-2)")


def test_a_removed_checkpoint_is_not_named() -> None:
    world = Ending(size=3)
    for version in (1, 2, 3):
        world.machine.on_checkpoint(version, f"ck/step-{version}")
    assert "ck/step-1" not in come_apart(world, pb.Diverged(alike=1)), "two are kept"


def test_what_a_launch_has_begun_with_is_named_if_it_has_left_no_checkpoint() -> None:
    world = Ending(size=3)
    world.machine.job.where, world.machine.job.start_version = "runs/a", 1
    said = come_apart(world, pb.Diverged(alike=2))
    assert "if `flashrecovery checkpoints runs/a` still lists step 1, with which it has begun" in said
    assert "the same command line with `--run-dir runs/a --resume` goes on from there" in said


def checkpointing(**config: object) -> Ending:
    world = Ending(checkpoint={"dir": "ck"}, **config)
    for one in world.machine.job.ranks.values():
        one.checkpoints = True
    return world


def notices_of(world: Ending, kind: str) -> list[str]:
    return [e.text for e in world.events if getattr(e, "kind", "") == kind]


def test_with_a_directory_a_last_checkpoint_is_written() -> None:
    world = checkpointing()
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    last = world.end()
    assert (last.version, last.whole, last.saved) == (2, True, "ck/step-2")
    assert sorted(world.kept) == sorted(world.written) == [0, 1], "in memory first, which takes no time"
    assert not world.written[0].lost and not notices_of(world, "checkpoint_failed")


def test_the_part_of_a_rank_that_is_gone_is_written_by_another_one() -> None:
    world = checkpointing()
    world.local_state = b"random numbers"
    world.machine.job.vacate(1)
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    assert world.end().saved == "ck/step-2"
    (lost,) = world.written[0].lost
    assert (lost.rank, lost.writer, lost.local_state) == (1, 0, b"random numbers")
    assert "capsule@1" not in lost.shards


@pytest.mark.parametrize("why", ["the disk is full", ""])
def test_a_last_checkpoint_that_is_not_written_is_said_and_the_snapshots_are_left(why: str) -> None:
    world = checkpointing()
    world.refused = why
    if not why:  # the page of a rank that is gone has nothing
        world.machine.job.vacate(1)
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    last = world.end()
    assert (last.version, last.whole, last.saved) == (2, True, "")
    (said,) = notices_of(world, "checkpoint_failed")
    assert (why or "its own state of step 2 is lost") in said


@pytest.mark.parametrize("config", [{"snapshots": {"keep": "never"}}, {"snapshots": {"persist": False}}])
def test_a_job_that_keeps_nothing_ends_at_once(config: dict[str, object]) -> None:
    world = Ending(**config)
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    world.collect()
    for rank, command in world.inbox:
        world.answer(rank, command)
    assert [(last.version, last.whole) for last in world.told] == [(0, False)]


def test_nothing_is_kept_before_the_first_step_and_after_the_last_one() -> None:
    world = Ending()
    for record in world.machine.job.ranks.values():
        record.committed = 0
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    assert not world.machine.job.ending.saving
    world = Ending()
    world.machine.job.move(0, Place.RELEASED)
    world.machine.on_stop_request("stopped by SIGTERM", world.now)
    assert not world.machine.job.ending.saving


def test_a_version_counts_if_every_rank_of_the_node_has_something_of_it() -> None:
    held = [HeldMemory(15, 1, 0, "own-0-of-2"), HeldMemory(14, 1, 0, "own-1-of-2"), HeldMemory(14, 1, 1, "own-0-of-2")]
    assert newest_of_all(held, {0, 1}) == 14
    assert newest_of_all(held[:2], {0, 1}) == 0
    assert newest_of_all([], set()) == 0


def test_what_is_written_is_named_with_the_way_on() -> None:
    folder = Path("runs/a/snapshots")
    assert saved_text(folder, 7, 12_300_000, several_nodes=False) == (
        "the state of step 7 (12.3 MB) is in runs/a/snapshots; --run-dir runs/a --resume goes on from there"
    )
    assert "all nodes" in saved_text(folder, 7, 0, several_nodes=True)
    assert "cannot continue" in saved_text(folder, 0, 0, several_nodes=False)


def test_how_far_an_earlier_launch_had_come() -> None:
    started = {"event": "job_started", "step": 0}
    assert step_of([]) == 0
    assert step_of([{"event": "job_failed", "step": -1}]) == 0, "it had not begun"
    assert step_of([started, {"event": "job_failed", "step": 44}]) == 44
    assert step_of([started, {"event": "job_failed", "step": 0}]) == 0
    assert step_of([started]) == 1, "killed; some step, as far as is known"
    assert step_of([started, {"event": "recovery_finished", "resume_step": 9}]) == 9
    begun_again = [started, {"event": "job_failed", "step": 44}, started, {"event": "job_failed", "step": 3}]
    assert step_of(begun_again) == 3
    refused = [started, {"event": "job_failed", "step": 44}, {"event": "job_failed", "step": -1}]
    assert step_of(refused) == 44


def test_a_run_ends_with_one_line() -> None:
    started, path = ev.JobStarted(monotonic=10.0, step=4), Path("runs/a")
    assert closing_line([], path) == closing_line([ev.JobFailed(reason="x")], path) == ""
    finished = ev.JobFinished(monotonic=33.1, step=18)
    assert closing_line([started, finished], path) == (
        "finished at step 18: 14 steps in 23.1 s, no recovery; flashrecovery report runs/a says more"
    )
    recovered = ev.RecoveryFinished(resume_step=6, total_s=0.42)
    failed, saved = ev.JobFailed(monotonic=12.0, step=5, reason="x"), ev.Notice(kind="last_save", step=7)
    assert closing_line([started, failed, saved], path).startswith("ended at step 7: 3 steps"), "heartbeats come late"
    assert closing_line([started, recovered, recovered, failed], path) == (
        "ended at step 6: 2 steps in 2.0 s, 2 recoveries (0.8 s lost); flashrecovery report runs/a says more"
    )


def test_a_checkpoint_that_fails_again_and_again_is_not_said_each_time(tmp_path: Path) -> None:
    text = failed_text(tmp_path, OSError(28, "No space left on device"))
    assert text == (
        f"nothing was written to {tmp_path} (No space left on device); there is no whole one; the job trains on"
    )
    (tmp_path / "step-0000000003").mkdir()
    assert "the newest whole one is of step 3" in failed_text(tmp_path, OSError(28, "No space left on device"))
    console = Console()
    said = [console.line_of(ev.Notice(kind="checkpoint_failed", rank=n % 4, text=text)) for n in range(8)]
    assert [line is not None for line in said] == [True, True, False, True, False, False, False, True]
    assert said[7] is not None and said[7].endswith("(8 times now)")
