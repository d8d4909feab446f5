"""Waits until a killed process has freed its GPU memory: an earlier replacement would find the GPU full.

Freed host memory is no sign of this (``procfs.Statm``): the kernel first frees a process's memory, then closes its
files, including the driver's, and only then reports its end to the parent. Processes that it has forked, especially
data loaders, may still have the driver open. So on a machine with NVIDIA GPUs the fence waits for the end of all
processes of the session, and then until NVML no longer lists the process. Elsewhere it costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import session_members
from flashrecovery.health.gpu_processes import GpuProcesses

DRIVER = Path("/dev/nvidiactl")
"""NVIDIA's control device; it exists if processes may use GPUs."""
_LOOK_S = 0.005


class GpuFence:
    """Makes sure that a dead process is gone from the GPUs of one node. ``find``: where the processes on the GPUs are
    listed, None if nowhere; called in a thread."""

    def __init__(self, find: Callable[[], GpuProcesses | None]) -> None:
        self._find = find
        self._present = DRIVER.exists()
        self._listed: GpuProcesses | None = None

    @staticmethod
    def of_this_node(environment: Mapping[str, str], local_ranks: int) -> GpuFence:
        """``environment``: the agent's."""
        return GpuFence(lambda: GpuProcesses.create(environment, local_ranks))

    async def prepare(self) -> None:
        """NVML takes seconds to come up; before this is over, it is not asked."""
        if self._present:
            self._listed = await asyncio.to_thread(self._find)

    async def released(self, process: WorkerProcess, timeout_s: float) -> bool:
        """True once what the killed ``process`` had on its GPU is free; False after ``timeout_s`` seconds."""
        if not self._present:
            return True
        deadline = time.monotonic() + timeout_s
        while await asyncio.to_thread(self._has_something, process):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def _has_something(self, process: WorkerProcess) -> bool:
        if session_members(process.pid):
            return True
        return self._listed is not None and process.pid in self._listed.on(process.local_rank)
