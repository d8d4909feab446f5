"""Jobs of the loop tests: where they are killed, and the comparison with the same launch without a kill.

A script that is run here has the flags ``--steps`` and ``--kill`` of :mod:`tests.scripts.proof`, and prints what that
module prints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.scripts.proof import MOMENTS, Kill
from tests.support.jobs import ROOT, Job, Layout, check_same, run_job

LOOPS = ROOT / "tests" / "scripts" / "loops.py"
TIMEOUT_S = 150
ROTATIONS = len(MOMENTS)
RESUMES = {
    "data": (-1, 0),
    "backward": (-1, 0),
    "optimizer": (0, 1),
    "below": (0, 1),
    "end": (0, 1),
    "broadcast": (0, 0),
}
"""At which steps, counted from the killed one, the job may go on. A rank needs no one up to its first collective of a
step, so until then a slow peer may still be in the step before; from the optimizer on its peers may have completed the
step. With ``--pause`` the peers have come as far as they can, and what is allowed is exact."""

_STEP = re.compile(r"^rank=(\d+) step=(\d+) (.*)$", re.MULTILINE)
_PART = re.compile(r"^end rank=(\d+) part=(\S+) ([0-9a-f]{64})$", re.MULTILINE)
_KILLED = re.compile(r"^killed (\S+)$", re.MULTILINE)


def rotated(rotation: int, *, every: int = 1, world: int = 3) -> list[Kill]:
    """One kill at each moment, in turn in a step in which the loop's unusual thing happens (the last of ``every``, from
    the second time on) and in the step after one. Five rotations are the whole product of moments and victims, and each
    moment comes once as the first."""
    kills = []
    for number in range(len(MOMENTS)):
        moment = (number + rotation) % len(MOMENTS)
        step = every * (number + 2) - 1 + number % 2
        kills.append(Kill((moment + rotation) % world, step, MOMENTS[moment], number))
    return kills


def from_the_start(steps: int, *, world: int = 3, touched_in: int | None = None) -> list[Kill]:
    """One kill at each moment: in the first steps, and in the last one.

    ``touched_in``: the first of those steps in which the loop changes tensors above its block. Of its version no one
    has a copy (docs/limits.md), so no one dies between the block of the step before and the end of this one.
    """
    early, late = ((1, "end"), (3, "data")) if touched_in != 2 else ((1, "data"), (3, "end"))
    places = ((0, "backward"), early, late, (4, "optimizer"), (steps - 1, "below"))
    return [Kill((number + 1) % world, step, moment, number) for number, (step, moment) in enumerate(places)]


def steps_for(kills: Sequence[Kill]) -> int:
    """Some steps more than the last kill's."""
    return max(kill.step for kill in kills) + 3


def run_loop(
    run_dir: Path, layout: Layout, steps: int, kills: Sequence[Kill] = (), script: Path = LOOPS, **kwargs: Any
) -> Job:
    """One job. ``layout.flags`` choose the loop."""
    flags = [*layout.flags, "--steps", str(steps)]
    for kill in kills:
        flags += ["--kill", str(kill)]
    standby = 1 if kills else 0
    return run_job(run_dir, layout, script=script, flags=flags, standby=standby, **{"timeout_s": TIMEOUT_S, **kwargs})


def check_loop(job: Job, reference: Job, kills: Sequence[Kill]) -> None:
    """Every kill has fired and was recovered from in place, at its step, and the job's every step and its end are, bit
    for bit, those of the reference."""
    fired = {match for log in _logs(job) for match in _KILLED.findall(log)}
    assert fired == {str(kill) for kill in kills}, f"fired: {fired}\n{job.explain()}"
    _check_in_place(job, kills)
    wrong = differences(job, reference)
    assert not wrong, "\n".join([*wrong, f"killed: {', '.join(map(str, kills))}", job.explain()])
    check_same(job, reference)


def _check_in_place(job: Job, kills: Sequence[Kill]) -> None:
    """Each kill was recovered from at its step, or next to it as :data:`RESUMES` says; nothing was begun again or read
    from a disk. Kills in quick succession may share a recovery."""
    left, together = list(kills), []
    for event in job.events:
        if event["event"] == "failure_detected" and event["kind"] == "killed" and left:
            together.append(left.pop(0))
        if event["event"] != "recovery_finished":
            continue
        said = f"killed: {', '.join(map(str, together))}; recovered: {event['victims']} at {event['resume_step']}"
        assert {kill.rank for kill in together} == {*event["victims"]}, f"{said}\n{job.explain()}"
        last = together[-1]
        assert event["resume_step"] - last.step in RESUMES[last.moment], f"{said}\n{job.explain()}"
        together = []
    left += together
    assert not left, f"not recovered from: {', '.join(map(str, left))}\n{job.explain()}"
    assert not job.of("fallback_started") and not job.notices("start_again"), job.explain()


def differences(job: Job, reference: Job) -> list[str]:
    """In words: the first step of each rank that differs, and every part of the end state that does."""
    found = []
    mine, theirs = said_steps(job), said_steps(reference)
    wrong = sorted(
        (step, rank) for rank, step in mine.keys() | theirs.keys() if mine.get((rank, step)) != theirs.get((rank, step))
    )
    for step, rank in wrong[:4]:
        found.append(f"step {step} of rank {rank}: {mine.get((rank, step))}, not {theirs.get((rank, step))}")
    if len(wrong) > 4:
        found.append(f"... {len(wrong)} steps in all")
    ends, right = said_ends(job), said_ends(reference)
    parts = sorted(key for key in ends.keys() | right.keys() if ends.get(key) != right.get(key))
    return found + [f"end of rank {rank}: another {part}" for rank, part in parts]


def said_steps(job: Job) -> dict[tuple[int, int], str]:
    """(rank, step) -> batch, learning rate and loss, as they were said last."""
    return {(int(rank), int(step)): rest for log in _logs(job) for rank, step, rest in _STEP.findall(log)}


def said_ends(job: Job) -> dict[tuple[int, str], str]:
    """(rank, part) -> SHA-256."""
    return {(int(rank), part): sha for log in _logs(job) for rank, part, sha in _PART.findall(log)}


def _logs(job: Job) -> list[str]:
    """What the ranks have said, the newest process last."""
    paths = sorted((job.run_dir / "logs").glob("rank*.log"), key=lambda path: path.stat().st_mtime)
    return [path.read_text() for path in paths]
