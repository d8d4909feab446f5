"""Failures of nodes are remembered over generations and jobs: the rating, the file, what the controller makes of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery import events as ev
from flashrecovery.cli.main import cli
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.controller.state.nodes import NodeRecord, NodeState
from flashrecovery.controller.state.outbox import Blame
from flashrecovery.controller.storage.node_failure_file import (
    FILE_NAME,
    add_marks,
    forget_marks,
    marks_path,
    read_marks,
)
from flashrecovery.kinds import FailureKind
from flashrecovery.plan.membership.node_failures import (
    EXCLUDED,
    HALF_LIFE_S,
    KEEP_S,
    SLOW,
    TOGETHER_S,
    WEIGHTS,
    NodeMark,
    Rating,
    Use,
    faded,
    may_be_used_again,
    ratings,
)
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.channel import Access
from tests.unit.test_machine import World
from tests.unit.test_proactive_replacement import warned

NOW = 1_800_000_000.0
DAY = 86400.0
BAD = {"b": Rating(Use.EXCLUDED, 4.0, 4, 0, "4 x device")}
DOUBTFUL = {"b": Rating(Use.LAST, 2.0, 2, 0, "2 x device")}


def mark(node: str = "b", kind: str = FailureKind.DEVICE, age_s: float = 0.0, job: str = "j") -> NodeMark:
    return NodeMark(NOW - age_s, node, kind, job)


# -- the rating ------------------------------------------------------------------------------------


def test_who_fails_repeatedly_is_used_last_then_not_at_all_then_again() -> None:
    uses = [ratings([mark(age_s=i * DAY) for i in range(n)], NOW).get("b") for n in range(5)]
    assert [None if r is None else r.use for r in uses] == [None, Use.NORMAL, Use.LAST, Use.LAST, Use.EXCLUDED]
    assert uses[4] is not None and uses[4].reason == "4 x device in 1 job within 3.0 days (score 3.47)"
    bad = [mark(age_s=i * DAY) for i in range(4)]
    again = may_be_used_again(bad, "b", NOW)
    assert ratings(bad, NOW + again - 60)["b"].use is Use.EXCLUDED
    assert ratings(bad, NOW + again + 60)["b"].use is Use.LAST
    assert ratings(bad, NOW + 2 * HALF_LIFE_S)["b"].use is Use.NORMAL
    assert ratings(bad, NOW + KEEP_S + 4 * DAY) == {}
    assert may_be_used_again(bad, "c", NOW) == may_be_used_again(bad, "b", NOW + again + 60) == 0


def test_what_comes_to_many_nodes_at_once_is_no_nodes_doing() -> None:
    outage = [mark(node, FailureKind.NODE_LOST, age_s) for node, age_s in (("a", 0), ("b", 60), ("c", 120))] * 4
    assert all(r.use is Use.NORMAL and r.score == 0 and r.common == 4 for r in ratings(outage, NOW).values())
    assert ratings(outage, NOW)["a"].reason == "4 together with other nodes, which do not count"
    pair = [m for m in outage if m.node != "c"]  # two nodes may be bad, each by itself
    assert {r.use for r in ratings(pair, NOW).values()} == {Use.EXCLUDED}
    spread = [mark(node, FailureKind.NODE_LOST, i * (TOGETHER_S + 1)) for i, node in enumerate("abc")]
    assert all(r.counted == 1 for r in ratings(spread, NOW).values())
    other_jobs = [mark(node, job=node) for node in "abc"]
    assert all(r.counted == 1 for r in ratings(other_jobs, NOW).values())


def test_kinds_that_are_nobodys_doing_leave_nothing() -> None:
    assert ratings([mark(kind=FailureKind.DEADLOCK_SUSPECTED), mark(kind="of a newer version")], NOW) == {}
    assert {k for k in FailureKind if k not in WEIGHTS} == {
        FailureKind.COMMAND,
        FailureKind.CONTEXT_LOST,
        FailureKind.DEADLOCK_SUSPECTED,
        FailureKind.WARNING,
        FailureKind.RESIZE,
        FailureKind.HANDOFF,
        FailureKind.CONTROLLER,
        FailureKind.REPLAN,
    }


def test_a_clock_that_is_ahead_gives_no_more_than_a_fresh_mark() -> None:
    assert faded(mark(age_s=-1e9), NOW) == 1.0 and ratings([mark(age_s=-1e9)], NOW)["b"].score == 1.0


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            mark,
            node=st.sampled_from("abcd"),
            kind=st.sampled_from(sorted(WEIGHTS)),
            age_s=st.floats(0, 2 * KEEP_S),
            job=st.sampled_from("jk"),
        ),
        max_size=30,
    ),
    st.floats(0, KEEP_S),
)
def test_without_new_failures_a_node_only_becomes_better(marks: list[NodeMark], later_s: float) -> None:
    order = list(Use)
    before, after = ratings(marks, NOW), ratings(marks, NOW + later_s)
    for node, rating in after.items():
        assert rating.score <= before[node].score + 1e-9 or rating.common < before[node].common
        assert order.index(rating.use) <= order.index(before[node].use) or rating.common < before[node].common
    for node in before:
        back = may_be_used_again(marks, node, NOW)
        assert (back > 0) == (before[node].score > EXCLUDED) or before[node].score == EXCLUDED


# -- the file --------------------------------------------------------------------------------------


def test_marks_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / FILE_NAME
    assert read_marks(path).marks == ()
    first, second = NodeMark(NOW, "a", SLOW, "j", 3, 'says "ü"\n'), mark()
    add_marks(path, [first])
    assert add_marks(path, [second]).marks == read_marks(path).marks == (first, second)
    assert forget_marks(path, ["a"]) == 1 and read_marks(path).marks == (second,)
    ahead = [mark(f"n{i}", age_s=-1e9) for i in range(10_000)]  # by a clock that is ahead: no newer than the others
    assert add_marks(path, ahead).marks[0].node == "n0" and add_marks(path, [second]).marks[-1] == second


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"time": 1}',
        b'{"time": "x", "node": "n", "kind": "k", "job": "j"}',
        b'{"time": NaN, "node": "n", "kind": "k", "job": "j"}',
        b'{"time": 1, "node": "", "kind": "k", "job": "j"}',
    ],
)
def test_a_damaged_file_is_set_aside_and_what_is_readable_goes_on(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / FILE_NAME
    add_marks(path, [mark("a")])
    path.write_bytes(path.read_bytes() + line + b"\n")
    damaged = path.read_bytes()
    assert "1 lines are no marks of nodes, the first is line 2" in read_marks(path).damage
    found = add_marks(path, [mark("b")])
    (aside,) = tmp_path.glob(f"{FILE_NAME}.damaged-*")
    assert aside.read_bytes() == damaged and aside.name in found.damage
    assert read_marks(path).damage == "" and [m.node for m in read_marks(path).marks] == ["a", "b"]


def test_a_newer_versions_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({"time": 1, "node": "n", "kind": "k", "job": "j", "colour": "red"}) + "\n")
    assert read_marks(path).damage == "" and read_marks(path).marks == (NodeMark(1, "n", "k", "j"),)


def test_several_jobs_lose_no_mark_of_each_other(tmp_path: Path) -> None:
    """Processes and threads add to one file at a time."""
    path = tmp_path / FILE_NAME
    code = (
        "import sys, time; from pathlib import Path\n"
        "from flashrecovery.controller.storage.node_failure_file import add_marks\n"
        "from flashrecovery.plan.membership.node_failures import NodeMark\n"
        "for i in range(20): add_marks(Path(sys.argv[1]), [NodeMark(time.time(), f'{sys.argv[2]}.{i}', 'slow', 'j')])"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(3)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: add_marks(path, [mark(f"t{i}", age_s=float(i))]), range(20)))
    assert [other.wait(60) for other in others] == [0, 0, 0]
    names = {m.node for m in read_marks(path).marks}
    assert names >= {f"t{i}" for i in range(20)} | {f"{n}.{i}" for n in range(3) for i in range(20)}


def test_which_file_a_job_uses(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    assert marks_path(None, run_dir) is None and marks_path(tmp_path / "x", run_dir) == tmp_path / "x"
    run_dir.mkdir(parents=True)
    (run_dir.parent / FILE_NAME).touch()
    assert marks_path(None, run_dir) == run_dir.parent / FILE_NAME


# -- the machine -----------------------------------------------------------------------------------


class Blaming(World):
    """Keeps what is to be remembered, too."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.blames: list[Blame] = []
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def collect(self) -> None:
        self.blames += [a for a in self.machine.job.outbox.actions if isinstance(a, Blame)]
        super().collect()

    def rated(self, found: dict[str, Rating]) -> None:
        self.machine.conduct.on_ratings(found)
        self.collect()

    def notices(self, kind: str) -> list[str]:
        return [e.text for e in self.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == kind]

    def homes(self) -> list[str]:
        return [r.home for r in self.machine.job.ranks.values()]


