"""Plain PyTorch scripts without a line of ours, by ``--auto`` alone: killed, they end with the same state, and have
printed each line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import (
    ENVIRONMENT,
    ROOT,
    Job,
    Layout,
    References,
    check_clean,
    check_fired,
    check_recovered,
    run_job,
)
from tests.support.unmodified import check_same, lines, printed

SCRIPT = ROOT / "tests" / "scripts" / "auto_loops.py"
TIMEOUT_S = 300
DDP = (
    *(
        "epochs",
        "top_break",
        "accumulation",
        "flushed",
        "accumulated",
        "trainer",
        "gan",
        "averaged",
        "teacher",
        "recurrent",
        "held",
    ),
    *("nano", "mingpt", "tutorial", "imagenet", "streamed", "skips", "infinite", "ahead", "shuffles"),
)
SHAPES = (*DDP, "held_sharded", "by_hand", "fsdp2", "fsdp2_epochs", "fsdp2_evaluated")
FEW = ("accumulation", "flushed", "accumulated")
"""With fewer steps."""
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer", "commit", "below")
IN_EACH_PHASE = [
    (shape, at)
    for shape in ("nano", "accumulation", "fsdp2_epochs")
    for at in PHASES
    if (shape, at) != ("nano", "data")
]
"""nanoGPT's loop reads no loader."""
REFUSED = {
    "lbfgs": "LBFGS",
    "comprehension": "is in no loop that is led back",
    "remade": "made in the loop at",
    "generator": "is a generator or a coroutine",
}

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def run(path: Path, shape: str, inject: Sequence[str] = (), *, nproc: int = 2, auto: str = "--auto") -> Job:
    layout = Layout(shape, "", nproc=nproc)
    return run_job(
        path, layout, script=SCRIPT, flags=(shape,), inject=inject, options=(auto,), timeout_s=TIMEOUT_S, standby=1
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The same launch without a fault, once a shape."""
    references = References(
        lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: run(path, layout.name, nproc=layout.nproc)
    )
    return lambda shape: references(Layout(shape, "", nproc=2))


def kills(shape: str) -> list[str]:
    """Four, of either rank."""
    steps = (2, 4, 5, 6) if shape in FEW else (3, 7, 9, 11)
    places = ((1, "backward"), (0, "forward"), (1, "below"), (0, "optimizer"))
    return [f"rank={rank},fault=sigkill,at={at},step={i}" for (rank, at), i in zip(places, steps, strict=True)]


def test_nanogpts_loop(reference: Callable[[str], Job], tmp_path: Path) -> None:
    """Two deaths: of rank 0 in an accumulation, and of rank 1 between the optimizer's step and the next round."""
    inject = ["rank=0,fault=sigkill,at=backward,step=4", "rank=1,fault=sigkill,at=below,step=9"]
    job = run(tmp_path / "run", "nano", inject)
    check_same(job, reference("nano"))
    check_fired(job, 2)
    check_recovered(job, (0, 1))
    assert "Protected:" in job.output and "model" in job.output


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape(shape: str, reference: Callable[[str], Job], tmp_path: Path) -> None:
    job = run(tmp_path / "run", shape, kills(shape))
    check_same(job, reference(shape))
    check_fired(job, 4)


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("shape", "at"), IN_EACH_PHASE)
def test_each_phase(shape: str, at: str, rank: int, reference: Callable[[str], Job], tmp_path: Path) -> None:
    """Twice in a row, and again."""
    job = run(tmp_path / "run", shape, [f"rank={rank},fault=sigkill,at={at},step={step}" for step in (2, 3, 6)])
    check_same(job, reference(shape))
    check_fired(job, 3)


@pytest.mark.grid
def test_persistent_workers_of_a_validation(reference: Callable[[str], Job], tmp_path: Path) -> None:
    """They begin again in each, so a replacement's draw their seeds where the dead process's did. Killed in the epochs
    after the first validation, and in one."""
    kills = (1, "backward", 10), (0, "optimizer", 12), (1, "below", 15), (0, "forward", 18)
    inject = [f"rank={rank},fault=sigkill,at={at},step={step}" for rank, at, step in kills]
    job = run(tmp_path / "run", "persistent", inject)
    check_same(job, reference("persistent"))
    check_fired(job, 4)


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_as_under_torchrun(shape: str, reference: Callable[[str], Job], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    command += ["--redirects", "3", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    # Its exit status does not count: without us a rank of torch aborts now and then when all has been printed.
    subprocess.run([*command, str(SCRIPT), shape], check=False, timeout=TIMEOUT_S, env={**os.environ, **ENVIRONMENT})
    for rank in (0, 1):
        (log,) = tmp_path.glob(f"*/attempt_0/{rank}/stdout.log")
        assert lines(log.read_text()) == printed(reference(shape), rank)
        assert f"digest rank={rank} {reference(shape).digests[rank]}" in log.read_text()


@pytest.mark.grid
@pytest.mark.parametrize("shape", REFUSED)
def test_what_cannot_be_led_back_is_refused_before_the_first_step(shape: str, tmp_path: Path) -> None:
    job = run(tmp_path / "run", shape)
    assert job.code != 0, job.explain()
    assert "auto_loops.py:" in job.output and REFUSED[shape] in job.output, job.explain()
    assert "by hand" in job.output, job.explain()
    assert not any(event.get("step", -1) > 0 for event in job.events if event.get("event") == "committed")
    check_clean(job)


@pytest.mark.grid
def test_one_process_is_refused(tmp_path: Path) -> None:
    job = run(tmp_path / "run", "by_hand", nproc=1)
    assert job.code != 0 and "there is one process" in job.output, job.explain()
    check_clean(job)


ALONE = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.grid
def test_processes_without_a_process_group_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    job = run_job(
        tmp_path / "run", Layout("alone", "", nproc=2), script=tmp_path / "train.py", options=("--auto",), timeout_s=60
    )
    assert job.code != 0 and "train.py:5: the script has not called init_process_group()" in job.output, job.explain()
    check_clean(job)
