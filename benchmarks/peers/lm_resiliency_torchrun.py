"""lm-resiliency 0.2.0: in-memory checkpoints with a paired copy, flushed to disk when torchrun restarts the workers.

Its checkpoints (an interval of one step, the most favourable) run under torchrun's own restart. Its
rendezvous backend for torchrun is left out: 0.2.0 registers it under a function that torch 2.13 cannot
call, and it waits for a manager that the package does not ship. What is measured is therefore at least as
fast as the whole of it. Detection of silent corruption needs NCCL and is off.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import workload
from harness import Launch
from peers import Peer
from workload import Job


def start(job: Job, launch: Launch) -> None:
    """One agent with all workers."""
    launch.start(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={job.world}", "--max-restarts=3", __file__),
        ],
        # As for plain torchrun: else the restarted gloo workers read the dead workers' addresses.
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        **job.to_env(),
    )


PEER = Peer(
    name="lm-resiliency 0.2.0 under torchrun",
    start=start,
    settings="checkpoint interval 1 (default 10), detection off, torchrun's own rendezvous",
    first=4,
    whole=4,
)


def main() -> None:
    """Train, from the recovered step if there is one."""
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    job = Job.from_env()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpt = workload.build_model(job)
    model = DistributedDataParallel(gpt)
    optimizer = workload.build_optimizer(gpt)
    handle = enable_resiliency(
        model,
        optimizer,
        interval=1,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_folder=str(Path(job.directory) / "checkpoints"),
            run_id="benchmark",
            pin_memory=False,
        ),
        # Given, so that it does not look for NCCL groups of its own.
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        recovery_mode="latest",
    )
    batches = workload.endless(workload.build_loader(job, rank, world))
    probe = workload.Probe(job, rank, workload.first_parameter(gpt))
    for _ in range(handle.step_count):
        next(batches)
    while handle.step_count < job.steps:
        step = handle.step_count
        probe.begin(step)
        x, y = next(batches)
        loss = model(x, y)
        workload.think(job)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.end(step)
    handle.close()


if __name__ == "__main__":
    main()
