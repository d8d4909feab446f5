"""A transfer that does not come to its end: only the rank that is to blame is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import DDP, check_fired, check_same, run_job

SOURCE = 0


@pytest.mark.slow
def test_only_the_source_that_hangs_is_replaced_not_who_waits_for_it(tmp_path: Path) -> None:
    """The replacement of rank 1 waits for a source that hangs. Both would miss the controller's deadline."""
    reference = run_job(tmp_path / "reference", DDP, steps=8, standby=0)
    config = tmp_path / "config.yaml"
    config.write_text("timeouts: {restore_s: 4, stop_ack_s: 4, mutation_grace_s: 2}\n")
    inject = ["rank=1,at=backward,step=4", f"rank={SOURCE},fault=hang,at=recovery:restoring"]
    job = run_job(tmp_path / "run", DDP, steps=8, inject=inject, options=["--config", str(config)])
    check_same(job, reference)
    check_fired(job, 2)
    assert [n["rank"] for n in job.notices("restore_failed")] == [1], job.explain()
    assert [e["rank"] for e in job.of("failure_detected")] == [1, SOURCE], job.explain()
