"""What recovery costs on GPUs, for the report of :mod:`tests.gpu_check`: memory that is lost, and longer steps."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.jobs import DDP, GPT, ROOT, Layout, RunningJob

Sample = tuple[float, int]
"""Seconds since the epoch, and bytes of all GPUs that are taken."""

_LOOK_S = 0.1
_RATE = re.compile(r"step=(\d+) loss=\S+ tokens/s=(\d+)")
_WARM_UP, _STEPS, _ROUNDS = 10, 60, 2
_RUN_S = 300


class MemoryWatch:
    """Looks at the GPUs' memory ten times a second while it is entered. ``used``: bytes of all GPUs that are taken."""

    def __init__(self, used: Callable[[], int]) -> None:
        self.samples: list[Sample] = []
        self._used = used
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpu-memory")

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.samples.append((time.time(), self._used()))


def used_bytes() -> int:
    """Of all GPUs, as NVML sees it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def lost_per_recovery(samples: Sequence[Sample], events: Sequence[dict[str, Any]]) -> float | None:
    """Bytes by which the memory that is taken grows from the end of one recovery to that of the next, on the average.

    What is taken after a recovery is the most that is seen until the next failure. The first recovery makes what stays
    (a standby's context, caches), and a step may end before the first look: None without two more recoveries.
    """
    after = []
    for number, event in enumerate(events):
        if event["event"] != "recovery_finished":
            continue
        rest = (e["time"] for e in events[number:] if e["event"] in ("failure_detected", "job_finished"))
        until = next(rest, float("inf"))
        seen = [taken for at, taken in samples if event["time"] <= at < until]
        if seen:
            after.append(max(seen))
    return (after[-1] - after[1]) / (len(after) - 2) if len(after) > 2 else None


@dataclass(frozen=True)
class Overhead:
    """Median tokens a second of a DDP job of ``ranks`` ranks: under torchrun, where recovery is off, and under ours."""

    ranks: int
    off: float
    on: float

    @property
    def percent(self) -> float:
        """By how much a step is longer."""
        return 100.0 * (self.off / self.on - 1.0)


HELD_BACK = ROOT / "tests" / "scripts" / "held_back.py"
"""DDP with a fused optimizer."""


def overhead(
    directory: Path, ranks: int, model: Sequence[str], path: Path = GPT / DDP.script, barrier: str = "host"
) -> Overhead:
    """Turn by turn. ``model``: flags of the example at ``path`` that say its size. Raises RuntimeError if a run has
    failed."""
    script, flags = str(path), _flags(model)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    seen: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(_ROUNDS):
        done = subprocess.run([*torchrun, script, *flags], capture_output=True, text=True, timeout=_RUN_S, check=False)
        if done.returncode:
            raise RuntimeError(f"torchrun has ended with {done.returncode}: {done.stderr[-500:]}")
        seen["off"] += rates(done.stdout)
        job = start(directory / f"{path.stem}-{barrier}{turn}", ranks, model, path, barrier).wait(_RUN_S)
        if job.code:
            raise RuntimeError(f"the job has ended with {job.code}: {job.output[-500:]}")
        seen["on"] += rates(job.output)
    return Overhead(ranks, statistics.median(seen["off"]), statistics.median(seen["on"]))


def start(
    run_dir: Path, ranks: int, model: Sequence[str], path: Path = GPT / DDP.script, barrier: str = "host"
) -> RunningJob:
    """The job under ours."""
    layout, config = Layout("overhead", DDP.script, nproc=ranks), {"barrier": barrier}
    return RunningJob(run_dir, layout, standby=0, script=path, flags=_flags(model), config=config)


def _flags(model: Sequence[str]) -> list[str]:
    return [*model, "--steps", str(_STEPS)]


def rates(output: str) -> list[float]:
    """Tokens a second in the steps that rank 0 has printed, but for the first."""
    return [float(rate) for step, rate in _RATE.findall(output) if int(step) >= _WARM_UP]
