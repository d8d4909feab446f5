"""Hugging Face Trainer scripts without a line of ours, by the key in ``deepspeed=ds_config.json`` alone. Killed, they
end with the state that they have with the key switched off, and have logged the same."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, References, check_fired, check_recovered, check_same, run_job
from tests.support.sameness import Printed
from tests.support.unmodified import output_of

skip_module_without("deepspeed", "transformers", "accelerate")

SCRIPT = ROOT / "tests" / "scripts" / "trainer_unmodified.py"
TIMEOUT_S = 300
LOG, EVALUATION, SAVED, BEST, AFTER = 2, 5, 16, 16, 18
"""Calls: two steps and a log in turn, an evaluation and a checkpoint with every second log. The script's own
``save_model()`` and ``evaluate()`` come after the count of operations, which is the last call of ``train()`` unless the
best model is loaded."""

pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.deepspeed]
Kills = tuple[tuple[int, str, int], ...]
Reference = Callable[[Layout], Job]


def by_key(zero: int, *, best: bool = False) -> Layout:
    return Layout(f"zero{zero}{best}", str(SCRIPT), ("--zero", str(zero), *["--best"] * best), nproc=2)


def run(path: Path, layout: Layout, *flags: str, **kwargs: Any) -> Job:
    flags = (*layout.flags, *flags, "--output", str(path.parent / f"{path.name}-output"))
    return run_job(path, layout, script=SCRIPT, flags=flags, timeout_s=TIMEOUT_S, **kwargs)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch with the key switched off, once a layout."""
    return References(
        lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: run(path, layout, "--off", standby=0)
    )


def printed(job: Job, rank: int) -> list[str]:
    return re.findall(rf"rank={rank} step=.*", output_of(job, rank))


@pytest.mark.parametrize(
    ("zero", "best", "kills"),
    [
        pytest.param(2, False, ((1, "backward", 3), (0, "optimizer", 7)), id="zero2"),
        *(
            pytest.param(zero, best, kills, id=f"zero{zero}-{name}", marks=pytest.mark.grid)
            for zero in (0, 1, 2, 3)
            for name, (best, kills) in {
                "steps": (False, ((0, "forward", 0), (1, "backward", 3), (0, "optimizer", 7), (1, "between", 10))),
                "calls": (False, ((1, "commit", LOG), (0, "forward", EVALUATION), (1, "commit", EVALUATION))),
                "end": (False, ((0, "backward", 13), (1, "commit", SAVED))),
                "best": (True, ((0, "backward", 10), (1, "commit", BEST))),
                "after": (True, ((0, "forward", AFTER),)),
            }.items()
        ),
    ],
)
def test_the_key_alone(zero: int, best: bool, kills: Kills, tmp_path: Path, reference: Reference) -> None:
    """``best``: with ``load_best_model_at_end``. Each line is printed once, and in its order."""
    layout = by_key(zero, best=best)
    job = run(tmp_path / "run", layout, inject=faults(*kills))
    check_fired(job, len(kills))
    check_like(job, {rank for rank, _, _ in kills}, reference(layout))


STEPS = (0, "forward", 0), (1, "backward", 3), (0, "optimizer", 7), (1, "commit", 11)
CALLS = (1, "commit", LOG), (0, "forward", EVALUATION), (1, "between", 10)


END = (0, "backward", 10), (1, "commit", BEST)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        pytest.param(("--by", "ddp"), STEPS, id="steps-ddp"),
        pytest.param(("--by", "ddp"), CALLS, id="calls-ddp"),
        pytest.param(("--by", "ddp", "--best"), END, id="best-ddp"),
        pytest.param(("--by", "fsdp"), STEPS, id="steps-fsdp"),
        pytest.param(("--by", "fsdp"), CALLS, id="calls-fsdp"),
        pytest.param(("--by", "fsdp", "--best"), END, id="best-fsdp"),
    ],
)
def test_auto_alone(flags: tuple[str, ...], kills: Kills, tmp_path: Path, reference: Reference) -> None:
    """Without an engine: `flashrecovery run --auto`. ``best``: with ``load_best_model_at_end``."""
    layout = Layout("".join(flags), str(SCRIPT), flags, nproc=2)
    job = run(tmp_path / "run", layout, inject=faults(*kills), options=["--auto"])
    check_fired(job, len(kills))
    check_like(job, {rank for rank, _, _ in kills}, reference(layout))


