"""nvidia-resiliency-ext 0.4.1, in-process: survivors run the training function again, from a checkpoint.

A dead process is not replaced: the world shrinks, or a rank that was held in reserve from the start steps
in. Both are measured. Its abort does not reach gloo, so a survivor that is no ring neighbour of the dead
rank waits for gloo's own time-out; with three active ranks everybody is a neighbour, which is the case that
favours it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import workload
from harness import Launch, free_ports, python
from peers import Peer
from workload import Job

ACTIVE_ENV = "FLASHRECOVERY_BENCH_ACTIVE"
GLOO_TIMEOUT_S = 10


def start(job: Job, launch: Launch, reserve: int = 0) -> None:
    """``job.world`` active processes and ``reserve`` more that wait."""
    port, store_port = free_ports(2)
    world = job.world + reserve
    for rank in range(world):
        launch.start(
            python(__file__),
            RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            FLASHRECOVERY_BENCH_STORE_PORT=str(store_port),
            **{ACTIVE_ENV: str(job.world)},
            **job.to_env(),
        )


_SETTINGS = f"defaults; checkpoint each step; gloo time-out {GLOO_TIMEOUT_S} s"
RESERVE = Peer(
    name="nvidia-resiliency-ext 0.4.1, 3 ranks + 1 in reserve",
    start=partial(start, reserve=1),
    settings=_SETTINGS,
    first=3,
    whole=3,
    world=3,
)
BETWEEN = replace(
    RESERVE,
    name=f"{RESERVE.name}, killed between steps",
    settings=f"{_SETTINGS}; the kill that favours it",
    kill_at="between",
)
SHRINK = Peer(name="nvidia-resiliency-ext 0.4.1, 4 ranks -> 3", start=start, settings=_SETTINGS, first=3, whole=None)


def train() -> None:
    """The function that is run again after each failure."""
    job = Job.from_env()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The store outlives a restart; a prefix keeps the two lives of the group apart.
    life = "after" if job.kill_file.exists() else "before"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        int(os.environ["FLASHRECOVERY_BENCH_STORE_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(life, store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )
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


def main() -> None:
    """Wrap ``train`` and run it."""
    import nvidia_resiliency_ext.inprocess as inprocess

    active = int(os.environ[ACTIVE_ENV])
    host = None
    if int(os.environ["RANK"]) == 0:
        # The groups' rendezvous lives as long as the process, not as long as one call of ``train``.
        host = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            int(os.environ["FLASHRECOVERY_BENCH_STORE_PORT"]),
            is_master=True,
            wait_for_workers=False,
        )
    assignment = inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(active), inprocess.rank_assignment.ShiftRanks()
    )
    wrapper = inprocess.Wrapper(rank_assignment=assignment)
    wrapper(train)()
    del host


if __name__ == "__main__":
    main()
