"""NVML at the library boundary: pynvml's functions give prescribed values, its constants and errors are real.

The values are written by hand after NVML's documentation; none was recorded on a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


@dataclass
class FakeGpu:
    """What one GPU answers; by default an idle H100 with two of its NVLinks. ``code``: every call gives this error."""

    uuid: str
    code: int = 0
    missing: set[str] = field(default_factory=set)
    xids: list[int] = field(default_factory=list)
    uncorrected: int = 0
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    temperature: int = 41
    thresholds: dict[int, int] = field(
        default_factory=lambda: {
            pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89,
            pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92,
        }
    )
    reasons: int = pynvml.nvmlClocksEventReasonGpuIdle
    links: list[int] = field(default_factory=lambda: [pynvml.NVML_FEATURE_ENABLED] * 2)
    link_counters: dict[tuple[int, int], int] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)


class FakeNvml:
    """Takes the place of pynvml's functions in one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, init: int = 0) -> None:
        self.gpus = gpus
        self.init = init
        self.event_sets: dict[int, FakeGpu] = {}
        self.shut_down = 0
        for name in dir(self):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, getattr(self, name))

    def _check(self, gpu: FakeGpu, name: str) -> None:
        if gpu.code:
            raise pynvml.NVMLError(gpu.code)
        if name in gpu.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        if self.init:
            raise pynvml.NVMLError(self.init)

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._check(self.gpus[index], "handle")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        self._check(gpu, "uuid")
        return gpu.uuid

    def nvmlEventSetCreate(self) -> ctypes.c_int:
        return ctypes.c_int()

    def nvmlEventSetFree(self, events: ctypes.c_int) -> None:
        self.event_sets.pop(id(events), None)

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, kinds: int, events: ctypes.c_int) -> None:
        self._check(gpu, "events")
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self.event_sets[id(events)] = gpu

    def nvmlEventSetWait_v2(self, events: ctypes.c_int, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "a look never waits"
        gpu = self.event_sets[id(events)]
        if gpu.xids:
            return SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=gpu.xids.pop(0))
        self._check(gpu, "wait")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        self._check(gpu, "ecc")
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return gpu.uncorrected

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        self._check(gpu, "remapped")
        return gpu.remapped

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        self._check(gpu, "temperature")
        return gpu.temperature

    def nvmlDeviceGetTemperatureThreshold(self, gpu: FakeGpu, threshold: int) -> int:
        self._check(gpu, "threshold")
        return gpu.thresholds[threshold]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        self._check(gpu, "reasons")
        return gpu.reasons

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        self._check(gpu, "links")
        if link >= len(gpu.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpu.links[link]

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu: FakeGpu, link: int, counter: int) -> int:
        self._check(gpu, "link counters")
        return gpu.link_counters.get((link, counter), 0)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self._check(gpu, "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.processes]
