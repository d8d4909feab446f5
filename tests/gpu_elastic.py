"""Jobs that change, for the report of :mod:`tests.gpu_check`: elastic ones, killed and grown again, as others were by
command; and one that goes on in another parallel layout, as one that Megatron alone has started in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.elastic import changes, command, sizes_of
from tests.support.elastic_sharded import DDP, FSDP2, Kind, check_as_commanded, megatron, zero
from tests.support.jobs import Job, check_fired
from tests.support.replan import Saved, Sizes, Training
from tests.support.replan_scenarios import check_changed_around, killed
from tests.support.wrappers import on_gpus

AT, BACK, VICTIM = 8, 32, 1
RANKS = 4
SHARDED = ("--use-distributed-optimizer", "--bf16")
KINDS = {f"elastic-{kind.name}": kind for kind in (DDP, FSDP2, zero(2), zero(3), megatron("megatron", *SHARDED))}
REPLANNED = {"replan-megatron": Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)}
NEEDS = {
    name: "deepspeed" if "zero" in name else "megatron.core"
    for name in (*KINDS, *REPLANNED)
    if "zero" in name or "megatron" in name
}
"""Packages, by the names of jobs."""


def changed(name: str, directory: Path, gpus: int, job_s: float) -> tuple[Job, list[str]]:
    """The job of this name, and what is not as it should be. Raises AssertionError if that cannot be
    seen."""
    if name in REPLANNED:
        return _in_another_layout(REPLANNED[name], directory, gpus, job_s)
    return _shrunk_and_grown(KINDS[name], directory, gpus, job_s)


def _in_another_layout(training: Training, directory: Path, gpus: int, job_s: float) -> tuple[Job, list[str]]:
    """One rank is killed and is not replaced; the others go on in another layout."""
    training = replace(training, wrapper=on_gpus(gpus, RANKS))
    job = training.start(directory / "killed", inject=[killed(VICTIM, "backward")]).wait(job_s)
    check_fired(job)
    check_changed_around(job, training, Saved(directory), RANKS - 1)
    return job, []


def _shrunk_and_grown(kind: Kind, directory: Path, gpus: int, job_s: float) -> tuple[Job, list[str]]:
    """4 -> 3 -> 4: one rank is killed and is not replaced, and comes back on command. What is not as in one that was
    resized by command at the same steps."""
    wrapper = on_gpus(gpus, RANKS)
    kind = replace(kind, script=wrapper.script, env=wrapper.environment(kind.script, kind.env))
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
