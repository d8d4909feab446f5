"""Waiting for the device: when, for how long at most, and what comes of an error. CUDA's calls are answered here."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from flashrecovery.errors import DrainError
from flashrecovery.groups import ENOUGH_FREE_BYTES
from flashrecovery.worker.control.device_sync import DeviceClock


class Device:
    """In place of CUDA: its synchronisation takes as long as ``busy`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self.error: RuntimeError | None = None
        self.waits = 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self, device: int = 0) -> None:
        self.waits += 1
        self.idle.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_without_cuda_nothing_waits() -> None:
    clock = DeviceClock()
    clock.before_mutation()
    clock.before_commit()
    clock.settle(0.0)
    assert not clock.runs_behind and clock.blocked_s == 0.0


def test_a_commit_waits_for_the_whole_device(device: Device) -> None:
    """An all-gather of updated parameters runs on a separate stream."""
    device.idle.clear()
    clock = DeviceClock()
    committing = threading.Thread(target=clock.before_commit)
    committing.start()
    deadline = time.monotonic() + 10
    while not clock.blocked_s and time.monotonic() < deadline:
        time.sleep(0.001)
    assert clock.blocked_s > 0 and committing.is_alive()
    device.idle.set()
    committing.join(10)
    assert clock.blocked_s == 0.0 and device.waits == 1


def test_a_device_that_never_comes_to_rest_is_no_survivor(device: Device) -> None:
    device.idle.clear()
    with pytest.raises(DrainError, match=r"not idle 0\.05 s after the abort \(timeouts.drain_s\)"):
        DeviceClock().settle(0.05)
    device.idle.set()


def test_nor_is_one_with_an_error(device: Device) -> None:
    device.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DrainError, match="the device cannot go on: an illegal memory access"):
        DeviceClock().settle(10)


def test_one_that_is_idle_goes_on(device: Device) -> None:
    DeviceClock().settle(10)
    assert device.waits == 1


@pytest.mark.parametrize(("free", "given_back"), [(ENOUGH_FREE_BYTES, 0), (ENOUGH_FREE_BYTES - 1, 1)])
def test_torchs_cache_is_given_back_where_little_is_left_for_communicators(
    device: Device, monkeypatch: pytest.MonkeyPatch, free: int, given_back: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    DeviceClock().make_room()
    assert len(calls) == given_back
