"""NVIDIA GPUs, read by NVML (extra ``nvidia``: the package nvidia-ml-py). :mod:`.gpu` says what the values mean.

Reading makes no CUDA context and takes a few milliseconds a GPU. Each GPU has its own event set, so that an XID
needs no look-up of its GPU: a lost GPU could not say its UUID any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

from flashrecovery.health import nvswitch
from flashrecovery.health.findings import HealthContext, HealthFinding
from flashrecovery.health.gpu import WINDOW_S, Gpu, GpuReading, NvLink, TemperatureLimits, judge, visible

T = TypeVar("T")
_WINDOW_PARTS = 60
_MOST_EVENTS = 64
"""XIDs taken from one GPU in one look; a storm must not keep the look from its end."""


class _Missing(Exception):
    """NVML's code says that the GPU or its driver does not have this value."""


class NvidiaPlugin:
    """Watches the GPUs that the local ranks see: local rank i uses the i-th visible device."""

    name = "nvidia"

    def __init__(self, nvml: Any, indices: Sequence[int]) -> None:
        """``nvml``: the module pynvml, initialised. ``indices``: NVML's index of each local rank's GPU."""
        self._nvml = nvml
        self._devices = [_Device(nvml, rank, index) for rank, index in enumerate(indices)]
        self._switches = nvswitch.find()

    def health(self) -> list[HealthFinding]:
        found = [finding for device in self._devices for finding in device.look()]
        return found if self._switches is None else [*found, *self._switches.look()]

    def close(self) -> None:
        if self._switches is not None:
            self._switches.close()
        for device in self._devices:
            device.close()
        self._nvml.nvmlShutdown()


