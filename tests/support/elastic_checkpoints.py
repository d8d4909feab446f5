"""Elastic jobs of ``tests/scripts/elastic_fsdp2.py`` that go back to a fallback checkpoint in another size."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashrecovery.redundancy.published import published
from tests.support.elastic import never
from tests.support.elastic_fsdp2 import start
from tests.support.jobs import Job, RunningJob, check_clean, marked_processes


def saving(folder: Path, interval_s: float = 0.3) -> dict[str, Any]:
    """Configuration: a checkpoint every so often, all of which stay."""
    return {"checkpoint": {"dir": str(folder), "interval_s": interval_s, "keep": 100}}


def of_ranks(path: Path) -> int:
    """How many ranks have written a checkpoint."""
    return len([*path.glob("part-*")])


def die_whole(running: RunningJob) -> Job:
    """SIGKILL to everything that belongs to a job, its launcher first, so that nothing is replaced or tidied up."""
    ranks = running.ranks()
    os.kill(running.popen.pid, signal.SIGKILL)
    for pid in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (left := marked_processes(running.marker)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    job = running.wait()
    assert job.code == -signal.SIGKILL and not job.of("job_finished"), job.explain()
    check_clean(job)
    return job


def dead_job(folder: Path, *flags: str, nproc: int = 4, checkpoints: int = 1) -> list[tuple[int, Path]]:
    """A job that has died whole after so many checkpoints or more. Returns version and path of each."""
    folder.mkdir(exist_ok=True)
    config = {**never(1), **saving(folder / "checkpoints")}
    config["elastic"] = {"min": 1, "max": nproc}
    running = start(folder / "died", "--step-time", "250", *flags, config=config, nproc=nproc)
    running.wait_for("checkpoint_saved", count=checkpoints)
    die_whole(running)
    found = published(folder / "checkpoints")
    assert len(found) >= checkpoints and {of_ranks(path) for _, path in found} == {nproc}
    return found


def launched(folder: Path, name: str, size: int, *flags: str, more: Mapping[str, Any] | None = None) -> Job:
    """A job of this size that is launched to go on from the newest checkpoint."""
    config = {"elastic": {"min": 1, "max": size}, **saving(folder / "checkpoints", 1000), "resume": True}
    return start(folder / name, *flags, config={**config, **(more or {})}, nproc=size).wait()
