"""Which layout a job changes to, and the controller's way there: the machine without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner

from flashrecovery import events as ev
from flashrecovery import layout
from flashrecovery.cli.main import cli
from flashrecovery.config import RunConfig, run_config, validate
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.relayout.staging_writers import assigned
from flashrecovery.controller.state.outbox import Emit, Send
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.errors import ConfigError, JobFailedError
from flashrecovery.plan.strategy.relayout import LayoutFacts, best, layout_text, parse_layout, why_not
from flashrecovery.plan.strategy.strategy import NothingFitsError, Strategy
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import LAYOUT_ENV

FACTS = LayoutFacts({"tp": 2, "pp": 2, "cp": 1, "ep": 1, "dp": 1}, 4, 64, 4, 4, 256, 512, 32, 12, 1)


# -- which layout -----------------------------------------------------------------------------------


def test_facts_travel_as_text() -> None:
    assert LayoutFacts.parse(FACTS.text()) == FACTS and FACTS.now == Strategy(2, 2, dp=1, micro_batch=1)


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("tp=2,pp=1,dp=2", 4, (2, 1, 2)),
        ("pp=2", 4, (1, 2, 2)),
        ("tp=1", 5, (1, 1, 4)),  # 5 replicas do not divide 12 micro-batches
        ("tp=4,pp=1", 4, (4, 1, 1)),
        ("tp=1, pp=4, dp=1", 4, (1, 4, 1)),
    ],
)
def test_sizes_are_read(text: str, ranks: int, expected: tuple[int, int, int]) -> None:
    found = parse_layout(text, FACTS, ranks)
    assert (found.tp, found.pp, found.dp) == expected and found.micro_batch == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp=3", "tp = 3 does not divide 4 heads"),
        ("pp=3", "pp = 3 does not divide 4 layers"),
        ("tp=2,pp=2,dp=2", "8 ranks are needed, and there are 4"),
        ("tp=1,dp=5", "5 ranks are needed"),
        ("cp=2", "has not asked flashrecovery.layout\\(\\) for cp, so it stays 1"),
        ("ep=2", "the model has no experts"),
        ("tp=0", "sizes as"),
        ("tp=1,tp=2", "each once"),
        ("", "sizes as"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_layout(text, FACTS, 4)


def test_replicas_must_divide_the_micro_batches() -> None:
    why = why_not(replace(FACTS, global_batch=6), Strategy(dp=4, micro_batch=1), 4)
    assert why == "dp = 4 does not divide the 6 micro-batches of a step; 1, 2, 3, 6 is allowed"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])
def test_what_is_chosen_fits(ranks: int) -> None:
    choice = best(FACTS, ranks, 1, step_s=0.2)
    for estimate in choice.ranked:
        assert why_not(FACTS, estimate.strategy, ranks) == "" and estimate.strategy.micro_batch == 1
        assert estimate.strategy.cp == estimate.strategy.ep == 1
    assert choice.lines[0].startswith(layout_text(choice.best.strategy))


def test_nothing_fits_and_says_why() -> None:
    with pytest.raises(NothingFitsError, match="fewer than 3 ranks"):
        best(FACTS, 2, 3)
    with pytest.raises(NothingFitsError):
        best(FACTS, 0, 1)
    with pytest.raises(NothingFitsError, match="GiB"):
        best(replace(FACTS, memory_bytes=1 << 20), 4, 1)


def test_a_script_asks_for_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = layout(tp=2, pp=2)
    assert (found.tp, found.pp, found.dp, found.changed) == (2, 2, 2, False)
    with pytest.raises(ConfigError, match="divide the 8 ranks"):
        layout(tp=3)
    monkeypatch.setenv(LAYOUT_ENV, "tp=1,pp=4,dp=2")
    found = layout(tp=2, pp=2)
    assert (found.tp, found.pp, found.dp, found.changed) == (1, 4, 2, True)


# -- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"redundancy": "parity"}, "parity"),
        ({"snapshots": {"keep": "always"}}, "snapshots are of one layout"),
        ({"parallelism": {"min": 5}}, "at most the ranks of the launch"),
    ],
)
def test_settings_that_do_not_go_together(more: Mapping[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run_config({"nproc_per_node": 4, "parallelism": {"min": 1}, **more}, "test")


def test_the_names_of_before_the_first_release_are_refused_with_the_new_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'replan'.*it is called 'parallelism' now"):
        run_config({"nproc_per_node": 4, "replan": {"min": 1}}, "test")
    done = CliRunner().invoke(cli, ["run", "--replan", "2", "train.py"])
    assert done.exit_code == 2 and "--replan 2: this option is called --parallelism now" in done.output


# -- who writes what --------------------------------------------------------------------------------


def record(rank: int, live: int, needs: Sequence[str], held: Sequence[pb.Held] = ()) -> RankRecord:
    found = RankRecord(rank, home="node")
    found.inventory.needs = dict.fromkeys((*needs, "common", f"capsule@{rank}"), 100)
    found.inventory.take(live, held)
    return found


def test_each_shard_is_written_once_by_somebody_who_has_it() -> None:
    records = {
        0: record(0, 5, ["a", "b"]),
        1: record(1, 6, ["a", "c"], [pb.Held(kind="undo", version=5)]),
        3: record(3, -1, ["d"], [pb.Held(kind="undo", version=5), pb.Held(kind="copy", version=5, shards=["x", "y"])]),
    }
    removed = {2: {"x": 100, "y": 100, "common": 100, "capsule@2": 10, "b": 100}}
    orders = assigned(records, removed, 5)
    items = [(rank, item.shard, item.kind) for rank, some in orders.items() for item in some]
    assert sorted(shard for _, shard, _ in items) == ["a", "b", "c", "d", "x", "y"]
    assert {(0, "b", "live"), (1, "c", "undo"), (3, "d", "undo"), (3, "x", "copy"), (3, "y", "copy")} <= set(items)


def test_what_nobody_has_is_named() -> None:
    records = {0: record(0, 5, ["a"])}
    with pytest.raises(JobFailedError, match="no rank has shard 'x' at version 5"):
        assigned(records, {1: {"x": 100}}, 5)


# -- the machine ------------------------------------------------------------------------------------


class World:
    """Four ranks of one node, each with its own shard, of which the next one keeps copies."""

    def __init__(self, **settings: object) -> None:
        self.machine = Machine(validate(RunConfig, self._config(settings), "test"))
        self.events: list[ev.Event] = []
        self.sent: list[pb.Command] = []
        self.pids = iter(range(100, 1000))
        self.machine.on_register(pb.Register(node="n", host="h", slots=4, node_rank=-1, incarnation="i"), 0.0)
        self.collect()
        self.start(FACTS)
        self.reply("resume")

    def _config(self, settings: dict[str, object]) -> dict[str, object]:
        return {"nproc_per_node": 4, "parallelism": {"min": 1, "replace": "never", **settings}}

    @property
    def job(self):  # type: ignore[no-untyped-def]
        return self.machine.job

    def collect(self) -> None:
        for action in self.job.take_actions():
            if isinstance(action, Emit):
                self.events.append(action.event)
            elif isinstance(action, Send):
                self.sent.append(action.command)

    def of(self, body: str) -> list[tuple[int, pb.Command]]:
        """The commands of this kind that have not been taken yet, one for each rank."""
        found = [c for c in self.sent if c.WhichOneof("body") == body]
        self.sent = [c for c in self.sent if c.WhichOneof("body") != body]
        return [(rank, c) for c in found for rank in (list(c.ranks) or [c.rank])]

    def start(self, facts: LayoutFacts, steps: int = 100) -> list[int]:
        """All that are to be filled come to their first step."""
        orders = self.of("replace")
        for rank, command in orders:
            started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=next(self.pids))
            self.machine.on_started(started, "n", "h")
        for rank, command in orders:
            self.machine.on_joined(
                pb.Joined(
                    rank=rank,
                    generation=command.generation,
                    needs=self.needs(rank),
                    steps=steps,
                    facts=facts.text(),
                ),
                1.0,
            )
        self.collect()
        return [rank for rank, _ in orders]

    @staticmethod
    def needs(rank: int) -> list[pb.ShardNeed]:
        return [pb.ShardNeed(name=name, nbytes=8) for name in (f"part{rank}", "common", f"capsule@{rank}")]

    def command(self, layout: str) -> None:
        """A user commands this layout: all ranks pause, and are stopped."""
        assert self.machine.replan(layout, -1)[0] == ""
        self.collect()
        self.machine.on_paused(pb.Paused(rank=0, generation=self.job.generation, version=7), 3.0)
        self.collect()
        self.stop()

    def has_no_room(self) -> None:
        """For what the first rank is to write into the node's memory."""
        (rank, command), *_ = self.of("staging")
        fields = {"serial": command.serial, "generation": command.generation, "rank": rank}
        self.machine.on_reply(pb.Reply(error_type="RestoreError", error="No space left", **fields), 3.0)
        self.collect()

    def reply(self, body: str, **fields: object) -> list[int]:
        orders = self.of(body)
        for rank, command in orders:
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, **fields)
            if body == "hold":
                reply.position.CopyFrom(pb.Position(settled=True, version=7))
            if body == "stop":
                reply.live_version = 7
                before = (rank - 1) % 4
                kept = pb.Held(kind="copy", version=7, shards=[f"part{before}", f"capsule@{before}"], nbytes=[8, 8])
                reply.held.append(kept)
            self.machine.on_reply(reply, 2.0)
        self.collect()
        return sorted(rank for rank, _ in orders)

    def kill(self, rank: int) -> None:
        failure = pb.Failure(rank=rank, pid=self.job.ranks[rank].process.pid, kind="killed", evidence="SIGKILL", step=7)
        self.machine.on_failure(failure, 3.0)
        self.collect()

    def stop(self) -> None:
        self.reply("hold")
        self.reply("stop")

    def replanned(self) -> list[ev.JobReplanned]:
        return [event for event in self.events if isinstance(event, ev.JobReplanned)]


