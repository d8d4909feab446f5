"""Fallback checkpoints of elastic jobs whose replicas have several ranks and have all of the state each: HSDP, and
DistributedDataParallel over layers that a script divides. Read by another number of the same replicas, bit for bit as a
job that was started in that size from that step's state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_checkpoints import dead_job, launched
from tests.support.elastic_checkpoints import started as began_otherwise
from tests.support.elastic_replicas import EACH, STEPS, check_goes_on_alike
from tests.support.elastic_replicas import start as start_replicas
from tests.support.jobs import RunningJob, check_clean

pytestmark = [pytest.mark.timeout(600), pytest.mark.grid]
KINDS = {"hsdp": (), "tensor": ("--kind", "tensor"), "tensor-stride": ("--kind", "tensor", "--stride")}


def begin(kind: str) -> Callable[..., RunningJob]:
    """As :mod:`tests.support.elastic_checkpoints` starts jobs: by ranks."""

    def started(folder: Path, *flags: str, config: Any, nproc: int) -> RunningJob:
        of_replicas = {**config, "elastic": {**config["elastic"], "max": nproc // EACH}}
        return start_replicas(folder, *KINDS[kind], *flags, replicas=nproc // EACH, config=of_replicas)

    return started


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_died_whole_goes_on_in_another_size(kind: str, before: int, after: int, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, nproc=before * EACH, begin=begin(kind))[-1]
    job = launched(tmp_path, "again", after * EACH, begin=begin(kind))
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    other = began_otherwise(tmp_path, before * EACH, version, after * EACH, begin=begin(kind))
    check_goes_on_alike(job, other, version, after * EACH, STEPS)
    check_clean(job)
