"""Loops as people write them, killed at five moments each: the end, and every step, is that of the same launch without
a kill, bit for bit.

A job has one kill at each moment, and its victims take turns. Five such jobs, between which moments and victims rotate,
are the whole product of moments and victims for a loop, and each moment comes once as the first of its job; a sixth
begins with a kill in step 0. ``make test`` has short jobs of some loops, ``make grid`` everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import Job, Layout, References
from tests.loops import ROTATIONS, Kill, check_loop, from_the_start, rotated, run_loop, steps_for
from tests.scripts.loops import LOOPS

Reference = Callable[[Layout], Job]
WORLD = 3
STEPS = {name: steps_for(rotated(0, every=loop.every)) for name, loop in LOOPS.items()}
QUICK = {
    ("python-and-numpy", "ddp"): "backward optimizer",
}
"""Loops of the quick tests, with the moments of their kills."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a kill, once for each loop and framework."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, it: run_loop(path, it, _steps(it)))


def _layout(loop: str, framework: str) -> Layout:
    return Layout(f"{loop}-{framework}", "", ("--loop", loop, "--framework", framework), nproc=WORLD)


def _steps(layout: Layout) -> int:
    return STEPS[layout.flags[1]]


def _cases() -> list[object]:
    return [pytest.param(loop, framework, id=f"{loop}-{framework}") for loop in LOOPS for framework in LOOPS[loop].only]


def _check(loop: str, framework: str, kills: list[Kill], path: Path, reference: Reference) -> None:
    layout = _layout(loop, framework)
    job = run_loop(path / "run", layout, STEPS[loop], kills)
    check_loop(job, reference(layout), kills, STEPS[loop])


@pytest.mark.parametrize(("loop", "framework"), QUICK)
def test_some_loops(loop: str, framework: str, tmp_path: Path, reference: Reference) -> None:
    every = LOOPS[loop].every
    kills = [
        Kill((2 - number) % WORLD, every * (2 * number + 1) - 1 + number, moment, number)
        for number, moment in enumerate(QUICK[loop, framework].split())
    ]
    _check(loop, framework, kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)  # nine cold starts of a process on two cores
@pytest.mark.parametrize("rotation", range(ROTATIONS))
@pytest.mark.parametrize(("loop", "framework"), _cases())
def test_every_moment(loop: str, framework: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    kills = rotated(rotation, every=LOOPS[loop].every, world=WORLD)
    _check(loop, framework, kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("loop", "framework"), _cases())
def test_first_and_last_step(loop: str, framework: str, tmp_path: Path, reference: Reference) -> None:
    _check(loop, framework, from_the_start(STEPS[loop], world=WORLD), tmp_path, reference)
