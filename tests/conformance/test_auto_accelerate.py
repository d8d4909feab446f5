"""accelerate's loops without a Trainer by ``--auto``, without a line of ours: killed, they end with the state that they
have under torchrun, and have printed each line once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ENVIRONMENT, ROOT, Job, Layout, check_clean, check_fired, check_recovered, run_job
from tests.support.unmodified import lines, printed

skip_module_without("accelerate")

SCRIPT = ROOT / "tests" / "scripts" / "auto_accelerate.py"
TIMEOUT_S = 300
SHORT = (1, "forward", 0), (0, "backward", 4), (1, "optimizer", 8), (0, "below", 11)
LONG = (1, "forward", 0), (0, "backward", 9), (1, "optimizer", 12), (0, "below", 18)
KILLS = {
    "nlp": SHORT,
    "fsdp2_nlp": SHORT,
    "amid": ((1, "forward", 3), (0, "below", 3), (0, "commit", 6), (1, "below", 9)),
    "trainer": ((0, "forward", 0), (1, "backward", 7), (0, "optimizer", 8), (1, "below", 15)),
    "bf16": ((0, "forward", 0), (1, "backward", 7), (0, "optimizer", 8), (1, "below", 15)),
    "by_hand": ((1, "backward", 2), (0, "commit", 4), (0, "forward", 5), (1, "optimizer", 9)),
    "fsdp2_by_hand": ((1, "backward", 2), (0, "commit", 4), (0, "forward", 5), (1, "optimizer", 9)),
    "seedable": LONG,
}
"""``amid``: in evaluations and where checkpoints are written. ``nlp``: the last one at the end of an epoch, which the
rest of an accumulation makes."""

pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.grid]


def flags(shape: str, path: Path) -> tuple[str, ...]:
    return shape, "--output", str(path / "output")


@pytest.fixture
def under_torchrun(tmp_path: Path) -> Callable[[str], dict[int, str]]:
    """What each rank has written."""

    def launch(shape: str) -> dict[int, str]:
        path = tmp_path / "torchrun"
        shutil.rmtree(path / "logs", ignore_errors=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--redirects", "3", "--log-dir", str(path / "logs"), str(SCRIPT), *flags(shape, path)]
        subprocess.run(command, check=False, timeout=TIMEOUT_S, cwd=ROOT, env={**os.environ, **ENVIRONMENT})
        return {int(log.parent.name): log.read_text() for log in (path / "logs").glob("*/*/*/stdout.log")}

    return launch


def run(path: Path, shape: str, inject: list[str]) -> Job:
    path.mkdir(exist_ok=True)
    return run_job(
        path / "run",
        Layout(shape, "", nproc=2),
        script=SCRIPT,
        flags=flags(shape, path),
        inject=inject,
        options=("--auto",),
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("shape", KILLS)
def test_after_four_deaths(shape: str, tmp_path: Path, under_torchrun: Callable[[str], dict[int, str]]) -> None:
    reference = under_torchrun(shape)
    check_like(run(tmp_path / "job", shape, faults(*KILLS[shape])), reference)


def test_persistent_workers_of_an_evaluation(tmp_path: Path) -> None:
    """They begin again in each: compared with the same launch without a fault, as they draw less under torchrun."""
    reference = run(tmp_path / "reference", "persistent", [])
    texts = {
        rank: "\n".join([*printed(reference, rank), f"digest rank={rank} {reference.digests[rank]}"]) for rank in (0, 1)
    }
    check_like(run(tmp_path / "job", "persistent", faults(*SHORT)), texts)


def test_resumed_from_a_checkpoint_amid_an_epoch(
    tmp_path: Path, under_torchrun: Callable[[str], dict[int, str]]
) -> None:
    """Which the first launch of the script has saved."""
    begun = under_torchrun("resumed")
    assert sorted(begun) == [0, 1] and "digest" not in begun[0]
    shutil.copytree(tmp_path / "torchrun" / "output", tmp_path / "job" / "output")
    reference = under_torchrun("resumed")
    assert lines(reference[0])[0].split()[1:3] == ["0", "6"]
    kills = (1, "forward", 0), (0, "backward", 2), (1, "optimizer", 8), (0, "below", 18)
    check_like(run(tmp_path / "job", "resumed", faults(*kills)), reference)


def check_like(job: Job, reference: dict[int, str]) -> None:
    """Each rank has said what it says in ``reference``, and four were killed."""
    assert job.code == 0 and sorted(reference) == [0, 1], job.explain()
    for rank, text in reference.items():
        assert printed(job, rank) == lines(text), job.explain()
        assert f"digest rank={rank} {job.digests[rank]}" in text, job.explain()
    check_fired(job, 4)
    check_recovered(job, (0, 1))
    assert not job.notices("not_registered") and not job.notices("unprotected"), job.explain()
    check_clean(job)


def test_batches_that_rank_0_hands_round_are_refused_before_the_first_step(tmp_path: Path) -> None:
    job = run(tmp_path / "job", "dispatched", [])
    assert job.code != 0 and "DataLoaderConfiguration(dispatch_batches=False)" in job.output, job.explain()
    assert not printed(job, 0), job.explain()
    check_clean(job)
