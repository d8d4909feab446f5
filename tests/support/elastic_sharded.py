"""Elastic jobs whose state is sharded among the ranks, in several sizes one after the other: FSDP2 and ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic, elastic_fsdp2
from tests.support.elastic import AHEAD, changes, grow, never, resize_by_command, sizes_of
from tests.support.jobs import ROOT, Job, RunningJob, check_clean, check_fired
from tests.support.megatron import ENVIRONMENT

END = 38
"""Steps of the jobs."""


@dataclass(frozen=True)
class Kind:
    """A framework: its script, with flags, and how two of its jobs are compared."""

    name: str
    script: Path
    flags: tuple[str, ...]
    steps_alike: Callable[[Job, Job, int, int, int], None]
    goes_on_alike: Callable[[Job, Job, int, int, int], None]
    env: Mapping[str, str] | None = None
    each: int = 1  # ranks of a replica

    def start(
        self,
        folder: Path,
        *flags: str,
        config: Mapping[str, Any] | None = None,
        nproc: int = 4,
        inject: Sequence[str] = (),
        standby: int = 0,
    ) -> RunningJob:
        """A job of this kind."""
        given = ["--steps", str(END), *self.flags, *flags]
        chosen = never() if config is None else config
        more: dict[str, Any] = {"inject": inject, "standby": standby, "script": self.script, "env": self.env}
        return elastic.start(folder, chosen, *given, nproc=nproc, **more)


Resized = Callable[[Kind, Sequence[tuple[int, int]]], Job]
"""Gives the job of a kind that is resized by command at these steps to these sizes, in ranks."""
DDP = Kind("ddp", elastic.SCRIPT, (), elastic.check_steps_alike, elastic.check_goes_on_alike)
"""Whose state is not sharded."""
FSDP2 = Kind("fsdp2", elastic_fsdp2.SCRIPT, (), elastic_fsdp2.check_steps_alike, elastic_fsdp2.check_goes_on_alike)


def zero(stage: int, *flags: str) -> Kind:
    """DeepSpeed, with twelve micro-batches in a step, so that every size divides them."""
    return Kind(
        "-".join([f"zero{stage}", *(flag.lstrip("-").rpartition("=")[2] for flag in flags)]),
        ROOT / "tests" / "scripts" / "elastic_deepspeed.py",
        ("--zero", str(stage), *flags),
        elastic.check_steps_alike,
        elastic.check_goes_on_alike,
    )


def megatron(name: str, *flags: str, each: int = 1) -> Kind:
    """megatron-core, with twelve micro-batches in a step."""
    script = ROOT / "tests" / "scripts" / "elastic_megatron.py"
    return Kind(name, script, flags, elastic.check_steps_alike, elastic.check_goes_on_alike, ENVIRONMENT, each)


def needing(kind: Kind) -> list[pytest.MarkDecorator]:
    """Marks of tests that need the framework of a kind."""
    return needing_framework_of(kind.script)


def needing_framework_of(script: Path) -> list[pytest.MarkDecorator]:
    """Marks of tests that need the framework which this script uses."""
    name = next((name for name in ("deepspeed", "megatron") if name in script.name), None)
    if name is None:
        return []
    absent = find_spec(name) is None
    return [getattr(pytest.mark, name), pytest.mark.skipif(absent, reason=f"{name} is not installed")]


def killed_and_back(
    kind: Kind, folder: Path, victims: Sequence[int], at: int, back: int, resized: Resized, *flags: str
) -> Job:
    """A job of four ranks that loses these in step ``at``, without any replacement, and gets them back on command
    before step ``back``: in all sizes as if both had been commanded."""
    faults = [f"rank={rank},fault=sigkill,at=backward,step={at}" for rank in victims]
    running = kind.start(folder, *flags, inject=faults)
    running.hold(back - AHEAD)
    running.wait_for("recovery_finished", 120)
    grow(running, 4, back)
    job = running.wait()
    check_fired(job, len(victims))
    assert (changes(job)[-1].step, changes(job)[-1].ranks) == (back, (0, 1, 2, 3)), job.explain()
    assert job.of("job_resized")[-1]["came"] == list(victims), job.explain()
    assert len(job.of("failure_detected")) == len(victims), job.explain()
    check_as_commanded(kind, job, resized)
    return job


def resized_by_command(
    kind: Kind,
    folder: Path,
    sizes: Sequence[tuple[int, int]],
    *flags: str,
    launched: int = 4,
    config: Mapping[str, Any] | None = None,
) -> Job:
    """A job of that many ranks that is resized by command at these steps to these sizes, undisturbed: (step, ranks), in
    order. After its last change it goes on as one that was *started* in that size from that step's state."""
    folder.mkdir(exist_ok=True)
    given = ["--step-time", "100", "--save-to", str(folder), *flags]
    chosen = config or {"elastic": {"min": 1, "max": launched // kind.each}}
    running = kind.start(folder / "run", *given, config=chosen, nproc=launched)
    resize_by_command(running, [(step, size // kind.each) for step, size in sizes], launched // kind.each)
    job = running.wait(240)
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    check_clean(job)
    step, size = sizes[-1]
    config = {"elastic": {"min": 1, "max": size // kind.each}} if size > 1 else {}
    new = kind.start(folder / "new", "--start-from", str(folder / f"{step}.pt"), *flags, config=config, nproc=size)
    begun = new.wait(240)
    assert begun.code == 0, begun.explain()
    kind.goes_on_alike(job, begun, step, size, END)
    check_clean(begun)
    return job


def resized_once(
    factory: pytest.TempPathFactory, *flags: str, launched: int = 4, config: Mapping[str, Any] | None = None
) -> Resized:
    """:func:`resized_by_command`, each of a kind with the same sizes made once."""
    made: dict[tuple[str, tuple[tuple[int, int], ...]], Job] = {}

    def job(kind: Kind, sizes: Sequence[tuple[int, int]]) -> Job:
        key = (kind.name, tuple(sizes))
        if key not in made:
            folder = factory.mktemp("resized") / "job"
            made[key] = resized_by_command(kind, folder, sizes, *flags, launched=launched, config=config)
        return made[key]

    return job


def check_as_commanded(kind: Kind, job: Job, resized: Resized) -> None:
    """In all its sizes the job went the way of one that was resized by command at the same steps."""
    assert job.code == 0, job.explain()
    sizes = sizes_of(job)
    other = resized(kind, sizes)
    for (step, size), (until, _) in zip(sizes, [*sizes[1:], (END, 0)], strict=True):
        kind.steps_alike(job, other, step, until, size)
    kind.goes_on_alike(job, other, *sizes[-1], END)
    check_clean(job)