def training(*names: str, **config: object) -> Blaming:
    world = Blaming(2, nnodes=2, steps=1000, **{"spare_nodes": len(names) - 2, **config})
    for name in names:
        world.join(name)
    while world.machine.job.state is not State.RUNNING:
        assert world.step()
    return world


def test_a_lost_node_is_to_blame_once_and_a_process_its_node() -> None:
    world = training("a", "b", "c")
    world.machine.on_node_lost("b", "silent", 1.0, world.now)
    world.collect()
    assert [(b.node, b.kind) for b in world.blames] == [("b", "node_lost")]
    for _ in range(200):
        world.step()
    world.kill(0, "device")
    world.kill(1, "device")  # of the same node, in the same recovery
    assert [(b.node, b.kind) for b in world.blames] == [("b", "node_lost"), ("a", "device")]


def test_a_drill_says_nothing_of_the_node() -> None:
    world = training("a", "b", "c")
    world.machine.job.asked.drills.append(pb.InjectRequest(rank=0, fault="sigkill"))
    world.kill(0, "killed")
    assert world.blames == [] and not world.machine.job.asked.drills
    for _ in range(200):
        world.step()
    world.kill(0, "killed")  # no one has asked for this one
    assert [(b.node, b.kind) for b in world.blames] == [("a", "killed")]


