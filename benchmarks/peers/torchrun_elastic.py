"""``torchrun --nnodes=3:4``: four agents with one worker each; one agent dies with its worker, as a node does.

The agents that are left end their workers, meet again, and start three from a checkpoint that is written each step. How
long they wait for a fourth once three are there is ``last_call_timeout``; with its default (30 s), and with 1 s.
"""

from __future__ import annotations

import sys
from functools import partial

from harness import Launch, free_ports
from peers import Peer, torchrun_restart
from workload import Job


def start(job: Job, launch: Launch, last_call_s: int | None = None) -> None:
    """One agent a worker. ``launch.processes[0]`` is that of the rendezvous."""
    (port,) = free_ports()
    waits = [] if last_call_s is None else [f"last_call_timeout={last_call_s}"]
    for agent in range(job.world):
        launch.start(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={job.world - 1}:{job.world}", "--nproc-per-node=1", "--max-restarts=3"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench"),
                "--rdzv-conf=" + ",".join([*waits, f"is_host={int(agent == 0)}"]),
                *("--local-addr=127.0.0.1", torchrun_restart.__file__),
            ],
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **job.with_its_launcher().to_env(),
        )


_SETTINGS = "checkpoint each step, --nnodes 3:4, --max-restarts 3"
PEER = Peer(name="torchrun elastic, 4 -> 3", start=start, settings=_SETTINGS, first=3, whole=None)
QUICK = Peer(
    name="torchrun elastic, 4 -> 3, last call 1 s",
    start=partial(start, last_call_s=1),
    settings=f"{_SETTINGS}, last_call_timeout 1",
    first=3,
    whole=None,
)
