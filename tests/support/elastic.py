"""Elastic jobs of ``tests/scripts/elastic.py``: started, resized by command, and compared step by step."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashrecovery.cli.inject import inject as inject_command
from flashrecovery.cli.resize import resize
from flashrecovery.plan.elastic.sample_order import BatchSplit, SampleOrder
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean

SCRIPT = ROOT / "tests" / "scripts" / "elastic.py"
STEPS = 16
_STEP = re.compile(r"step=(\d+) rank=(\d+) size=(\d+) loss_hex=(\S+)")
_STATE = re.compile(r"state=(\d+) size=(\d+) ([0-9a-f]{64})")
_DIGEST = re.compile(r"digest rank=(\d+) ([0-9a-f]{64})")


def never(least: int = 2, **timeouts: float) -> dict[str, Any]:
    return {"elastic": {"min": least, "max": 4, "replace": "never"}, "timeouts": timeouts}


def start(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *flags: str,
    nproc: int = 4,
    inject: Sequence[str] = (),
    standby: int = 0,
    script: Path = SCRIPT,
    env: Mapping[str, str] | None = None,
) -> RunningJob:
    return RunningJob(
        folder,
        Layout("elastic", "", nproc=nproc),
        standby=standby,
        inject=inject,
        config=never() if config is None else config,
        script=script,
        flags=["--steps", str(STEPS), *flags],
        env=env,
    )


def command(job: RunningJob, replicas: int, step: int | None = None) -> str:
    """``flashrecovery resize``; returns what it has refused, "" if nothing."""
    at = () if step is None else ("--at-step", str(step))
    done = CliRunner().invoke(resize, [str(job.run_dir), "--to", str(replicas), *at])
    return "" if done.exit_code == 0 else str(done.exception)


AHEAD = 8
"""So many steps before a growth the ranks are held until all are there that come: where state is sharded, the ranks are
told of it some steps before."""


def grow(job: RunningJob, replicas: int, step: int, then: int | None = None, wait_s: float = 120) -> None:
    """Have the job, which is held (:meth:`RunningJob.hold`) :data:`AHEAD` steps before ``step``, grown to so many
    replicas before exactly that one. Afterwards it is held at ``then``."""
    _resize(job, replicas, step, then, wait_s, come=True)


def shrink(job: RunningJob, replicas: int, step: int, then: int | None = None, wait_s: float = 120) -> None:
    """Have the job, which is held some steps before ``step``, left with that many replicas before exactly that one.
    Afterwards it is held at ``then``."""
    _resize(job, replicas, step, then, wait_s, come=False)


def _resize(job: RunningJob, replicas: int, step: int, then: int | None, wait_s: float, *, come: bool) -> None:
    before = [event["event"] for event in job.events()]
    assert command(job, replicas, step) == ""
    if come:
        job.wait_for_joining_processes(wait_s)
    else:
        time.sleep(0.5)  # the word to the ranks is on its way
    job.hold(then)
    found = job.wait_for("job_resized", wait_s, count=before.count("job_resized") + 1)
    assert (found["step"], found["replicas"]) == (step, replicas), job.wait(1).explain()
    job.wait_for("recovery_finished", wait_s, count=before.count("recovery_finished") + 1)


def resize_by_command(
    job: RunningJob,
    sizes: Sequence[tuple[int, int]],
    launched: int,
    wait_s: float = 120,
    held: Callable[[int], int] = lambda step: step,
) -> None:
    """Have a job that has just been started with that many replicas resized: (step, replicas), in order, each before
    exactly that step. ``held``: by which number the script knows a step."""
    holds, before, free = [], launched, 0
    for step, replicas in sizes:
        holds.append(max(step - AHEAD if replicas > before else step - 3, free))
        before, free = replicas, step + 1  # a change is over when a step has been taken
    job.hold(held(holds[0]))
    job.wait_for("job_started", wait_s)
    before = launched
    for number, (step, replicas) in enumerate(sizes, 1):
        then = held(holds[number]) if number < len(holds) else None
        (grow if replicas > before else shrink)(job, replicas, step, then, wait_s)
        before = replicas


def inject(job: RunningJob, *, rank: int, at: str, step: int | None = None, fault: str = "sigkill") -> None:
    """``flashrecovery inject``."""
    args = ["--run-dir", str(job.run_dir), "--rank", str(rank), "--fault", fault, "--at", at]
    done = CliRunner().invoke(inject_command, args if step is None else [*args, "--step", str(step)])
    assert done.exit_code == 0, done.exception


@dataclass
class Course:
    """What the processes of a job have printed: losses by step, number in the group, and size; digests of the state by
    version and size (a victim may have completed a step alone, of which no other rank knows); and of the end by number.
    More than one of the same is a difference."""

    losses: dict[tuple[int, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    states: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    ends: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(job: Job) -> Course:
        found = Course()
        for log in job.run_dir.rglob("rank*.log"):
            text = log.read_text()
            for step, rank, size, loss in _STEP.findall(text):
                found.losses[int(step), int(rank), int(size)].add(loss)
            for version, size, digest in _STATE.findall(text):
                found.states[int(version), int(size)].add(digest)
            found.ends |= {int(rank): digest for rank, digest in _DIGEST.findall(text)}
        return found


def check_goes_on_alike(job: Job, other: Job, step: int, size: int, end: int = STEPS) -> None:
    """From ``step`` on both jobs are of this size, and have the same bits in every step on every rank, to the ``end``
    of their steps."""
    check_steps_alike(job, other, step, end, size)
    mine, theirs = Course.of(job), Course.of(other)
    why = f"{job.explain()}\n--- the other\n{other.explain()}"
    assert mine.ends == theirs.ends and set(mine.ends) == set(range(size)), why


def completed_without(events: Sequence[Mapping[str, Any]]) -> set[tuple[int, int, int]]:
    """Steps that the others have completed without a victim: step, the number in the group of any process that fills
    its rank now, and size. It died when it had the gradients of all, so no one has printed the victim's line."""
    found: set[tuple[int, int, int]] = set()
    members: list[int] = []
    for event in events:
        if event["event"] == "job_started":
            members = list(range(event["world_size"]))
        elif event["event"] == "job_resized":
            members = event["ranks"]
        elif event["event"] == "recovery_finished":
            stays = [victim for victim in event["victims"] if victim in members]
            found |= {(event["resume_step"] - 1, members.index(victim), len(members)) for victim in stays}
    return found