def test_a_slow_node_is_remembered() -> None:
    world = training("a", "b")
    for record in world.machine.job.ranks.values():
        record.health.own_s = record.health.own_least_s = 5.0 if record.rank == 3 else 1.0
        record.health.step_s = 5.0
    world.machine.watch.report_stragglers(world.now + 10)
    world.collect()
    assert [(b.node, b.kind) for b in world.blames] == [("b", SLOW)]


def test_an_excluded_node_takes_no_rank_while_there_is_another() -> None:
    world = training("a", "x", "b", "c")
    world.rated(BAD)
    assert world.notices("node_excluded") == ["node b is excluded from now on: 4 x device"]
    world.machine.on_node_lost("x", "silent", 1.0, world.now)
    world.collect()
    assert world.homes() == ["a", "a", "c", "c"]


def test_a_node_that_is_used_last_is_taken_when_no_other_is_there() -> None:
    world = training("a", "x", "b", "c")
    world.rated(DOUBTFUL)
    world.machine.on_node_lost("x", "silent", 1.0, world.now)
    world.collect()
    assert world.homes() == ["a", "a", "c", "c"] and world.notices("node_used_last")
    for _ in range(200):
        world.step()
    world.machine.on_node_lost("c", "silent", 1.0, world.now)
    world.collect()
    assert world.homes() == ["a", "a", "b", "b"]


def test_ranks_wait_for_another_node_and_then_take_the_excluded_one() -> None:
    world = training("a", "x", "b", timeouts={"node_wait_s": 50})
    world.rated(BAD)
    world.machine.on_node_lost("x", "silent", 1.0, world.now)
    world.collect()
    assert world.homes() == ["a", "a", "", ""]
    assert "node b is excluded: 4 x device" in world.notices("waiting_for_node")[0]
    world.now += 51
    world.machine.on_tick(world.now)
    world.collect()
    assert world.homes() == ["a", "a", "b", "b"] and world.machine.job.state is not State.FAILED
    assert "although it is excluded, because there is no other" in world.notices("node_excluded")[-1]
    while world.machine.job.state is not State.RUNNING:
        assert world.step()


def test_a_node_with_a_past_is_left_with_the_next_failure() -> None:
    """As one that a device plugin warns of."""
    world = warned()
    world.machine.job.nodes["b"].suspect = ""
    world.machine.conduct.on_ratings(DOUBTFUL)
    world.kill(3)
    while world.machine.job.state is not State.RUNNING or world.machine.job.recovery is not None:
        assert world.step()
    assert [r.home for r in world.machine.job.ranks.values()] == ["a", "a", "x", "x"]
    (text,) = [e.text for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "node_replaced"]
    assert "2 x device" in text


