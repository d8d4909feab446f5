"""The agent of a node whose ranks a cluster's launcher has started, a separate process::

    python -m flashrecovery.adopt.daemon LISTENER-FD < LAUNCH

It begins once every task of the node has its guard here, and ends when the job ends, or when no guard is left.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashrecovery.adopt.launch import TaskLaunch
from flashrecovery.agent.processes.task_slots import Guards
from flashrecovery.errors import ConfigError, FlashRecoveryError
from flashrecovery.rpc.quiet_grpc import import_grpc
from flashrecovery.rpc.token import SHORTEST_TOKEN, TOKEN_ENV
from flashrecovery.runtime.environment import PER_TASK_ENV
from flashrecovery.runtime.process_control import name_thread

_TOKEN_LOOK_S = 0.2


def main() -> None:
    """The process's end is the job's end on this node."""
    name_thread("fr-agent")
    launch = TaskLaunch.from_json(sys.stdin.read())
    import_grpc()
    asyncio.run(_serve(launch, socket.socket(fileno=int(sys.argv[1]))))


async def _serve(launch: TaskLaunch, listener: socket.socket) -> None:
    leave = _Leave()
    world_size = launch.config.world_size
    guards = Guards(listener, launch.first, world_size, launch.settings, leave)
    code, reason = 1, "the agent of this node has failed"
    try:
        code, reason = await _run(launch, guards, leave)
    except FlashRecoveryError as e:
        code, reason = 2, str(e)
    except BaseException as e:
        reason = f"{reason}: {type(e).__name__}: {e} (see {launch.log})"
        raise
    finally:
        await guards.end(code, reason)


async def _run(launch: TaskLaunch, guards: Guards, leave: _Leave) -> tuple[int, str]:
    coming = asyncio.ensure_future(guards.all_here(launch.config.timeouts.rendezvous_s))
    leave.by(lambda: coming.cancel())
    try:
        await coming
    except asyncio.CancelledError:
        return 1, leave.reason
    _surround(guards)
    from flashrecovery.job import run_job

    config = launch.config.model_copy(update=_token(launch))
    leave.by(lambda: os.kill(os.getpid(), signal.SIGTERM))  # as a scheduler would end `flashrecovery run`
    code, reason = await run_job(config, launch.command, launch.path, guards)
    return code, leave.reason or reason


class _Leave:
    """What is to be done when this node's tasks are gone, or told to end. ``reason``: why; "" before."""

    def __init__(self) -> None:
        self.reason = ""
        self._way: Callable[[], object] = lambda: None

    def by(self, way: Callable[[], object]) -> None:
        self._way = way
        if self.reason:
            way()

    def __call__(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._way()


def _surround(guards: Guards) -> None:
    """What the agent's processes have is what all tasks have: any of their CPUs, and no variable of one of them."""
    cpus = guards.cpus()
    os.sched_setaffinity(0, cpus)
    differing = guards.differing()
    for name in differing:
        os.environ.pop(name, None)
    os.environ[PER_TASK_ENV] = " ".join(differing)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cpus) // guards.number)))


def _token(launch: TaskLaunch) -> dict[str, Path]:
    """The token that all nodes share, if none is given: a file in the run directory, which the first node makes. Raises
    ConfigError."""
    config = launch.config
    if not config.several_nodes or config.token_file is not None or os.environ.get(TOKEN_ENV):
        return {}
    path = launch.path / "token"
    if launch.first.node_rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_new(path, secrets.token_hex(SHORTEST_TOKEN))
    deadline = time.monotonic() + config.timeouts.rendezvous_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path}: the first node has made no token there: the run directory is not shared, so give all tasks "
                f"one in {TOKEN_ENV}, or --token-file"
            )
        time.sleep(_TOKEN_LOOK_S)
    return {"token_file": path}


def _write_new(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner only. Nothing if it is there already."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    try:
        os.link(part, path)
    except FileExistsError:
        pass  # of an earlier launch
    finally:
        part.unlink()


if __name__ == "__main__":
    main()
