"""The conformance grid: whatever fails, wherever, the job ends exactly as if nothing had happened.

Each job has its faults at different steps, on the first, a middle and the last rank, so rank 0 is always among the
victims. The representative part runs with ``make test``; ``make grid`` runs everything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrecovery.config import PHASES
from tests.support.jobs import (
    DDP,
    FSDP,
    HSDP,
    LAYOUTS,
    ROOT,
    SMALL,
    Job,
    Layout,
    References,
    RunningJob,
    check_fired,
    check_recovered,
    check_same,
    run_job,
)

STEPS = 14
VICTIMS = ((0, 3), (2, 6), (3, 9))  # rank, step
CONFIG = {"timeouts": {"stopped_s": 0.3}}
FAULTS = ("sigkill", "sigstop", "raise")
Reference = Callable[[Layout], Job]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return References(
        lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: run_job(path, layout, steps=STEPS, standby=0)
    )


def _phases(layout: Layout) -> tuple[str, ...]:
    return tuple(p for p in PHASES if p != "param-gather" or layout is not DDP)


def _grid() -> list[object]:
    """Every phase and fault of every layout; the quick ones are unmarked."""
    quick = {
        (DDP, "backward", "sigkill"),
        (FSDP, "param-gather", "sigkill"),
    }
    cases = []
    for layout in LAYOUTS:
        for phase in _phases(layout):
            for fault in FAULTS:
                marks = [] if (layout, phase, fault) in quick else [pytest.mark.grid]
                cases.append(pytest.param(layout, phase, fault, id=f"{layout.name}-{phase}-{fault}", marks=marks))
    return cases


@pytest.mark.parametrize(("layout", "phase", "fault"), _grid())
def test_fault_in_phase(layout: Layout, phase: str, fault: str, tmp_path: Path, reference: Reference) -> None:
    inject = [f"rank={rank},fault={fault},at={phase},step={step}" for rank, step in VICTIMS]
    job = run_job(tmp_path / "run", layout, steps=STEPS, standby=1, inject=inject, config=CONFIG)
    check_same(job, reference(layout))
    check_fired(job, len(VICTIMS))
    check_recovered(job, [rank for rank, _ in VICTIMS])


STATES = ("quiescing", "replacing", "regrouping", "restoring", "verifying")
QUICK_STATES = {(DDP, "restoring")}


@pytest.mark.parametrize(
    ("layout", "state"),
    [
        pytest.param(
            layout,
            state,
            id=f"{layout.name}-{state}",
            marks=[] if (layout, state) in QUICK_STATES else [pytest.mark.grid],
        )
        for layout in (DDP, HSDP)
        for state in STATES
    ],
)
def test_second_failure_in_a_recovery_state(layout: Layout, state: str, tmp_path: Path, reference: Reference) -> None:
    second = 1 if state == "replacing" else 2  # the replacement itself, or a survivor
    inject = ["rank=1,at=backward,step=4", f"rank={second},at=recovery:{state}"]
    job = run_job(tmp_path / "run", layout, steps=STEPS, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, 2)
    check_recovered(job)


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        pytest.param(DDP, (0, 1), id="ddp-0-1"),
        pytest.param(DDP, (0, 2, 3), id="ddp-three-of-four", marks=pytest.mark.grid),
        pytest.param(FSDP, (0, 2), id="fsdp-not-neighbours", marks=pytest.mark.grid),
        pytest.param(HSDP, (0, 1), id="hsdp-same-shard-group", marks=pytest.mark.grid),
        pytest.param(HSDP, (1, 2), id="hsdp-different-groups", marks=pytest.mark.grid),
    ],
)
def test_victims_at_once(layout: Layout, victims: tuple[int, ...], tmp_path: Path, reference: Reference) -> None:
    """More victims than standbys: the second replacement starts cold."""
    inject = [f"rank={rank},at=backward,step=5" for rank in victims]
    job = run_job(tmp_path / "run", layout, steps=STEPS, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, len(victims))


def test_without_standby_and_the_replacement_dies_too(tmp_path: Path, reference: Reference) -> None:
    inject = ["rank=3,at=forward,step=5", "rank=3,at=backward,step=5"]
    job = run_job(tmp_path / "run", DDP, steps=STEPS, standby=0, inject=inject)
    check_same(job, reference(DDP))
    check_fired(job, 2)


@pytest.mark.parametrize("fault", ["exit", "segv"])
@pytest.mark.grid
def test_other_deaths(fault: str, tmp_path: Path, reference: Reference) -> None:
    job = run_job(tmp_path / "run", DDP, steps=STEPS, inject=[f"rank=1,fault={fault},at=backward,step=4"])
    check_same(job, reference(DDP))
    check_fired(job)


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_first_and_last_step(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    inject = ["rank=1,at=backward,step=0", f"rank=2,at=optimizer,step={STEPS - 1}"]
    job = run_job(tmp_path / "run", layout, steps=STEPS, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, 2)


@pytest.mark.parametrize(
    ("layout", "phase"),
    [
        pytest.param(
            x, phase, id=f"{x.name}-{phase}", marks=[] if (x, phase) == (DDP, "commit") else [pytest.mark.grid]
        )
        for x in LAYOUTS
        for phase in ("optimizer", "commit")
    ],
)
def test_a_death_when_others_may_have_finished_the_first_step(
    layout: Layout, phase: str, tmp_path: Path, reference: Reference
) -> None:
    """They go back to the beginning, in place."""
    job = run_job(tmp_path / "run", layout, steps=STEPS, inject=[f"rank=1,at={phase},step=0"])
    check_same(job, reference(layout))
    check_fired(job)
    check_recovered(job, [1])
    assert not job.notices("start_again"), job.explain()


def test_a_corrupted_shard_is_taken_from_its_next_source(tmp_path: Path, reference: Reference) -> None:
    inject = ["rank=1,at=backward,step=4", "rank=1,fault=corrupt,at=recovery:restoring"]
    job = run_job(tmp_path / "run", DDP, steps=STEPS, inject=inject)
    check_same(job, reference(DDP))
    assert job.notices("digest_mismatch"), job.explain()


def test_a_synchronisation_that_only_some_ranks_can_leave(tmp_path: Path, reference: Reference) -> None:
    """Ranks 1 and 3 have all they need for their step; rank 2 lacks what rank 0 had still to send."""
    job = run_job(
        tmp_path / "run",
        HSDP,
        steps=STEPS,
        script=ROOT / "tests" / "scripts" / "hsdp_torn_sync.py",
        flags=[*SMALL, "--steps", str(STEPS), *HSDP.flags],
    )
    check_same(job, reference(HSDP))
    check_recovered(job, [0])
    assert job.of("recovery_finished")[0]["resume_step"] == 4


@pytest.mark.grid
@pytest.mark.timeout(400)  # two jobs of 200 steps and ten recoveries, one after another
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_ten_failures_in_a_row(layout: Layout, tmp_path: Path) -> None:
    """``kill -9`` from outside, ten times, whatever the ranks are doing."""
    flags = ["--step-time", "40"]
    steps = 200
    ref = run_job(tmp_path / "reference", layout, steps=steps, standby=0, flags=flags, timeout_s=170)
    running = RunningJob(tmp_path / "run", layout, steps=steps, standby=2, flags=flags)
    running.wait_for("job_started")
    for number in range(10):
        time.sleep(0.13 * (number % 4) + 0.2)
        os.kill(running.ranks()[(0, 3, 1, 2)[number % 4]], signal.SIGKILL)
        running.wait_for("recovery_finished", 60, number + 1)
    check_same(running.wait(170), ref)
