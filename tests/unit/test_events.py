"""The event log and the run directory: what is written is what is read, and no two jobs share a directory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashrecovery import events as ev
from flashrecovery.errors import ConfigError
from flashrecovery.events import EventLog, EventLogError, RunDir, RunFiles, read_events


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [
        ev.JobStarted(generation=0, world_size=4, seconds=3.5),
        ev.FailureDetected(generation=0, rank=3, kind="killed", evidence="SIGKILL", detect_s=0.004, step=41),
        ev.RecoveryStarted(generation=1, victims=[3], cause="killed"),
        ev.RecoveryPhase(generation=1, name="quiesce", seconds=0.02),
        ev.RecoveryFinished(
            generation=1,
            resume_step=41,
            victims=[3],
            sources={"0": 2},
            bytes=1 << 20,
            phases={"detect": 0.004},
        ),
        ev.FallbackStarted(generation=2, version=30, path="ckpt/30", reason="no cut"),
        ev.CheckpointSaved(generation=2, version=50, path="ckpt/50", seconds=0.4),
        ev.StandbyReady(generation=2, ready=1),
        ev.FaultInjected(generation=2, rank=1, fault="raise", phase="backward", step=60),
        ev.Notice(generation=2, rank=1, kind="swallowed", text="näive"),
        ev.JobFailed(generation=2, reason="no source"),
        ev.JobFinished(generation=2, exit_code=0, seconds=9.0),
    ]
    before = (time.time(), time.monotonic())
    with EventLog(tmp_path / "events.jsonl") as log:
        stamped = [log.write(event) for event in written]
    found = read_events(tmp_path / "events.jsonl")
    assert found == stamped
    assert [type(e) for e in found] == [type(e) for e in written]
    assert all(e.time >= before[0] and e.monotonic >= before[1] for e in found)
    assert [e.model_copy(update={"time": 0.0, "monotonic": 0.0}) for e in found] == written


def test_every_line_is_one_json_object_with_the_common_fields(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log:
        log.write(ev.Notice(generation=3, text="two\nlines"))
    (line,) = (tmp_path / "e").read_text().splitlines()
    assert {"event", "time", "monotonic", "generation"} <= json.loads(line).keys()
    assert json.loads(line)["event"] == "notice"


def test_a_log_is_continued_and_an_unfinished_line_left_out(tmp_path: Path) -> None:
    path = tmp_path / "e"
    for _ in range(2):
        with EventLog(path) as log:
            log.write(ev.JobStarted(world_size=1))
    with open(path, "a") as f:
        f.write('{"event": "job_fin')
    assert len(read_events(path)) == 2
    with EventLog(path) as log:
        log.write(ev.JobFinished())
    assert [e.event for e in read_events(path)] == ["job_started", "job_started", "job_finished"]


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, heard = tmp_path / "e", []

    class Full:
        """Takes the beginning of a line."""

        name = str(path)

        def write(self, line: bytes) -> int:
            file.write(line[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

    with EventLog(path) as log:
        log.subscribe(heard.append)
        file = log._file
        log.write(ev.JobStarted())
        with monkeypatch.context() as patched:
            patched.setattr(log, "_file", Full())
            log.write(ev.StandbyReady())
        log.write(ev.JobFinished())
    assert [e.event for e in read_events(path)] == ["job_started", "job_finished"]
    assert [e.event for e in heard] == ["job_started", "standby_ready", "job_finished"]


def test_who_listens_and_raises_disturbs_nobody(tmp_path: Path) -> None:
    heard: list[ev.Event] = []

    def raises(_: ev.Event) -> None:
        raise KeyError("a mistake")

    with EventLog(tmp_path / "e") as log:
        log.subscribe(raises)
        log.subscribe(heard.append)
        log.write(ev.JobStarted())
    assert [e.event for e in heard] == ["job_started"]


def test_a_damaged_or_unknown_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_text('{"event": "job_started"}\n{"event": "alien"}\n')
    with pytest.raises(EventLogError, match=":2: "):
        read_events(path)
    path.write_text("not json\n")
    with pytest.raises(EventLogError, match=":1: "):
        read_events(path)


def test_unknown_fields_of_a_newer_job_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_text('{"event": "job_started", "world_size": 4, "colour": "red"}\n')
    assert read_events(path) == [ev.JobStarted(world_size=4)]


def test_run_dir_writes_what_tools_read(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "deep" / "run")
    table = [{"rank": 0, "host": "h", "pid": 7, "node": "n", "joined_generation": 0}]
    run_dir.write_rank_table(2, table)
    run_dir.write_controller(address="127.0.0.1:5", pid=7, token="secret", observe="http://127.0.0.1:6/")
    reader = RunFiles(run_dir.path)
    assert reader.rank_table() == {"generation": 2, "ranks": table}
    expected = {"address": "127.0.0.1:5", "pid": 7, "token": "secret", "observe": "http://127.0.0.1:6/"}
    expected |= {"ca": "", "name": ""}
    assert reader.controller() == expected
    assert run_dir.controller_path.stat().st_mode & 0o077 == 0
    assert run_dir.log_path(3, 1) == run_dir.path / "logs" / "rank3.gen1.log"
    assert run_dir.log_dir.is_dir()
    assert sorted(p.name for p in run_dir.path.iterdir()) == [
        "controller.json",
        "lock",
        "logs",
        "ranktable.json",
    ]
    assert reader.is_live()
    run_dir.close()
    run_dir.close()
    assert not reader.is_live()


def test_a_new_job_in_an_old_directory_drops_only_what_is_no_longer_true(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    first.write_controller(address="127.0.0.1:5", pid=7, token="t")
    first.write_rank_table(0, [])
    with EventLog(first.events_path) as log:
        log.write(ev.JobStarted(world_size=1))
    first.close()
    second = RunDir(tmp_path)
    assert second.controller() is None and second.rank_table() is None and len(second.events()) == 1
    second.close()


def test_run_dir_of_another_live_job_is_refused(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from flashrecovery.events import RunDir
RunDir(Path({str(tmp_path)!r}))
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"another live job \(pid {other.pid}\)"):
            RunDir(tmp_path)
        other.kill()
        other.wait()
        RunDir(tmp_path).close()


def test_the_lock_does_not_outlive_the_launcher_in_its_workers(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline()  # vfork returns before close-on-exec
        run_dir.close()
        RunDir(tmp_path).close()
        worker.kill()


@pytest.mark.parametrize("path", ["/proc/flashrecovery", "file/run"])
def test_unwritable_run_dir_is_a_clear_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir(tmp_path / path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_run_dir_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir(tmp_path / "run")


def test_no_run_dir_is_a_clear_error(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert files.controller() is None and files.rank_table() is None and not files.is_live()
    with pytest.raises(ConfigError, match="is not a run directory"):
        files.events()
    files.controller_path.write_text('{"address": "x"}')
    with pytest.raises(ConfigError, match="address, pid and token"):
        files.controller()
    files.controller_path.write_text("[]")
    with pytest.raises(ConfigError, match="a JSON object is needed"):
        files.controller()


def test_rank_table_readers_never_see_half_a_table(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    small, large = [{"rank": 0}], [{"rank": r} for r in range(500)]
    run_dir.write_rank_table(0, small)
    code = f"""
from pathlib import Path
from flashrecovery.events import RunFiles
reader, seen = RunFiles(Path({str(tmp_path)!r})), set()
while True:
    table = reader.rank_table()
    seen.add(len(table["ranks"]))
    if table["generation"] == -1:
        print(sorted(seen))
        break
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as reader:
        deadline = time.monotonic() + 20
        for i in range(100):
            run_dir.write_rank_table(i, large if i % 2 else small)
        time.sleep(0.5)
        while reader.poll() is None and time.monotonic() < deadline:
            run_dir.write_rank_table(-1, small)
            time.sleep(0.01)
        assert reader.stdout is not None
        assert set(json.loads(reader.stdout.read())) <= {1, 500}
    run_dir.close()