def test_at_the_launch_an_excluded_node_stays_outside_if_there_are_enough_others() -> None:
    world = Blaming(2, nnodes=2, spare_nodes=1)
    world.machine.conduct.on_ratings(BAD)
    for name in ("b", "a"):
        world.join(name)
    assert not world.machine.job.launched
    world.join("c")
    assert world.machine.job.launched and set(world.homes()) == {"a", "c"}
    assert world.machine.job.nodes["b"].state is NodeState.SPARE


def test_at_the_launch_a_spare_node_stands_in_for_an_excluded_one() -> None:
    """Nodes that are numbered by a scheduler, and one that is said to be spare."""
    for fields in ({"node_rank": 2}, {"spare": True}):
        world = Blaming(2, nnodes=2, spare_nodes=1)
        world.machine.conduct.on_ratings(BAD)
        world.join("a", node_rank=0)
        world.join("b", node_rank=1)
        assert not world.machine.job.launched
        world.join("c", **fields)
        assert world.homes() == ["a", "a", "c", "c"]


def test_at_the_launch_it_is_used_if_nobody_else_is_expected() -> None:
    world = Blaming(2, nnodes=2)
    world.machine.conduct.on_ratings(BAD)
    for name in ("b", "a"):
        world.join(name)
    assert world.machine.job.launched and set(world.homes()) == {"a", "b"}
    assert any("although it is excluded" in text for text in world.notices("node_excluded"))


def test_at_the_launch_it_is_used_if_nobody_else_comes_in_time() -> None:
    world = Blaming(2, nnodes=2, spare_nodes=1, timeouts={"node_wait_s": 50})
    world.machine.conduct.on_ratings(BAD)
    for name in ("b", "a"):
        world.join(name)
    world.now += 49
    world.machine.on_tick(world.now)
    assert not world.machine.job.launched
    world.now += 2
    world.machine.on_tick(world.now)
    world.collect()
    assert world.machine.job.launched and set(world.homes()) == {"a", "b"}


def test_a_job_that_runs_already_is_not_launched_for_an_excluded_nodes_sake() -> None:
    """A controller that is started again hears new nodes first, and then one of the job that it has lost."""
    world = Blaming(2, nnodes=2, spare_nodes=2, timeouts={"node_wait_s": 5, "takeover_s": 60})
    world.machine.conduct.on_ratings(BAD)
    for name in ("b", "a"):
        world.join(name)
    world.join("c", stride=2)
    world.now += 6
    world.machine.on_tick(world.now)
    world.collect()
    assert not world.machine.job.launched and not world.inbox


def test_among_nodes_that_have_come_the_doubtful_one_becomes_the_spare() -> None:
    world = Blaming(2, nnodes=2, spare_nodes=1)
    world.machine.conduct.on_ratings({**DOUBTFUL, "a": BAD["b"]})
    for name in ("a", "b", "c"):  # a is excluded, so b and c begin, c first
        world.join(name)
    assert world.homes() == ["c", "c", "b", "b"]


# -- the service -----------------------------------------------------------------------------------


def service_with(tmp_path: Path, marks: Path | None) -> tuple[ControllerService, ev.RunDir, ev.EventLog]:
    run_dir = ev.RunDir(tmp_path / "runs" / "one")
    log = ev.EventLog(run_dir.events_path)
    config = RunConfig(nproc_per_node=1)
    return ControllerService(config, Access("the-token-of-this-test-job"), log, run_dir, marks=marks), run_dir, log