def test_a_loss_leads_to_another_layout() -> None:
    world = World()
    world.kill(1)
    world.stop()
    assert world.job.state is State.REPLACING and not world.of("replace")
    stagings = world.of("staging")
    items = {(rank, item.shard, item.kind) for rank, c in stagings for item in c.staging.items}
    assert items == {(0, "part0", "live"), (2, "part2", "live"), (3, "part3", "live"), (2, "part1", "copy")}
    world.sent += [command for _, command in stagings]
    assert world.reply("staging", staged_bytes=10) == [0, 2, 3]
    (event,) = world.replanned()
    assert (event.step, event.before, event.ranks, event.bytes) == (7, "tp=2,pp=2,dp=1", 3, 30)
    assert list(world.job.ranks) == [0, 1, 2] and world.job.state is State.STARTING
    orders = [command.replace for command in world.sent if command.HasField("replace")]
    assert {(o.world_size, o.layout, o.detached, o.attempt) for o in orders} == {(3, event.layout, False, 1)}
    assert sorted(o.local_rank for o in orders) == [0, 2, 3]  # where those were that live
    world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3}))
    restores = world.of("restore")
    assert sorted(rank for rank, _ in restores) == [0, 1, 2]
    assert {(c.restore.version, c.restore.staging.directory, tuple(c.restore.staging.ranks)) for _, c in restores} == {
        (7, "1-1-7", (0, 2, 3))
    }
    world.sent += [command for _, command in restores]
    world.reply("restore")
    assert world.reply("resume") == [0, 1, 2] and world.job.state is State.RUNNING
    assert not world.of("drop_staging")  # no rank has taken a step yet
    health = [pb.RankHealth(rank=r, pid=world.job.ranks[r].process.pid, committed=8) for r in range(3)]
    world.machine.on_heartbeat(pb.Heartbeat(generation=world.job.generation, ranks=health), 4.0)
    world.collect()
    assert world.of("drop_staging") and [e for e in world.events if isinstance(e, ev.RecoveryFinished)]


