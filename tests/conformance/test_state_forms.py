"""State in forms that torch's own operations do not copy bit for bit, or not at all: it is brought back as it was, or
refused by name before the second step (``tests/scripts/state_forms.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Layout, check_clean
from tests.support.loops import check_loop, run_loop

SCRIPT = ROOT / "tests" / "scripts" / "state_forms.py"
STEPS = 8


def _layout(framework: str, *flags: str) -> Layout:
    return Layout(framework, "", ("--framework", framework, *flags), nproc=2)


@pytest.mark.parametrize("framework", [pytest.param("ddp", marks=pytest.mark.grid), "fsdp2"])
def test_is_brought_back(framework: str, tmp_path: Path) -> None:
    layout = _layout(framework)
    kills = [Kill(1, 2, "backward", 0), Kill(0, 4, "data", 1), Kill(1, 5, "optimizer", 2)]
    reference = run_loop(tmp_path / "reference", layout, STEPS, script=SCRIPT)
    job = run_loop(tmp_path / "run", layout, STEPS, kills, script=SCRIPT)
    check_loop(job, reference, kills)


def test_tensors_that_do_not_say_what_they_consist_of_are_refused_by_name(tmp_path: Path) -> None:
    job = run_loop(tmp_path / "run", _layout("ddp", "--refused"), STEPS, script=SCRIPT)
    assert job.code != 0 and "state 'odd' is a __main__.Unnamed" in job.output, job.explain()
    assert max(step for _, step in job.losses) == 0, job.explain()
    check_clean(job)