def check_steps_alike(job: Job, other: Job, step: int, until: int, size: int) -> None:
    """From ``step`` until before ``until`` both jobs are of this size, and have the same bits on every rank."""
    mine, theirs, unprinted = Course.of(job), Course.of(other), completed_without(job.events)
    why = f"{job.explain()}\n--- the other\n{other.explain()}"
    for number in range(step, until):
        for rank in range(size):
            losses = mine.losses[number, rank, size]
            if not losses and (number, rank, size) in unprinted:
                continue  # all others have printed theirs, and the state that came of it is compared below
            assert len(losses) == 1, f"step {number}, rank {rank}: {losses}\n{why}"
            assert losses == theirs.losses[number, rank, size], f"step {number}, rank {rank}\n{why}"
        states = mine.states[number + 1, size]
        assert len(states) == 1, f"the ranks differ in version {number + 1}\n{why}"
        assert states == theirs.states[number + 1, size], f"version {number + 1}\n{why}"


def commanded(
    folder: Path,
    step: int,
    size: int,
    *flags: str,
    launched: int = 4,
    script: Path = SCRIPT,
    timeout_s: float = 120,
    sharded: bool = False,
    started: bool = True,
    env: Mapping[str, str] | None = None,
) -> Job:
    """A job of that many ranks that is resized by command, undisturbed: from ``step`` on to ``size``. It is itself
    compared with a job that was started in the new size from that step's state. ``sharded``: its state is, and who
    leaves need not be the last ones. ``started``: False leaves out the comparison."""
    folder.mkdir(exist_ok=True)
    elastic = {"elastic": {"min": 1, "max": launched}}
    slowly = ("--step-time", "100", "--save-to", str(folder), *flags)
    running = start(folder / "run", elastic, *slowly, nproc=launched, script=script, env=env)
    running.wait_for("job_started", timeout_s)
    assert command(running, size, step) == ""
    job = running.wait(timeout_s)
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    left = event["left"] if sharded else list(range(size, launched))
    assert len(left) == launched - size, job.explain()
    assert (event["step"], event["before"], event["replicas"], event["left"]) == (step, launched, size, left), (
        job.explain()
    )
    assert [n["text"][-11:] for n in job.notices("rank_left")] == ["exit code 0"] * len(left), job.explain()
    assert not job.of("failure_detected"), job.explain()
    check_clean(job)
    if not started:
        return job
    config = {"elastic": {"min": 1, "max": size}} if size > 1 else {}
    begin = ("--start-from", str(folder / f"{step}.pt"), *flags)
    new = start(folder / "new", config, *begin, nproc=size, script=script, env=env).wait(timeout_s)
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, step, size)
    check_clean(new)
    return job


LONG = 44
"""Steps of jobs in which processes are built up meanwhile."""


