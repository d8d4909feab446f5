"""Jobs of the unmodified loop of a checkout of Megatron-LM (``tests/scripts/replan_megatron_lm.py``) that change their
parallel layout, and what they are compared with.

Versions count the loop's protected calls, as in :mod:`tests.support.elastic_megatron_lm`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.elastic_megatron_lm import SMALL
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean
from tests.support.megatron_lm import CHECKOUT, MODEL, environment
from tests.support.replan import Course, Sizes, check_same_steps, left_in_memory, replanned

SCRIPT = ROOT / "tests" / "scripts" / "replan_megatron_lm.py"
TIMEOUT_S = 240
ITERATIONS = 8
_LOGGED = re.compile(
    r" iteration +(\d+)/ +\d+ \| consumed samples: +(\d+) \|.*? learning rate: (\S+) .*?lm loss: (\S+)"
)
_EVALUATED = re.compile(r"evaluated=(\d+) rank=(\d+) layout=(\S+) (.*)")


@dataclass(frozen=True)
class Training:
    """A layout at the launch, and what is trained how.

    Attributes:
        evaluates, saves, logs: after so many iterations each time; 0: never.
        padding: the vocabulary (of 128) is padded to a multiple of so many rows for each tensor-parallel rank.
    """

    name: str
    sizes: Sizes
    flags: tuple[str, ...] = ()
    batch: int = 24
    iterations: int = ITERATIONS
    evaluates: int = 0
    saves: int = 0
    logs: int = 1
    padding: int = 64

    def __str__(self) -> str:
        return self.name

    @property
    def calls(self) -> list[tuple[str, int]]:
        """What each call is, and of which iteration."""
        found = []
        for number in range(self.iterations):
            found.append(("train", number))
            if number == 0 or (number + 1) % self.logs == 0:
                found.append(("log", number))
            if self.evaluates and (number + 1) % self.evaluates == 0:
                found += [("barrier", number), ("evaluate", number), ("barrier", number)]
            if self.saves and (number + 1) % self.saves == 0:
                found.append(("exit", number))
        return found

    def call(self, kind: str, number: int) -> int:
        """The number of a call."""
        return self.calls.index((kind, number))

    def iteration(self, call: int) -> int:
        """The first iteration that is computed when a job goes on with a call."""
        return next((number for kind, number in self.calls[call:] if kind == "train"), self.iterations)

    def start(
        self,
        folder: Path,
        *flags: str,
        sizes: Sizes | None = None,
        config: Mapping[str, Any] | None = None,
        inject: Sequence[str] = (),
    ) -> RunningJob:
        sizes = sizes or self.sizes
        return RunningJob(
            folder,
            Layout("replan", "", nproc=sizes.ranks),
            standby=0,
            inject=inject,
            config={"replan": {"min": 1, "replace": "never"}} if config is None else config,
            script=SCRIPT,
            flags=[f"--steps={self.iterations}", *self.arguments(sizes), *flags],
            env={**environment(Path(CHECKOUT)), "PYTHONWARNINGS": "ignore"},
        )

    def arguments(self, sizes: Sizes) -> list[str]:
        """Megatron's."""
        found = [*MODEL, *SMALL, "--flash-recovery", f"--global-batch-size={self.batch}", *sizes.flags]
        found += [f"--log-interval={self.logs}", f"--make-vocab-size-divisible-by={self.padding}"]
        found += [f"--eval-interval={self.evaluates}", "--eval-iters=2"] if self.evaluates else []
        return [*found, *self.flags]


