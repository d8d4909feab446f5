"""Jobs of ``tests/scripts/replan_megatron.py`` on several hosts, which are network namespaces: compared as those of one
host are (:mod:`tests.support.replan`), with jobs of one host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.hosts import Host, Network
from tests.support.jobs import Job, Layout
from tests.support.megatron import ENVIRONMENT
from tests.support.nodes import TOKEN, NodesJob
from tests.support.replan import SCRIPT, STEPS, Sizes, Training

SIZES = ("--heads", "2", "--width", "16", "--context", "8", "--batch-size", "2")
"""Of the model, as the script has them by itself; jobs of several hosts are given others first."""


def start(
    net: Network,
    folder: Path,
    training: Training,
    *flags: str,
    nnodes: int = 2,
    spare: int = 0,
    config: Mapping[str, Any],
    options: Sequence[str] = (),
    step_ms: int = 150,
    alone: bool = False,
) -> NodesJob:
    """On the first ``nnodes`` hosts, with as many ranks each; the controller is on the first one, perhaps ``alone``."""
    folder.mkdir(exist_ok=True)
    file = folder / "job.json"
    file.write_text(json.dumps(config))
    return NodesJob(
        net,
        folder / "run",
        Layout("replan", str(SCRIPT), nproc=training.sizes.ranks),
        nnodes=nnodes,
        spare=spare,
        steps=STEPS,
        step_ms=step_ms,
        options=["--standby", "0", *options],
        config=file,
        flags=[*SIZES, "--dropout", "0.1", *training.sizes.flags, *training.flags, *flags],
        env=ENVIRONMENT,
        alone=alone,
    )


def run(job: NodesJob, host: Host, *command: str) -> str:
    """A command of ours, given on ``host``; returns what it has refused, "" if nothing."""
    line = [*host.command, sys.executable, "-m", "flashrecovery.cli.main", *command]
    done = subprocess.run(line, capture_output=True, text=True, env=_environment(), timeout=60)
    return "" if done.returncode == 0 else done.stderr + done.stdout


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "FLASHRECOVERY_TOKEN": TOKEN}


def command(job: NodesJob, layout: Sizes | None, step: int | None = None, host: Host | None = None) -> str:
    """``flashrecovery replan``."""
    wanted = () if layout is None else ("--layout", str(layout))
    at = () if step is None else ("--at-step", str(step))
    return run(job, host or job.net.hosts[0], "replan", str(job.directory()), *wanted, *at)


def inject(job: NodesJob, *, rank: int, at: str, step: int | None = None) -> None:
    """``flashrecovery inject``: SIGKILL."""
    flags = ["--run-dir", str(job.directory()), "--rank", str(rank), "--fault", "sigkill", "--at", at]
    flags += [] if step is None else ["--step", str(step)]
    refused = run(job, job.controller_host(), "inject", *flags)
    assert not refused, refused


def lose(job: NodesJob, host: Host) -> None:
    """A host loses its power, and all that was in its memory."""
    agent = job.popens[host.name].pid
    job.kill_node(host)
    for left in Path("/dev/shm").glob(f"flashrecovery-staging-*-{agent}-*"):
        shutil.rmtree(left)


def nodes_of(job: Job) -> dict[int, str]:
    """Where the ranks are, as the newest rank table of a job that has ended says."""
    table = max(job.run_dir.glob("**/ranktable.json"), key=lambda path: path.stat().st_mtime)
    return {entry["rank"]: entry["node"] for entry in json.loads(table.read_text())["ranks"]}
