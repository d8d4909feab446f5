"""Jobs that are elastic and whose parallel layout may change, and what they are compared with.

A history is a list of stages: from a step on the job has these sizes. Each stage is compared with a job that
megatron-core alone has *started* in these sizes from the state that megatron-core alone has written down at that step
in the job of the stage before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.jobs import Job, check_clean
from tests.support.replan import STEPS, TIMEOUT_S, Course, Sizes, Training, check_same_steps, left_in_memory, start


@dataclass(frozen=True)
class Stage:
    """From ``step`` on the job has these sizes. ``anew``: its processes are others."""

    step: int
    sizes: Sizes
    anew: bool = False


def both(training: Training, *, least: int = 1, ranks: int = 1, **settings: str) -> dict[str, Any]:
    """``--elastic`` and ``--replan`` of a job of this training. ``settings``: of both (replace)."""
    return {
        "elastic": {"min": least, "max": training.sizes.dp, **settings},
        "replan": {"min": ranks, **settings},
    }


def never(training: Training, *, least: int = 1, ranks: int = 1) -> dict[str, Any]:
    return both(training, least=least, ranks=ranks, replace="never")


def stages(job: Job, training: Training) -> list[Stage]:
    """All that there were, in order, without the launch; of several before one step only the last one counts."""
    now, found = training.sizes, dict[int, Stage]()
    for event in job.events:
        if event["event"] == "job_resized":
            now = replace(now, dp=event["replicas"])
            found[event["step"]] = Stage(event["step"], now, anew=found.get(event["step"], Stage(0, now)).anew)
        elif event["event"] == "job_replanned":
            now = Sizes.parse(event["layout"])
            found[event["step"]] = Stage(event["step"], now, anew=True)
    return [found[step] for step in sorted(found)]


class History:
    """Jobs that are made once: each was started where the one before it has written a version down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Any, ...], tuple[Path, Job]] = {}

    def of(self, training: Training, begun: Sequence[tuple[int, Sizes]], steps: int = STEPS) -> tuple[Path, Job]:
        """The job that has begun so: with the launch's sizes, or (the last of ``begun``) with sizes from the state of a
        step of the one before. And where its versions are."""
        key = training, tuple(begun), steps
        if key not in self._known:
            place = self._folder / f"versions-{len(self._known)}"
            place.mkdir()
            given: tuple[str, ...] = ("--save-to", str(place), "--steps", str(steps))
            sizes = None
            if begun:
                step, sizes = begun[-1]
                before, _ = self.of(training, begun[:-1], steps)
                given = (*given, "--start-from", str(before / str(step)))
            job = start(self._folder / f"run-{len(self._known)}", training, *given, sizes=sizes).wait(TIMEOUT_S)
            assert job.code == 0, job.explain()
            check_clean(job)
            self._known[key] = place, job
        return self._known[key]


def check_history(
    job: Job, training: Training, history: History, expected: Sequence[Stage], steps: int = STEPS
) -> None:
    """The job has gone through these stages, and each of them is, bit for bit, a job that was started so: losses of
    every rank, and the whole state. What it begins a stage with is the state of the stage before."""
    why = job.explain()
    assert job.code == 0, why
    found = stages(job, training)
    assert found == list(expected), f"{found}\n{why}"
    mine = Course.of(job)
    begun: list[tuple[int, Sizes]] = []
    first, sizes = 0, training.sizes
    for stage in [*found, Stage(steps, sizes)]:
        _, theirs = history.of(training, begun, steps)
        other = Course.of(theirs)
        check_same_steps(mine, other, first, stage.step, sizes, f"{why}\n--- started so\n{theirs.explain()}")
        if stage.step < steps:
            begins = mine.states["begin", stage.step, str(stage.sizes)]
            known = other.states["state", stage.step, str(sizes)]
            assert begins == known and len(known) == 1, f"{stage} is begun with {begins}, and was {known}\n{why}"
        begun.append((stage.step, stage.sizes))
        first, sizes = stage.step, stage.sizes
    last = found[-1].sizes if found else training.sizes
    assert {rank for rank, layout in mine.ends if layout == str(last)} == set(range(last.ranks)), why
    check_clean(job)
    assert not left_in_memory(), why
