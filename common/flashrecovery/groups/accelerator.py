"""The device that runs behind the host, as far as recovery has to do with it: CUDA.

On CUDA the host queues kernels and collectives and goes on, so what the host has done says little about what has
happened to the state. Everything that has to wait for the device asks here. On a machine without a GPU nothing is in
use, and nothing of this costs anything.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

import torch

from flashrecovery.errors import UnsupportedError
from flashrecovery.groups import native_build

PATIENCE_S = 5.0
"""How long a hold may last (:class:`StreamHold`). A host that has waited so long for its peers loses nothing but the
launches of one optimizer step, which it does again."""

_DRIVER, _WAIT, _ADDRESS = "libcuda.so.1", "cuStreamWaitValue32_v2", "cuMemHostGetDevicePointer_v2"
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ (cuda.h), in cyclic order


class DeviceMark(Protocol):
    """A place in a stream. A protocol, as :class:`Accelerator`."""

    def done(self) -> bool:
        """Whether the device has come so far; does not wait. RuntimeError: the device fails."""


class SideStream(Protocol):
    """One that runs beside all others. A protocol, as :class:`Accelerator`."""

    def current(self) -> AbstractContextManager[object]:
        """What the calling thread starts within it is queued on this stream."""

    def mark(self) -> DeviceMark:
        """Behind everything that has been queued on it."""


class StreamHold(Protocol):
    """Holds back what is queued on a stream, until the host says whether it is to count. A protocol, as
    :class:`Accelerator`.

    Attributes:
        flag: float32, no dimension, on the device. For what is queued behind :meth:`hold`: 1 if it is void, else 0.
    """

    flag: torch.Tensor

    def hold(self) -> None:
        """What is queued on the calling thread's current stream from here on waits for :meth:`let_go`."""

    def wait(self) -> None:
        """Wait until everything that was queued on that stream before :meth:`hold` has happened. RuntimeError: the
        device fails."""

    def let_go(self, *, void: bool) -> bool:
        """What is held back happens, with the flag set if ``void``. False: a hold that nothing has ended for
        :data:`PATIENCE_S` has ended by itself, as void. It does that for a host that waits for the stream itself."""

    def mark(self) -> DeviceMark:
        """Behind what has been queued on that stream since."""


class Accelerator(Protocol):
    """The device of this process. A protocol, as the double of NCCL in the tests brings one that is no GPU."""

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

    def stream_hold(self, device: torch.device) -> StreamHold:
        """A new one, of the calling thread's device. Raises UnsupportedError, by name."""

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


class CudaHold:
    """The stream waits for a word of page-locked memory of the host (a stream memory operation of the driver's)."""

    def __init__(self, device: torch.device) -> None:
        if reason := why_not_held():
            raise UnsupportedError(reason)
        self._device = device
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._host_flag = self._words[1:].view(torch.float32).reshape(())
        self.flag = torch.zeros((), device=device)
        self._native = native_build.native()
        self._hold = self._native.stream_hold(self._words.data_ptr(), timedelta(seconds=PATIENCE_S))
        self._driver = ctypes.CDLL(_DRIVER)
        self._address = ctypes.c_uint64()
        host = ctypes.c_void_p(self._words.data_ptr())
        self._call(_ADDRESS, ctypes.byref(self._address), host, 0)
        self._before = torch.cuda.Event()
        self._stream = torch.cuda.current_stream(device)

    def hold(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)
        self._before.record(self._stream)
        number = self._native.stream_hold_begin(self._hold)
        try:
            stream = ctypes.c_void_p(self._stream.cuda_stream)
            self._call(_WAIT, stream, self._address, ctypes.c_uint32(number), _AT_LEAST)
            self.flag.copy_(self._host_flag, non_blocking=True)
        except (RuntimeError, UnsupportedError):
            self.let_go(void=True)
            raise

    def wait(self) -> None:
        self._before.synchronize()

    def let_go(self, *, void: bool) -> bool:
        return bool(self._native.stream_hold_end(self._hold, void))

    def mark(self) -> DeviceMark:
        return CudaMark(self._stream.record_event())

    def _call(self, name: str, *arguments: object) -> None:
        if (code := getattr(self._driver, name)(*arguments)) != 0:
            raise UnsupportedError(f"{name} gave error {code}")


def why_not_held() -> str:
    """Why no stream of CUDA can be held back here, as far as can be said without using a GPU; "" if one can."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "with CUDA_LAUNCH_BLOCKING each launch waits for its kernel"
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        return f"the driver cannot be called: {error}"
    missing = [name for name in (_WAIT, _ADDRESS) if not hasattr(driver, name)]
    return f"the driver has no {', '.join(missing)}" if missing else ""


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

    def stream_hold(self, device: torch.device) -> StreamHold:
        return CudaHold(device)

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