@pytest.mark.grid
@pytest.mark.parametrize(("when", "victim"), [("before", 0), ("half", 1)])
def test_killed_while_the_best_model_is_loaded(when: str, victim: int, tmp_path: Path, reference: Reference) -> None:
    """Into FSDP's shards: a rank dies among the collectives of that, with nothing or all of its part in place."""
    flags = ("--by", "fsdp", "--best")
    layout = Layout("".join(flags), str(SCRIPT), flags, nproc=2)
    job = run(tmp_path / "run", layout, f"--die-{when}", str(victim), options=["--auto"])
    check_like(job, {victim}, reference(layout))


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of an unprotected training that has ended with one checkpoint, at this step, once each."""

    @functools.cache
    def made(by: str, step: int, *more: str) -> Path:
        path = tmp_path_factory.mktemp("begun")
        layout = Layout(f"{by}{step}", str(SCRIPT), ("--by", by, "--save", "2", "--stop", str(step), *more), nproc=2)
        job = run(path / "run", layout, "--off", standby=0)
        assert job.code == 0, job.explain()
        return path / "run-output"

    return made


RESUMED = (0, "forward", 0), (1, "backward", 3), (0, "optimizer", 4), (1, "commit", 5), (0, "forward", 8)
"""From the second one on the checkpoint is deleted, and a newer one is there."""
TO_THE_BEST = (0, "forward", 0), (1, "backward", 3), (1, "commit", 6), (0, "commit", 7), (1, "forward", 9)
"""Before the best model is loaded, and after it."""


@pytest.mark.grid
@pytest.mark.parametrize(
    ("by", "step", "more", "killed"),
    [
        pytest.param("ddp", 6, (), RESUMED, id="ddp"),
        pytest.param("ddp", 4, (), RESUMED, id="ddp-after-an-epoch"),
        pytest.param("ddp", 6, ("--best",), TO_THE_BEST, id="ddp-best"),
        pytest.param("fsdp", 6, (), RESUMED, id="fsdp"),
        pytest.param("deepspeed", 6, (), RESUMED, id="zero2"),
    ],
)
def test_resumed_from_a_checkpoint_of_the_trainer(
    by: str, step: int, more: tuple[str, ...], killed: Kills, begun: Callable[..., Path], tmp_path: Path
) -> None:
    """Amid an epoch, and at its beginning: killed, it goes on as the same launch does that is not protected. ``best``:
    with ``load_best_model_at_end``."""
    layout = Layout(f"{by}{step}", str(SCRIPT), ("--by", by, "--save", "2", *more), nproc=2)
    options = [] if by == "deepspeed" else ["--auto"]
    protected = {"inject": faults(*killed), "options": options}
    jobs = []
    for name, flags, how in (("ref", ["--off"], {"standby": 0}), ("run", [], protected)):
        shutil.copytree(begun(by, step, *more), tmp_path / f"{name}-output")
        jobs.append(run(tmp_path / name, layout, *flags, **how))
    reference, job = jobs
    check_fired(job, len(killed))
    check_like(job, {0, 1}, reference)


def check_like(job: Job, victims: set[int], reference: Job) -> None:
    """The state of ``reference``, and its lines, each once and in their order."""
    check_same(job, reference, printed=Printed.LOGS)
    check_recovered(job, victims)
    for rank in job.digests:
        assert printed(job, rank) == printed(reference, rank), job.explain()
    assert not job.notices("unprotected") and not job.notices("not_registered"), job.explain()
