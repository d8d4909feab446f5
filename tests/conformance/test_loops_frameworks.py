"""Loops as people write them, with DeepSpeed and with megatron-core, killed at five moments each: every step and the
end are those of the same launch without a kill, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts.proof import MOMENTS, Kill
from tests.support.jobs import ROOT, Job, Layout, References
from tests.support.loops import ROTATIONS, check_loop, from_the_start, rotated, run_loop, steps_for

SCRIPT = ROOT / "tests" / "scripts" / "loops_frameworks.py"
ENVIRONMENT = {"FR_MEGATRON_CPU": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 300  # six processes that import a framework, on two cores
WORLD = 3
LATE = {"late-draws": 9}
"""Loops whose unusual thing does not happen in every third step."""

EVERYWHERE = (
    "expert-bias",
    "rank-bias",
    "scheduler-below",
    "evaluation-below",
    "evaluation-inside",
    "late-draws",
    "in-place-batches",
    "python-and-numpy",
    "ema-of-rank-buffers",
    "accumulation",
    "rate-by-hand",
    "rate-by-hand-below",
    "edited-groups",
    "generators",
    "running-average",
    "running-average-below",
    "best-of-rank-zero",
    "random-batches",
    "checkpointed-batch-norm",
    "prefetch-below",
    "draws-above",
    "silent-codebook",
    "silent-queue",
    "module-counter",
    "freezes-later",
)
BUFFERS = ("expert-bias", "rank-bias", "checkpointed-batch-norm", "silent-codebook")
NOW_AND_THEN = ("decay-sometimes", "momentum-edited")
TOUCHES = (*NOW_AND_THEN, "decay-above")
CASES = (
    *((loop, framework) for framework in ("zero2", "megatron") for loop in EVERYWHERE),
    *((loop, framework) for framework in ("zero0", "zero1", "overlaps") for loop in BUFFERS),
    *((loop, framework) for framework in ("zero0", "zero1", "zero2") for loop in TOUCHES),
    *((loop, framework) for framework in ("megatron", "fp32", "overlaps") for loop in TOUCHES),
    ("momentum-edited", "zero3"),
    *(("weights-above", framework) for framework in ("zero1", "zero2", "megatron")),
    *(("momentum-set", framework) for framework in ("zero1", "zero2")),  # zero3's fails by itself on three ranks
    ("growing-batch", "zero0"),
    ("growing-batch", "zero2"),
    ("highest-rate", "megatron"),
    ("unhooked-evaluation", "overlaps"),
)
QUICK = (("expert-bias", "megatron", (Kill(2, 2, "optimizer", 0), Kill(0, 6, "end", 1))),)
MORE = (
    ("momentum-edited", "zero2", (Kill(1, 5, "backward", 0), Kill(2, 8, "optimizer", 1))),
    ("expert-bias", "zero2", (Kill(2, 2, "optimizer", 0), Kill(0, 6, "end", 1))),
    ("decay-sometimes", "fp32", (Kill(1, 5, "backward", 0), Kill(2, 8, "optimizer", 1))),
)
"""Not in ``make test``."""
Reference = Callable[[Layout], Job]
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a kill, once for each loop and framework."""
    return References(lambda: tmp_path_factory.mktemp("reference"), _run)


def _every(loop: str) -> int:
    return LATE.get(loop, 3)


def _steps(loop: str) -> int:
    return steps_for(rotated(0, every=_every(loop), world=WORLD))


def _run(path: Path, layout: Layout, kills: list[Kill] | None = None) -> Job:
    steps = _steps(layout.flags[1])
    return run_loop(path, layout, steps, kills or [], script=SCRIPT, env=ENVIRONMENT, timeout_s=TIMEOUT_S)


def _check(loop: str, framework: str, kills: list[Kill], path: Path, reference: Reference) -> None:
    pytest.importorskip(_package(framework))
    layout = Layout(f"{loop}-{framework}", "", ("--loop", loop, "--framework", framework), nproc=WORLD)
    check_loop(_run(path / "run", layout, kills), reference(layout), kills)


def _package(framework: str) -> str:
    return "deepspeed" if framework.startswith("zero") else "megatron.core"


def _case(loop: str, framework: str, *values: object, more: tuple[pytest.MarkDecorator, ...] = ()) -> object:
    """With the marker by which ``make grid-deepspeed`` or ``make grid-megatron``, and not ``make grid``, chooses it."""
    marker = getattr(pytest.mark, _package(framework).partition(".")[0])
    return pytest.param(loop, framework, *values, id=f"{loop}-{framework}", marks=(marker, *more))


@pytest.mark.parametrize(
    ("loop", "framework", "kills"),
    [
        *(_case(*case) for case in QUICK),
        *(_case(*case, more=(pytest.mark.grid,)) for case in MORE),
    ],
)
def test_some_loops(loop: str, framework: str, kills: tuple[Kill, ...], tmp_path: Path, reference: Reference) -> None:
    _check(loop, framework, list(kills), tmp_path, reference)


@pytest.mark.grid
@pytest.mark.parametrize("rotation", range(ROTATIONS))
@pytest.mark.parametrize(("loop", "framework"), [_case(*case) for case in CASES])
def test_every_moment(loop: str, framework: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    kills = rotated(rotation, every=_every(loop), world=WORLD)
    assert {kill.moment for kill in kills} == set(MOMENTS)
    _check(loop, framework, kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.parametrize(("loop", "framework"), [_case(*case) for case in CASES])
def test_first_and_last_step(loop: str, framework: str, tmp_path: Path, reference: Reference) -> None:
    touched_in = _every(loop) - 1 if loop in NOW_AND_THEN else None
    _check(loop, framework, from_the_start(_steps(loop), world=WORLD, touched_in=touched_in), tmp_path, reference)
