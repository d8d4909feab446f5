"""Aborts of communicators that take 1.5 s, over the fake of NCCL, and what may happen meanwhile.

New communicators are made beside them, and the fake ends a process that launches something before all of its aborts
have returned. The end is that of the same launch without a fault, bit for bit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests import gpu_check
from tests.support import fake_nccl
from tests.support import megatron as mg
from tests.support.jobs import DDP, FSDP, Job, Layout, RunningJob, check_clean, check_fired, check_same
from tests.support.nccl_jobs import NEEDS, killed_in_every_phase, options, references, run

pytestmark = pytest.mark.timeout(500)  # some ten cold starts of a process on two cores

KINDS = ("nccl-legacy", "nccl2")
LAYOUTS = (DDP, FSDP, gpu_check.ZERO2, mg.DP4_DISTRIBUTED)
PHASES = ("quiescing", "regrouping", "restoring", "verifying", "resuming")
FIRST = "rank=1,fault=sigkill,at=backward,step=3"


def _slow(kind: str, milliseconds: int = 1500) -> dict[str, str]:
    return {fake_nccl.KIND: kind, "FAKE_NCCL_ABORT_MS": str(milliseconds)}


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    return references(tmp_path_factory)


def _cases() -> list[object]:
    return [
        pytest.param(layout, kind, id=f"{layout.name}-{kind}", marks=[*filter(None, [NEEDS.get(layout.script)])])
        for layout in LAYOUTS
        for kind in KINDS
    ]


@pytest.mark.grid
@pytest.mark.parametrize(("layout", "kind"), _cases())
def test_a_kill_in_every_phase(layout: Layout, kind: str, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    inject = killed_in_every_phase(layout)
    job = run(tmp_path / "run", layout, inject=inject, standby=1, env=_slow(kind))
    check_fired(job, len(inject))
    check_same(job, reference(layout))


def _second_deaths() -> list[object]:
    """One that tells most in `make test`."""
    return [
        pytest.param(
            layout,
            kind,
            phase,
            id=f"{layout.name}-{kind}-{phase}",
            marks=[
                *filter(None, [NEEDS.get(layout.script)]),
                *([] if (layout, kind, phase) == (FSDP, "nccl2", "regrouping") else [pytest.mark.grid]),
            ],
        )
        for layout in LAYOUTS
        for kind in KINDS
        for phase in PHASES
    ]


@pytest.mark.parametrize(("layout", "kind", "phase"), _second_deaths())
def test_a_survivor_dies_while_the_first_aborts_are_under_way(
    layout: Layout, kind: str, phase: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """Those that are left have communicators that were made in vain, and abort these, too."""
    inject = [FIRST, f"rank=2,fault=sigkill,at=recovery:{phase}"]
    job = run(tmp_path / "run", layout, inject=inject, standby=1, env=_slow(kind))
    check_fired(job, 2)
    check_same(job, reference(layout))
    assert {rank for recovery in job.of("recovery_finished") for rank in recovery["victims"]} == {1, 2}, job.explain()


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [DDP, FSDP], ids=lambda layout: layout.name)
@pytest.mark.parametrize("fault", ["sigstop", "hang"])
@pytest.mark.parametrize("phase", ["regrouping", "restoring"])
def test_a_survivor_stands_still_while_the_first_aborts_are_under_way(
    phase: str, fault: str, layout: Layout, kind: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """It is fenced, which waits for the aborts of the others, and those are a second round of them. In a recovery only
    the time for an answer tells."""
    inject = [FIRST, f"rank=2,fault={fault},at=recovery:{phase}"]
    config = {"timeouts": {"regroup_s": 10.0, "restore_s": 10.0}}
    job = run(tmp_path / "run", layout, inject=inject, standby=1, env=_slow(kind), config=config)
    check_fired(job, 2)
    check_same(job, reference(layout))


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [DDP, FSDP], ids=lambda layout: layout.name)
@pytest.mark.parametrize("fault", ["sigstop", "hang"])
def test_a_rank_that_stands_still_in_a_step_is_fenced_behind_the_aborts_of_the_others(
    fault: str, layout: Layout, kind: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """With GPUs that are joined, where an earlier end would take the others along."""
    env = {**_slow(kind), "FAKE_NCCL_NVLINK": f"4:{tmp_path}/domains"}
    inject = [f"rank=1,fault={fault},at=backward,step=3"]
    config = {"timeouts": {"hang_step_s": 4.0}}
    job = run(tmp_path / "run", layout, inject=inject, standby=1, env=env, config=config)
    check_fired(job)
    assert not [*(tmp_path / "domains" / "0").glob("faulted.*")], "an abort after another one had ended"
    check_same(job, reference(layout))


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["detected", "quiesce", "replace"])
def test_a_job_is_told_to_end_while_aborts_are_under_way(moment: str, number: int, kind: str, tmp_path: Path) -> None:
    """Nothing of it is left, and no process has met a rule of NCCL's."""
    fake_nccl.build()
    slow = replace(FSDP, flags=("--step-time=30",))
    job = RunningJob(tmp_path / "run", FSDP, standby=1, inject=[FIRST], **options(slow, 400, _slow(kind, 4000)))
    if moment == "detected":
        job.wait_for("recovery_started")
    else:
        job.wait_for("recovery_phase", name=moment)  # which is over
    job.popen.send_signal(number)
    ended = job.wait()
    assert ended.code > 0, ended.explain()
    assert not [log.name for log in job.logs() if "fake NCCL:" in log.read_text()], ended.explain()
    check_clean(ended)
