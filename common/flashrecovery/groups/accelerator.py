"""The device that runs behind the host, as far as recovery has to do with it: CUDA.

On CUDA the host queues kernels and collectives and goes on, so what the host has done says little about what has
happened to the state. Everything that has to wait for the device asks here. On a machine without a GPU nothing is in
use, and nothing of this costs anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class DeviceMark(Protocol):
    """A place in a stream."""

    def done(self) -> bool:
        """Whether the device has come so far; does not wait. RuntimeError: the device fails."""


class SideStream(Protocol):
    """One that runs beside all others."""

    def current(self) -> AbstractContextManager[object]:
        """What the calling thread starts within it is queued on this stream."""

    def mark(self) -> DeviceMark:
        """Behind everything that has been queued on it."""


class Accelerator(Protocol):
    """What plays the device."""

    def in_use(self) -> bool:
        """Whether this process has begun to use it."""

    def current(self) -> torch.device | None:
        """The calling thread's device; None if the process uses none."""

    def synchronize_stream(self) -> None:
        """Wait until everything on the calling thread's current stream has happened. RuntimeError: the device fails."""

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until everything on all streams of ``device`` (default: the current one) has happened. RuntimeError: the
        device fails."""

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether ``tensor`` lies in the memory of ``device``."""

    def stream(self, device: torch.device) -> SideStream:
        """A new one."""

    def mark(self, device: torch.device) -> DeviceMark:
        """Behind everything that is queued on the calling thread's current stream of ``device``."""

    def free_bytes(self) -> int:
        """Bytes of the current device's memory that neither this process nor another one has taken from the driver."""

    def empty_cache(self) -> None:
        """Give what is free in torch's allocator back to the driver."""

    def check(self) -> None:
        """A call to the device that waits for nothing. RuntimeError: the device fails."""

    def fail(self) -> None:
        """Start a kernel that faults: every later call of this process to its device fails. For fault drills."""


class CudaStream:
    """A CUDA stream or event, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> DeviceMark:
        return CudaMark(self._stream.record_event())


class CudaMark:
    """An event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


class Cuda:
    """NVIDIA GPUs, through torch."""

    def in_use(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def current(self) -> torch.device | None:
        return torch.device("cuda", torch.cuda.current_device()) if self.in_use() else None

    def synchronize_stream(self) -> None:
        torch.cuda.current_stream().synchronize()

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.cuda.synchronize(device)

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        return tensor.device == device

    def stream(self, device: torch.device) -> SideStream:
        return CudaStream(device)

    def mark(self, device: torch.device) -> DeviceMark:
        return CudaMark(torch.cuda.current_stream(device).record_event())

    def free_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info()
        return int(free)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def check(self) -> None:
        torch.cuda.current_stream().query()

    def fail(self) -> None:
        torch.zeros(1, device="cuda").index_select(0, torch.ones(1, dtype=torch.int64, device="cuda"))  # out of range


def on_device(tensor: torch.Tensor) -> bool:
    """Whether it lies on a device of the kind that this process uses."""
    current = _accelerator.current()
    return current is not None and tensor.device.type == current.type and _accelerator.holds(tensor, tensor.device)


def lost_context() -> str:
    """The error with which every call of this process to its device fails from now on; "" if they do not. Waits for
    nothing.

    CUDA calls such errors sticky: an illegal address, a failed assertion of a kernel, a peer's memory that has gone
    away (``cudaErrorContained``). "This leaves the process in an inconsistent state and any further CUDA work will
    return the same error" (driver_types.h). So the device itself is asked, twice: what is over with one error (no
    memory) is none, and neither the type nor the text of an error decides.
    """
    if not _accelerator.in_use():
        return ""
    error: RuntimeError | None = None
    for _ in range(2):
        try:
            _accelerator.check()
            return ""
        except RuntimeError as e:
            error = e
    code = getattr(error, "error_code", None)
    text = str(error).partition("\n")[0]
    return text if code is None else f"{text} (code {code})"


_accelerator: Accelerator = Cuda()


def accelerator() -> Accelerator:
    """The one of this process."""
    return _accelerator


def use(other: Accelerator) -> None:
    """Another one plays the device from now on: a test's."""
    global _accelerator
    _accelerator = other
