"""DeepSpeed scripts without a line of ours, by the key in their config alone: killed, they end with the same state, and
have printed each line."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import ENVIRONMENT, ROOT, Job, Layout, check_fired, check_recovered, run_job
from tests.support.unmodified import check_same, lines, printed

skip_module_without("deepspeed")

SCRIPT = ROOT / "tests" / "scripts" / "own_loops.py"
TIMEOUT_S = 300
SHAPES = (
    *("epochs", "while_next", "random_batches", "trainer", "generator", "zipped", "early", "shuffled", "module"),
    *("phases", "twice", "logged"),
)
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer", "commit", "below")

pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.deepspeed]


def run(path: Path, shape: str, flags: Sequence[str] = (), inject: Sequence[str] = ()) -> Job:
    layout = Layout(shape, "", nproc=2)
    return run_job(path, layout, script=SCRIPT, flags=(shape, *flags), inject=inject, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """The healthy job of a shape and its flags, which several tests compare with."""
    return functools.cache(lambda shape, *flags: run(tmp_path_factory.mktemp("reference"), shape, flags))


def test_epochs_with_an_accumulation(tmp_path: Path) -> None:
    """Two deaths: in the midst of an accumulation, and of the other rank right after an epoch's last step."""
    flags = ("--accumulation", "2")
    reference = run(tmp_path / "reference", "epochs", flags)
    inject = ["rank=1,fault=sigkill,at=backward,step=2", "rank=0,fault=sigkill,at=forward,step=8"]
    job = run(tmp_path / "run", "epochs", flags, inject)
    check_same(job, reference)
    check_fired(job, 2)
    check_recovered(job, (0, 1))


def test_a_survivor_that_asks_for_its_next_micro_batch(tmp_path: Path, reference_of: Callable[..., Job]) -> None:
    """It is stopped where it fetches it, and goes on in its process."""
    flags = ("--accumulation", "2", "--zero", "1")
    inject = ["rank=1,fault=sigkill,at=backward,step=1", "rank=0,fault=sigkill,at=forward,step=3"]
    job = run(tmp_path / "run", "slow", flags, inject)
    check_same(job, reference_of("slow", *flags))
    check_fired(job, 2)
    assert [event["victims"] for event in job.of("recovery_finished")] == [[1], [0]], job.explain()


@pytest.mark.grid
@pytest.mark.parametrize("zero", [1, 3])
def test_accumulations_that_span_epochs(zero: int, tmp_path: Path) -> None:
    """The third step begins in one epoch and ends in the next; after the last one a micro-batch is left over."""
    flags = ("--accumulation", "3", "--epochs", "2", "--zero", str(zero))
    reference = run(tmp_path / "reference", "epochs", flags)
    inject = [
        "rank=0,fault=sigkill,at=backward,step=2",
        "rank=1,fault=sigkill,at=below,step=2",
        "rank=1,fault=sigkill,at=forward,step=5",
    ]
    job = run(tmp_path / "run", "epochs", flags, inject)
    check_same(job, reference)
    check_fired(job, 3)


@pytest.mark.grid
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_death_after_the_last_step(accumulation: int, tmp_path: Path) -> None:
    """All go through the end of the loop again, with its evaluation."""
    flags = ("--accumulation", str(accumulation), "--epochs", "2")
    reference = run(tmp_path / "reference", "ending", flags)
    (files := tmp_path / "files").mkdir()
    job = run(tmp_path / "run", "ending", (*flags, "--files", str(files)))
    check_same(job, reference)
    check_recovered(job, (0,))


@pytest.mark.grid
@pytest.mark.parametrize("shape", ["counted", "cut_short", "streamed", "walk"])
def test_what_a_source_counts_itself(shape: str, tmp_path: Path) -> None:
    """Loaders, iterators and generators of the script's that change its objects when they are read. Killed in the first
    step, at the beginning of a run of the loop (the sixth step of one that is cut short) and within one."""
    flags = ("--zero", "1")
    reference = run(tmp_path / "reference", shape, flags)
    places = ((1, "forward", 0), (0, "forward", 5), (1, "forward", 8), (0, "backward", 11))
    job = run(tmp_path / "run", shape, flags, [f"rank={r},fault=sigkill,at={at},step={i}" for r, at, i in places])
    check_same(job, reference)
    check_fired(job, 4)


@pytest.mark.grid
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape(shape: str, zero: int, tmp_path: Path, reference_of: Callable[..., Job]) -> None:
    flags = ("--zero", str(zero))
    reference = reference_of(shape, *flags)
    inject = [
        "rank=1,fault=sigkill,at=backward,step=3",
        "rank=0,fault=sigkill,at=forward,step=8",
        "rank=1,fault=sigkill,at=below,step=10",
        f"rank=0,fault=sigkill,at=optimizer,step={11 if shape == 'twice' else 13}",
    ]
    job = run(tmp_path / "run", shape, flags, inject)
    check_same(job, reference)
    check_fired(job, 4)


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", PHASES)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_each_phase(zero: int, at: str, rank: int, tmp_path: Path, reference_of: Callable[..., Job]) -> None:
    """Twice in a row, at the end of an epoch and within one."""
    flags = ("--zero", str(zero), "--accumulation", "2")
    reference = reference_of("epochs", *flags)
    inject = [f"rank={rank},fault=sigkill,at={at},step={step}" for step in (3, 4, 9)]
    job = run(tmp_path / "run", "epochs", flags, inject)
    check_same(job, reference)
    check_fired(job, 3)


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_as_under_torchrun(shape: str, tmp_path: Path, reference_of: Callable[..., Job]) -> None:
    reference = reference_of(shape, "--zero", "2")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    command += ["--redirects", "3", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    subprocess.run([*command, str(SCRIPT), shape], check=True, timeout=TIMEOUT_S, env={**os.environ, **ENVIRONMENT})
    for rank in (0, 1):
        (log,) = tmp_path.glob(f"*/attempt_0/{rank}/stdout.log")
        text = log.read_text()
        assert lines(text) == printed(reference, rank)
        assert f"digest rank={rank} {reference.digests[rank]}" in text


@pytest.mark.grid
@pytest.mark.parametrize("at", ["backward", "below", "forward"])
def test_checkpoints_and_a_log(at: str, tmp_path: Path) -> None:
    jobs = []
    for name, inject in (("reference", []), ("run", [f"rank=0,fault=sigkill,at={at},step=8"])):
        (files := tmp_path / f"{name}.files").mkdir()
        jobs.append(run(tmp_path / name, "checkpoints", ("--files", str(files)), inject))
    reference, job = jobs
    check_same(job, reference)
    logs = [(tmp_path / f"{name}.files" / "log.txt").read_text() for name in ("reference", "run")]
    assert dict(line.split() for line in logs[1].splitlines()) == dict(line.split() for line in logs[0].splitlines())
