"""Bad input in a DeepSpeed config ends the job at its start, with the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Layout, check_clean, check_fired, check_same, run_job

skip_module_without("deepspeed")

UNUSED_SCRIPT = ROOT / "tests" / "scripts" / "deepspeed_unused.py"
pytestmark = [pytest.mark.deepspeed, pytest.mark.grid, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("nproc", "setting", "words"),
    [
        (
            1,
            'flash_recovery.redundancy="neighbor"',
            ["redundancy = 'neighbor'", "one rank", "allowed here: auto, none"],
        ),
        (1, 'flash_recovery.redundancy="replica"', ["redundancy = 'replica'", "one rank"]),
        (1, "elasticity={}", ["DeepSpeedConfigError", "'elasticity' configuration block is no longer supported"]),
        (1, "zero_optimization.mics_shard_size=2", ["DeepSpeedConfigError", "'zero_optimization.mics_shard_size'"]),
    ],
    ids=["dp1-neighbor", "dp1-replica", "elasticity", "mics"],
)
def test_refused_at_start(nproc: int, setting: str, words: list[str], tmp_path: Path) -> None:
    layout = Layout("refused", "train_deepspeed.py", ("--zero", "1", "--set", setting), nproc=nproc)
    job = run_job(tmp_path / "run", layout, standby=0, options=["--max-restarts", "0"], timeout_s=200)
    assert job.code != 0 and not job.losses, job.explain()
    for word in words:
        assert word in job.output, job.explain()
    check_clean(job)


@pytest.mark.parametrize("how", [(), ("thawed",)], ids=["unused", "frozen at first"])
def test_zero3_refuses_a_parameter_without_a_gradient(how: tuple[str, ...], tmp_path: Path) -> None:
    """In the first micro-batch of step 3: DeepSpeed would add its gradient to that of step 2."""
    layout = Layout("unused", "", nproc=2)
    options = ["--max-restarts", "0"]
    job = run_job(
        tmp_path / "run", layout, standby=0, script=UNUSED_SCRIPT, flags=["3", *how], options=options, timeout_s=200
    )
    assert job.code != 0 and not job.digests, job.explain()
    assert "(rare.weight) has no gradient in the first micro-batch of a step" in job.output, job.explain()
    check_clean(job)


@pytest.mark.parametrize("flags", [("2",), ("3", "frozen")], ids=["ZeRO-2", "ZeRO-3, frozen"])
def test_recovers_with_a_parameter_without_a_gradient(flags: tuple[str, ...], tmp_path: Path) -> None:
    layout = Layout("unused", "", nproc=2)
    jobs = [
        run_job(tmp_path / name, layout, standby=0, script=UNUSED_SCRIPT, flags=flags, inject=inject, timeout_s=200)
        for name, inject in (("reference", []), ("run", ["rank=1,at=backward,step=3", "rank=0,at=optimizer,step=4"]))
    ]
    check_same(jobs[1], jobs[0])
    check_fired(jobs[1], 2)
