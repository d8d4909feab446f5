"""Where a node's processes come from. The providers are asked in turn, until one of them returns a process.

To its agent a process is always the same: a channel, a page, and its own session (:mod:`.process`). How it was made
differs: a zygote forked it, the agent started an interpreter, or a launcher's task that has the rank's place started it
(:mod:`.task_slots`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.zygote import Zygotes
from flashrecovery.agent.processes.zygote_process import Adopted, ZygoteLostError
from flashrecovery.runtime.page import Page
from flashrecovery.runtime.process_control import start_interpreter


@dataclass(frozen=True)
class ProcessOrder:
    """One process that is wanted.

    Attributes:
        env: its environment, on top of its starter's.
        log: the file that it prints into; a standby does so once it fills a rank.
        local_rank: of the rank that it is to fill; None for a standby.
        replacement: the job runs, and the process takes the place of a dead one.
    """

    env: Mapping[str, str]
    log: Path
    local_rank: int | None = None
    replacement: bool = False

    @property
    def standby(self) -> bool:
        return self.local_rank is None

    def new_page(self) -> Page:
        return Page.create("standby" if self.standby else self.log.stem)


class ProcessProvider(Protocol):
    """One way to come by a process."""

    async def start(self, order: ProcessOrder) -> WorkerProcess | None:
        """A new process that connects by the bootstrap (:mod:`flashrecovery.worker_main`), in a session of
        its own. None if this provider has none for the order now: the next one is asked. It may take its time; the
        caller ends a process that is not wanted any more when it comes."""


class Forked:
    """From a zygote that has done the imports, in milliseconds. None where no zygote is ready."""

    def __init__(self, zygotes: Zygotes) -> None:
        self._zygotes = zygotes

    async def start(self, order: ProcessOrder) -> WorkerProcess | None:
        while True:
            try:
                return await self._fork(order)
            except ZygoteLostError:  # not asked again, so at last there is none
                continue

    async def _fork(self, order: ProcessOrder) -> WorkerProcess | None:
        """Raises ZygoteLostError: a child that may be there all the same ends with its channel."""
        ours, theirs = socket.socketpair()
        page = order.new_page()
        pid = None
        try:
            with theirs, open(order.log, "ab") as out:
                descriptors = (theirs.fileno(), page.fd, out.fileno())
                pid = await self._zygotes.fork({**os.environ, **order.env}, descriptors, standby=order.standby)
        finally:
            if pid is None:
                ours.close()
                page.close()
        return None if pid is None else WorkerProcess(Adopted(pid), page, ours)


class Spawned:
    """A new interpreter, a child of the agent. There is always one."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def start(self, order: ProcessOrder) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        page = order.new_page()
        role = "--standby" if order.standby else "--worker"
        with theirs, open(order.log, "ab") as out:
            env = {**os.environ, **order.env}
            popen = start_interpreter(role, self._command, env, theirs.fileno(), page.fd, out)
        return WorkerProcess(popen, page, ours)
