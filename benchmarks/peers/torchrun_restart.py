"""Plain ``torchrun``: a failure restarts all workers, which load a checkpoint that rank 0 writes each step.

A checkpoint a step is the most favourable interval for it: nothing but the interrupted step is lost.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import workload
from harness import Launch
from peers import Peer
from workload import Job


def start(job: Job, launch: Launch, script: str = __file__, **env: str) -> None:
    """One agent with all workers."""
    launch.start(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={job.world}", "--max-restarts=3", script),
        ],
        # Without this the restarted gloo workers read the dead workers' addresses from the agent's store.
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        **env,
        **job.to_env(),
    )


PEER = Peer(
    name="torchrun restart + checkpoint",
    start=start,
    settings="checkpoint each step, --max-restarts 3",
    first=4,
    whole=4,
)


def main() -> None:
    """Train, from the checkpoint if there is one."""
    job = Job.from_env()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    gpt = workload.build_model(job)
    model = DistributedDataParallel(gpt)
    optimizer = workload.build_optimizer(gpt)
    checkpoint = Path(job.directory) / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    batches = workload.endless(workload.build_loader(job, rank, world))
    for _ in range(first):
        next(batches)
    probe = workload.Probe(job, rank, workload.first_parameter(gpt))
    for step in range(first, job.steps):
        probe.begin(step)
        x, y = next(batches)
        loss = model(x, y)
        workload.think(job)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            temporary = checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            os.replace(temporary, checkpoint)
        probe.end(step)


if __name__ == "__main__":
    main()
