"""Jobs that change, for the report of :mod:`tests.gpu_check`: elastic ones, killed and grown again, as others were by
command; and one that goes on in another parallel layout, as one that Megatron alone has started in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.elastic import changes, command, sizes_of
from tests.support.elastic_sharded import DDP, FSDP2, Kind, check_as_commanded, megatron, zero
from tests.support.jobs import Job, RunningJob, check_fired
from tests.support.replan import Saved, Sizes, Training
from tests.support.replan_scenarios import check_changed_around, killed
from tests.support.wrappers import Wrapper

AT, BACK, VICTIM = 8, 32, 1
RANKS = 4
SLOWLY = ("--step-time", "200")
SHARDED = ("--use-distributed-optimizer", "--bf16")
KINDS = {f"elastic-{kind.name}": kind for kind in (DDP, FSDP2, zero(2), zero(3), megatron("megatron", *SHARDED))}
REPLANNED = {"replan-megatron": Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)}
NEEDS = {
    name: "deepspeed" if "zero" in name else "megatron.core"
    for name in (*KINDS, *REPLANNED)
    if "zero" in name or "megatron" in name
}
"""Packages, by the names of jobs."""


def start(name: str, run_dir: Path, wrapper: Wrapper) -> RunningJob:
    """The job of this name, in which one rank is killed and is not replaced."""
    if name in REPLANNED:
        return replace(REPLANNED[name], wrapper=wrapper).start(run_dir, inject=[killed(VICTIM, "backward")])
    fault = f"rank={VICTIM},fault=sigkill,at=backward,step={AT}"
    return _wrapped(KINDS[name], wrapper).start(run_dir, *SLOWLY, inject=[fault])


def changed(name: str, directory: Path, wrapper: Wrapper, job_s: float) -> tuple[Job, list[str]]:
    """That job, and what is not as it should be. Raises AssertionError if that cannot be seen."""
    running = start(name, directory / "killed", wrapper)
    if name in REPLANNED:
        return _in_another_layout(replace(REPLANNED[name], wrapper=wrapper), running, directory, job_s)
    return _shrunk_and_grown(_wrapped(KINDS[name], wrapper), running, directory, job_s)


def _wrapped(kind: Kind, wrapper: Wrapper) -> Kind:
    return replace(kind, script=wrapper.script, env=wrapper.environment(kind.script, kind.env))


def _in_another_layout(training: Training, running: RunningJob, directory: Path, job_s: float) -> tuple[Job, list[str]]:
    """The others go on in another layout."""
    job = running.wait(job_s)
    check_fired(job)
    check_changed_around(job, training, Saved(directory), RANKS - 1)
    return job, []


def _shrunk_and_grown(kind: Kind, running: RunningJob, directory: Path, job_s: float) -> tuple[Job, list[str]]:
    """4 -> 3 -> 4: the rank comes back on command. What is not as in one that was resized by command at the same
    steps."""
    running.wait_for("recovery_finished", job_s)
    refused = command(running, 4, BACK)
    job = running.wait(job_s)
    found = [text for text in [refused] if text]
    if job.code != 0:
        return job, [*found, f"ended with code {job.code}"]
    if len(job.notices("fault_fired")) != 1 or [len(c.ranks) for c in changes(job)] != [3, 4]:
        found.append(f"sizes: {changes(job)}")
    other = kind.start(directory / "commanded", *SLOWLY, config={"elastic": {"min": 1, "max": 4}})
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
