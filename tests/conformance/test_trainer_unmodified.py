"""Hugging Face Trainer scripts without a line of ours, by the key in ``deepspeed=ds_config.json`` alone. Killed, they
end with the state that they have with the key switched off, and have logged the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, References, check_fired, check_recovered, check_same, run_job
from tests.support.sameness import Printed

skip_module_without("deepspeed", "transformers", "accelerate")

SCRIPT = ROOT / "tests" / "scripts" / "trainer_unmodified.py"
TIMEOUT_S = 300
LOG, EVALUATION, SAVED, AFTER = 2, 5, 16, 17
"""Calls: two steps and a log in turn, an evaluation and a checkpoint with every second log. The script's own
``save_model()`` and ``evaluate()`` come after the count of operations, which is the last call of ``train()``."""

pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.deepspeed]
Kills = tuple[tuple[int, str, int], ...]
Reference = Callable[[Layout], Job]


def by_key(zero: int) -> Layout:
    return Layout(f"zero{zero}", str(SCRIPT), ("--zero", str(zero)), nproc=2)


def run(path: Path, layout: Layout, *flags: str, **kwargs: Any) -> Job:
    flags = (*layout.flags, *flags, "--output", str(path.parent / f"{path.name}-output"))
    return run_job(path, layout, script=SCRIPT, flags=flags, timeout_s=TIMEOUT_S, **kwargs)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch with the key switched off, once a layout."""
    return References(
        lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: run(path, layout, "--off", standby=0)
    )


@pytest.mark.parametrize(
    ("zero", "kills"),
    [
        pytest.param(2, ((1, "backward", 3), (0, "optimizer", 7)), id="zero2"),
        *(
            pytest.param(zero, kills, id=f"zero{zero}-{name}", marks=pytest.mark.grid)
            for zero in (0, 1, 2, 3)
            for name, kills in {
                "steps": ((0, "forward", 0), (1, "backward", 3), (0, "optimizer", 7), (1, "between", 10)),
                "calls": ((1, "commit", LOG), (0, "forward", EVALUATION), (1, "commit", EVALUATION)),
                "end": ((0, "backward", 13), (1, "forward", SAVED), (0, "forward", AFTER)),
            }.items()
        ),
    ],
)
def test_the_key_alone(zero: int, kills: Kills, tmp_path: Path, reference: Reference) -> None:
    layout = by_key(zero)
    job = run(tmp_path / "run", layout, inject=faults(*kills))
    check_same(job, reference(layout), printed=Printed.LOGS)
    check_fired(job, len(kills))
    check_recovered(job, {rank for rank, _, _ in kills})
    assert not job.notices("unprotected") and not job.notices("not_registered"), job.explain()
