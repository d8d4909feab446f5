"""The device that runs behind the host, as far as recovery has to do with it: CUDA.

On CUDA the host queues kernels and collectives and goes on, so what the host has done says little about what has
happened to the state. Everything that has to wait for the device asks here. On a machine without a GPU nothing is in
use, and nothing of this costs anything.
"""

from __future__ import annotations

from typing import Protocol

import torch


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

    def free_bytes(self) -> int:
        """Bytes of the current device's memory that neither this process nor another one has taken from the driver."""

    def empty_cache(self) -> None:
        """Give what is free in torch's allocator back to the driver."""


class Cuda:
    """NVIDIA's, by way of torch."""

    def in_use(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def current(self) -> torch.device | None:
        return torch.device("cuda", torch.cuda.current_device()) if self.in_use() else None

    def synchronize_stream(self) -> None:
        torch.cuda.current_stream().synchronize()

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.cuda.synchronize(device)

    def free_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info()
        return int(free)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


_accelerator: Accelerator = Cuda()


def accelerator() -> Accelerator:
    """The one of this process."""
    return _accelerator


def use(other: Accelerator) -> None:
    """Another one plays the device from now on: a test's."""
    global _accelerator
    _accelerator = other
