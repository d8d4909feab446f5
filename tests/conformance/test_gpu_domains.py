"""A node with two (labelled) NVLink domains loses all ranks of one at one moment: what has their state is in the other.
Copies that outlive processes are switched off, so that only their place helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import FSDP, Job, Layout, References, RunningJob, check_fired, check_same, run_job

pytestmark = pytest.mark.timeout(300)

STEPS = 10
DOMAIN = (0, 1)
IN_RECOVERY = ("regrouping", "restoring", "verifying", "resuming")


def _options(redundancy: str) -> dict[str, Any]:
    config = {
        "gpu_domain": len(DOMAIN),
        "redundancy": redundancy,
        "snapshots": {"keep": "never"},
        "max_failures_per_step": 4,
        "max_kills_per_step": 4,
    }
    return {"config": config, "steps": STEPS}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    launch = lambda path, layout: run_job(path, layout, standby=0, **_options("auto"))  # noqa: E731
    return References(lambda: tmp_path_factory.mktemp("reference"), launch)


def _check(job: Job, reference: Job) -> None:
    check_same(job, reference)
    assert not job.of("fallback_started"), job.explain()
    said = [notice["text"] for notice in job.notices("redundancy")]
    assert any("survives the loss of a rank, or of the GPUs that share NVLink" in text for text in said), said


@pytest.mark.parametrize("redundancy", ["neighbor", "parity"])
def test_all_ranks_of_a_domain_are_killed_at_once(
    redundancy: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    job = RunningJob(tmp_path / "run", FSDP, flags=("--step-time=50",), **_options(redundancy))
    job.wait_for_step(4)
    job.kill(*DOMAIN)
    ended = job.wait()
    assert {rank for e in ended.of("recovery_finished") for rank in e["victims"]} == {*DOMAIN}, ended.explain()
    _check(ended, reference(FSDP))


@pytest.mark.grid
@pytest.mark.parametrize("state", IN_RECOVERY)
@pytest.mark.parametrize("redundancy", ["neighbor", "parity"])
def test_and_in_the_recovery_of_one_of_them(
    redundancy: str, state: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """The replacement dies, and the other rank of the domain, when they come to this state."""
    inject = ["rank=1,fault=sigkill,at=backward,step=4"]
    inject += [f"rank={rank},fault=sigkill,at=recovery:{state}" for rank in DOMAIN]
    job = run_job(tmp_path / "run", FSDP, inject=inject, standby=2, **_options(redundancy))
    check_fired(job, len(inject))
    _check(job, reference(FSDP))
