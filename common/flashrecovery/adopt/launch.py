"""From a task's variables and the options to the job's configuration, and to the node's agent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from flashrecovery.config import CONTROLLER_PORT, RunConfig
from flashrecovery.errors import ConfigError
from flashrecovery.runtime import local_socket
from flashrecovery.runtime.task import Task

_FREE_S = 30.0
"""An agent of an earlier launch with the same number ends meanwhile."""
_LOOK_S = 0.05
_PORTS = (20_000, 10_000)
"""The first one, and how many: below those that the kernel gives away itself, on most machines."""


@dataclass(frozen=True)
class TaskLaunch:
    """What the agent of a node is started with. ``path``: the run directory; ``first``: the task that starts it."""

    first: Task
    config: RunConfig
    command: list[str]
    path: Path

    @property
    def settings(self) -> str:
        """What all tasks must have alike."""
        return self.config.model_copy(update={"node_rank": None}).model_dump_json()

    @property
    def socket_name(self) -> str:
        """Where the guards find the agent of their job on this node."""
        job = f"{self.first.job}:{self.first.node_rank}"
        return f"flashrecovery-guards-{os.getuid()}-{xxhash.xxh3_128_hexdigest(job.encode())}"

    @property
    def log(self) -> Path:
        """What the agent prints."""
        own = self.path / "nodes" / str(self.config.node_name) if self.config.several_nodes else self.path
        return own / "logs" / "agent.log"

    def to_json(self) -> str:
        values: dict[str, Any] = {
            "first": vars(self.first),
            "config": self.config.model_dump(mode="json"),
            "command": self.command,
            "path": str(self.path),
        }
        return json.dumps(values)

    @staticmethod
    def from_json(text: str) -> TaskLaunch:
        values = json.loads(text)
        config = RunConfig.model_validate(values["config"])
        return TaskLaunch(Task(**values["first"]), config, values["command"], Path(values["path"]))


def placed(task: Task, overrides: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """``overrides`` (the options that were given) with what the task says of nodes and ranks. Raises ConfigError."""
    values = {**overrides, "nproc_per_node": task.local_world_size, "log": "none"}
    spare = values.get("spare_nodes", 0)
    if task.nodes <= spare:
        raise ConfigError(
            f"--spare-nodes {spare}: {task.launcher} has started tasks on {task.nodes} nodes, one must train"
        )
    values["nnodes"] = task.nodes - spare
    if task.nodes > 1:
        values["node_rank"] = task.node_rank
        values.setdefault("node_name", environment.get("SLURMD_NODENAME") or socket.gethostname())
        values.setdefault("controller", _controller(task, environment))
        domain = _failure_domain(environment)
        if domain is not None:
            values.setdefault("failure_domain", domain)
    return values


def _controller(task: Task, environment: Mapping[str, str]) -> str:
    if task.head is None:
        raise ConfigError(
            f"{task.launcher}: there are {task.nodes} nodes, and nothing says which has rank 0: set MASTER_ADDR for "
            f"all tasks, or give --controller HOST:PORT (port {CONTROLLER_PORT} by default)"
        )
    port = environment.get("MASTER_PORT", "")
    first, number = _PORTS
    return f"{task.head}:{port if port.isdigit() else first + zlib.crc32(task.job.encode()) % number}"


def _failure_domain(environment: Mapping[str, str]) -> str | None:
    """With Slurm's topology/tree, all but the node itself of its way from the top switch, such as core.leaf7."""
    pattern, address = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""), environment.get("SLURM_TOPOLOGY_ADDR", "")
    return address.rpartition(".")[0] or None if pattern.endswith("switch.node") else None


def start_agent(launch: TaskLaunch) -> subprocess.Popen[bytes]:
    """The agent of this node, in a separate session. From now on its socket can be called.

    Raises:
        ConfigError: there is one already, and it does not end, or its directory cannot be written.
    """
    deadline = time.monotonic() + _FREE_S
    while True:
        try:
            listener = local_socket.listen(launch.socket_name, socket.SOCK_STREAM)
            break
        except OSError as e:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{launch.first.launcher}: an agent of job {launch.first.job!r} is there already on this node: two "
                    "launches at once, or two tasks with local rank 0"
                ) from e
            time.sleep(_LOOK_S)
    try:
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        out = open(launch.log, "ab")  # noqa: SIM115 - closed below
    except OSError as e:
        raise ConfigError(f"--run-dir {launch.path}: {e.strerror}") from e
    with listener, out, open(os.memfd_create("launch"), "w+b") as order:
        order.write(launch.to_json().encode())
        order.seek(0)
        popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "flashrecovery.adopt.daemon", str(listener.fileno())],
            stdin=order,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )
    return popen
