"""What compares a job that changes its replicas and its layout with jobs that were started so
(:mod:`tests.support.replan_elastic`) finds what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import replan, replan_elastic
from tests.support.jobs import Job
from tests.support.megatron_lm_loop import LoopTraining
from tests.support.replan import STEPS, LaidOut, Saved, Sizes, check_goes_on
from tests.support.replan_elastic import Stage, check_stages

ITERATIONS = 6
WIDE, HALF, ONE = Sizes(2, 1, 2), Sizes(2, 1, 1), Sizes(1, 1, 1)
EVENTS = [
    {"event": "job_resized", "step": 3, "replicas": 1},  # the log of iteration 1 is made again
    {"event": "job_replanned", "step": 8, "layout": str(ONE)},
]
STAGES = [Stage(3, HALF), Stage(8, ONE, restarted=True)]
PARTS = [(0, 2, WIDE), (2, 4, HALF), (4, ITERATIONS, ONE)]


def digest(iteration: int) -> str:
    return f"{iteration:064x}"


def loss(number: int, sizes: Sizes) -> str:
    """Of sums in another order."""
    return f"{number + sizes.ranks / 64:.6f}"


def lines(first: int, until: int, sizes: Sizes) -> list[str]:
    found = []
    for number in range(first, until):
        found.append(f"begin={number} layout={sizes} {digest(number)}")
        for rank in range(sizes.ranks):
            found.append(f"step={number} rank={rank} layout={sizes} loss_hex={loss(number, sizes)}")
        found.append(f"state={number + 1} layout={sizes} {digest(number + 1)}")
    return found


def made(folder: Path, printed: Sequence[str], events: Sequence[Mapping[str, Any]] = ()) -> Job:
    folder.mkdir()
    (folder / "rank0.gen0.log").write_text("\n".join(printed))
    job = Job.__new__(Job)
    job.code, job.run_dir, job.events, job.output, job.seconds = 0, folder, [dict(e) for e in events], "", 0.0
    return job


@dataclass(frozen=True)
class Printed(LoopTraining):
    """Jobs that are there as soon as they are started."""

    sizes: Sizes = WIDE

    def start(self, folder: Path, *flags: str, sizes: Sizes | None = None, **_: Any) -> Any:
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        first = int(Path(given.get("--start-from", "0")).name)
        job = made(folder, lines(first, self.iterations, sizes or self.sizes))
        return SimpleNamespace(wait=lambda _: job)


TRAINING: LaidOut = Printed("printed", iterations=ITERATIONS)


@pytest.fixture(autouse=True)
def nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replan, replan_elastic):
        monkeypatch.setattr(module, "check_clean", lambda job: None)
        monkeypatch.setattr(module, "left_in_memory", list)


def compare(folder: Path, printed: Sequence[str], events: Sequence[Mapping[str, Any]] = EVENTS) -> Any:
    return check_stages(made(folder / "job", printed, events), TRAINING, Saved(folder), STAGES)


def all_lines() -> list[str]:
    return [line for part in PARTS for line in lines(*part)]


def test_each_stage_is_compared_with_a_job_that_was_started_so(tmp_path: Path) -> None:
    found = compare(tmp_path, all_lines())
    assert [(part.first, part.until, part.sizes) for part in found] == PARTS


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(loss(0, WIDE), "0.1") if line.startswith("step=0 rank=2") else line,
        lambda line: line.replace(digest(2), digest(99)) if line.startswith("begin=2") else line,
        lambda line: line.replace(digest(4), digest(99)) if line.startswith("begin=4") else line,
        lambda line: line.replace(digest(6), digest(99)) if line.startswith("state=6") else line,
        lambda line: line.replace(loss(4, ONE), loss(5, ONE)) if line.startswith("step=4") else line,
        lambda line: "" if line.startswith("step=3 rank=1") else line,
        lambda line: "" if line.startswith("state=3") else line,
        lambda line: f"{line}\nstate=5 layout={ONE} {digest(1)}" if line.startswith("state=5") else line,
    ],
    ids=["loss", "begin", "begin-again", "last-state", "samples", "rank", "state", "ranks-differ"],
)
def test_what_differs_is_found(change: Callable[[str], str], tmp_path: Path) -> None:
    changed = [change(line) for line in all_lines()]
    assert changed != all_lines()
    with pytest.raises(AssertionError):
        compare(tmp_path, changed)


def test_a_change_that_was_not_expected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        compare(tmp_path, all_lines(), EVENTS[:1])


def test_sizes_in_which_nothing_was_computed(tmp_path: Path) -> None:
    """The replica has left before the log of iteration 1, and the layout has changed before the training step after
    it: the latter begins with what the launch's sizes had."""
    events = [EVENTS[0], {**EVENTS[1], "step": 4}]
    printed = [*lines(0, 2, WIDE), *lines(2, ITERATIONS, ONE)]
    expected = [Stage(3, HALF), Stage(4, ONE, restarted=True)]
    found = check_stages(made(tmp_path / "job", printed, events), TRAINING, Saved(tmp_path), expected)
    assert [(part.first, part.until, part.sizes) for part in found] == [(0, 2, WIDE), (2, ITERATIONS, ONE)]


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line,
        lambda line: line.replace(digest(6), digest(99)) if line.startswith("begin=6") else line,
        lambda line: line.replace(loss(7, WIDE), "0.1") if line.startswith("step=7 rank=2") else line,
        lambda line: line.replace(digest(9), digest(99)) if line.startswith("state=9") else line,
    ],
    ids=["alike", "begin", "loss", "last-state"],
)
def test_a_job_that_changes_its_layout_twice(change: Callable[[str], str], tmp_path: Path) -> None:
    parts = [(0, 3, WIDE), (3, 6, ONE), (6, STEPS, WIDE)]
    printed = [line for part in parts for line in lines(*part)]
    printed += [f"digest rank={rank} layout={WIDE} {digest(STEPS)}" for rank in range(WIDE.ranks)]
    changed = [change(line) for line in printed]
    events = [{"event": "job_replanned", "step": step, "layout": str(sizes)} for step, _, sizes in parts[1:]]
    job, training = made(tmp_path / "job", changed, events), Printed("printed", iterations=STEPS)
    changes = [(step, sizes) for step, _, sizes in parts[1:]]
    if changed == printed:
        check_goes_on(job, training, Saved(tmp_path), changes)
        return
    with pytest.raises(AssertionError):
        check_goes_on(job, training, Saved(tmp_path), changes)
