"""The course of an elastic job as chance has it: ranks killed at random moments, also in the middle of a change, and
commands to random sizes. Each stretch between two changes is, bit for bit, a job that was *started* in that size from
the state at its beginning. ``FLASHRECOVERY_SOAK_SEED`` changes the course, ``FLASHRECOVERY_ELASTIC_EVENTS`` how many
kills and commands there are."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.elastic import command, never
from tests.support.elastic_sharded import DDP
from tests.support.jobs import Job, RunningJob, check_clean
from tests.support.soak import SEED

EVENTS = int(os.environ.get("FLASHRECOVERY_ELASTIC_EVENTS", "12"))
STEP_MS = 60
STEPS_AN_EVENT = 22
SPARE_STEPS = 40
LIMIT_S = 90.0
RANKS = 4


@dataclass(frozen=True)
class Stretch:
    """Steps from ``start`` until before ``end`` that were taken by that many ranks."""

    start: int
    end: int
    size: int


def stretches(events: Sequence[Mapping[str, Any]], end: int) -> list[Stretch]:
    """Those of a job of that many steps. A later word of a size also corrects earlier ones of the same or later
    steps."""
    sizes = [(0, RANKS)]
    for event in (event for event in events if event["event"] in ("job_resized", "job_started")):
        if event["event"] == "job_started":  # perhaps again, before a step counts
            sizes = [(0, RANKS)]
            continue
        while sizes and sizes[-1][0] >= event["step"]:
            sizes.pop()
        sizes.append((event["step"], len(event["ranks"])))
    ends = [*(step for step, _ in sizes[1:]), end]
    found = [Stretch(step, until, size) for (step, size), until in zip(sizes, ends, strict=True)]
    return [stretch for stretch in found if stretch.end > stretch.start]


def kill_some(job: RunningJob, chance: random.Random) -> int:
    """Kill one or two ranks, not all. How many it were."""
    living = job.ranks()
    victims = chance.sample(sorted(living), min(chance.randint(1, 2), len(living) - 1))
    job.kill(*victims)
    return len(victims)


def newest_step(job: RunningJob) -> int:
    """The newest step that anybody has printed; -1 before the first."""
    ends = [line for log in job.logs() for line in log.read_text().splitlines()[-3:] if line.startswith("step=")]
    return max((int(line.split()[0].removeprefix("step=")) for line in ends), default=-1)


def wait_some_steps(job: RunningJob, chance: random.Random) -> None:
    """None, or up to twice as many as there are for an event; and then a part of a step."""
    until = newest_step(job) + (0 if chance.random() < 0.3 else chance.randrange(2 * STEPS_AN_EVENT))
    deadline = time.monotonic() + LIMIT_S
    while newest_step(job) < until and job.popen.poll() is None:
        assert time.monotonic() < deadline, job.wait(1).explain()
        time.sleep(0.05)
    time.sleep(chance.random() * 0.1)


def resize(job: RunningJob, chance: random.Random) -> bool:
    """Command another size, as soon as the job takes a command. Whether it has."""
    size, deadline = chance.choice([n for n in range(1, RANKS + 1) if n != len(job.ranks())]), time.monotonic() + 10
    while command(job, size):
        if time.monotonic() > deadline or job.popen.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def disturb(job: RunningJob, chance: random.Random) -> tuple[int, int]:
    """Kills and commands at random moments: how many ranks were killed, and how many commands were taken."""
    killed = taken = 0
    for _ in range(EVENTS):
        wait_some_steps(job, chance)
        if job.popen.poll() is not None:
            break
        if len(job.ranks()) == 1 or chance.random() < 0.5:
            taken += resize(job, chance)
        else:
            killed += kill_some(job, chance)
    return killed, taken


def saved(folder: Path, stretch: Stretch) -> int:
    """The first version in a stretch whose state has been written whole; its end if there is none. A rank that is
    killed while it writes leaves a part."""
    for version in range(max(stretch.start, 1), stretch.end):
        try:
            torch.load(folder / f"{version}.pt", weights_only=False)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
            continue
        return version
    return stretch.end


def compare(job: Job, states: Path, folder: Path, end: int) -> int:
    """Each stretch with a job started in its size. How many steps have been compared."""
    compared, kind = 0, replace(DDP, env={"OMP_NUM_THREADS": "1"})  # as jobs of several ranks have
    for number, stretch in enumerate(stretches(job.events, end)):
        first = 0 if not stretch.start else saved(states, stretch)
        if first == stretch.end:
            continue
        config = {"elastic": {"min": 1, "max": stretch.size}} if stretch.size > 1 else {}
        flags = ["--steps", str(end), *(["--start-from", str(states / f"{first}.pt")] if first else [])]
        other = kind.start(folder / f"other{number}", *flags, config=config, nproc=stretch.size).wait(240)
        assert other.code == 0, other.explain()
        kind.steps_alike(job, other, first, stretch.end, stretch.size)
        compared += stretch.end - first
        print(f"  {stretch}: compared from step {first} on", flush=True)
    return compared


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak(tmp_path: Path) -> None:
    """DistributedDataParallel, whose first rank has all that there is to be written, without the others."""
    chance, end = random.Random(SEED), EVENTS * STEPS_AN_EVENT + SPARE_STEPS
    states = tmp_path / "states"
    states.mkdir()
    flags = ["--steps", str(end), "--step-time", str(STEP_MS), "--save-to", str(states)]
    running = DDP.start(tmp_path / "run", *flags, config=never(1))
    running.wait_for("job_started", 120)
    killed, taken = disturb(running, chance)
    job = running.wait(600)
    assert job.code == 0, job.explain()
    check_clean(job)
    sizes = [stretch.size for stretch in stretches(job.events, end)]
    print(f"{killed} ranks killed, {taken} commands taken, sizes {sizes}", flush=True)
    assert killed and taken and len(sizes) > EVENTS // 3, job.explain()
    assert compare(job, states, tmp_path, end) > 0.8 * end
