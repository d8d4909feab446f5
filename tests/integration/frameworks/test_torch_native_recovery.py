"""DDP, FSDP2 and HSDP: interrupted at every phase, reset and restored, equal bit for bit to the
undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import results, run_ranks
from tests.support.torch_native_jobs import Fault, Job, run


def train(tmp_path: Path, world: int, job: Job) -> list[tuple[list[float], dict[str, str]]]:
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return results(run_ranks(run, world, tmp_path, folder, job, group=False, deadline_s=80))


CASES = [
    ("ddp", 3),
    ("fsdp2", 3),
    pytest.param("hsdp", 4, marks=[pytest.mark.grid, pytest.mark.mutants]),
]


@pytest.mark.parametrize(("layout", "world"), CASES)
def test_every_phase_in_one_run(tmp_path: Path, layout: str, world: int) -> None:
    phases = ["forward", "backward", "grad-sync", "optimizer"]
    phases += ["param-gather"] if layout != "ddp" else []
    faults = [Fault(0, p, i % world, fresh=i % 2 == 0) for i, p in enumerate(phases)]
    faults += [Fault(3 + i // 2, p, (i + 1) % world, fresh=i % 2 == 1) for i, p in enumerate(phases)]
    faults += [Fault(6, "backward", 0, fresh=True), Fault(6, "optimizer", 1, fresh=True)]
    reference = train(tmp_path, world, Job(layout, watched=False))
    assert train(tmp_path, world, Job(layout)) == reference
    assert train(tmp_path, world, Job(layout, faults=tuple(faults))) == reference


DDP_VARIANTS = {
    "bucket views": Job("ddp", ddp=(("gradient_as_bucket_view", True),), zero_in_place=True),
    "find unused": Job(
        "ddp", ddp=(("find_unused_parameters", True), ("gradient_as_bucket_view", True)), zero_in_place=True
    ),
    "accumulation, comm hook": Job("ddp", accumulate=2, optimizer="sgd", compressed=True),
    "mixed types, first step skipped": Job("ddp", mixed_types=True, skip_first=True),
}


@pytest.mark.parametrize("name", DDP_VARIANTS)
def test_ddp_options(tmp_path: Path, name: str) -> None:
    job = replace(DDP_VARIANTS[name], steps=5)
    faults = (Fault(0, "backward", 0), Fault(1, "backward", 1, fresh=True), Fault(3, "grad-sync", 0))
    reference = train(tmp_path, 3, replace(job, watched=False))
    assert train(tmp_path, 3, replace(job, faults=faults)) == reference


def test_fsdp2_accumulation(tmp_path: Path) -> None:
    job = Job("fsdp2", steps=4, accumulate=2, optimizer="sgd", zero_in_place=True)
    faults = (Fault(0, "backward", 1, fresh=True), Fault(2, "forward", 0), Fault(2, "optimizer", 1, fresh=True))
    reference = train(tmp_path, 2, replace(job, watched=False))
    assert train(tmp_path, 2, replace(job, faults=faults)) == reference
