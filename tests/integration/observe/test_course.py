"""A real job, killed and killed again: page, terminal and report show the same course, and its parts add up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.cli.status import look_at
from flashrecovery.events import RunFiles
from flashrecovery.observe.course import Wait
from tests.integration.observe.test_observe import TINY, TWO, get, url_of
from tests.support.jobs import DDP, RunningJob, check_clean

TOKENS = 4 * 2 * 32
"""Of a step: ranks, batch and context of the small example."""


def tool(*arguments: str) -> str:
    command = [sys.executable, "-m", "flashrecovery.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def adds_up(goodput: dict[str, Any]) -> None:
    parts = [v for name, v in goodput.items() if name.endswith("_s") and name != "wall_s"]
    assert round(sum(parts) * 1e6) == round(goodput["wall_s"] * 1e6), goodput
    assert goodput["trained_s"] / goodput["wall_s"] == pytest.approx(goodput["share"])


def of_recoveries(course: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (m["victims"], m["cause"], m["resume_step"], round(m["total_s"], 3), round(m["at_s"], 3))
        for m in course["recoveries"]
    ]


def test_page_terminal_and_report_show_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--step-time", "100"]
    job = RunningJob(run, DDP, steps=100_000, standby=0, flags=flags, options=["--observe-port", "0"])
    job.wait_for("job_started", timeout_s=120)
    url = url_of(job)
    time.sleep(3)
    job.kill(1)
    (event,) = [job.wait_for("recovery_finished", timeout_s=120)]
    time.sleep(4)
    page = json.loads(get(f"{url}api/course"))
    live = json.loads(tool("status", str(run), "--json"))["course"]
    text = tool("status", str(run))
    picture = get(f"{url}api/picture")

    adds_up(page["goodput"])
    adds_up(live["goodput"])
    assert of_recoveries(page) == of_recoveries(live)
    ((victims, cause, resumed, total, at),) = of_recoveries(page)
    assert (victims, cause, resumed) == ([1], "killed", event["resume_step"])
    assert total == pytest.approx(event["total_s"], abs=1e-3) and page["goodput"]["recovery_s"] == pytest.approx(
        event["total_s"], abs=1e-5
    )
    started = next(e for e in job.events() if e["event"] == "controller_started")
    assert at == pytest.approx(event["monotonic"] - started["monotonic"] - event["total_s"], abs=2e-3)
    assert 0.1 < page["step_s"] < 5 and 0.1 < live["step_s"] < 5, "asked one after the other: not the same step"
    assert page["tokens_per_step"] == live["tokens_per_step"] == TOKENS
    assert page["world_size"] == 4 and len(page["whole"]["ranks"]) == 4
    assert 0 < sum(page["whole"]["steps"]) <= page["version"] <= live["version"]
    assert sum(page["whole"]["tokens"]) == pytest.approx(TOKENS * sum(page["whole"]["steps"]), abs=TOKENS * 60)
    assert "Goodput" in text and "▲" in text and "tokens/s" in text and "1 recovery" in text
    assert f"resumed at step {resumed}" in picture and "<script" not in picture

    job.popen.send_signal(signal.SIGTERM)
    ended = job.wait(20)
    check_clean(ended)
    tool("report", str(run), "--html", str(tmp_path / "report.html"))
    left = json.loads(tool("report", str(run), "--json"))
    adds_up(left["goodput"])
    assert (
        left["course"]["goodput"] == left["goodput"] and left["goodput"]["recovery_s"] == page["goodput"]["recovery_s"]
    )
    assert of_recoveries(left["course"]) == of_recoveries(page)
    assert left["recoveries"][0]["at_s"] == pytest.approx(at, abs=1e-3)
    failed = next(e for e in ended.events if e["event"] == "job_failed")
    assert left["goodput"]["wall_s"] == pytest.approx(failed["monotonic"] - started["monotonic"], abs=1e-5)
    assert failed["step"] >= page["version"]
    # the page had the same buckets, as far as it had come
    known = dict(zip(page["whole"]["at_s"], page["whole"]["steps"], strict=True))
    after = dict(zip(left["course"]["whole"]["at_s"], left["course"]["whole"]["steps"], strict=True))
    assert all(after[at_s] == n for at_s, n in list(known.items())[:-1])
    html = (tmp_path / "report.html").read_text()
    assert f"resumed at step {resumed}" in html and f"{100 * left['goodput']['share']:.2f} %" in html
    assert "http://" not in html and "https://" not in html and "<script" not in html


def waiting_for(run: Path, what: str, where: str) -> Wait:
    """The first such wait that the controller tells of."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        course = look_at(RunFiles(run)).course
        for wait in course.waiting if course is not None else ():
            if what in wait.what and where in wait.where:
                return wait
        time.sleep(0.2)
    raise AssertionError((what, course))


