"""Elastic jobs: a rank dies and is not replaced, and the others go on as a job that was resized by command at the
same step, bit for bit, which goes on as a job that was started in the new size from that step's state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import Course, check_goes_on_alike, command, commanded, never, often, shrink, start
from tests.support.jobs import Job, Layout, check_clean, check_fired, run_job

pytestmark = pytest.mark.timeout(240)
AT = 9
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
VICTIMS = (0, 1, 3)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Job]:
    """The job that is resized by command, undisturbed: from this step on to this size. Each is made once, and is itself
    compared with a job that was started in the new size from that step's state."""

    @cache
    def job(step: int, size: int) -> Job:
        return commanded(tmp_path_factory.mktemp(f"resized-{step}-{size}"), step, size)

    return job


def check_shrunk(job: Job, resized: Callable[[int, int], Job], left: list[int]) -> None:
    """These ranks have left together, and the others go on as if that had been commanded."""
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    size = 4 - len(left)
    assert event["left"] == left and event["replicas"] == size, job.explain()
    assert event["step"] in (AT, AT + 1), job.explain()
    assert all(recovery["left"] == recovery["victims"] for recovery in job.of("recovery_finished"))
    check_goes_on_alike(job, resized(event["step"], size), event["step"], size)
    check_clean(job)


def test_the_example_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples/gpt/train_elastic.py"
    job = run_job(
        tmp_path / "run",
        Layout("example", "", nproc=3),
        script=example,
        flags=["--steps", "8", "--batch-size", "2", "--global-batch-size", "12"],
        standby=0,
        config={"elastic": {"min": 2, "max": 3, "replace": "never"}},
        inject=["rank=2,fault=sigkill,at=backward,step=4"],
    )
    assert job.code == 0 and "step=7 loss=" in job.output, job.explain()
    check_fired(job)
    (event,) = job.of("job_resized")
    assert event["left"] == [2] and event["replicas"] == 2
    check_clean(job)


OFTEN = {("backward", 0)}


def kills() -> list[Any]:
    """Each victim in each phase; one of them in every run of the tests, the rest in the grid."""
    return [
        pytest.param(phase, victim, id=f"{phase}-{victim}", marks=() if (phase, victim) in OFTEN else pytest.mark.grid)
        for phase in PHASES
        for victim in VICTIMS
    ]


