"""Loops as people write them, killed at five moments each: every step and the end are those of the same launch without
a kill, bit for bit.

A job has one kill at each moment, and its victims take turns. Five such jobs, between which moments and victims rotate,
are the whole product of moments and victims for a loop, and each moment comes once as the first of its job; a sixth
begins with a kill in step 0 and ends with one in the last step. ``make test`` has jobs of several loops in one,
``make grid`` everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import Job, Layout, References
from tests.loops import ROTATIONS, Kill, check_loop, from_the_start, rotated, run_loop, steps_for
from tests.scripts.loops import LOOPS, loop_class

Reference = Callable[[Layout], Job]
WORLD = 3
IN_BLOCK = "in-place-batches+python-and-numpy+edited-groups+rank-bias+checkpointed-batch-norm+ema-module"
BELOW = "scheduler-below+evaluation-below+averaged-below+running-average-below+generators+best-of-rank-zero"
LATE_COLLECTIVES = "expert-bias+averaged-in-block+draws-above+accumulation"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a kill, once for each loop and framework."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, it: run_loop(path, it, _steps(it)))


def _layout(loop: str, framework: str) -> Layout:
    return Layout(f"{loop}-{framework}", "", ("--loop", loop, "--framework", framework), nproc=WORLD)


def _steps(layout: Layout) -> int:
    return steps_for(rotated(0, every=loop_class(layout.flags[1]).every))


def _cases() -> list[object]:
    return [pytest.param(loop, framework, id=f"{loop}-{framework}") for loop in LOOPS for framework in LOOPS[loop].only]


def _check(layout: Layout, kills: list[Kill], path: Path, reference: Reference) -> None:
    job = run_loop(path / "run", layout, _steps(layout), kills)
    check_loop(job, reference(layout), kills)


@pytest.mark.parametrize(
    ("loops", "framework", "moments"),
    [
        pytest.param(IN_BLOCK, "ddp", ("backward", "optimizer"), id="in the block"),
        pytest.param(BELOW, "ddp", ("end", "below"), id="below it"),
        pytest.param("evaluation-below+scheduler-below+rank-bias", "fsdp2", ("optimizer",), id="fsdp2"),
    ],
)
def test_several_loops_in_one(
    loops: str, framework: str, moments: tuple[str, ...], tmp_path: Path, reference: Reference
) -> None:
    """Each job's first kill is in a step in which the unusual things happen, its second in the step after one."""
    every = loop_class(loops).every
    kills = [Kill(2 - i, every * (2 * i + 2) - 1 + i, moment, i) for i, moment in enumerate(moments)]
    _check(_layout(loops, framework), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)  # nine cold starts of a process on two cores
@pytest.mark.parametrize("rotation", range(ROTATIONS))
@pytest.mark.parametrize("loops", [IN_BLOCK, BELOW, LATE_COLLECTIVES])
def test_every_moment_of_several_loops_in_one(loops: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    kills = rotated(rotation, every=loop_class(loops).every, world=WORLD)
    _check(_layout(loops, "ddp"), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rotation", range(ROTATIONS))
@pytest.mark.parametrize(("loop", "framework"), _cases())
def test_every_moment(loop: str, framework: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    kills = rotated(rotation, every=LOOPS[loop].every, world=WORLD)
    _check(_layout(loop, framework), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("loop", "framework"), _cases())
def test_first_and_last_step(loop: str, framework: str, tmp_path: Path, reference: Reference) -> None:
    layout = _layout(loop, framework)
    _check(layout, from_the_start(_steps(layout), world=WORLD), tmp_path, reference)


def test_a_plain_variable_that_decides_something(tmp_path: Path) -> None:
    """nanoGPT's ``iter_num`` is 0 in a replacement, so that it takes another learning rate than its peers."""
    job = run_loop(tmp_path / "run", _layout("plain-variable", "ddp"), 9, [Kill(1, 4, "backward", 0)])
    assert job.code not in (0, -1000), f"it went on with ranks that differ, or stood\n{job.explain()}"
    assert "do not agree" in job.output and "rank 1" in job.output, job.explain()
