"""What ``flashrecovery plan --run`` reads from a run directory: measured times, and which failures count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashrecovery import events as ev
from flashrecovery.cli.measured import measure
from flashrecovery.cli.plan import NODE_FAILURES, PROCESS_FAILURES, plan
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.errors import ConfigError
from flashrecovery.events import EventLog, RunDir, RunFiles
from flashrecovery.plan.checkpoint_interval import DAY_S, checkpoint_interval
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.channel import Access
from tests.support.history_samples import FAST, START, at, kill, two_recoveries

DAY = 86_400.0


def joined(count: int, slots: int) -> list[ev.Event]:
    return [at(0, ev.NodeJoined(node=f"node{i}", slots=slots)) for i in range(count)]


def node_lost(t: float, generation: int, ranks: list[int]) -> list[ev.Event]:
    return [
        at(t, ev.NodeLost(generation=generation, node="node1", ranks=ranks)),
        *(at(t, ev.FailureDetected(generation=generation, rank=r, kind="node_lost")) for r in ranks),
        at(t, ev.RecoveryStarted(generation=generation + 1, victims=ranks, cause="node_lost")),
        at(t + 9, ev.RecoveryFinished(generation=generation + 1, resume_step=5, victims=ranks, total_s=9.0)),
    ]


def ten_days() -> list[ev.Event]:
    """Four nodes of eight: one process dies, one is killed on purpose, one node is lost, a spare one goes."""
    return [
        *joined(5, 8),
        at(100, ev.JobStarted(world_size=32, seconds=100.0)),
        at(200, ev.CheckpointSaved(version=5, path="c/5", seconds=30.0, k0_s=1.0, step_s=3.0)),
        *kill(1000, 1, 3, 41, FAST),
        at(2000, ev.FaultInjected(generation=1, rank=7, fault="sigkill")),
        *kill(2000, 2, 7, 60, FAST),
        *node_lost(3000, 2, list(range(8, 16))),
        at(4000, ev.NodeLost(generation=3, node="node4", ranks=[])),
        at(5000, ev.CheckpointSaved(generation=3, version=900, path="c/900", seconds=40.0, k0_s=2.0, step_s=4.0)),
        at(100 + 10 * DAY, ev.JobFinished(generation=3, seconds=10 * DAY, step_s=4.5)),
    ]


def write(folder: Path, events: list[ev.Event]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(e.model_dump_json() + "\n" for e in events))
    return folder


def said(run: Path, *more: str) -> dict[str, Any]:
    arguments = ["--parameters", "7e9", "--run", str(run), "--json", *more]
    found = json.loads(CliRunner().invoke(plan, arguments, catch_exceptions=False).output)
    assert isinstance(found, dict)
    return found


def test_times_and_failures_of_a_run() -> None:
    found = measure(ten_days())
    assert (found.ranks, found.nodes, found.slots) == (32, 4, 8)
    assert found.days == pytest.approx(10.0)
    assert (found.step_s, found.k0_s, found.checkpoint_s) == (4.5, 2.0, 40.0)
    assert (found.process_failures, found.node_failures, found.injected) == (1, 1, 1)
    assert found.process_rate == pytest.approx(1 / 320) and found.node_rate == pytest.approx(1 / 40)
    quick = sum(FAST.values()) - FAST["restore"] - FAST["redo"]
    assert found.recovery_s == pytest.approx(quick), "the median, without what the plan computes itself"
    assert (found.recoveries, found.fallbacks) == (3, 0)


def test_two_ranks_of_one_recovery_are_one_failure() -> None:
    events = [
        at(5, ev.JobStarted(world_size=4, seconds=5.0)),
        at(10, ev.FailureDetected(generation=0, rank=1, kind="killed")),
        at(10, ev.FailureDetected(generation=0, rank=2, kind="exception")),
        at(10, ev.RecoveryStarted(generation=1, victims=[1, 2])),
        at(11, ev.RecoveryFinished(generation=1, resume_step=3, victims=[1, 2], total_s=1.0)),
        at(20, ev.FailureDetected(generation=1, rank=1, kind="killed")),
    ]
    assert measure(events).process_failures == 2


def test_what_was_injected_into_an_earlier_launch_excuses_nothing() -> None:
    events = [
        at(5, ev.JobStarted(world_size=4, seconds=5.0)),
        at(6, ev.FaultInjected(rank=1, fault="sigkill", step=1000)),
        at(10, ev.JobFinished()),
        at(20, ev.JobStarted(world_size=4, seconds=5.0)),
        at(30, ev.FailureDetected(generation=0, rank=1, kind="killed")),
    ]
    found = measure(events)
    assert (found.process_failures, found.injected) == (1, 0)


def test_the_time_of_a_job_that_runs_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", [at(5, ev.JobStarted(world_size=4, seconds=5.0))])
    monkeypatch.setattr("flashrecovery.cli.plan.time.time", lambda: START + 5 + DAY)
    assert said(run)["measured"]["days"] == 0.0
    monkeypatch.setattr(RunFiles, "is_live", lambda _: True)
    assert said(run)["measured"]["days"] == pytest.approx(1.0)


def test_fallbacks_are_no_recoveries_from_memory() -> None:
    events = [
        at(5, ev.JobStarted(world_size=4, seconds=5.0)),
        at(10, ev.FailureDetected(generation=0, rank=1, kind="killed")),
        at(10, ev.RecoveryStarted(generation=1, victims=[1])),
        at(10, ev.FallbackStarted(generation=1, version=3, path="c/3")),
        at(90, ev.RecoveryFinished(generation=1, resume_step=3, victims=[1], total_s=80.0)),
    ]
    found = measure(events)
    assert (found.recoveries, found.fallbacks, found.recovery_s) == (1, 1, 0.0)


def test_how_long_it_ran() -> None:
    assert measure(two_recoveries()).days == pytest.approx(65 / DAY), "from its first step, of which step 0 is at 5 s"
    lost = [*two_recoveries()[:-1]]
    assert measure(lost).days == pytest.approx(55 / DAY), "until the last that is known"
    assert measure(lost, START + 1005).days == pytest.approx(1000 / DAY), "it still runs"
    again = [*lost, at(500, ev.JobStarted(world_size=4, seconds=5.0)), at(600, ev.JobFinished())]
    assert measure(again).days == pytest.approx(155 / DAY), "not between the launches"
    assert measure([]).days == 0.0 and measure([]).node_rate is None


def test_an_older_log_does_not_say_what_a_checkpoint_holds_up() -> None:
    found = measure(two_recoveries())
    assert found.k0_s is None and found.step_s == 0.0 and found.checkpoint_s == 1.0


def test_the_plan_follows_what_was_measured(tmp_path: Path) -> None:
    run = write(tmp_path / "run", ten_days())
    found = said(run)
    assert (found["gpus"], found["nodes"], found["step_s"]) == (32, 4, 4.5)
    assert found["failures_per_day"]["nodes"] == pytest.approx(0.1)
    assert found["failures_per_day"]["processes"] == pytest.approx(0.1)
    checkpoint = found["protections"][0]["with_spares"][0]
    assert checkpoint["interval_s"] == pytest.approx(checkpoint_interval(DAY_S, 2.0, 0.2))
    assert found["measured"]["injected"] == 1
    given = said(run, "--step-s", "9", "--k0-s", "8", "--node-failures", "0.5", "--gpus", "64", "--gpus-per-node", "4")
    assert (given["step_s"], given["nodes"]) == (9.0, 16), "what is given counts"
    assert given["failures_per_day"]["nodes"] == 8.0
    text = CliRunner().invoke(plan, ["--parameters", "7e9", "--run", str(run)], catch_exceptions=False).output
    said_once = " ".join(text.split())
    assert "measured: step 4.50 s; k0 2.00 s" in said_once and "node failures: 1 in 40 days of one" in said_once
    assert "1 injected fault not counted" in said_once


def test_what_was_never_seen_is_not_taken_for_impossible(tmp_path: Path) -> None:
    calm = [*joined(4, 8), at(100, ev.JobStarted(world_size=32, seconds=100.0)), at(100 + DAY, ev.JobFinished())]
    run = write(tmp_path / "run", calm)
    found = said(run)["failures_per_day"]
    assert found["nodes"] == pytest.approx(4 * NODE_FAILURES)
    assert found["processes"] == pytest.approx(32 * PROCESS_FAILURES)
    text = CliRunner().invoke(plan, ["--parameters", "7e9", "--run", str(run)], catch_exceptions=False).output
    assert "node failures: none in 4 days of one, so at most 0.75 a day (95 %); not used" in " ".join(text.split())


def test_the_controller_writes_what_was_measured(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with EventLog(run_dir.events_path) as log:
        service = ControllerService(RunConfig(nproc_per_node=2), Access("the-token-of-this-test-job"), log, run_dir)
        for rank, record in service.machine.job.ranks.items():
            record.health.step_s = 2.0 + rank
        saved = pb.CheckpointSaved(version=7, path="c/7", seconds=5.0, k0_s=0.25)
        service.deliver(pb.AgentMessage(checkpoint=saved), "node")
    run_dir.close()
    (event,) = run_dir.events()
    assert isinstance(event, ev.CheckpointSaved)
    assert (event.version, event.seconds, event.k0_s, event.step_s) == (7, 5.0, 0.25, 3.0)


def test_a_run_that_never_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rank reached its first step there"):
        said(write(tmp_path / "run", joined(2, 8)))
