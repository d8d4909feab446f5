"""Elastic jobs on Megatron-LM's unmodified loop do not grow beyond their launch yet: refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic_megatron_lm import Training
from tests.support.jobs import check_clean
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S

pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(300), needs_checkout]


def test_refused_before_the_first_step(tmp_path: Path) -> None:
    config = {"elastic": {"min": 1, "max": 3}}
    job = Training("plain", launched=2).start(tmp_path / "run", config=config).wait(TIMEOUT_S)
    assert job.code != 0 and "Megatron-LM's loop (not tried)" in job.explain(), job.explain()
    assert "elastic.max = 2 is allowed" in job.explain() and not job.of("job_started"), job.explain()
    check_clean(job)
