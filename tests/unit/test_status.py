"""``flashrecovery status`` against a real gRPC server, and against run directories of ended jobs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrecovery import events as ev
from flashrecovery.cli.status import ask, from_files, look_at, status, tag_text
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import RunDir, RunFiles
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from tests.support.history_samples import at, two_recoveries

RANK = pb.RankStatus(
    rank=1,
    pid=77,
    node="n0",
    state="running",
    tag=41,
    progress_age_s=0.25,
    generation=1,
    committed=41,
    step_s=0.125,
)
RECOVERY = pb.RecoverySummary(generation=1, victims=[1], resume_step=40, total_s=0.5, kind="killed")
RUNNING = pb.JobStatus(
    state="running",
    generation=1,
    ranks=[RANK, pb.RankStatus(rank=0, state="starting", tag=-2, committed=-1)],
    standby_ready=1,
    standby_starting=2,
    recoveries=[RECOVERY],
    last_failure="rank 1: killed: SIGKILL",
    run_dir="/runs/a",
    uptime_s=12.0,
)


class Controller(rpc.ControllerServicer):  # type: ignore[misc]
    """Answers with one status after the other, then with the last one for ever."""

    def __init__(self, answers: list[pb.JobStatus]) -> None:
        self.answers = answers

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.JobStatus:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def serving(*answers: pb.JobStatus, token: str = "") -> Iterator[str]:
    """A controller in a separate thread."""
    bound: Future[int] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        server = Access(token).server()
        rpc.add_ControllerServicer_to_server(Controller(list(answers)), server.grpc)
        bound.set_result(await server.start("127.0.0.1", 0, CONTROLLER))
        await over.wait()
        await server.stop(0.0)

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        yield f"127.0.0.1:{bound.result(10)}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(status, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def log(run_dir: Path, events: list[ev.Event]) -> RunFiles:
    (run_dir / "events.jsonl").write_text("".join(e.model_dump_json() + "\n" for e in events))
    return RunFiles(run_dir)


def test_the_controllers_answer_becomes_the_view() -> None:
    with serving(RUNNING) as address:
        view = ask(address, Access(""))
    assert view is not None and view.live
    assert (view.state, view.generation, view.seconds, view.run_dir) == ("running", 1, 12.0, "/runs/a")
    assert [r.rank for r in view.ranks] == [0, 1]
    assert view.ranks[0].tag == "set-up" and view.ranks[0].committed is None and view.ranks[0].step_s is None
    assert view.ranks[1].tag == "step 41" and view.ranks[1].committed == 41 and view.ranks[1].step_s == 0.125
    assert view.recoveries[0].victims == (1,) and view.recoveries[0].resume_step == 40


def test_table_and_json_from_a_controller() -> None:
    with serving(RUNNING) as address:
        text = run("--controller", address)
        plain = json.loads(run("--controller", address, "--json"))
    for part in ("Job running", "standbys 1 ready + 2 starting", "step 41", "rank 1: killed", "0.50 s in all", "77"):
        assert part in text
    assert plain["ranks"][1]["pid"] == 77 and plain["standby_starting"] == 2


def test_of_thousands_of_ranks_those_that_need_a_look_are_shown() -> None:
    ranks = [
        pb.RankStatus(rank=r, state="running", tag=7, committed=7, progress_age_s=9.0 if r == 500 else 0.1, own_s=0.1)
        for r in range(18_000)
    ]
    ranks[17_000].state = "starting"
    ranks[9_000].straggler = True
    ranks[123].own_s = 0.3
    with serving(pb.JobStatus(state="running", ranks=ranks)) as address:
        text = run("--controller", address)
    shown = [int(line.split()[0]) for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert len(shown) == 32 and {123, 500, 9_000, 17_000} <= set(shown) and shown == sorted(shown)
    assert "17,968 other ranks" in text


@pytest.mark.parametrize("arguments", [["--watch"], ["--watch", "--json"]])
def test_watch_ends_with_the_job(arguments: list[str]) -> None:
    ended = pb.JobStatus(state="finished", generation=1)
    with serving(RUNNING, RUNNING, ended) as address:
        text = run("--controller", address, *arguments)
    assert "finished" in text
    if "--json" in arguments:
        assert [json.loads(line)["state"] for line in text.splitlines()] == ["running", "running", "finished"]


def test_run_dir_of_a_live_job_asks_its_controller(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with serving(RUNNING, token="t") as address:
        run_dir.write_controller(address=address, pid=1, token="t")
        assert look_at(RunFiles(tmp_path)).live
        run_dir.close()
        log(tmp_path, two_recoveries())
        assert not look_at(RunFiles(tmp_path)).live  # another job may use the port by now


def test_who_else_listens_there_is_no_controller_of_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRECOVERY_TOKEN", "another one")
    with closing(RunDir(tmp_path)) as run_dir, serving(RUNNING, token="t") as address:
        run_dir.write_controller(address=address, pid=1, token="another one")
        log(tmp_path, two_recoveries()[:-1])
        assert not look_at(RunFiles(tmp_path)).live
        with pytest.raises(StrangerError, match="does not know this job's token"):
            run("--controller", address)


def test_live_job_whose_controller_does_not_answer_is_read_from_disk(tmp_path: Path, free_port: int) -> None:
    with_lock = RunDir(tmp_path)
    with_lock.write_controller(address=f"127.0.0.1:{free_port}", pid=1, token="t")
    log(tmp_path, two_recoveries()[:-1])
    view = look_at(RunFiles(tmp_path))
    assert not view.live and view.state == "running" and view.standby_ready == 1
    with_lock.close()


def test_finished_job_from_its_run_dir(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_rank_table(2, [{"rank": 0, "host": "h", "pid": 9, "node": "n0", "joined_generation": 0}])
    run_dir.close()
    view = from_files(log(tmp_path, two_recoveries()))
    assert view.state == "finished" and view.generation == 2 and view.standby_ready == 0
    assert [r.victims for r in view.recoveries] == [(3,), (1,)]
    assert view.ranks[0].state == "ended" and view.last_failure == "rank 1: hang: SIGKILL"
    assert "Job finished" in run(str(tmp_path))


def test_failed_job_says_why(tmp_path: Path) -> None:
    log(tmp_path, [at(0, ev.JobStarted(world_size=2)), at(9, ev.JobFailed(reason="no source is left"))])
    assert "Reason: no source is left" in run(str(tmp_path))


def test_a_launcher_that_ended_without_a_word_is_lost(tmp_path: Path) -> None:
    log(tmp_path, two_recoveries()[:4])
    assert "Job lost" in run(str(tmp_path), "--watch")


def test_wrong_arguments_are_clear_errors(tmp_path: Path, free_port: int) -> None:
    for arguments, text in [
        ([], "either RUN_DIR or --controller"),
        ([str(tmp_path), "--controller", "x:1"], "either RUN_DIR or --controller"),
        ([str(tmp_path)], "not a run directory"),
        (["--controller", f"127.0.0.1:{free_port}"], "no controller answers"),
    ]:
        with pytest.raises(ConfigError, match=text):
            run(*arguments)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize(("tag", "text"), [(7, "step 7"), (-1, "updating"), (-2, "set-up")])
def test_tag_text(tag: int, text: str) -> None:
    assert tag_text(tag) == text
