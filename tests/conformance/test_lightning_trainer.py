"""Lightning's Trainer by ``--auto``, without a line of ours: killed in each phase, it ends with the state that it has
under torchrun, has printed each line once, and has written the same rows of metrics and the same checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.jobs import ENVIRONMENT, ROOT, Job, Layout, check_clean, check_fired, check_recovered, run_job
from tests.support.unmodified import lines, printed

pytest.importorskip("lightning.pytorch")

SCRIPT = ROOT / "tests" / "scripts" / "lightning_trainer.py"
TIMEOUT_S = 300
WHOLE = (1, "forward", 1), (0, "commit", 5), (1, "commit", 11), (0, "optimizer", 14)
CALLBACKS = (1, "backward", 2), (0, "commit", 4), (0, "forward", 12), (1, "commit", 21)
WORKERS = (1, "forward", 1), (0, "backward", 7), (0, "commit", 10), (1, "optimizer", 14)
KILLS = {
    "steps": ("plain", ((1, "forward", 0), (0, "backward", 5), (0, "optimizer", 14), (1, "commit", 26))),
    "twice": ("plain", ((0, "between", 2), (0, "forward", 3), (1, "backward", 20), (1, "optimizer", 21))),
    "validation": ("plain", ((1, "between", 10), (0, "commit", 10), (0, "commit", 11), (1, "between", 12))),
    "end": ("plain", ((0, "optimizer", 33), (1, "commit", 34), (0, "commit", 35), (1, "commit", 36))),
    "accumulation": ("whole", WHOLE),
    "callbacks": ("callbacks", CALLBACKS),
    "workers": ("workers", WORKERS),
    "metrics": ("metrics", ((1, "forward", 1), (0, "backward", 4), (0, "commit", 12), (1, "optimizer", 21))),
    "fsdp2": ("fsdp2", ((1, "forward", 0), (0, "backward", 5), (0, "optimizer", 14), (1, "commit", 26))),
    "fsdp2-validation": ("fsdp2", ((1, "between", 10), (0, "forward", 12), (0, "commit", 22), (1, "commit", 36))),
    "fsdp2-accumulation": ("sharded-whole", WHOLE),
    "fsdp2-callbacks": ("sharded-callbacks", CALLBACKS),
    "fsdp2-shadow": ("sharded-shadow", CALLBACKS),
    "fsdp2-workers": ("sharded-workers", WORKERS),
    "fsdp2-folders": ("folders", ((1, "backward", 9), (0, "commit", 10), (1, "between", 12), (0, "optimizer", 13))),
}
"""The shape of the script, and which rank is killed in which phase of which call: ten steps, the validation and the end
of an epoch in turn, or four steps in place of ten; then the end of the training."""
REFUSED = {
    "parts": "parts of the LightningModule that are given to fully_shard",
    "manual": "manual optimization",
    "two": "2 training loaders",
    "lbfgs": "the optimizer LBFGS",
    "averaging": "the callback WeightAveraging",
}

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(3 * TIMEOUT_S)]


@dataclass(frozen=True)
class Healthy:
    """What it came to under torchrun. ``said``: of each rank; ``rows``: of metrics."""

    said: dict[int, list[str]]
    digests: dict[int, str]
    rows: str


def rows(output: Path) -> str:
    (folder,) = (output / "logs").iterdir()
    return (folder / "metrics.csv").read_text()


@pytest.fixture(scope="session")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Healthy]:
    known: dict[str, Healthy] = {}

    def launch(shape: str) -> Healthy:
        path = tmp_path_factory.mktemp(shape)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--redirects", "3", "--log-dir", str(path / "logs")]
        command += [str(SCRIPT), shape, "--output", str(path / "output")]
        subprocess.run(command, check=False, timeout=TIMEOUT_S, cwd=ROOT, env={**os.environ, **ENVIRONMENT})
        texts = {int(log.parent.name): log.read_text() for log in (path / "logs").glob("*/*/*/stdout.log")}
        digests = {rank: text.rpartition(f"digest rank={rank} ")[2].split()[0] for rank, text in texts.items()}
        return Healthy({rank: lines(text) for rank, text in texts.items()}, digests, rows(path / "output"))

    def reference(shape: str) -> Healthy:
        if shape not in known:
            known[shape] = launch(shape)
        return known[shape]

    return reference


def run(path: Path, shape: str, *, inject: list[str], options: tuple[str, ...] = ("--auto",)) -> Job:
    flags = (shape, "--output", str(path.parent / "output"))
    layout = Layout(shape, "", nproc=2)
    return run_job(path, layout, script=SCRIPT, flags=flags, inject=inject, options=options, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", KILLS)
def test_after_four_deaths(name: str, tmp_path: Path, under_torchrun: Callable[[str], Healthy]) -> None:
    shape, kills = KILLS[name]
    reference = under_torchrun(shape)
    job = run(tmp_path / "run", shape, inject=faults(*kills))
    assert job.code == 0 and job.digests == reference.digests, job.explain()
    for rank, said in reference.said.items():
        assert printed(job, rank) == said, job.explain()
    assert rows(tmp_path / "output") == reference.rows
    check_fired(job, len(kills))
    replaced = {rank for event in job.of("recovery_finished") for rank in event["victims"]}
    assert replaced == {rank for rank, _, _ in kills}, job.explain()
    assert not job.notices("not_registered") and not job.notices("unprotected"), job.explain()
    copies = bool(job.notices("pre_step_copy_enabled"))
    assert copies == shape.endswith(("whole", "callbacks", "shadow")), job.explain()
    check_clean(job)


@pytest.mark.parametrize("shape", REFUSED)
def test_others_are_refused_before_the_first_step(shape: str, tmp_path: Path) -> None:
    job = run(tmp_path / "run", shape, inject=[])
    assert job.code != 0 and REFUSED[shape] in job.output and "docs/lightning.md" in job.output, job.explain()
    assert not printed(job, 0), job.explain()
    check_clean(job)


def test_both_ranks_die(tmp_path: Path, under_torchrun: Callable[[str], Healthy]) -> None:
    """Training goes on from a fallback checkpoint, in which the place in the Trainer's loops is."""
    kills = (1, "backward", 23), (0, "backward", 23)
    folder = ("--auto", "--checkpoint-dir", str(tmp_path / "fallback"), "--checkpoint-interval", "0.2")
    job = run(tmp_path / "run", "plain", inject=faults(*kills), options=folder)
    assert job.code == 0 and job.digests == under_torchrun("plain").digests, job.explain()
    check_fired(job, 2)
    check_recovered(job, (0, 1))