@pytest.mark.grid
def test_what_is_waited_for_is_named_while_it_lasts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--mode", "slow-to-start", "--steps", "100000"]
    job = RunningJob(run, TWO, script=TINY, standby=0, flags=flags)
    while not (run / "controller.json").exists():
        time.sleep(0.05)
    wait = waiting_for(run, "2 of 2 ranks to come to their first step", "time.sleep(12)")
    assert wait.rank == 0 and wait.seconds >= 10 and "tiny.py:" in wait.where
    wait = waiting_for(run, "the first one", "time.sleep(16)")
    assert wait.seconds >= 10
    job.wait_for("job_started", timeout_s=60)
    while json.loads(tool("status", str(run), "--json"))["course"]["version"] < 5:
        time.sleep(0.2)
    assert json.loads(tool("status", str(run), "--json"))["course"]["waiting"] == []
    job.kill(1)
    wait = waiting_for(run, "1 of 2 ranks to come to their first step after a failure", "time.sleep(12)")
    assert wait.rank == 1 and wait.seconds >= 10
    event = job.wait_for("recovery_finished", timeout_s=60)
    job.popen.send_signal(signal.SIGTERM)
    ended = job.wait(20)
    check_clean(ended)
    assert "waiting for rank 0, for 10 s now: tiny.py:" in ended.output and "time.sleep(16)" in ended.output
    html = tmp_path / "report.html"
    text = tool("report", str(run), "--html", str(html))
    (started,) = [e for e in ended.events if e["event"] == "job_started"]
    for longest in (started["start"][0], event["start"][0]):
        assert longest["text"].startswith("time.sleep(12)") and 11.5 < longest["seconds"] < 16
        assert longest["where"] in html.read_text() and longest["where"] in text
    assert "before its first step, at launch" in html.read_text()
    assert "before its first step, in a replacement" in text


@pytest.mark.grid
def test_a_launch_that_is_killed_and_one_that_goes_on_in_the_same_directory(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", {"checkpoint": {"dir": str(tmp_path / "saved"), "interval_s": 2}}
    first = RunningJob(run, DDP, steps=100_000, standby=0, flags=["--step-time", "50"], config=saved)
    first.wait_for("checkpoint_saved", timeout_s=120)
    time.sleep(13)  # its timeline is written every ten seconds
    first.popen.kill()
    first.wait(20)
    seen = json.loads((run / "timeline.json").read_text())["controllers"][0]
    assert seen["version"] > 0
    lost = json.loads(tool("report", str(run), "--json"))
    assert lost["course"]["state"] == "lost" and lost["goodput"]["trained_s"] > 0
    adds_up(lost["goodput"])
    time.sleep(2)
    again = RunningJob(
        run, DDP, steps=seen["version"] + 30, standby=0, flags=["--step-time", "50"], config=saved, options=["--resume"]
    )
    ended = again.wait(240)
    assert ended.code == 0, ended.explain()
    check_clean(ended)
    found = json.loads(tool("report", str(run), "--json"))
    adds_up(found["goodput"])
    launches = [e for e in RunFiles(run).events() if e.event == "controller_started"]
    starts = [e for e in ended.events if e["event"] == "job_started"]
    assert len(launches) == len(starts) == 2 and starts[1]["step"] > 0
    saved_later = max(
        e["version"]
        for e in ended.events
        if e["event"] == "checkpoint_saved" and e["monotonic"] < starts[1]["monotonic"]
    )
    assert starts[1]["step"] == saved_later
    goodput = found["goodput"]
    assert goodput["down_s"] >= 2 and goodput["launch_s"] > 0
    assert goodput["repeated_steps"] == max(seen["version"] - starts[1]["step"], 0)
    assert goodput["wall_s"] == pytest.approx(ended.events[-1]["time"] - launches[0].time, abs=1.0)
    assert [i["kind"] for i in found["course"]["idle"]] == ["launch", "down", "launch"]