class Saved:
    """Jobs that are made once: undisturbed ones that write each iteration down, and those that were started from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Training, Job] = {}
        self._started: dict[tuple[Training, Sizes, int], Job] = {}

    def written(self, training: Training) -> tuple[Path, Job]:
        """An undisturbed job in the layout of the launch, and where its states are."""
        place = self._folder / training.name
        if training not in self._written:
            place.mkdir()
            running = training.start(self._folder / f"{training.name}-run", f"--save-to={place}")
            self._written[training] = finished(running.wait(TIMEOUT_S))
        return place, self._written[training]

    def started(self, training: Training, sizes: Sizes, iteration: int) -> Job:
        """A job in this layout that has begun with what megatron-core itself reads of the state of that iteration."""
        known = training, sizes, iteration
        if known not in self._started:
            place, _ = self.written(training)
            name = self._folder / f"{training.name}-{str(sizes).replace(',', '-')}-{iteration}"
            running = training.start(name, f"--start-from={place / str(iteration)}", sizes=sizes)
            self._started[known] = finished(running.wait(TIMEOUT_S))
        return self._started[known]


def finished(job: Job) -> Job:
    assert job.code == 0, job.explain()
    check_clean(job)
    return job


def check_goes_on(job: Job, training: Training, saved: Saved, changes: Sequence[tuple[int, Sizes]]) -> None:
    """The job has changed its layout so (from which calls on), and from its first change on it is, bit for bit, one
    that was started in the new layout from that iteration's state, until the next change: losses of each rank and
    iteration, the whole state, evaluations, and what Megatron logs. Before the change it is an undisturbed one."""
    why = job.explain()
    finished(job)
    assert replanned(job) == list(changes), why
    mine, first = Course.of(job), saved.written(training)[1]
    before = Course.of(first)
    changes = list(dict(changes).items())  # of several before one call only the last one has taken it
    call, sizes = changes[0]
    at, end = training.iteration(call), training.iteration(changes[1][0]) if changes[1:] else training.iterations
    check_same_steps(mine, before, 0, at, training.sizes, why)
    check_logged(job, first, training, [(0, training.sizes), *((training.iteration(c), s) for c, s in changes)], why)
    check_evaluated(job, first, 0, _evaluated_before(training, call), training.sizes, why)
    again = [number for kind, number in training.calls[call:] if kind == "evaluate" and number < at]
    for number in again:  # the same samples in another layout: sums have another order
        here, there = (
            evaluated(one)[number, s.ranks - 1, str(s)] for one, s in ((job, sizes), (first, training.sizes))
        )
        ours, known = (float.fromhex(text.split("'")[3]) for (text,) in (here, there))
        assert ours == pytest.approx(known, rel=1e-5), f"evaluation {number}: {ours}, and {known}\n{why}"
    if at < training.iterations:
        begun = mine.states["begin", at, str(sizes)]
        known = before.states["state", at, str(training.sizes)]
        same = begun == known or training.padding > 64  # the same but for the padding
        assert len(begun) == 1 and same, f"iteration {at} begins as {begun}, and was {known}\n{why}"
        new = saved.started(training, sizes, at)
        why = f"{why}\n--- started so\n{new.explain()}"
        assert begun == Course.of(new).states["begin", at, str(sizes)], why
        check_same_steps(mine, Course.of(new), at, end, sizes, why)
        if len(changes) == 1:
            check_evaluated(job, new, at, training.iterations, sizes, why)
    assert not left_in_memory(), why


def _evaluated_before(training: Training, call: int) -> int:
    return len([None for kind, _ in training.calls[:call] if kind == "evaluate"]) * training.evaluates


def evaluated(job: Job) -> dict[tuple[int, int, str], list[str]]:
    """What evaluations have found, by iteration, rank and layout, in order."""
    found: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for log in job.run_dir.rglob("rank*.log"):
        for number, rank, layout, losses in _EVALUATED.findall(log.read_text()):
            if losses not in found[int(number), int(rank), layout]:  # one that was made again
                found[int(number), int(rank), layout].append(losses)
    return found


def check_evaluated(job: Job, other: Job, first: int, until: int, sizes: Sizes, why: str) -> None:
    def of(one: Job) -> dict[tuple[int, int, str], list[str]]:
        return {at: losses for at, losses in evaluated(one).items() if first <= at[0] < until and at[2] == str(sizes)}

    assert of(job) == of(other), f"evaluations {of(job)}, and {of(other)}\n{why}"


def logged(job: Job) -> dict[int, set[tuple[str, ...]]]:
    """What Megatron has logged of each iteration: consumed samples, learning rate, loss."""
    found: dict[int, set[tuple[str, ...]]] = defaultdict(set)
    for log in job.run_dir.rglob("rank*.log"):
        for number, *rest in _LOGGED.findall(log.read_text()):
            found[int(number) - 1].add(tuple(rest))
    return found


def check_logged(job: Job, other: Job, training: Training, layouts: Sequence[tuple[int, Sizes]], why: str) -> None:
    """Megatron has logged consumed samples and learning rate as of the undisturbed job ``other``, and the means of the
    losses that the iterations since the log before have had, in whatever layout. ``layouts``: from which iteration on
    the job has had which."""
    mine, theirs, losses = logged(job), logged(other), Course.of(job).losses
    total, count = torch.zeros(1), 0
    for number in range(training.iterations):
        sizes = [sizes for first, sizes in layouts if first <= number][-1]
        (loss,) = losses[number, sizes.ranks - 1, str(sizes)]
        total, count = total + float.fromhex(loss), count + 1
        if number and (number + 1) % training.logs:
            continue
        ((samples, rate, _),) = theirs[number]
        line = samples, rate, f"{total.item() / count:.6E}"
        assert line in mine[number], f"iteration {number}: {mine[number]}, and not {line}\n{why}"
        if number:  # what the first line says, is in the second one, too
            total, count = torch.zeros(1), 0


def named(training: Training, name: str, **changes: Any) -> Training:
    """Another training like this one."""
    return replace(training, name=f"{training}-{name}", **changes)
