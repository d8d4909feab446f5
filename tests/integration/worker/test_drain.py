"""A survivor whose operations do not let go of their tensors is replaced: what is left of them might write into what it
restores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import DDP, ROOT, SMALL, check_recovered, check_same, run_job

SCRIPT = ROOT / "tests" / "scripts" / "stuck_abort.py"
CONFIG = {"timeouts": {"drain_s": 0.5}}


@pytest.mark.grid
def test_a_survivor_that_is_not_quiet_is_replaced(tmp_path: Path) -> None:
    def flags(stuck: int) -> list[str]:
        return [str(stuck), *SMALL, "--steps", "8"]

    reference = run_job(tmp_path / "reference", DDP, script=SCRIPT, flags=flags(-1))
    job = run_job(
        tmp_path / "job",
        DDP,
        script=SCRIPT,
        flags=flags(2),
        config=CONFIG,
        inject=["rank=1,fault=sigkill,at=backward,step=3"],
    )
    check_same(job, reference)
    check_recovered(job, [1, 2])
    (recovery,) = job.of("recovery_finished")
    assert recovery["generation"] == 1, "the second victim joins the recovery"
    assert recovery["resume_step"] in (2, 3), "2: the others had not begun to change what rank 1 had left behind"
    (stop,) = job.notices("stop_failed")
    assert stop["rank"] == 2 and "DrainError" in stop["text"] and "stuck_aborts=('0'," in stop["text"]
