"""Start an agent on each host of a hostfile by a command such as ``ssh``, as pdsh does for ``deepspeed``.

``ssh HOST PYTHON -m flashrecovery.launchers.node`` runs on each host; everything else (the token, variables, the
configuration, the script's arguments) goes to its standard input, so nothing of it needs quoting, or shows in a list of
processes. What a host's agent prints comes back by its standard output.

The connections are for the terminal only. When this process gets a signal to end, it passes it to the hosts. When it
dies, or a connection does, the job goes on: its agents hold each other, and write to files (:mod:`.node`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrecovery.errors import ConfigError

UP = "flashrecovery: the agent of this host has been started"
"""The first line of a host that is up."""
ENDED = "flashrecovery: the agent of this host has ended"
"""The last line of a host. A connection that ends without it is lost, and the agent may go on."""
STOP = b"stop\n"
WRONG_OPTIONS = 2
"""The exit code of an agent whose configuration is wrong, or that the job has refused."""
_END_S = 8.0
"""Agents end their workers within 5 s."""
_LONGEST_LINE = 1 << 20
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH")
"""Beginnings of the names of variables that all hosts get, as from ``deepspeed``."""
_ENVIRONMENT_FILE = ".deepspeed_env"


@dataclass(frozen=True)
class HostOrder:
    """The message to one host: one line of JSON."""

    name: str
    token: str
    folder: str
    environment: dict[str, str]
    config: dict[str, Any]
    command: list[str]
    output: str

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def exported(environ: Mapping[str, str], folder: Path, home: Path) -> dict[str, str]:
    """Variables that all hosts get: as DeepSpeed 0.19 chooses them, and those of ``.deepspeed_env`` in the home folder
    and in ``folder``, which is in PYTHONPATH, too. Raises ConfigError."""
    found = {name: value for name, value in environ.items() if name.startswith(_EXPORTED)}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH", "")]))
    for path in (home, folder):
        file = path / environ.get("DS_ENV_FILE", _ENVIRONMENT_FILE)
        if file.is_file():
            found.update(_variables(file))
    return found


def _variables(file: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            name, sep, value = line.partition("=")
            if not sep:
                raise ConfigError(f"{file}, line {number}: {line!r} is not NAME=VALUE")
            found[name.strip()] = value
    return found


def command_for(shell: Sequence[str], host: str, python_path: str) -> list[str]:
    """The words that start a host's side: ``ssh HOST env PYTHONPATH=... PYTHON -m ...``. ssh joins the words behind
    HOST for the shell there, others do not; so they are quoted, which changes none of the usual ones."""
    words = ["env", f"PYTHONPATH={python_path}", sys.executable, "-u", "-m", "flashrecovery.launchers.node"]
    return [*shell, host, *(shlex.quote(word) for word in words)]


class _Host:
    """One host's connection."""

    def __init__(self, order: HostOrder, command: list[str]) -> None:
        self.order = order
        self.up = False
        self.ended = False
        self.code: int | None = None
        self._command = command
        self._process: Process | None = None

    async def run(self) -> None:
        """Start it, and show what it prints, until it ends."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True, limit=_LONGEST_LINE
            )
        except OSError as e:
            self.say(f"{self._command[0]}: {e.strerror}")
            self.code = 127
            return
        self._send(self.order.line())
        while (output := self._process.stdout) is not None:
            try:
                line = await output.readline()
            except ValueError:
                continue  # a longer one than fits is not shown; it is in the host's file
            if not line:
                break
            text = line.decode(errors="replace").rstrip("\n")
            self.up |= text == UP
            self.ended |= text == ENDED
            if text not in (UP, ENDED):
                self.say(text)
        self.code = await self._process.wait()

    def say(self, text: str) -> None:
        print(f"{self.order.name}: {text}", flush=True)

    def stop(self) -> None:
        """Tell the host that the job is to end."""
        if self.code is None:
            self._send(STOP)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _send(self, data: bytes) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)


async def run_on(orders: Sequence[HostOrder], shell: Sequence[str]) -> tuple[int, str]:
    """Start all hosts and wait for the job's end. Returns the exit code and, if it is not 0, the reason.

    The job has finished if an agent reports it. A host that is lost meanwhile is the agents' business; one that cannot
    be started at all, or whose agent is refused, ends the launch.
    """
    hosts = [_Host(order, command_for(shell, order.name, order.environment["PYTHONPATH"])) for order in orders]
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN and number is not signal.SIGINT:
            continue  # nohup
        loop.add_signal_handler(number, told.set)
    reason = ""
    waiting: set[asyncio.Task[Any]] = {asyncio.create_task(host.run(), name=host.order.name) for host in hosts}
    waiting.add(asyncio.create_task(told.wait()))
    try:
        while not reason and any(host.code is None for host in hosts):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            reason = "stopped by a signal" if told.is_set() else _wrong(hosts)
        if reason:
            await _end(hosts, waiting)
    finally:
        for host in hosts:
            host.kill()
        for task in waiting:
            task.cancel()
    if any(host.code == 0 for host in hosts):
        return 0, ""
    code = WRONG_OPTIONS if any(host.code == WRONG_OPTIONS for host in hosts) else 1
    return code, reason or _why_ended(hosts)


def _wrong(hosts: Sequence[_Host]) -> str:
    """Why the launch cannot go on; nothing if it can."""
    for host in hosts:
        if host.code not in (None, 0) and not host.up:
            return f"host {host.order.name} could not be started (exit code {host.code}); see --remote-shell"
        if host.code == WRONG_OPTIONS:
            return f"host {host.order.name} was refused, see above"
    return ""


def _why_ended(hosts: Sequence[_Host]) -> str:
    """Why no agent has said that the job has finished."""
    lost = ", ".join(host.order.name for host in hosts if not host.ended)
    if lost:
        return f"the connections to {lost} are lost; agents that live there go on: see `flashrecovery status`"
    return "the agents have ended with exit codes " + ", ".join(f"{host.order.name}: {host.code}" for host in hosts)


async def _end(hosts: Sequence[_Host], waiting: set[asyncio.Task[Any]]) -> None:
    """Tell all, and wait until they have ended."""
    for host in hosts:
        host.stop()
    deadline = asyncio.get_running_loop().time() + _END_S
    while any(host.code is None for host in hosts) and asyncio.get_running_loop().time() < deadline:
        await asyncio.wait(waiting, timeout=0.1)
