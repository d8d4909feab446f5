"""Elastic jobs that go back to a fallback checkpoint in another size: of ``tests/scripts/elastic_fsdp2.py``, or begun
in another way."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashrecovery.redundancy.checkpoint.published import published
from tests.support.elastic import never
from tests.support.elastic_fsdp2 import start
from tests.support.jobs import Job, RunningJob, check_clean, marked_processes

Begin = Callable[..., RunningJob]
"""Starts a job: folder, flags of the script, ``config=``, ``nproc=``."""
START_S = 120.0


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


def dead_job(
    folder: Path, *flags: str, nproc: int = 4, checkpoints: int = 1, begin: Begin = start
) -> list[tuple[int, Path]]:
    """A job that has died whole after that many checkpoints or more. Returns version and path of each."""
    folder.mkdir(exist_ok=True)
    config = {**never(1), **saving(folder / "checkpoints")}
    config["elastic"] = {"min": 1, "max": nproc}
    running = begin(folder / "died", "--step-time", "250", *flags, config=config, nproc=nproc)
    running.wait_for("checkpoint_saved", START_S, count=checkpoints)
    die_whole(running)
    found = published(folder / "checkpoints")
    assert len(found) >= checkpoints and {of_ranks(path) for _, path in found} == {nproc}
    return found


def launched(
    folder: Path, name: str, size: int, *flags: str, more: Mapping[str, Any] | None = None, begin: Begin = start
) -> Job:
    """A job of this size that is launched to go on from the newest checkpoint."""
    config = {"elastic": {"min": 1, "max": size}, **saving(folder / "checkpoints", 1000), "resume": True}
    return begin(folder / name, *flags, config={**config, **(more or {})}, nproc=size).wait(START_S)


def started(folder: Path, before: int, step: int, size: int, *flags: str, begin: Begin = start) -> Job:
    """The job that is started in this size from the state that one of ``before`` ranks, which nothing has disturbed,
    has had at this step."""
    saves = ("--save-to", str(folder), *flags)
    undisturbed = begin(folder / "undisturbed", *saves, config=up_to(before), nproc=before).wait(START_S)
    assert undisturbed.code == 0, undisturbed.explain()
    state = ("--start-from", str(folder / f"{step}.pt"), *flags)
    other = begin(folder / "other", *state, config=up_to(size), nproc=size).wait(START_S)
    assert other.code == 0, other.explain()
    return other


def up_to(size: int) -> dict[str, Any]:
    """An elastic job of that many ranks; of one rank, a job that is not elastic."""
    return {"elastic": {"min": 1, "max": size}} if size > 1 else {}


def spoil(path: Path, how: str) -> str:
    """Damage a checkpoint. Returns what must be said of it."""
    data = path / "part-2" / "__0_0.distcp"
    if how == "metadata":
        (path / ".metadata").write_bytes(b"")
        return str(path)
    if how == "missing":
        shutil.rmtree(path / "part-2")
    elif how == "short":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])
    else:
        content = bytearray(data.read_bytes())
        for at in range(1500, len(content) // 2, 4096):  # wherever the tensors are
            content[at] ^= 1
        data.write_bytes(content)
    return "part-2/__0_0.distcp"


def fell_back(job: Job, ranks: int, size: int, steps: int) -> int:
    """To a checkpoint of that many ranks, in this size. Returns its version."""
    assert job.code == 0, job.explain()
    fallback, (*_, event) = job.of("fallback_started")[-1], job.of("job_resized")
    assert of_ranks(Path(fallback["path"])) == ranks and event["replicas"] == size, job.explain()
    assert event["step"] == fallback["version"] < steps, job.explain()
    return int(fallback["version"])
