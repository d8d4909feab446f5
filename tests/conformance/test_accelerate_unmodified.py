"""accelerate's own loop by a DeepSpeed engine, by the key alone. Killed, it ends with the state and the lines that it
has with the key switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, check_clean, check_fired, check_recovered, run_job
from tests.support.unmodified import output_of

skip_module_without("deepspeed", "accelerate")

SCRIPT = ROOT / "tests" / "scripts" / "accelerate_unmodified.py"
TIMEOUT_S = 300
pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.deepspeed, pytest.mark.grid]


def run(path: Path, zero: int, *more: str, **kwargs: Any) -> Job:
    flags = ("--zero", str(zero), *more, "--output", str(path.parent / f"{path.name}-output"))
    return run_job(path, Layout("accelerate", "", nproc=2), script=SCRIPT, flags=flags, timeout_s=TIMEOUT_S, **kwargs)


def printed(job: Job, rank: int) -> list[str]:
    return [line for line in output_of(job, rank).splitlines() if line.startswith((f"rank={rank} ", "digest "))]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "kills",
    [
        ((1, "backward", 3), (0, "forward", 8), (1, "optimizer", 13), (0, "between", 17)),
        ((1, "optimizer", 2), (0, "optimizer", 4), (1, "grad-sync", 7), (0, "commit", 13)),
    ],
    ids=["phases", "optimizer"],
)
def test_the_key_alone(zero: int, kills: tuple[tuple[int, str, int], ...], tmp_path: Path) -> None:
    """Deaths within an accumulation, and where the engine steps in accelerate's ``backward()``."""
    reference = run(tmp_path / "reference", zero, "--off", standby=0)
    assert reference.code == 0 and reference.digests, reference.explain()
    job = run(tmp_path / "run", zero, inject=faults(*kills))
    assert job.code == 0 and job.digests == reference.digests, job.explain()
    for rank in reference.digests:
        assert printed(job, rank) == printed(reference, rank), job.explain()
    check_fired(job, len(kills))
    check_recovered(job, (0, 1))
    failed = {event["kind"] for event in job.of("failure_detected")}
    assert failed == {"killed"}, job.explain()
    check_clean(job)
