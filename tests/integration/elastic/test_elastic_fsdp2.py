"""Elastic jobs with FSDP2: a rank dies and is not replaced, and what is sharded among the ranks is sharded among the
others, bit for bit as in a job that was resized by command at the same step, which goes on as a job that was started in
the new size from that step's state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.elastic import command, never, often
from tests.support.elastic_fsdp2 import (
    Course,
    Resized,
    check_goes_on_alike,
    check_moved,
    resized_once,
    start,
)
from tests.support.jobs import Job, check_clean, check_fired

pytestmark = pytest.mark.timeout(240)
AT = 9
PHASES = (
    *("between", "data", "forward", "param-gather", "backward", "grad-sync", "optimizer-start", "optimizer"),
    *("commit", "below"),
)
VICTIMS = (0, 1, 3)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def check_ends_as_resized(job: Job, resized: Resized, left: Sequence[int], *flags: str) -> None:
    """These ranks have left, at the same step, and the others go on as if that had been commanded."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == sorted(left), job.explain()
    step, size = events[-1]["step"], 4 - len(left)
    assert events[-1]["replicas"] == size and {event["step"] for event in events} <= {step, step - 1}, job.explain()
    check_goes_on_alike(job, resized(step, size, *flags), step, size)
    check_moved(job)
    check_clean(job)


@pytest.mark.grid
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_not_replaced(phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    job = start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait()
    check_fired(job)
    (event,) = job.of("job_resized")
    # Killed before its copies of a version were made, it takes that version with it: the step before is done again.
    assert event["step"] in (AT - 1, AT, AT + 1), job.explain()
    check_ends_as_resized(job, resized, [victim])


@pytest.mark.parametrize("fault", often(("raise", "exit", "sigstop"), ()))
def test_other_losses(fault: str, tmp_path: Path, resized: Resized) -> None:
    job = start(tmp_path / "run", inject=[f"rank=2,fault={fault},at=backward,step={AT}"]).wait()
    check_fired(job)
    check_ends_as_resized(job, resized, [2])


@pytest.mark.grid
def test_two_at_once(tmp_path: Path, resized: Resized) -> None:
    """Neither keeps the other's copies."""
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    check_ends_as_resized(job, resized, [0, 2])


STATES = ("quiescing", "regrouping", "restoring", "reshaping", "verifying", "resuming")


@pytest.mark.parametrize("state", often(STATES, ("reshaping",)))
@pytest.mark.parametrize(("first", "second"), [(1, 3), pytest.param(0, 2, marks=pytest.mark.grid)])
def test_a_second_death_during_the_change(
    first: int, second: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    faults = [f"rank={first},fault=sigkill,at=backward,step={AT}", f"rank={second},fault=sigkill,at=recovery:{state}"]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    check_ends_as_resized(job, resized, [first, second])


@pytest.mark.parametrize("state", often(STATES, ()))
def test_a_death_during_a_command(state: str, tmp_path: Path, resized: Resized) -> None:
    running = start(
        tmp_path / "run",
        "--step-time",
        "100",
        config=never(1),
        inject=[f"rank=1,fault=sigkill,at=recovery:{state}"],
    )
    running.wait_for("job_started")
    assert command(running, 3, AT) == ""
    job = running.wait()
    check_fired(job)
    check_ends_as_resized(job, resized, [1] if state == "quiescing" else [1, 3])


@pytest.mark.grid
def test_again_and_again_down_to_one(tmp_path: Path) -> None:
    """Each kill strikes in a job that has become smaller; the last one goes on alone."""
    faults = [f"rank={rank},fault=sigkill,at=forward,step={step}" for step, rank in enumerate((0, 2, 1), AT - 4)]
    job = start(tmp_path / "run", config=never(1), inject=faults).wait()
    check_fired(job, 3)
    assert [event["replicas"] for event in job.of("job_resized")] == [3, 2, 1], job.explain()
    assert job.code == 0 and set(Course.of(job).ends) == {0}, job.explain()
    check_clean(job)


@pytest.mark.grid
@pytest.mark.parametrize("victim", [0, 2])
def test_replaced_in_the_new_size(victim: int, tmp_path: Path, resized: Resized) -> None:
    """After a command has taken one away, a rank dies that has room: its replacement comes into the smaller job."""
    running = start(
        tmp_path / "run",
        *("--step-time", "100"),
        config={"elastic": {"min": 2, "max": 4}},
        standby=1,
        inject=[f"rank={victim},fault=sigkill,at=backward,step={AT + 3}"],
    )
    running.wait_for("job_started")
    assert command(running, 3, AT) == ""
    job = running.wait()
    check_fired(job)
    assert job.code == 0 and len(job.of("job_resized")) == 1, job.explain()
    assert job.of("recovery_finished")[-1]["victims"] == [victim], job.explain()
    assert job.of("recovery_finished")[-1]["left"] == [], job.explain()
    check_goes_on_alike(job, resized(AT, 3), AT, 3)
    check_clean(job)


@pytest.mark.grid
def test_replaced_in_the_size_of_the_launch(tmp_path: Path) -> None:
    elastic = {"elastic": {"min": 2, "max": 4}}
    undisturbed = start(tmp_path / "undisturbed", config=elastic).wait()
    inject = [f"rank=2,fault=sigkill,at=optimizer,step={AT}"]
    job = start(tmp_path / "run", config=elastic, standby=1, inject=inject).wait()
    check_fired(job)
    assert job.of("recovery_finished")[0]["victims"] == [2] and not job.of("job_resized"), job.explain()
    check_goes_on_alike(job, undisturbed, 0, 4)
    check_clean(job)


@pytest.mark.grid
def test_all_die_in_the_new_size(tmp_path: Path, resized: Resized) -> None:
    """They go back to a checkpoint of that size. (Of another size: test_elastic_checkpoints.py.)"""
    config = {
        "elastic": {"min": 2, "max": 4},
        "checkpoint": {"dir": str(tmp_path / "checkpoints"), "interval_s": 0.3, "keep": 100},
    }
    running = start(tmp_path / "run", "--step-time", "400", config=config)
    running.wait_for("job_started")
    assert command(running, 3, AT) == ""
    running.wait_for("recovery_finished")
    before = len([e for e in running.events() if e["event"] == "checkpoint_saved"])
    while running.wait_for("checkpoint_saved", count=before + 1)["version"] < AT:
        before += 1
    running.kill(0, 1, 2)
    job = running.wait()
    assert job.code == 0 and job.of("fallback_started")[0]["version"] >= AT, job.explain()
    check_goes_on_alike(job, resized(AT, 3), AT, 3)
    check_clean(job)


@pytest.mark.grid
def test_two_at_once_that_keep_each_others_copies(tmp_path: Path) -> None:
    """What one of them had is nowhere: the job says so, and does not go on with less."""
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (1, 2)]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    assert job.code != 0 and "held by no living process" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)


