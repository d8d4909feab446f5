"""Jobs that are elastic and whose parallel layout may change, and what they are compared with.

A history is a list of stages: from a step on the job has these sizes. (In Megatron-LM's loop a step is one of its
calls, and what is computed is compared by iterations.) Each stage is compared with a job that
megatron-core alone has *started* in these sizes from the state that megatron-core alone has written down at that step
in the job of the stage before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.jobs import Job, check_clean
from tests.support.replan import STEPS, Course, LaidOut, Saved, Sizes, check_same_steps, left_in_memory


@dataclass(frozen=True)
class Stage:
    """From ``step`` on the job has these sizes. ``restarted``: its processes are others."""

    step: int
    sizes: Sizes
    restarted: bool = False


@dataclass(frozen=True)
class Compared:
    """From iteration ``first`` until before ``until`` the job has had these sizes, and was as ``job`` was."""

    first: int
    until: int
    sizes: Sizes
    job: Job


def both(training: LaidOut, *, least: int = 1, ranks: int = 1, **settings: str) -> dict[str, Any]:
    """``--elastic`` and ``--parallelism`` of a job of this training. ``settings``: of both (replace)."""
    return {
        "elastic": {"min": least, "max": training.sizes.replicas, **settings},
        "parallelism": {"min": ranks, **settings},
    }


def never(training: LaidOut, *, least: int = 1, ranks: int = 1) -> dict[str, Any]:
    return both(training, least=least, ranks=ranks, replace="never")


def stages(job: Job, training: LaidOut) -> list[Stage]:
    """All that there were, in order, without the launch; of several before one step only the last one counts."""
    now, found = training.sizes, dict[int, Stage]()
    for event in job.events:
        if event["event"] == "job_resized":
            now = now.of(event["replicas"])
            found[event["step"]] = Stage(
                event["step"], now, restarted=found.get(event["step"], Stage(0, now)).restarted
            )
        elif event["event"] == "job_replanned":
            now = Sizes.parse(event["layout"])
            found[event["step"]] = Stage(event["step"], now, restarted=True)
    return [found[step] for step in sorted(found)]


History = Saved
"""A job's stages are compared with these."""


def check_stages(
    job: Job,
    training: LaidOut,
    saved: Saved,
    expected: Sequence[Stage],
    steps: int | None = None,
    *,
    alike: bool = True,
) -> list[Compared]:
    """The job has gone through these stages, and each of them is, bit for bit, a job that was started so: losses of
    every rank, and the whole state. What it begins a stage with is the state of the stage before (``alike``: to the
    bit; not where each layout pads tensors in its own way). Returns with what each stage was compared."""
    why = job.explain()
    assert job.code == 0, why
    found = stages(job, training)
    assert found == list(expected), f"{found}\n{why}"
    end = training.iterations if steps is None else steps
    mine = Course.of(job)
    parts = [(0, training.sizes)]
    for stage in found:
        first = training.iteration(stage.step)
        if first == parts[-1][0]:
            parts.pop()  # nothing was computed in those sizes
        if first < end:
            parts.append((first, stage.sizes))
    compared: list[Compared] = []
    for number, (first, sizes) in enumerate(parts):
        until = parts[number + 1][0] if parts[number + 1 :] else end
        _, theirs = saved.of(training, parts[1 : number + 1], end)
        other = Course.of(theirs)
        what = f"{why}\n--- started so\n{theirs.explain()}"
        check_same_steps(mine, other, first, until, sizes, what)
        if number:
            begins = mine.states["begin", first, str(sizes)]
            assert begins == other.states["begin", first, str(sizes)] and len(begins) == 1, what
            known = Course.of(compared[-1].job).states["state", first, str(compared[-1].sizes)]
            assert begins == known or not alike, f"{sizes} begin with {begins}, and it was {known}\n{why}"
        compared.append(Compared(first, until, sizes, theirs))
    check_clean(job)
    assert not left_in_memory(), why
    return compared


def check_history(job: Job, training: LaidOut, saved: Saved, expected: Sequence[Stage], steps: int = STEPS) -> None:
    """See :func:`check_stages`; of scripts that say what they end with."""
    compared = check_stages(job, training, saved, expected, steps)
    last = compared[-1].sizes
    ends = Course.of(job).ends
    assert {rank for rank, layout in ends if layout == str(last)} == set(range(last.ranks)), job.explain()
