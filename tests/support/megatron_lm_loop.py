"""Jobs on the unmodified loop of a checkout of Megatron-LM of which each iteration is printed
(``tests/scripts/followed_megatron_lm.py``): what each of the loop's calls is, and what evaluations and checkpoints
hold.

Versions count the loop's protected calls: in each iteration a training step and a log, and after it an evaluation
(between timers that begin with barriers) or a checkpoint where one is due.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.jobs import Job, check_clean
from tests.support.megatron_lm import CHECKOUT, MODEL, environment

TIMEOUT_S = 240
SMALL = ("--hidden-size=16", "--num-attention-heads=2", "--seq-length=16", "--max-position-embeddings=16")
_LINE = re.compile(r" iteration +(\d+)/ +\d+ \| (.*)")
_EXPERTS = re.compile(r"experts=(\d+) (?:size|layout)=(\S+) (\S+) (\S+)")
_EVALUATED = re.compile(r"evaluated=(\d+) rank=(\d+) (?:size|layout)=(\S+) (.*)")


@dataclass(frozen=True)
class LoopTraining:
    """What is trained how long, and what the loop does besides.

    Attributes:
        batch: samples of an iteration.
        evaluates, saves, logs: after that many iterations each time; 0: never. The first one is logged, too.
        experts: there are MoE layers, whose losses are reduced in each iteration's log, which is a call.
    """

    name: str
    batch: int = field(default=24, kw_only=True)
    iterations: int = field(default=9, kw_only=True)
    evaluates: int = field(default=0, kw_only=True)
    saves: int = field(default=0, kw_only=True)
    logs: int = field(default=1, kw_only=True)
    experts: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return self.name

    @property
    def calls(self) -> list[tuple[str, int]]:
        """What each call is, and of which iteration."""
        found = []
        for number in range(self.iterations):
            found.append(("train", number))
            if number == 0 or (number + 1) % self.logs == 0 or self.experts:
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
        """The first iteration that is computed when a job goes on with a call; ``iterations``: none."""
        return next((number for kind, number in self.calls[call:] if kind == "train"), self.iterations)

    def common_flags(self) -> list[str]:
        """Megatron's, but for the layout. A later one takes the place of an earlier one."""
        found = [*MODEL, *SMALL, "--flash-recovery", f"--global-batch-size={self.batch}", f"--log-interval={self.logs}"]
        return [*found, "--eval-iters=2", f"--eval-interval={self.evaluates}"] if self.evaluates else found


def loop_environment() -> Mapping[str, str]:
    return {**environment(Path(CHECKOUT)), "PYTHONWARNINGS": "ignore"}


def finished(job: Job) -> Job:
    """It has come to its end, and has left nothing behind."""
    assert job.code == 0, job.explain()
    check_clean(job)
    return job


Value = TypeVar("Value")


def in_force(since: Sequence[tuple[int, Value]], number: int) -> Value:
    """What iteration ``number`` has had. ``since``: from which iterations on the job has had what."""
    return [value for first, value in since if first <= number][-1]


def logs_of(training: LoopTraining, value: Callable[[int], Value]) -> Iterator[tuple[int, Sequence[Value]]]:
    """Each iteration after which Megatron logs, and the values of those of which it logs the mean: those since the log
    before, but for the first one, which is in the second log, too."""
    values: list[Value] = []
    for number in range(training.iterations):
        values.append(value(number))
        if number == 0 or (number + 1) % training.logs == 0:
            yield number, tuple(values)
        if number and (number + 1) % training.logs == 0:
            values.clear()


def mean_loss(shown: Sequence[str]) -> str:
    """Of losses as they are printed, as Megatron computes and logs it."""
    total = torch.zeros(1)
    for loss in shown:
        total = total + float.fromhex(loss)
    return f"{total.item() / len(shown):.6E}"


def evaluated(job: Job) -> dict[tuple[int, int, str], list[str]]:
    """What evaluations have found, by iteration, rank and place (size or layout), in order."""
    found: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for log in job.run_dir.rglob("rank*.log"):
        for number, rank, place, losses in _EVALUATED.findall(log.read_text()):
            if losses not in found[int(number), int(rank), place]:  # one that was made again
                found[int(number), int(rank), place].append(losses)
    return found


def check_experts_logged(
    job: Job, training: LoopTraining, places: Sequence[tuple[int, str]], *, begun: Sequence[Path] = (), first: int = 0
) -> None:
    """What Megatron has logged of the losses of experts are the means of what the iterations since the log before have
    had, in whatever size or layout. ``places``: from which iteration on the job has had which. ``begun``: run
    directories of the jobs that it goes on from, with the log of iteration ``first``."""
    lines, summed = defaultdict[int, set[str]](set), defaultdict[tuple[int, str, str], set[float]](set)
    for folder in (job.run_dir, *begun):
        for log in folder.rglob("rank*.log"):
            text = log.read_text()
            for number, line in _LINE.findall(text) if folder == job.run_dir else ():
                lines[int(number) - 1].add(line)
            for number, place, name, value in _EXPERTS.findall(text):
                summed[int(number), place, name].add(float.fromhex(value))
    names = sorted({name for _, _, name in summed})
    assert bool(names) == training.experts, job.explain()

    def value(number: int, name: str) -> float:
        (found,) = summed[number, in_force(places, number), name]
        return found

    for name in names:
        for number, values in logs_of(training, partial(value, name=name)):
            if number < first:
                continue
            found = [float(shown) for line in lines[number] for shown in re.findall(rf"\b{name}: (\S+)", line)]
            mean = sum(values) / len(values)
            assert mean > 0 and pytest.approx(mean, rel=2e-6) in found, (
                f"iteration {number}: {name} {found}, and not {mean}\n{job.explain()}"
            )


def content(checkpoint: Path, into: Path) -> dict[str, Any]:
    """All that one of Megatron's own checkpoints holds but for the arguments: tensors, put together as bytes, and
    numbers, by name."""
    dcp_to_torch_save(checkpoint, into)
    return dict(_flattened("", torch.load(into, weights_only=False)))


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, (list, tuple)):
        value = list(enumerate(value))
    else:
        tensor = isinstance(value, torch.Tensor)
        shown = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor else repr(value)
        yield name, (str(value.dtype), tuple(value.shape), shown) if tensor else shown
        return
    for key, part in value:
        yield from _flattened(f"{name}/{key}", part)
