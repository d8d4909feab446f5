"""Loops that write files, by ``--auto``: killed, each file has what it has without a fault, each line once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_clean, check_fired, run_job
from tests.support.unmodified import output_of

SCRIPT = ROOT / "tests" / "scripts" / "file_loops.py"
TIMEOUT_S = 200
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
STEPS = 12

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def run(path: Path, inject: Sequence[str] = (), *flags: str) -> tuple[Job, dict[str, bytes]]:
    """Returns the files by name, too, and what each rank has printed."""
    files = path.parent / f"{path.name}.files"
    files.mkdir()
    job = run_job(
        path,
        Layout("files", "", nproc=2),
        script=SCRIPT,
        flags=(str(files), *flags),
        inject=inject,
        options=("--auto",),
        timeout_s=TIMEOUT_S,
        standby=1,
    )
    assert job.code == 0, job.explain()
    check_clean(job)
    found = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
    for rank in range(2):
        lines = [line for line in output_of(job, rank).splitlines() if line.startswith(("rank=", "digest"))]
        found[f"printed by rank {rank}"] = "\n".join(lines).encode()
    return job, found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    _, found = run(tmp_path_factory.mktemp("reference") / "run")
    return found


def check_files(found: dict[str, bytes], reference: dict[str, bytes], job: Job) -> None:
    assert len(reference) == 2 * (11 + STEPS + 1), sorted(reference)
    different = [name for name in {*found, *reference} if found.get(name) != reference.get(name)]
    parts = [f"{name}: {found.get(name)!r}, and not {reference.get(name)!r}" for name in sorted(different)]
    assert not different, "\n".join([*parts, job.explain()])


def test_ranks_that_write_are_killed(reference: dict[str, bytes], tmp_path: Path) -> None:
    """Before their writes and after them; one of them twice in a row."""
    places = ((0, "below", 2), (1, "backward", 4), (1, "optimizer", 5), (0, "commit", 9))
    inject = [f"rank={rank},fault=sigkill,at={at},step={step}" for rank, at, step in places]
    job, found = run(tmp_path / "run", inject)
    check_fired(job, len(places))
    check_files(found, reference, job)
    assert not job.notices("not_registered") and not job.notices("setup_differs"), job.explain()


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", PHASES)
def test_each_phase(at: str, rank: int, reference: dict[str, bytes], tmp_path: Path) -> None:
    """In the first step, twice in a row, and in the last epoch."""
    job, found = run(tmp_path / "run", [f"rank={rank},fault=sigkill,at={at},step={step}" for step in (0, 3, 4, 10)])
    check_fired(job, 4)
    check_files(found, reference, job)


@pytest.mark.grid
def test_a_file_of_several_ranks_is_named_and_loses_nothing(reference: dict[str, bytes], tmp_path: Path) -> None:
    inject = ["rank=1,fault=sigkill,at=below,step=5", "rank=0,fault=sigkill,at=below,step=8"]
    job, found = run(tmp_path / "run", inject, "--shared")
    check_fired(job, 2)
    lines = found.pop("shared.txt").decode().splitlines()
    assert {*lines} == {f"rank {rank} step {step}" for rank in range(2) for step in range(STEPS)}, lines
    check_files(found, reference, job)
    assert any("shared.txt" in notice["text"] for notice in job.notices("not_registered")), job.explain()
