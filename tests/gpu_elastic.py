"""Elastic jobs for the report of :mod:`tests.gpu_check`: killed, and grown again, as others were by command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.elastic import changes, command, sizes_of
from tests.support.elastic_divided import DDP, FSDP2, Kind, check_as_commanded, zero
from tests.support.jobs import ROOT, Job

WRAPPER = ROOT / "tests" / "scripts" / "one_gpu.py"
AT, BACK, VICTIM = 8, 32, 1
KINDS = {f"elastic-{kind.name}": kind for kind in (DDP, FSDP2, zero(2), zero(3))}


def on_gpus(kind: Kind, *, shared: bool) -> Kind:
    """``shared``: all ranks on one GPU."""
    env = {**(kind.env or {}), "ONE_GPU_SCRIPT": str(kind.script), "PYTHONWARNINGS": "ignore"}
    if shared:
        env["FLASHRECOVERY_SHARED_GPU"] = "1"
    return replace(kind, script=WRAPPER, env=env)


def shrunk_and_grown(kind: Kind, directory: Path, job_s: float) -> tuple[Job, list[str]]:
    """4 -> 3 -> 4: one rank is killed and nobody replaces it, and comes back on command. The job, and what is not as
    in one that was resized by command at the same steps."""
    fault = f"rank={VICTIM},fault=sigkill,at=backward,step={AT}"
    running = kind.start(directory / "killed", "--step-time", "200", inject=[fault])
    running.wait_for("recovery_finished", job_s)
    refused = command(running, 4, BACK)
    job = running.wait(job_s)
    found = [text for text in [refused] if text]
    if job.code != 0:
        return job, [*found, f"ended with code {job.code}"]
    if len(job.notices("fault_fired")) != 1 or [len(c.ranks) for c in changes(job)] != [3, 4]:
        found.append(f"sizes: {changes(job)}")
    other = kind.start(directory / "commanded", "--step-time", "200", config={"elastic": {"min": 1, "max": 4}})
    other.wait_for("job_started", job_s)
    for number, (step, size) in enumerate(sizes_of(job), 1):
        found += [text for text in [command(other, size, step)] if text]
        other.wait_for("recovery_finished", job_s, count=number)
    return job, found + _differences(kind, job, other.wait(job_s))


def _differences(kind: Kind, job: Job, other: Job) -> list[str]:
    sizes = sizes_of(job)
    if other.code != 0 or sizes_of(other) != sizes:
        return [f"the job that was resized by command: code {other.code}, sizes {sizes_of(other)}, not {sizes}"]
    try:
        check_as_commanded(kind, job, lambda *_: other)
    except AssertionError as e:
        return [str(e).splitlines()[0]]
    return []
