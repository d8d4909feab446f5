"""Ranks whose devices are slow, over the fake of NCCL: the host runs ahead, and its clock does not tell them from those
that wait for them (docs/hangs.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fake_nccl
from tests.support.jobs import DDP, Job
from tests.support.nccl_jobs import run

STEPS = 180  # of which one in ten is measured, and ten have to be
ALL = ",".join(f"{rank}:30" for rank in range(4))


def _slow_ranks(folder: Path, devices: str, kind: str = "nccl-legacy", *flags: str) -> tuple[set[int], Job]:
    """Those that a notice names."""
    env = {fake_nccl.KIND: kind, "FAKE_NCCL_DEVICE_MS": devices}
    job = run(folder / "run", replace(DDP, flags=flags), STEPS, env=env, standby=0)
    assert job.code == 0, job.explain()
    return {notice["rank"] for notice in job.notices("straggler")}, job


@pytest.mark.parametrize("kind", ["nccl-legacy", pytest.param("nccl2", marks=pytest.mark.grid)])
def test_a_rank_whose_device_is_slow_is_named_and_those_that_wait_for_it_are_not(kind: str, tmp_path: Path) -> None:
    named, job = _slow_ranks(tmp_path, "0:10,1:10,2:100,3:10", kind)
    assert named == {2}, job.explain()


@pytest.mark.grid
@pytest.mark.parametrize(
    "devices", [ALL, "", f"{ALL},2:400:8"], ids=["all alike", "quick ones", "a rank is slow to begin"]
)
def test_no_rank_is_named_without_a_reason(devices: str, tmp_path: Path) -> None:
    named, job = _slow_ranks(tmp_path, devices)
    assert not named, job.explain()