def test_the_service_reads_and_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"garbage\n")

    async def go() -> list[ev.Event]:
        service, run_dir, log = service_with(tmp_path, path)
        await service.start("127.0.0.1", 0)
        for _ in range(4):
            service.machine.job.generation += 1
            service.machine.job.restarts += 1
            service.machine.job.blame("b", FailureKind.DEVICE, "XID 79")
        service.act()
        await service.stop()
        run_dir.close()
        log.close()
        return run_dir.events()

    async def next_job() -> NodeRecord:
        service, run_dir, log = service_with(tmp_path, path)
        await service.start("127.0.0.1", 0)
        node = NodeRecord.of(pb.Register(node="b", host="b", slots=1, node_rank=-1, peer_port=1, incarnation="b"))
        service.machine.conduct.judge(node)
        await service.stop()
        run_dir.close()
        log.close()
        return node

    events = asyncio.run(go())
    notices = {e.kind: e.text for e in events if isinstance(e, ev.Notice)}
    assert "kept as node_marks.jsonl.damaged-" in notices["node_failure_log"]
    found = read_marks(path).marks
    assert [(m.node, m.kind, m.generation, m.detail) for m in found] == [
        ("b", "device", n, "XID 79") for n in range(1, 5)
    ]
    assert all(m.job == str(tmp_path / "runs" / "one") for m in found)
    node = asyncio.run(next_job())
    assert node.excluded and node.doubt.startswith("4 x device in 1 job")


def test_what_fails_while_somebody_ends_the_job_is_not_remembered(tmp_path: Path) -> None:
    """A scheduler's SIGTERM comes to the nodes one after the other."""
    path = tmp_path / FILE_NAME

    async def go(*, told: bool) -> None:
        service, run_dir, log = service_with(tmp_path, path)
        await service.start("127.0.0.1", 0)
        service.machine.job.blame("b", FailureKind.NODE_LOST, "its connection broke")
        service.act()
        await asyncio.sleep(0)
        if told:
            service.request_stop("stopped by SIGTERM")
        await service.stop()
        run_dir.close()
        log.close()

    asyncio.run(go(told=True))
    assert read_marks(path).marks == ()
    asyncio.run(go(told=False))
    assert [m.node for m in read_marks(path).marks] == ["b"]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    async def go() -> None:
        service, run_dir, log = service_with(tmp_path, None)
        await service.start("127.0.0.1", 0)
        service.machine.job.blame("b", FailureKind.DEVICE, "XID 79")
        service.act()
        await service.stop()
        run_dir.close()
        log.close()

    asyncio.run(go())
    assert not list(tmp_path.rglob("*marks*"))


def test_a_file_that_cannot_be_used_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()

    async def go() -> list[ev.Event]:
        service, run_dir, log = service_with(tmp_path, tmp_path / "dir")
        await service.start("127.0.0.1", 0)
        await service.stop()
        run_dir.close()
        log.close()
        return run_dir.events()

    (notice,) = [e for e in asyncio.run(go()) if isinstance(e, ev.Notice)]
    assert notice.kind == "node_failure_log" and "not remembered" in notice.text


# -- the command -----------------------------------------------------------------------------------


def test_the_command_shows_and_forgets(tmp_path: Path) -> None:
    import time

    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    now = time.time()
    marks = [NodeMark(now - i, "gpu7", FailureKind.DEVICE, "j", i, "XID 79") for i in range(4)]
    add_marks(run_dir.parent / FILE_NAME, [*marks, NodeMark(now, "gpu8", SLOW, "j")])
    for where in (run_dir, run_dir.parent, run_dir.parent / FILE_NAME):
        shown = CliRunner().invoke(cli, ["nodes", str(where)])
        lines = shown.output.splitlines()
        assert shown.exit_code == 0 and lines[1].split()[:2] == ["gpu7", "excluded"] and "4 x device" in lines[1]
        assert any(line.split()[:2] == ["gpu8", "normal"] for line in lines[2:])
    every = CliRunner().invoke(cli, ["nodes", str(run_dir), "--marks"]).output
    assert every.count("XID 79") == 4
    facts = json.loads(CliRunner().invoke(cli, ["nodes", str(run_dir), "--json"]).output)
    assert (
        facts["gpu7"]["use"] == "excluded" and facts["gpu7"]["used_last_in_s"] > 0 and len(facts["gpu8"]["marks"]) == 1
    )
    assert "4 failures of gpu7" in CliRunner().invoke(cli, ["nodes", str(run_dir), "--forget", "gpu7"]).output
    assert "gpu7" not in CliRunner().invoke(cli, ["nodes", str(run_dir)]).output
    nowhere = CliRunner().invoke(cli, ["nodes", str(tmp_path / "nowhere" / "x")])
    assert "node_failure_log in the configuration" in str(nowhere.exception)