def test_a_second_loss_while_the_state_is_written() -> None:
    world = World()
    world.kill(0)
    world.stop()
    old = world.of("staging")
    assert {c.staging.directory for _, c in old} == {"1-1-7"}
    world.kill(2)
    new = world.of("staging")
    assert {c.staging.directory for _, c in new} == {"1-2-7"} and sorted(rank for rank, _ in new) == [1, 3]
    for rank, command in old:  # late answers to what is void
        world.machine.on_reply(pb.Reply(serial=command.serial, generation=command.generation, rank=rank), 3.0)
    assert not world.replanned()
    world.sent += [command for _, command in new]
    world.reply("staging")
    assert [event.ranks for event in world.replanned()] == [2]


def test_who_has_not_got_the_state_gets_it_from_the_memory_once_more() -> None:
    world = World()
    world.kill(1)
    world.stop()
    world.reply("staging")
    world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3}))
    world.kill(2)
    world.reply("hold")
    orders = world.of("stop")
    for rank, command in orders:
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=-1)
        world.machine.on_reply(reply, 3.0)
    world.collect()
    assert not world.of("staging")
    assert [(event.ranks, event.step) for event in world.replanned()] == [(3, 7), (2, 7)]
    assert world.job.state is State.STARTING
    world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 2}))
    assert {tuple(c.restore.staging.ranks) for _, c in world.of("restore")} == {(0, 2, 3)}


def test_too_few_ranks_end_the_job_with_the_reasons() -> None:
    world = World(min=4)
    world.kill(1)
    assert world.job.state is State.FAILED
    assert "no parallel layout fits the 3 ranks" in world.job.failure_reason
    assert "fewer than 4 ranks (parallelism.min)" in world.job.failure_reason


