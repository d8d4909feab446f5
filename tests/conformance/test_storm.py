"""A storm of SIGKILLs with no standby: up to three ranks within a second, the next ones as soon as the job is whole.

Most of them hit a recovery that is under way, and every replacement starts cold. Snapshots hold what the last holder of
a shard takes with it. At the end: no hang, and the same bits as without a failure. ``FLASHRECOVERY_STORM_KILLS`` and
``FLASHRECOVERY_SOAK_SEED`` change the number and the choice.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

import pytest

from tests.support.jobs import DDP, FSDP, Layout, RunningJob, check_same, run_job
from tests.support.soak import SEED, kill_now, whole_again

KILLS = int(os.environ.get("FLASHRECOVERY_STORM_KILLS", "40"))
STEP_MS = 40
STEPS_A_KILL = 30
SPARE_STEPS = 200
CONFIG = {"max_kills_per_step": 2 * KILLS}
LAYOUTS = [
    pytest.param(DDP, id="ddp"),
    pytest.param(FSDP, id="fsdp"),
    pytest.param(Layout("zero2", "train_deepspeed.py", ("--zero", "2")), id="zero2", marks=pytest.mark.deepspeed),
    pytest.param(
        Layout("tp2dp2", "pretrain_gpt.py", ("--tensor-model-parallel-size", "2")),
        id="tp2dp2",
        marks=pytest.mark.megatron,
    ),
]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_storm(layout: Layout, tmp_path: Path) -> None:
    env = {"FR_MEGATRON_CPU": "1"} if layout.name == "tp2dp2" else {}
    steps = KILLS * STEPS_A_KILL + SPARE_STEPS
    reference = run_job(tmp_path / "reference", layout, steps=steps, standby=0, timeout_s=1800, env=env)
    flags = ["--step-time", str(STEP_MS)]
    options = ["--snapshots", "always"]
    job = RunningJob(
        tmp_path / "run", layout, steps=steps, standby=0, options=options, config=CONFIG, flags=flags, env=env
    )
    job.wait_for_step(2, 120)  # in its first step a job with unique shards starts again instead
    rng = random.Random(SEED)
    times: list[float] = []
    killed = 0
    while killed < KILLS:
        assert job.newest_step() < steps - SPARE_STEPS, "the job has overtaken its kills"
        victims = rng.sample(range(4), min(rng.choice((1, 2, 3)), KILLS - killed))
        within_s = rng.choice((0.25, 1.0))  # the former is as long as a recovery
        moments = [0.0, *sorted(rng.uniform(0.0, within_s) for _ in victims[1:])]
        began = time.monotonic()
        for rank, at in zip(victims, moments, strict=True):
            time.sleep(max(0.0, began + at - time.monotonic()))
            last = kill_now(job, rank)
        killed += len(victims)
        times.append(whole_again(job, last))
        print(f"kill {killed}/{KILLS}: ranks {victims} at {moments}: {times[-1]:.2f} s", flush=True)
        time.sleep(rng.uniform(0.0, 1.0))
    ended = job.wait(1800)
    print(f"{layout.name}: median {statistics.median(times):.2f} s, worst {max(times):.2f} s", flush=True)
    died = [e for e in ended.of("failure_detected") if e["kind"] == "killed"]
    assert len(died) >= KILLS, f"{len(died)} of {KILLS} kills were seen\n{ended.explain()}"
    check_same(ended, reference)
