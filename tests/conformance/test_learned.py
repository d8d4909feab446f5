"""What a framework learns while it runs is part of a version: of a job that is killed in the steps in which it learns,
and later, every step and the end are those of the same launch without a kill, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Job, Layout, check_same
from tests.support.loops import check_loop, differences, run_loop

BORROWED = ROOT / "tests" / "scripts" / "borrowed_parameters.py"
ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
STEPS = 8
TIMEOUT_S = 300  # processes that import a framework on a busy machine
WHOLE = ("--persistent", "100000")

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(3 * TIMEOUT_S)]


def _run(path: Path, flags: tuple[str, ...], kills: tuple[Kill, ...] = ()) -> Job:
    layout = Layout("zero3", "", flags, nproc=2)
    return run_loop(path, layout, STEPS, kills, script=BORROWED, env=ENVIRONMENT, timeout_s=TIMEOUT_S)


def _check(path: Path, flags: tuple[str, ...], kills: tuple[Kill, ...]) -> None:
    pytest.importorskip("deepspeed")
    check_loop(_run(path / "run", flags, kills), _run(path / "reference", flags), kills)


def test_what_modules_read_of_others(tmp_path: Path) -> None:
    """The first kill is in the second step: the survivor has learned, its replacement has not. The optimizer has been
    set to train before ``deepspeed.initialize``, like a schedule-free one."""
    _check(tmp_path, ("--model", "adapted", "--client"), (Kill(1, 1, "backward", 0), Kill(0, 4, "optimizer", 1)))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        (("--model", "adapted"), (Kill(1, 0, "backward", 0), Kill(0, 1, "backward", 1))),
        (("--model", "adapted-unequal"), (Kill(1, 1, "backward", 0), Kill(0, 1, "optimizer", 1))),
        (("--model", "adapted-unequal", "--fp32"), (Kill(0, 2, "below", 0), Kill(0, 4, "backward", 1))),
        (("--model", "tied"), (Kill(1, 1, "data", 0), Kill(0, 3, "backward", 1))),
        (("--model", "tied", *WHOLE), (Kill(0, 0, "optimizer", 0), Kill(1, 3, "backward", 1))),
        (("--model", "tied", "--evaluate", "inside"), (Kill(1, 2, "optimizer", 0), Kill(0, 4, "below", 1))),
        (("--model", "returning"), (Kill(1, 1, "backward", 0), Kill(0, 3, "below", 1))),
        (("--model", "changing"), (Kill(1, 2, "backward", 0), Kill(0, 5, "backward", 1))),
        (("--model", "learns-later"), (Kill(1, 5, "backward", 0), Kill(0, 6, "backward", 1))),
        (("--model", "adapted", "--evaluate", "before"), (Kill(1, 0, "backward", 0), Kill(0, 4, "backward", 1))),
        (("--model", "tied", "--evaluate", "before", *WHOLE), (Kill(0, 1, "backward", 0), Kill(1, 1, "backward", 1))),
    ],
    ids=lambda value: "-".join(value[1:]).replace("--", "") if isinstance(value[0], str) else "",
)
def test_every_way_to_read(flags: tuple[str, ...], kills: tuple[Kill, ...], tmp_path: Path) -> None:
    _check(tmp_path, flags, kills)


MUON = ("--model", "adapted-unequal", "--optimizer", "Muon")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        (("--stage", "1", "--accumulation", "2"), (Kill(1, 0, "backward", 0), Kill(0, 3, "optimizer", 1))),
        (("--stage", "2", "--accumulation", "2"), (Kill(1, 0, "backward", 0), Kill(0, 3, "optimizer", 1))),
        (("--stage", "3"), (Kill(1, 0, "backward", 0), Kill(0, 3, "optimizer", 1))),
        (("--stage", "3", "--within-update"), (Kill(1, 1, "backward", 0), Kill(0, 3, "backward", 1))),
        (("--stage", "2", "--within-update"), (Kill(1, 1, "backward", 0), Kill(0, 3, "backward", 1))),
    ],
    ids=lambda value: "".join(value).replace("--", "-") if isinstance(value[0], str) else "",
)
def test_muon(flags: tuple[str, ...], kills: tuple[Kill, ...], tmp_path: Path) -> None:
    """DeepSpeed's. Its kernels are not compiled here, which takes a minute a process. With ZeRO-3 a kill within the
    update comes after the first write into the momentum."""
    pytest.importorskip("deepspeed.runtime.zero.muon")
    _check(tmp_path, (*MUON, *flags, "--set", "reduce_scatter=false"), kills)


@pytest.mark.grid
@pytest.mark.parametrize("where", ["above", "below"])
def test_what_is_learned_between_two_steps(where: str, tmp_path: Path) -> None:
    """An evaluation outside of the block gathers there, so a survivor may have to be replaced, too (docs/limits.md)."""
    pytest.importorskip("deepspeed")
    flags = ("--model", "changing", "--evaluate", where)
    job = _run(tmp_path / "run", flags, (Kill(1, 2, "backward", 0), Kill(0, 5, "optimizer", 1)))
    reference = _run(tmp_path / "reference", flags)
    # One recovery, if the second death comes before the controller has heard that the first one is over.
    assert {rank for event in job.of("recovery_finished") for rank in event["victims"]} == {0, 1}, job.explain()
    assert not differences(job, reference)
    check_same(job, reference)
