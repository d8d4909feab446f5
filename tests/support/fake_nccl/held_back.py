"""A stream that is held back, for the fake: what a fused optimizer launches is queued, and a thread carries it out.

It waits for what the host has run ahead of, then for the word of the host's memory, copies the flag, and runs the
kernels. The host, which plays the stream, catches up when it has let go.

``FAKE_NCCL_STRIKE=RANK:HOLD:POINT``: the rank's first process is killed at that point of that hold (from 1; the two by
which the product tries the stream are 1 and 2). ``FAKE_NCCL_CHANCE=SEED:PERCENT:KILLS:DIRECTORY``: every process is
killed in so many of its holds, at a random one of :data:`POINTS`, until so many have been. The directory gets a file
for each. In the directory ``FAKE_NCCL_VOIDS`` each void step of a job leaves one, too.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version

from flashrecovery.groups import accelerator, native_build

KERNELS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_foreach_add_", "_foreach_sub_")
"""What the fused optimizers of torch launch."""
PATCHED = (*KERNELS, "maximum", "_amp_foreach_non_finite_check_and_unscale_")
"""What :func:`queue_kernels` replaces in torch."""
POINTS = (
    *("held", "launch1", "launch2", "launch3", "launched", "whole", "decided", "let-go"),
    *("kernel1", "kernel2", "kernel3", "applied"),
)
"""Where a process can be killed, in order: the host's, then from "let-go" on the stream's."""
TRIALS = 2


class Strikes:
    """Kills this process where the environment says so."""

    def __init__(self) -> None:
        self._holds = 0
        rank, generation = os.environ.get("RANK", ""), os.environ.get("FLASHRECOVERY_GENERATION")
        one = os.environ.get("FAKE_NCCL_STRIKE", "").split(":")
        self._certain = (int(one[1]), one[2]) if one[0] == rank and generation == "0" else (0, "")
        self._chance = os.environ.get("FAKE_NCCL_CHANCE", "").split(":", 3)
        self._random = random.Random(f"{self._chance[0]} {rank} {generation} {os.getpid()}")
        self._now = ""

    def hold(self) -> None:
        """Another hold begins."""
        self._holds += 1
        number, point = self._certain
        self._now = point if number == self._holds else ""
        if len(self._chance) == 4 and self._holds > TRIALS and self._random.uniform(0, 100) < float(self._chance[1]):
            self._now = self._random.choice(POINTS)

    def at(self, point: str) -> None:
        if point != self._now:
            return
        if len(self._chance) == 4 and not self._counts(point):
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def _counts(self, point: str) -> bool:
        """Whether there are kills left; takes one."""
        folder = Path(self._chance[3])
        for number in range(int(self._chance[2])):
            with suppress(FileExistsError), (folder / f"kill{number}").open("x") as file:
                file.write(f"{point} {os.environ['RANK']}")
                return True
        return False


class FakeHold:
    """A ``flashrecovery.groups.accelerator.StreamHold``."""

    holding: FakeHold | None = None
    """The one that holds back what is launched now."""

    def __init__(self, module: Any) -> None:
        self.flag = torch.zeros(())
        self._module = module
        self._words = torch.zeros(2, dtype=torch.int32)
        address = self._words.data_ptr()
        self._word, self._host_flag = ctypes.c_uint32.from_address(address), ctypes.c_float.from_address(address + 4)
        self._native = native_build.native()
        self._hold = self._native.stream_hold(address, timedelta(seconds=accelerator.PATIENCE_S))
        self._before = module.take_behind()
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._launched = self._run = 0
        self._strikes = Strikes()
        threading.Thread(target=self._play, name="fake-stream", daemon=True).start()

    def _play(self) -> None:
        while True:
            task = self._queue.get()
            task()
            self._queue.task_done()

    def hold(self) -> None:
        self._strikes.hold()
        self._before = self._module.take_behind()
        self._launched = self._run = 0
        self._queue.put(partial(self._come_to_it, self._native.stream_hold_begin(self._hold), self._before))
        FakeHold.holding = self
        self._strikes.at("held")

    def _come_to_it(self, number: int, before: Any) -> None:
        """On the stream: what comes before, the wait for the word, the copy of the flag."""
        with suppress(RuntimeError):  # a kernel has failed: whoever asks is told
            before.wait()
        while (self._word.value - number) & 0x80000000:  # in cyclic order: not yet
            time.sleep(0.0001)
        self.flag.fill_(self._host_flag.value)

    def launch(self, kernel: Callable[[], None], written: Iterable[torch.Tensor]) -> None:
        """Queue one; the version counters move when it is launched."""
        self._launched += 1
        tensors = tuple(written)
        increment_version(tensors)
        self._queue.put(partial(self._execute, kernel, tensors))
        self._strikes.at(f"launch{self._launched}")

    def _execute(self, kernel: Callable[[], None], tensors: tuple[torch.Tensor, ...]) -> None:
        self._run += 1
        self._strikes.at(f"kernel{self._run}")
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensors):
            kernel()

    def wait(self) -> None:
        self._strikes.at("launched")
        self._before.wait()
        self._strikes.at("whole")

    def let_go(self, *, void: bool) -> bool:
        self._strikes.at("decided")
        in_time = bool(self._native.stream_hold_end(self._hold, void))
        FakeHold.holding = None
        if void and self._launched and (folder := os.environ.get("FAKE_NCCL_VOIDS")):
            (Path(folder) / f"{os.environ['RANK']}.{os.getpid()}.{time.monotonic_ns()}").touch()
        self._strikes.at("let-go")
        self.drain()
        self._strikes.at("applied")
        return in_time

    def drain(self) -> None:
        """Everything queued has happened."""
        self._queue.join()

    def mark(self) -> accelerator.DeviceMark:
        return _Mark(self._queue)


class _Mark:
    def __init__(self, tasks: queue.Queue[Callable[[], None]]) -> None:
        self._come = threading.Event()
        tasks.put(self._come.set)

    def done(self) -> bool:
        return self._come.wait(0.01)


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    return [tensor for value in values if isinstance(value, (list, tuple)) for tensor in value]


def queue_kernels(module: Any) -> None:
    """What the fused optimizers launch is queued where it is held back. Who reads gradients on the host comes behind
    what it has run ahead of."""

    def queued(name: str) -> None:
        original = getattr(torch, name)

        @wraps(original)
        def call(*arguments: Any, **more: Any) -> Any:
            hold = FakeHold.holding
            if hold is None:
                return original(*arguments, **more)
            written = arguments[:1] if name.startswith("_foreach") else (arguments[0], *arguments[2:])
            hold.launch(partial(original, *arguments, **more), _tensors(written))
            return None

        setattr(torch, name, call)

    for name in KERNELS:
        queued(name)
    maximum = torch.maximum

    @wraps(maximum)
    def queued_maximum(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if FakeHold.holding is None or out is None:
            return maximum(one, other, out=out)
        FakeHold.holding.launch(partial(maximum, one, other, out=out), [out])
        return out

    torch.maximum = queued_maximum
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    @wraps(unscale)
    def caught_up(*arguments: Any, **more: Any) -> Any:
        module.catch_up()
        return unscale(*arguments, **more)

    torch._amp_foreach_non_finite_check_and_unscale_ = caught_up
