"""torchft 0.2.0: each rank is a replica group; survivors go on with fewer, the replacement heals later.

The gradients go through ``Manager.allreduce`` in one flat tensor, because torchft's own DDP wrapper ends
the survivors when a peer dies inside an all-reduce (``assert fut._fut`` in its communication hook).
Restarting a dead replica is the user's business with torchft; here it is restarted the moment it is dead.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import workload
from harness import Launch, free_ports
from peers import Peer
from workload import Job

RANK_ENV = "FLASHRECOVERY_BENCH_REPLICA"
TIMEOUT_ENV = "FLASHRECOVERY_BENCH_TIMEOUT"
DEFAULT_TIMEOUT_S = 60
LIGHTHOUSE = Path(sys.executable).parent / "torchft_lighthouse"


def _replica(job: Job, launch: Launch, rank: int, lighthouse: str, timeout_s: int = DEFAULT_TIMEOUT_S) -> None:
    launch.start(
        [sys.executable, __file__],
        **{RANK_ENV: str(rank), TIMEOUT_ENV: str(timeout_s), "TORCHFT_LIGHTHOUSE": lighthouse, "LOGLEVEL": "WARNING"},
        **job.to_env(),
    )


def start(job: Job, launch: Launch, timeout_s: int = DEFAULT_TIMEOUT_S) -> None:
    """The lighthouse, then one process a replica. ``launch.processes[1 + r]`` is replica r. ``timeout_s``: of
    collectives and of the quorum."""
    (port,) = free_ports()
    launch.start([str(LIGHTHOUSE), "--min_replicas", "1", "--bind", f"[::]:{port}"], RUST_BACKTRACE="0")
    (Path(job.directory) / "lighthouse").write_text(f"http://localhost:{port}")
    for rank in range(job.world):
        _replica(job, launch, rank, f"http://localhost:{port}", timeout_s)


def tend(job: Job, launch: Launch) -> None:
    """Restart a replica that died."""
    lighthouse = (Path(job.directory) / "lighthouse").read_text()
    for rank in range(job.world):
        process = launch.processes[1 + rank]
        if process.poll() is not None and process.returncode != 0:
            _replica(job, launch, rank, lighthouse)
            launch.processes[1 + rank] = launch.processes.pop()


_SETTINGS = "defaults; min_replicas 1; dead replica restarted at once"
PEER = Peer(name="torchft 0.2.0, 4 replicas", start=start, settings=_SETTINGS, first=3, whole=4, tend=tend)
DROPS = Peer(
    name="torchft 0.2.0, 4 -> 3",
    start=start,
    settings="defaults; min_replicas 1; dead replica not restarted",
    first=3,
    whole=None,
)
DROPS_QUICKLY = replace(
    DROPS,
    name="torchft 0.2.0, 4 -> 3, time-out 5 s",
    start=partial(start, timeout_s=5),
    settings=f"{DROPS.settings}; time-outs 5 s",
)
PAIR = Peer(name="torchft 0.2.0, 2 replicas", start=start, settings=_SETTINGS, first=1, whole=2, world=2, tend=tend)


def main() -> None:
    """One replica group of one rank."""
    from torchft import Manager, ProcessGroupGloo

    job = Job.from_env()
    replica = int(os.environ[RANK_ENV])
    gpt = workload.build_model(job)
    optimizer = workload.build_optimizer(gpt)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load(state: dict[str, Any]) -> None:
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}

    timeout = timedelta(seconds=int(os.environ[TIMEOUT_ENV]))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        timeout=timeout,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    probe = workload.Probe(job, replica, workload.first_parameter(gpt))
    batches = workload.endless(workload.build_loader(job, replica, job.world))
    parameters = list(gpt.parameters())
    while manager.current_step() < job.steps:
        manager.start_quorum()
        step = manager.current_step()
        probe.begin(step)
        x, y = next(batches)
        loss = gpt(x, y)
        workload.think(job)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        manager.allreduce(flat).wait()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        if manager.should_commit():
            optimizer.step()
            probe.end(step)
    manager.shutdown()


if __name__ == "__main__":
    main()