@pytest.mark.parametrize(("phase", "victim"), kills())
def test_killed_and_not_replaced(phase: str, victim: int, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    job = start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait()
    check_fired(job)
    check_shrunk(job, resized, [victim])


@pytest.mark.grid
@pytest.mark.parametrize("fault", ["raise", "exit", "sigstop"])
def test_other_losses(fault: str, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    job = start(tmp_path / "run", inject=[f"rank=2,fault={fault},at=backward,step={AT}"]).wait()
    check_fired(job)
    check_shrunk(job, resized, [2])


@pytest.mark.grid
def test_two_at_once(tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    check_ends_as_resized(job, resized, [0, 2])


@pytest.mark.parametrize("state", often(("quiescing", "regrouping", "verifying"), ()))
def test_a_second_death_during_the_change(state: str, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}", f"rank=3,fault=sigkill,at=recovery:{state}"]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    check_ends_as_resized(job, resized, [1, 3])


@pytest.mark.parametrize("state", often(("quiescing", "regrouping"), ()))
def test_a_death_during_a_command(state: str, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    faults = [f"rank=1,fault=sigkill,at=recovery:{state}"]
    running = start(tmp_path / "run", None, "--step-time", "100", inject=faults)
    running.wait_for("job_started")
    assert command(running, 3, AT) == ""
    job = running.wait()
    check_fired(job)
    # A rank that dies before the decision leaves instead of the last one; after it, it leaves as well.
    check_ends_as_resized(job, resized, [1] if state == "quiescing" else [1, 3])


def check_ends_as_resized(job: Job, resized: Callable[[int, int], Job], left: list[int]) -> None:
    """These ranks have left, at the same step, and the others go on as if that had been commanded."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, size = events[-1]["step"], 4 - len(left)
    assert {event["step"] for event in events} == {step} and events[-1]["replicas"] == size, job.explain()
    check_goes_on_alike(job, resized(step, size), step, size)
    check_clean(job)


def test_again_and_again_down_to_one(tmp_path: Path) -> None:
    """Each kill strikes in a job that has become smaller; the last one goes on alone."""
    faults = [f"rank={rank},fault=sigkill,at=forward,step={step}" for step, rank in enumerate((0, 2, 1), AT - 4)]
    job = start(tmp_path / "run", never(1), inject=faults).wait()
    check_fired(job, 3)
    assert [event["replicas"] for event in job.of("job_resized")] == [3, 2, 1], job.explain()
    assert job.code == 0 and set(Course.of(job).ends) == {0}, job.explain()
    check_clean(job)


@pytest.mark.parametrize("victim", often((0, 2), (2,)))
def test_replaced_in_the_new_size(victim: int, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    """After a command has taken one away, a rank dies that has room: its replacement comes into the smaller job."""
    running = start(
        tmp_path / "run",
        {"elastic": {"min": 2, "max": 4}},
        *("--step-time", "100"),
        standby=1,
        inject=[f"rank={victim},fault=sigkill,at=backward,step={AT + 3}"],
    )
    running.hold(AT - 3)
    running.wait_for("job_started")
    shrink(running, 3, AT)
    job = running.wait()
    check_fired(job)
    assert job.code == 0 and len(job.of("job_resized")) == 1, job.explain()
    assert job.of("recovery_finished")[-1]["victims"] == [victim], job.explain()
    assert job.of("recovery_finished")[-1]["left"] == [], job.explain()
    check_goes_on_alike(job, resized(AT, 3), AT, 3)
    check_clean(job)


def test_two_commands_one_at_once(tmp_path: Path) -> None:
    running = start(tmp_path / "run")
    running.hold(3)
    running.wait_for("job_started")
    assert "allowed" in command(running, 4) and "allowed" in command(running, 1)
    assert command(running, 3) == ""
    running.hold(11)
    running.wait_for("recovery_finished")
    shrink(running, 2, 14)
    job = running.wait()
    assert [event["replicas"] for event in job.of("job_resized")] == [3, 2], job.explain()
    assert job.of("job_resized")[1]["step"] == 14 and job.code == 0, job.explain()
    assert set(Course.of(job).ends) == {0, 1} and len({*Course.of(job).ends.values()}) == 1
    check_clean(job)


def test_below_the_least_it_waits_and_then_ends(tmp_path: Path) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}"]
    job = start(tmp_path / "run", never(4, node_wait_s=3.0), inject=faults).wait()
    check_fired(job)
    (failed,) = job.of("job_failed")
    assert job.code != 0 and "fewer than elastic.min = 4" in failed["reason"], job.explain()
    assert not job.of("job_resized") and job.notices("waiting_for_node"), job.explain()
    check_clean(job)


@pytest.mark.grid
def test_plain_modules(tmp_path: Path) -> None:
    """The script sums the gradients itself."""
    running = start(tmp_path / "commanded", None, "--step-time", "100", "--mode", "plain")
    running.wait_for("job_started")
    assert command(running, 3, AT) == ""
    commanded = running.wait()
    faults = [f"rank=0,fault=sigkill,at=backward,step={AT}"]
    job = start(tmp_path / "run", None, "--mode", "plain", inject=faults).wait()
    check_fired(job)
    assert [e["step"] for e in (*job.of("job_resized"), *commanded.of("job_resized"))] == [AT, AT], job.explain()
    check_goes_on_alike(job, commanded, AT, 3)
    check_clean(job)


def test_checkpoints_of_another_size(tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    """All processes of the smaller job die at once: it goes back to a checkpoint, perhaps one of the larger job. So
    does a job that is launched with fewer ranks."""
    config = {
        "elastic": {"min": 2, "max": 4},
        "checkpoint": {"dir": str(tmp_path / "checkpoints"), "interval_s": 0.3, "keep": 100},
    }
    running = start(tmp_path / "run", config, "--step-time", "400")
    running.hold(AT - 3)
    running.wait_for("job_started")
    shrink(running, 3, AT)
    running.wait_for("checkpoint_saved")  # the first one may be announced too early, and is announced again 3 s later
    running.kill(0, 1, 2)
    job = running.wait()
    assert job.code == 0 and job.of("fallback_started"), job.explain()
    if job.of("fallback_started")[0]["version"] >= AT:
        check_goes_on_alike(job, resized(AT, 3), AT, 3)
    check_clean(job)
    smaller = {**config, "elastic": {"min": 1, "max": 2}, "resume": True}
    launched = start(tmp_path / "launched", smaller, nproc=2).wait()
    assert launched.code == 0 and launched.of("job_started")[0]["step"] > 0, launched.explain()
    assert set(Course.of(launched).ends) == {0, 1}, launched.explain()
    check_clean(launched)


REFUSED = {
    "loader": "recovery.data() in an elastic job",
    "no-batches": "has not said where its batches come from",
    "broken-off": "has not gone through its micro-batches",
    "in-a-list": "before it computed the one before",
    "batch-norm": "running statistics of BatchNorm",
    "per-rank": "differ between the ranks",
    "subgroup": "process group of 2 of its 4 ranks",
}


@pytest.mark.parametrize("mode", often(REFUSED, ("loader",)))
def test_scripts_that_are_refused(mode: str, tmp_path: Path) -> None:
    job = start(tmp_path / "run", {"elastic": {"min": 2, "max": 4}}, "--mode", mode).wait()
    assert job.code != 0 and REFUSED[mode] in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)