def test_a_command() -> None:
    world = World()
    assert world.machine.replan("tp=3", -1)[0].startswith("--layout tp=3: tp = 3 does not divide")
    assert "already" in world.machine.replan("tp=2,pp=2", -1)[0]
    assert "takes 100 steps" in world.machine.replan("tp=1", 100)[0]
    assert world.machine.replan("tp=1,pp=2,dp=1", 9) == ("", "tp=1,pp=2,dp=1", ("commanded",))
    world.collect()
    assert {(rank, c.pause.step) for rank, c in world.of("pause")} == {(rank, 9) for rank in range(4)}
    paused = pb.Paused(rank=0, generation=world.job.generation, version=9)
    world.machine.on_paused(paused, 3.0)
    world.collect()
    world.stop()  # at 7, before the step: not yet
    assert world.job.state is State.REGROUPING and not world.of("staging")
    world.reply("regroup")
    world.reply("restore")
    assert {c.resume.pause.step for _, c in world.of("resume")} == {9}


def test_a_command_needs_the_setting() -> None:
    machine = Machine(validate(RunConfig, {"nproc_per_node": 2}, "test"))
    assert "launch it with --parallelism" in machine.replan("", -1)[0]


def test_memory_that_cannot_be_written() -> None:
    world = World()
    world.kill(1)
    world.stop()
    world.has_no_room()
    assert world.job.state is State.FAILED and "No space left" in world.job.failure_reason


def test_memory_that_cannot_be_written_for_a_command() -> None:
    world = World()
    world.command("tp=1,pp=2,dp=1")
    world.has_no_room()
    assert [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"]
    world.stop()
    assert world.job.state is State.REGROUPING  # on in the old layout


@pytest.mark.parametrize("checkpoint", [False, True])
def test_there_is_no_room_and_the_layout_has_to_change(checkpoint: bool) -> None:
    """A checkpoint that any layout reads is begun with, if there is one."""
    world = World()
    if checkpoint:
        world.machine.on_checkpoint(5, "/checkpoints/5")
    world.kill(1)
    world.stop()
    world.has_no_room()
    assert bool(world.replanned()) is checkpoint
    if not checkpoint:
        assert world.job.state is State.FAILED and "No space left" in world.job.failure_reason
        return
    (fallback,) = [event for event in world.events if isinstance(event, ev.FallbackStarted)]
    assert (fallback.version, fallback.path) == (5, "/checkpoints/5") and "No space left" in fallback.reason
    assert world.of("drop_staging"), "what others have written is given back"
    world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3}))
    assert {(c.restore.version, c.restore.checkpoint) for _, c in world.of("restore")} == {(5, "/checkpoints/5")}


def test_there_is_no_room_before_all_have_taken_a_step_in_the_layout_before() -> None:
    """What they had read is there still: nothing is lost."""
    world = World()
    world.machine.on_checkpoint(5, "/checkpoints/5")
    world.kill(1)
    world.stop()
    world.reply("staging")
    world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3}))
    world.reply("restore")
    world.reply("resume")
    world.kill(2)
    world.reply("hold")
    for rank, command in world.of("stop"):
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=7)
        reply.held.append(pb.Held(kind="copy", version=7, shards=["part2", "capsule@2"], nbytes=[8, 8]))
        world.machine.on_reply(reply, 3.0)
    world.collect()
    world.has_no_room()
    assert [(event.step, event.ranks) for event in world.replanned()] == [(7, 3), (7, 2)]
    assert not [event for event in world.events if isinstance(event, ev.FallbackStarted)]
    assert not world.of("drop_staging") and world.job.state is State.STARTING
    world.start(replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 2}))
    assert {tuple(c.restore.staging.ranks) for _, c in world.of("restore")} == {(0, 2, 3)}


def test_who_differs_has_no_checkpoint_to_go_back_to() -> None:
    """Which of the two has the right state is not known, nor which of them was in the checkpoint."""
    world = World()
    world.machine.on_checkpoint(5, "/checkpoints/5")
    world.kill(1)
    world.stop()
    for number, (rank, command) in enumerate(world.of("staging")):
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
        reply.sent_digests["the registered object 'x'"] = str(number)
        world.machine.on_reply(reply, 3.0)
    world.collect()
    assert world.job.state is State.FAILED and not world.replanned()
    assert "the registered object 'x' is not what it is on rank 0" in world.job.failure_reason


def test_a_job_whose_retries_run_out_fails_once() -> None:
    world = World()
    world.kill(1)
    world.job.tries.retries, world.job.round.retry_at = 3, 4.0
    for now in (5.0, 6.0):
        world.machine.on_tick(now)
    world.collect()
    assert len([event for event in world.events if isinstance(event, ev.JobFailed)]) == 1
