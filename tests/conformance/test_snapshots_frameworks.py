"""Snapshots under DeepSpeed, Megatron and HSDP: all ranks die at once, or everything does and a new launch goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import megatron as mg
from tests.support.jobs import HSDP, Job, Layout, References, RunningJob, check_same, run_job

STEPS = 30
TIMEOUT_S = 400
ALWAYS = ("--snapshots", "always")
DEEPSPEED = [Layout(f"zero{stage}", "train_deepspeed.py", ("--zero", str(stage))) for stage in (1, 2, 3)]
PIPELINE = Layout("zero1-pipeline", "train_deepspeed.py", ("--zero", "1", "--pipeline", "2"))
EXPERTS = Layout("zero2-moe", "train_deepspeed.py", ("--zero", "2", "--moe", "4"))
MEGATRON = [
    mg.DP4_DISTRIBUTED,
    mg.gpt("tp2-dp2-distributed", *mg.TP, *mg.DISTRIBUTED),
    mg.gpt("pp2-dp2-distributed", *mg.PP, *mg.DISTRIBUTED),
    mg.FSDP2_DP4,
    mg.MEGATRON_FSDP_DP4,
]
REPLICATED = mg.gpt("tp2-dp2", *mg.TP)
pytestmark = pytest.mark.timeout(TIMEOUT_S)


def _cases() -> list[object]:
    quick = ("zero2", "dp4-distributed")
    auto = [*DEEPSPEED, PIPELINE, EXPERTS, *MEGATRON]
    needs = {"train_deepspeed.py": [pytest.mark.deepspeed], "pretrain_gpt.py": [pytest.mark.megatron]}
    return [
        pytest.param(
            layout,
            options,
            id=layout.name,
            marks=[*needs.get(layout.script, []), *([] if layout.name in quick else [pytest.mark.grid])],
        )
        for layout, options in [*((layout, ()) for layout in auto), (REPLICATED, ALWAYS), (HSDP, ALWAYS)]
    ]


def start(run_dir: Path, layout: Layout, *options: str) -> RunningJob:
    env = mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else None
    return RunningJob(run_dir, layout, steps=STEPS, standby=0, options=options, env=env)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    def launch(folder: Path, layout: Layout) -> Job:
        env = mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else None
        return run_job(folder, layout, steps=STEPS, standby=0, env=env, timeout_s=TIMEOUT_S)

    return References(lambda: tmp_path_factory.mktemp("reference"), launch)


@pytest.mark.parametrize("launcher", [False, True], ids=["ranks", "launcher"])
@pytest.mark.parametrize(("layout", "options"), _cases())
def test_everybody_dies_at_once(
    layout: Layout, options: tuple[str, ...], launcher: bool, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """All ranks, or the launcher, too: then the next one goes on."""
    running = start(tmp_path / "run", layout, *options)
    running.wait_for_step(6, TIMEOUT_S)
    pids = [*running.ranks().values(), *([running.popen.pid] if launcher else [])]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job = running.wait(TIMEOUT_S)
    if launcher:
        job = start(tmp_path / "run", layout, *options, "--resume").wait(TIMEOUT_S)
        (version,) = job.gone_on_from_snapshots()
        assert version >= 6
    else:
        victims = {v for e in job.of("recovery_finished") for v in e["victims"]}
        assert victims == {*range(layout.nproc)}, job.explain()
    check_same(job, reference(layout), launches=1 + launcher)