@pytest.mark.grid
def test_a_damaged_message_is_noticed(tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}", "rank=3,fault=corrupt,at=recovery:restoring"]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    assert any("did not arrive as it was sent" in notice["text"] for notice in job.of("notice")), job.explain()
    check_ends_as_resized(job, resized, [1])


FORMS = {
    "kept-unsharded": ("--keep",),
    "mixed-precision": ("--mixed",),
    "tied-named": ("--tied", "--named"),
    "clipped": ("--clip",),
    "gradients-kept": ("--keep-gradients",),
    "momentum": ("--optimizer", "sgd"),
    "uneven-batch": ("--global-batch", "20"),
}


@pytest.mark.parametrize("form", often(FORMS, ()))
def test_forms(form: str, tmp_path: Path, resized: Resized) -> None:
    job = start(tmp_path / "run", *FORMS[form], inject=[f"rank=1,fault=sigkill,at=optimizer,step={AT}"]).wait()
    check_fired(job)
    check_ends_as_resized(job, resized, [1], *FORMS[form])


REFUSED = {
    "offload": "an offload policy",
    "post-forward": "process group of 2 of its 4 ranks",
    "hsdp": "the job is launched with 4 ranks, which are 1 replica of 4 ranks each",
    "dimension": "sharded in dimension",
    "ignored": "is not on all 4 ranks",
    "divide": "set_gradient_divide_factor",
    "compile": "a compiled module",
    "state": "optimizer state 'state/seen'",
}


@pytest.mark.parametrize("what", often(REFUSED, ("hsdp", "state")))
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    elastic = {"elastic": {"min": 2, "max": 4}}
    job = start(tmp_path / "run", "--refused", what, config=elastic).wait()
    assert job.code != 0 and REFUSED[what] in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)


@pytest.mark.grid
def test_without_copies_it_is_refused(tmp_path: Path) -> None:
    config = {"elastic": {"min": 2, "max": 4}, "redundancy": "none"}
    job = start(tmp_path / "run", config=config).wait()
    assert job.code != 0 and "allowed here: auto" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)
