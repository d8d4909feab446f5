"""How long a rank may take without progress depends on what it does (``timeouts.hang_*_s``).

One that hangs is found by the deadline of its kind; one that only takes long, in a healthy job, is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_clean, run_job

SCRIPT = ROOT / "tests" / "scripts" / "kinds_of_work.py"
STEP_S, KIND_S, TAKES_S = 3.0, 5.0, 8.0
KEYS = {"first": "hang_first_step_s", "compile": "hang_first_step_s", "evaluation": "hang_evaluation_s"}
KEYS |= {"save": "hang_save_s", "fetch": "hang_step_s", "step": "hang_step_s"}
FOR_EVER = 1e6


def run(tmp_path: Path, long: dict[str, float], **deadlines: float) -> Job:
    saved = tmp_path / "saved"
    saved.mkdir(exist_ok=True)
    flags = [f"--checkpoint={saved}", *(f"--long={kind}:{seconds}" for kind, seconds in long.items())]
    config: dict[str, Any] = {"timeouts": {"hang_step_s": STEP_S, "hang_factor": 2.0, **deadlines}}
    name = "-".join(long) or "plain"
    layout = Layout(name, "", nproc=2)
    return run_job(tmp_path / name, layout, script=SCRIPT, flags=flags, standby=0, config=config, timeout_s=240)


def ends(job: Job) -> dict[str, str]:
    text = "\n".join(path.read_text() for path in sorted((job.run_dir / "logs").glob("rank*.log")))
    return dict(re.findall(r"^end rank=(\d) (\S+)$", text, re.M))


def test_a_healthy_rank_may_take_long_for_all_that_is_no_step(tmp_path: Path) -> None:
    """Longer than ``hang_step_s``, and the other rank waits for it."""
    kinds = ("first", "compile", "evaluation", "save")
    job = run(tmp_path, dict.fromkeys(kinds, TAKES_S), **{KEYS[kind]: 120.0 for kind in kinds})
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    assert not job.notices("deadlock_suspected") and not job.notices("deadlock"), job.explain()
    assert len(ends(job)) == 2
    check_clean(job)


def test_each_batch_of_an_evaluation_is_progress(tmp_path: Path) -> None:
    """The whole evaluation takes longer than its deadline."""
    job = run(tmp_path, {"batches": TAKES_S}, hang_evaluation_s=KIND_S)
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    assert len(ends(job)) == 2
    check_clean(job)


@pytest.mark.parametrize(
    "kind",
    [
        "evaluation",
        pytest.param("first", marks=pytest.mark.grid),
        pytest.param("save", marks=pytest.mark.grid),
        pytest.param("compile", marks=pytest.mark.grid),
        pytest.param("fetch", marks=pytest.mark.grid),
        pytest.param("step", marks=pytest.mark.grid),
    ],
)
def test_a_hang_is_found_by_the_deadline_of_what_the_rank_does(kind: str, tmp_path: Path) -> None:
    key = KEYS[kind]
    job = run(tmp_path, {kind: FOR_EVER}, **{key: KIND_S})
    (failed,) = job.of("failure_detected")
    assert (failed["rank"], failed["kind"]) == (1, "hang"), job.explain()
    assert f"({key})" in failed["evidence"] and "kinds_of_work.py" in failed["evidence"], failed["evidence"]
    assert failed["detect_s"] >= KIND_S
    assert job.code == 0 and job.of("recovery_finished")[0]["victims"] == [1], job.explain()
    assert ends(job) == ends(run(tmp_path, {}))
    check_clean(job)
