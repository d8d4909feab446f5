"""DeepSpeed ZeRO-2 on the same job: with FlashRecovery, and restarted by ``torchrun`` from a checkpoint a step.

The restart's checkpoint is DeepSpeed's own (``engine.save_checkpoint``, ``engine.load_checkpoint``), every step, which
is the most favourable interval for it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import workload
from harness import Launch
from peers import Peer, ours, torchrun_restart
from workload import Job

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ZERO2, RESTART = "zero2", "zero2-restart"


def start_protected(job: Job, launch: Launch, standby: int) -> None:
    """``flashrecovery run`` with that many standbys."""
    ours.start(replace(job, layout=ZERO2), launch, standby, __file__)


def start_restarted(job: Job, launch: Launch) -> None:
    """``torchrun`` that restarts all workers."""
    torchrun_restart.start(replace(job, layout=RESTART), launch, __file__)


def start_bare(job: Job, launch: Launch) -> None:
    """``torchrun`` without any protection."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.world}", __file__]
    launch.start(command, **replace(job, layout=ZERO2).to_env())


STANDBY = Peer(
    name="DeepSpeed ZeRO-2, FlashRecovery, one standby",
    start=partial(start_protected, standby=1),
    settings="defaults; --standby 1",
    ready=ours.standby_ready,
    first=4,
    whole=4,
)
RESTARTED = Peer(
    name="DeepSpeed ZeRO-2, torchrun restart + load_checkpoint",
    start=start_restarted,
    settings="save_checkpoint each step, --max-restarts 3",
    first=4,
    whole=4,
)


def config(job: Job) -> dict[str, Any]:
    """ZeRO-2 in bf16 with torch's AdamW."""
    return {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
        "flash_recovery": {"enabled": True},
    }


def unique_bytes(job: Job) -> int:
    """What of a rank's state no other rank holds: fp32 master, exp_avg and exp_avg_sq of its partition."""
    return 12 * sum(p.numel() for p in workload.build_model(job).parameters()) // job.world


def main() -> None:
    """Train."""
    import deepspeed

    import fr_deepspeed  # noqa: F401 - engine.recovery, also where it is off

    job = Job.from_env()
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpt = workload.build_model(job)
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=gpt.parameters(), config=config(job))
    loader = workload.build_loader(job, rank, world)
    probe = workload.Probe(job, rank, workload.first_parameter(gpt))
    if job.layout == RESTART:
        _restartable(engine, job, loader, probe)
    else:
        _protected(engine, job, loader, probe)
    dist.destroy_process_group()


def _step(engine: Any, job: Job, batch: Any) -> None:
    x, y = batch
    loss = engine(x, y)
    workload.think(job)
    engine.backward(loss)
    engine.step()


def _protected(engine: Any, job: Job, loader: Any, probe: workload.Probe) -> None:
    batches = engine.recovery.data(loader)
    committed = None
    for step in engine.recovery.steps(job.steps):
        if committed is not None and step.index == committed + 1:
            probe.end(committed)
        with step:
            probe.begin(step.index)
            _step(engine, job, next(batches))
        committed = step.index


def _restartable(engine: Any, job: Job, loader: Any, probe: workload.Probe) -> None:
    directory = Path(job.directory) / "checkpoints"
    if (directory / "latest").exists():
        engine.load_checkpoint(str(directory))
    batches = workload.endless(loader)
    for _ in range(engine.global_steps):
        next(batches)
    for step in range(engine.global_steps, job.steps):
        probe.begin(step)
        _step(engine, job, next(batches))
        engine.save_checkpoint(str(directory))
        probe.end(step)


if __name__ == "__main__":
    main()