def create(context: HealthContext) -> NvidiaPlugin | None:
    """None without nvidia-ml-py, driver or GPU. Raises NVMLError for what else goes wrong."""
    nvml = open_nvml()
    if nvml is None:
        return None
    uuids = [uuid_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    indices = visible(context.environment.get("CUDA_VISIBLE_DEVICES"), uuids)[: context.local_ranks]
    if not indices:
        nvml.nvmlShutdown()
        return None
    return NvidiaPlugin(nvml, indices)


def open_nvml() -> Any | None:
    """The module pynvml, initialised; None without it, driver or GPU. Raises NVMLError for what else goes wrong."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_NO_PERMISSION)
        # 28, GPU_NOT_FOUND, has no name in older releases of nvidia-ml-py
        if e.value in (*absent, 28):
            return None
        raise
    return nvml


def uuid_of(nvml: Any, index: int) -> str:
    """ "" for a GPU that is lost or cannot be read: it keeps its place in the order."""
    try:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:  # every look at this GPU reports the code
        return ""


class _Device:
    """One GPU: its handle, its event set, and the readings that the next one is compared with."""

    def __init__(self, nvml: Any, rank: int, index: int) -> None:
        self._nvml = nvml
        self.gpu = Gpu(rank, index, uuid_of(nvml, index))
        self._handle: Any = None
        self._events: Any = None
        self._limits = TemperatureLimits()
        self._start: GpuReading | None = None
        self._before = GpuReading()
        self._window: deque[tuple[float, GpuReading]] = deque()  # readings of the last WINDOW_S seconds

    def look(self) -> list[HealthFinding]:
        """Read the GPU once, and judge."""
        now = self._reading()
        readable = not now.lost and not now.error
        if self._start is None:
            if not readable:
                return judge(self.gpu, now, now, now)
            self._start = self._before = now
        findings = judge(self.gpu, self._start, self._before, now, self._oldest(now, readable))
        if readable:  # counters of a GPU that cannot be read count on from where they were
            self._before = now
        return findings

    def _oldest(self, now: GpuReading, readable: bool) -> GpuReading:
        """Of the window, which ``now`` joins."""
        at = time.monotonic()
        while self._window and at - self._window[0][0] > WINDOW_S:
            self._window.popleft()
        oldest = self._window[0][1] if self._window else now
        if readable and (not self._window or at - self._window[-1][0] >= WINDOW_S / _WINDOW_PARTS):
            self._window.append((at, now))
        return oldest

    def close(self) -> None:
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
            self._events = None

    def _reading(self) -> GpuReading:
        xids: list[int] = []
        try:
            if self._handle is None:
                self._open()
            self._take_xids(xids)
            return self._values(tuple(xids))
        except self._nvml.NVMLError as e:
            name = _code_name(self._nvml, e.value)
            gone = e.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED)
            return GpuReading(lost=name if gone else "", error="" if gone else name, xids=tuple(xids))

    def _open(self) -> None:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(self.gpu.index)
        self._limits = TemperatureLimits(
            self._maybe(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            self._maybe(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        )
        events = nvml.nvmlEventSetCreate()
        try:
            self._call(nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, events)
        except _Missing:  # a GPU without events: counters and states are left
            nvml.nvmlEventSetFree(events)
            events = None
        except nvml.NVMLError:
            nvml.nvmlEventSetFree(events)
            raise
        self._handle, self._events = handle, events

    def _take_xids(self, xids: list[int]) -> None:
        """Append what has happened since the last look; what was taken counts also if the next call fails."""
        while self._events is not None and len(xids) < _MOST_EVENTS:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as e:
                if e.value == self._nvml.NVML_ERROR_TIMEOUT:
                    return
                raise
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                xids.append(int(event.eventData))

    def _values(self, xids: tuple[int, ...]) -> GpuReading:
        nvml, handle = self._nvml, self._handle
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        remapped = self._maybe(nvml.nvmlDeviceGetRemappedRows, handle)
        reasons = self._maybe(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        return GpuReading(
            xids=xids,
            uncorrected=self._maybe(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            temperature=self._maybe(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            limits=self._limits,
            throttle=_throttle(nvml, reasons),
            links=tuple(self._links()),
        )

    def _links(self) -> Iterator[NvLink]:
        """The first number that the GPU does not know ends them. A link that is down has no counters."""
        nvml, handle = self._nvml, self._handle
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._maybe(nvml.nvmlDeviceGetNvLinkState, handle, number)
            if state is None:
                return
            if state != nvml.NVML_FEATURE_ENABLED:
                yield NvLink(number, False)
                continue
            recoveries, *errors = (
                self._maybe(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, number, counter)
                for counter in (
                    nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                    nvml.NVML_NVLINK_ERROR_DL_REPLAY,
                    nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
                )
            )
            known = [count for count in errors if count is not None]
            yield NvLink(number, True, recoveries, sum(known) if known else None)

    def _maybe(self, function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return self._call(function, *arguments)
        except _Missing:
            return None

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Raises _Missing if the code says that there is no such value, else NVMLError."""
        nvml = self._nvml
        try:
            return function(*arguments)
        except nvml.NVMLError as e:
            if e.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
                nvml.NVML_ERROR_NO_PERMISSION,
                nvml.NVML_ERROR_NO_DATA,
                nvml.NVML_ERROR_DEPRECATED,
            ):
                raise _Missing from e
            raise


def _throttle(nvml: Any, reasons: int) -> tuple[str, ...]:
    """The hardware's own reasons among the bits of ``reasons``; power caps and idle clocks are usual."""
    named = {
        "thermal": nvml.nvmlClocksEventReasonHwThermalSlowdown,
        "power_brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    }
    found = tuple(name for name, bit in named.items() if reasons & bit)
    return found or (("hardware",) if reasons & nvml.nvmlClocksEventReasonHwSlowdown else ())


def _code_name(nvml: ModuleType, code: int) -> str:
    """ "gpu_is_lost" for 15, "nvml_error_<n>" for a code without a name."""
    for name, value in vars(nvml).items():
        if name.startswith("NVML_ERROR_") and value == code:
            return name.removeprefix("NVML_ERROR_").lower()
    return f"nvml_error_{code}"
