"""FlashRecovery itself, on the same job; launched by ``flashrecovery run`` like any script."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
import workload
from harness import Launch
from model import GPT
from peers import Peer
from workload import Job


def start(
    job: Job, launch: Launch, standby: int, script: str = __file__, options: Sequence[str] = (), **env: str
) -> None:
    """``flashrecovery run`` with that many standbys."""
    launch.start(
        [
            *(sys.executable, "-m", "flashrecovery.cli.main", "run"),
            *("--nproc-per-node", str(job.world), "--standby", str(standby)),
            *("--run-dir", str(Path(job.directory) / "run"), *options, script),
        ],
        **env,
        **job.to_env(),
    )


def events(job: Job, name: str) -> list[dict[str, Any]]:
    """All events of that name that the launch has written so far."""
    path = Path(job.directory) / "run" / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    parsed = (json.loads(line) for line in lines if line.endswith("\n"))
    return [event for event in parsed if event["event"] == name]


def standby_ready(job: Job) -> bool:
    """A standby has imported everything."""
    return any(event["ready"] > 0 for event in events(job, "standby_ready"))


STANDBY = Peer(
    name="FlashRecovery, one standby",
    start=partial(start, standby=1),
    settings="defaults; --standby 1",
    ready=standby_ready,
    first=4,
    whole=4,
)
COLD = Peer(
    name="FlashRecovery, cold replacement",
    start=partial(start, standby=0),
    settings="defaults; no standby",
    first=4,
    whole=4,
)


def wrap(gpt: GPT, job: Job) -> torch.nn.Module:
    """The model in the layout of the job."""
    if job.layout == "ddp":
        return DistributedDataParallel(gpt)
    mesh = init_device_mesh("cpu", (job.world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    return gpt


def main() -> None:
    """Train."""
    job = Job.from_env()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    recovery = flashrecovery.init()
    gpt = workload.build_model(job)
    model = wrap(gpt, job)
    optimizer = workload.build_optimizer(gpt)
    ballast = torch.ones(job.ballast_bytes if rank == job.victim else 0, dtype=torch.uint8)
    recovery.register(model=model, optimizer=optimizer)
    batches = recovery.data(workload.build_loader(job, rank, world))
    probe = workload.Probe(job, rank, workload.first_parameter(gpt))
    committed = None
    for step in recovery.steps(job.steps):
        # Being handed step i+1 is what says that step i is committed.
        if committed is not None and step.index == committed + 1:
            probe.end(committed)
        with step:
            probe.begin(step.index)
            x, y = next(batches)
            loss = model(x, y)
            workload.think(job)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        committed = step.index
    dist.destroy_process_group()
    del ballast


if __name__ == "__main__":
    main()
