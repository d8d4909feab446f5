"""Trainers with state of their own, and callbacks that change what is trained, under ``protect``: equal bits after
deaths in every phase, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, References, RunningJob, check_fired, check_same
from tests.support.sameness import Printed

skip_module_without("transformers", "accelerate")

SCRIPT = ROOT / "tests" / "scripts" / "trainers.py"
TIMEOUT_S = 300
BEGUN = 6
"""The call in which the second epoch begins, where no callback needs its own call."""
pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S)]
Reference = Callable[[Layout], Job]


def _kind(name: str) -> Layout:
    return Layout(name, str(SCRIPT), ("--kind", name), nproc=2)


def _run(path: Path, layout: Layout, **kwargs: Any) -> Job:
    flags = [*layout.flags, "--output", str(path.parent / f"{path.name}-output")]
    return RunningJob(path, layout, script=SCRIPT, flags=flags, **kwargs).wait(TIMEOUT_S)


def _comes_back(kind: str, kills: tuple[tuple[int, str, int], ...], tmp_path: Path, reference: Reference) -> Job:
    job = _run(tmp_path / "run", _kind(kind), inject=faults(*kills))
    check_same(job, reference(_kind(kind)), printed=Printed.LOGS)
    check_fired(job, len(kills))
    replaced = {rank for e in job.of("recovery_finished") for rank in e["victims"]}
    assert replaced == {rank for rank, _, _ in kills}, job.explain()
    return job


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a kind."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: _run(path, layout, standby=0))


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("baseline", ((1, "backward", 4), (0, "optimizer", 10)), id="baseline"),
        pytest.param("teacher", ((1, "backward", 5), (0, "commit", 10)), id="teacher", marks=pytest.mark.grid),
        *(
            pytest.param(kind, ((rank, phase, step),), id=f"{kind}-{phase}-{rank}", marks=pytest.mark.grid)
            for kind in ("baseline", "teacher", "inside", "norms", "best", "rows", "two-forwards")
            for rank, phase, step in (
                (0, "forward", 6),
                (1, "backward", 9),
                (1, "optimizer", 10),
                (0, "optimizer-start", 7),
                (1, "between", 8),
                (0, "commit", 11),
            )
        ),
    ],
)
def test_own_state_comes_back(
    kind: str, kills: tuple[tuple[int, str, int], ...], tmp_path: Path, reference: Reference
) -> None:
    job = _comes_back(kind, kills, tmp_path, reference)
    assert not job.notices("not_registered"), job.explain()


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("by-losses", ((1, "backward", BEGUN),), id="by-losses"),
        *(
            pytest.param(kind, ((rank, phase, step),), id=f"{kind}-{phase}-{rank}-{step}", marks=pytest.mark.grid)
            for kind in (
                *("curriculum", "by-losses", "reading-on", "reading-within", "reading-the-step"),
                *("counting", "weighing", "drawing", "by-step"),
            )
            for rank, phase, step in (
                (1, "backward", 3),
                (0, "optimizer", BEGUN),
                (1, "backward", 9),
                (0, "between", 13),
            )
        ),
    ],
)
def test_samplers_that_are_set_or_count_come_back(
    kind: str, kills: tuple[tuple[int, str, int], ...], tmp_path: Path, reference: Reference
) -> None:
    """In each epoch: what a callback sets, the loss, the trainer's step, asking, the step itself."""
    _comes_back(kind, kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lazy", "the module trainer.teacher (Model), which has come about while the Trainer was training"),
        ("two-optimizers", "trainer.critic_optimizer, the optimizer SGD"),
    ],
)
def test_what_cannot_be_brought_back_is_refused_by_name(kind: str, said: str, tmp_path: Path) -> None:
    job = _run(tmp_path / "run", _kind(kind), standby=0)
    assert job.code != 0 and said in job.output, job.explain()
    assert not job.digests


@pytest.mark.grid
def test_iterators_and_files_are_named(tmp_path: Path) -> None:
    job = _run(tmp_path / "run", _kind("iterating"), standby=0)
    assert job.code == 0, job.explain()
    (notice,) = job.notices("not_registered")
    assert "trainer.unlabelled (cycle), trainer.notes (TextIOWrapper)" in notice["text"], notice