def long_flags(step_ms: int = 100) -> list[str]:
    return ["--steps", str(LONG), "--step-time", str(step_ms)]


@dataclass(frozen=True)
class Change:
    """From ``step`` on the job consists of these ``ranks``, as it was launched."""

    step: int
    ranks: tuple[int, ...]


def changes(job: Job) -> list[Change]:
    """All that there were, in order; of several before one step only the last one counts."""
    found = {event["step"]: Change(event["step"], tuple(event["ranks"])) for event in job.of("job_resized")}
    return [found[step] for step in sorted(found)]


def resized_by_command(
    folder: Path,
    sizes: Sequence[tuple[int, int]],
    launched: int = 4,
    end: int = LONG,
    config: Mapping[str, Any] | None = None,
) -> Job:
    """A job that is resized by command at these steps to these sizes, undisturbed: (step, size), in order. After its
    last change it goes on as one that was *started* in that size from that step's state."""
    folder.mkdir(exist_ok=True)
    elastic = config or {"elastic": {"min": 1, "max": launched}}
    flags = ["--steps", str(end), "--step-time", "100", "--save-to", str(folder)]
    running = start(folder / "run", elastic, *flags, nproc=launched)
    resize_by_command(running, sizes, launched)
    job = running.wait()
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    check_clean(job)
    step, size = sizes[-1]
    config = {"elastic": {"min": 1, "max": size}} if size > 1 else {}
    started = ["--steps", str(end), "--start-from", str(folder / f"{step}.pt")]
    new = start(folder / "new", config, *started, nproc=size).wait()
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, step, size, end)
    check_clean(new)
    return job


_BATCHES = re.compile(r"batches=(\d+) rank=(\d+) size=(\d+) (.*)")
ORDER, GLOBAL, MICRO = SampleOrder(97, 24, 3), 24, 2
"""As the script has them."""


@cache
def _first_number(sample: int) -> str:
    """By which it is known in what the script prints."""
    return float(torch.randn(16, generator=torch.Generator().manual_seed(sample))[0]).hex()


def check_batches(job: Job, until: int) -> None:
    """Every step before ``until`` has had its samples, all of them, in their order, divided among the replicas that
    there were: in each size in which it was begun, and once all of them in a size in which it was completed (who is
    killed in a step may not live to say so, but has said before what it gives to the others)."""
    seen: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    states = Course.of(job).states
    for log in job.run_dir.rglob("rank*.log"):
        for step, rank, size, shown in _BATCHES.findall(log.read_text()):
            seen[int(step), int(size), int(rank)].add(shown)
    whole = set()
    for (step, size, rank), shown in seen.items():
        batch_split = BatchSplit(GLOBAL, MICRO, size)
        expected = [
            f"{number}:{'/'.join(_first_number(ORDER.sample(position)) for position in positions)}"
            for number, positions in batch_split.schedule(step, rank)
        ]
        assert shown == {" ".join(expected)}, f"step {step}, rank {rank} of {size}: {shown}, not {expected}"
        if (step + 1, size) in states and all((step, size, other) in seen for other in range(size)):
            whole.add(step)
    assert whole >= set(range(until)), f"not done by all: {sorted(set(range(until)) - whole)}"


def sizes_of(job: Job) -> list[tuple[int, int]]:
    """The steps from which the job had other numbers of ranks, each with the number."""
    sizes: list[tuple[int, int]] = []
    for change in changes(job):
        if not sizes or sizes[-1][1] != len(change.ranks):  # else others, or as many again before they took a step
            sizes.append((change.step, len(change.ranks)))
    return sizes


def check_ends_as_resized(
    job: Job, at: int, left: Sequence[int], resized: Callable[[int, int], Job], *, sharded: bool
) -> None:
    """These ranks have left, since something has happened in step ``at``, and the others go on as if that had been
    commanded: as ``resized`` from a step on to a size. Where state is sharded a second death can take the newest copies
    with it, before the change: then it comes a step earlier than the first decision has said."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == sorted(left), job.explain()
    step, size = events[-1]["step"], 4 - len(left)
    assert all(event["step"] in (step, step + sharded) for event in events), job.explain()
    assert events[-1]["replicas"] == size, job.explain()
    assert step in ((at - 1, at, at + 1) if sharded else (at, at + 1)), job.explain()
    check_goes_on_alike(job, resized(step, size), step, size)
    check_clean(job)


def often(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Parameters of a test of which only the ``chosen`` ones are in every run; the others are in the grid."""
    return [pytest.param(v, id=str(v), marks=() if v in chosen else pytest.mark.grid) for v in values]
