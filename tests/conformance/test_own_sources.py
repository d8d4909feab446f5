"""Sources of a script's own that draw from the global random streams are read in the same order by a replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.scripts.own_sources import SOURCES
from tests.support.jobs import ROOT, Job, Layout, References, check_fired, check_same, run_job
from tests.support.unmodified import check_same as check_same_lines

SCRIPTS = ROOT / "tests" / "scripts"
TIMEOUT_S = 300
Kill = tuple[int, str, int]
"""Rank, phase and step."""
FORMS = ("data", "loop")
PHASES = ("data", "forward", "backward", "grad-sync", "optimizer", "commit", "below")

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def run(path: Path, layout: Layout, inject: Sequence[str] = ()) -> Job:
    form = layout.name.rpartition("-")[2]
    return run_job(
        path,
        layout,
        script=SCRIPTS / f"own_sources_{form}.py",
        flags=layout.flags,
        inject=inject,
        options=("--auto",) if form == "loop" else (),
        timeout_s=TIMEOUT_S,
        standby=1,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    """The same launch without a fault, once a layout."""
    return References(lambda: tmp_path_factory.mktemp("reference"), run)


def layout_of(source: str, form: str) -> Layout:
    return Layout(f"{source}-{form}", "", (source,), nproc=2)


def check(layout: Layout, kills: Sequence[Kill], path: Path, reference: Callable[[Layout], Job]) -> None:
    inject = [f"rank={rank},fault=sigkill,at={at},step={step}" for rank, at, step in kills]
    job = run(path / "run", layout, inject)
    same = check_same_lines if layout.name.endswith("-loop") else check_same
    same(job, reference(layout))
    check_fired(job, len(kills))


def test_noise_and_an_order_that_began_long_before(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    check(layout_of("noise", "data"), [(1, "backward", 6), (0, "optimizer", 10)], tmp_path, reference)


@pytest.mark.grid
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_source(source: str, form: str, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """The last pass began two or three steps before, in this one, or one before the last."""
    if (source, form) == ("passes", "loop"):
        pytest.skip("its loop ends with the first pass")
    kills = [(1, "backward", 3), (0, "data", 6), (0, "forward", 9), (1, "optimizer", 13)]
    check(layout_of(source, form), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", PHASES)
def test_each_phase(at: str, form: str, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    check(layout_of("ahead", form), [(0, at, 5), (1, at, 6), (1, at, 11), (0, at, 14)], tmp_path, reference)
