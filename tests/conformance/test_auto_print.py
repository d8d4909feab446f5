"""``--auto=print``: the patch that it prints applies, and the patched script survives kills with the same result."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import (
    ENVIRONMENT,
    PROGRAM,
    ROOT,
    Job,
    Layout,
    check_clean,
    check_fired,
    check_recovered,
    run_job,
)
from tests.support.unmodified import printed

SCRIPT = ROOT / "tests" / "scripts" / "auto_loops.py"
TIMEOUT_S = 300
OFFERED = ("epochs", "gan", "recurrent", "nano", "by_hand", "fsdp2", "accumulated", "fsdp2_epochs", "trainer")
OFFERED += ("left", "endless", "skips", "imagenet")
FEW = ("accumulated",)
"""With fewer steps."""
REFUSED = {
    "top_break": "which a `while` loop of epochs does not count",
    "accumulation": "taken in some rounds only",
    "flushed": "an optimizer's step outside of the loop of steps",
    "averaged": "a line that is printed below the block calls mse()",
    "teacher": "recovery.data() tells the sampler its epoch, which this script does not",
    "mingpt": "may change top, which is a variable of another function",
    "tutorial": "may begin where a checkpoint says that the script loads",
    "streamed": "neither a range() nor a DataLoader",
    "comprehension": "is in no loop that is led back",
}
KILLS = ((1, "backward", 3), (0, "forward", 7), (1, "below", 9), (0, "optimizer", 11))

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def print_patch(folder: Path, shape: str) -> subprocess.CompletedProcess[str]:
    """Of a copy of the script in ``folder``."""
    shutil.copy(SCRIPT, folder / "train.py")
    command = [*PROGRAM, "run", "--auto=print", "--nproc-per-node", "2", "train.py", shape]
    env = {**os.environ, **ENVIRONMENT}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=TIMEOUT_S, check=False)


def run(path: Path, script: Path, shape: str, inject: list[str]) -> Job:
    layout = Layout(shape, "", nproc=2)
    return run_job(path, layout, script=script, flags=(shape,), inject=inject, timeout_s=TIMEOUT_S, standby=1)


def check_lines(job: Job, reference: Job, rank: int, deaths: int) -> None:
    """By hand a line of a step that is done again comes twice, with the same values; and a rank that dies when its step
    counts has not printed it."""
    own, wanted = (list(dict.fromkeys(printed(one, rank))) for one in (job, reference))
    assert own == [line for line in wanted if line in own] and len(wanted) - len(own) <= deaths, job.explain()


def check_patched(tmp_path: Path, shape: str, kills: tuple[tuple[int, str, int], ...]) -> None:
    found = print_patch(tmp_path, shape)
    assert found.returncode == 0 and found.stdout.startswith("--- a/train.py\n+++ b/train.py\n"), found.stderr
    assert "unprotected" not in found.stderr, found.stderr
    script = tmp_path / "train.py"
    assert script.read_bytes() == SCRIPT.read_bytes() and {path.name for path in tmp_path.iterdir()} == {"train.py"}
    subprocess.run(["git", "apply", "-"], input=found.stdout, text=True, cwd=tmp_path, check=True)
    reference = run(tmp_path / "reference", SCRIPT, shape, [])
    job = run(
        tmp_path / "run", script, shape, [f"rank={rank},fault=sigkill,at={at},step={step}" for rank, at, step in kills]
    )
    assert reference.code == job.code == 0, job.explain()
    assert reference.digests and job.digests == reference.digests, job.explain()
    for rank in (0, 1):
        check_lines(job, reference, rank, sum(victim == rank for victim, _, _ in kills))
    assert not job.notices("not_registered") and not job.notices("unprotected"), job.explain()
    check_fired(job, len(kills))
    check_recovered(job, (0, 1))
    check_clean(job)


def test_the_patched_script_survives(tmp_path: Path) -> None:
    check_patched(tmp_path, "left", ((1, "backward", 5), (0, "below", 9)))


@pytest.mark.grid
@pytest.mark.parametrize("shape", OFFERED)
def test_each_shape(shape: str, tmp_path: Path) -> None:
    steps = (2, 4, 5, 7) if shape in FEW else (3, 7, 9, 11)
    check_patched(tmp_path, shape, tuple((rank, at, i) for (rank, at, _), i in zip(KILLS, steps, strict=True)))


@pytest.mark.grid
@pytest.mark.parametrize("shape", REFUSED)
def test_what_cannot_be_written_is_refused_with_its_line(shape: str, tmp_path: Path) -> None:
    found = print_patch(tmp_path, shape)
    said = re.sub(r"\s*\n(\[rank\d\])?\s*", " ", found.stderr)
    assert found.returncode == 1 and not found.stdout, found.stderr
    assert re.search(r"train\.py:\d+", said) and REFUSED[shape] in said, found.stderr
