"""Which processes have memory on a GPU, as NVML sees it.

NVML gives the pids of the machine. In a container with its own pid namespace this process sees other pids; then
none of them is ever recognised, and what NVML says is worth nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashrecovery.health.gpu import visible
from flashrecovery.health.nvidia import open_nvml, uuid_of


class GpuProcesses:
    """The processes on the GPUs that local ranks use."""

    def __init__(self, nvml: Any, indices: list[int]) -> None:
        self._nvml = nvml
        self._indices = indices

    @staticmethod
    def create(environment: Mapping[str, str], local_ranks: int) -> GpuProcesses | None:
        """None if NVML says nothing; why, the health plugin says. Takes seconds on a big node."""
        try:
            import pynvml as nvml
        except ImportError:
            return None
        try:
            if open_nvml() is None:
                return None
            uuids = [uuid_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            return None
        indices = visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)[:local_ranks]
        return GpuProcesses(nvml, indices) if indices else None

    def on(self, local_rank: int) -> frozenset[int]:
        """The pids of the processes on its GPU; empty if that cannot be read. Takes milliseconds, seconds if the driver
        is busy."""
        if local_rank >= len(self._indices):
            return frozenset()
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(self._indices[local_rank])
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:  # whatever is wrong with the GPU is the health plugin's to say
            return frozenset()
        return frozenset(process.pid for process in found)
