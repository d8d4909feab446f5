"""Jobs of ``tests/scripts/replan_megatron.py``, which change their parallel layout, and what they are compared with.

Those are jobs that were *started* in the new layout by megatron-core alone, from what megatron-core alone has written
down in the old one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from click.testing import CliRunner

from flashrecovery.cli.replan import replan
from flashrecovery.runtime.parallel_layout import layout_sizes
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean
from tests.support.megatron import ENVIRONMENT
from tests.support.wrappers import Wrapper

SCRIPT = ROOT / "tests" / "scripts" / "replan_megatron.py"
STEPS, AT = 9, 5
TIMEOUT_S = 240
_STEP = re.compile(r"step=(\d+) rank=(\d+) layout=(\S+) loss_hex=(\S+)")
_STATE = re.compile(r"(begin|state)=(\d+) layout=(\S+) ([0-9a-f]{64})")
_END = re.compile(r"digest rank=(\d+) layout=(\S+) ([0-9a-f]{64})")


@dataclass(frozen=True)
class Sizes:
    """A parallel layout."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """Of an elastic job: what has the whole model, all experts included."""
        return self.dp * self.cp // max(self.cp, self.ep)

    def of(self, replicas: int) -> Sizes:
        """The same with that many replicas."""
        return replace(self, dp=self.dp * replicas // self.replicas)

    def __str__(self) -> str:
        more = "".join(f"{name}={size}," for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1)
        return f"tp={self.tp},pp={self.pp},{more}dp={self.dp}"

    @staticmethod
    def parse(text: str) -> Sizes:
        return Sizes(**layout_sizes(text))

    @property
    def flags(self) -> list[str]:
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--pipeline-model-parallel-size": self.pp,
            "--context-parallel-size": self.cp,
            "--expert-model-parallel-size": self.ep,
        }
        return [text for flag, size in sizes.items() if size > 1 for text in (flag, str(size))]


class LaidOut(Protocol):
    """What is trained how, and in which layout it is launched; one of a frozen dataclass."""

    @property
    def sizes(self) -> Sizes:
        """Of the launch."""

    @property
    def iterations(self) -> int:
        """Steps, or iterations of a loop of which a step is one call."""

    def iteration(self, step: int) -> int:
        """The first iteration that is computed when a job goes on with a step; ``iterations``: none."""

    def start(
        self,
        folder: Path,
        *flags: str,
        sizes: Sizes | None = None,
        config: Mapping[str, Any] | None = None,
        inject: Sequence[str] = (),
    ) -> RunningJob:
        """Start one job, in the layout of the launch or another one."""


@dataclass(frozen=True)
class Training:
    """A layout at the launch, and what is trained how, in a loop of the script's own; ``wrapper`` runs that script."""

    name: str
    sizes: Sizes
    flags: tuple[str, ...] = ()
    wrapper: Wrapper | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def iterations(self) -> int:
        return STEPS

    def iteration(self, step: int) -> int:
        return step

    def start(self, folder: Path, *flags: str, **options: Any) -> RunningJob:
        return start(folder, self, *flags, **options)


def never(least: int = 1, **timeouts: float) -> dict[str, Any]:
    return {"parallelism": {"min": least, "replace": "never"}, "timeouts": timeouts}


def start(
    folder: Path,
    training: Training,
    *flags: str,
    sizes: Sizes | None = None,
    config: Mapping[str, Any] | None = None,
    inject: Sequence[str] = (),
    options: Sequence[str] = (),
    within: Sequence[str] = (),
) -> RunningJob:
    sizes = sizes or training.sizes
    wrapper = training.wrapper
    # as ranks of a launch of several have; one alone would take more
    env = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    return RunningJob(
        folder,
        Layout("replan", "", nproc=sizes.ranks),
        standby=0,
        inject=inject,
        options=options,
        within=within,
        config=never() if config is None else config,
        script=SCRIPT if wrapper is None else wrapper.script,
        flags=["--steps", str(STEPS), "--dropout", "0.1", *sizes.flags, *training.flags, *flags],
        env=env if wrapper is None else wrapper.environment(SCRIPT, env),
    )


def command(job: RunningJob, layout: Sizes | None, step: int | None = None) -> str:
    """``flashrecovery replan``; returns what it has refused, "" if nothing."""
    wanted = () if layout is None else ("--layout", str(layout))
    at = () if step is None else ("--at-step", str(step))
    done = CliRunner().invoke(replan, [str(job.run_dir), *wanted, *at])
    return "" if done.exit_code == 0 else str(done.exception)


@dataclass
class Course:
    """What the processes of a job have printed: losses by step, rank and layout; digests of the whole state, which do
    not depend on the layout, by version, layout, and whether a process has begun with it; and of the end."""

    losses: dict[tuple[int, int, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    states: dict[tuple[str, int, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    ends: dict[tuple[int, str], str] = field(default_factory=dict)

    @staticmethod
    def of(job: Job) -> Course:
        found = Course()
        for log in job.run_dir.rglob("rank*.log"):
            text = log.read_text()
            for step, rank, layout, loss in _STEP.findall(text):
                found.losses[int(step), int(rank), layout].add(loss)
            for kind, version, layout, digest in _STATE.findall(text):
                found.states[kind, int(version), layout].add(digest)
            found.ends |= {(int(rank), layout): digest for rank, layout, digest in _END.findall(text)}
        return found


class Saved:
    """Jobs that are made once, which write each of their versions down with nothing of flash-recovery: undisturbed
    ones, those that were started with one of their versions, those that were started with one of *these*, and so on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Any, ...], tuple[Path, Job]] = {}

    def of(
        self, training: LaidOut, begun: Sequence[tuple[int, Sizes]] = (), steps: int | None = None
    ) -> tuple[Path, Job]:
        """The job that has begun so: with the launch's sizes, or (the last of ``begun``) with sizes from the state of
        an iteration of the one before. And where its versions are."""
        steps = training.iterations if steps is None else steps
        key = training, tuple(begun), steps
        if key not in self._known:
            place = self._folder / f"versions-{len(self._known)}"
            place.mkdir()
            given: tuple[str, ...] = ("--save-to", str(place), "--steps", str(steps))
            sizes = None
            if begun:
                iteration, sizes = begun[-1]
                before, _ = self.of(training, begun[:-1], steps)
                given = (*given, "--start-from", str(before / str(iteration)))
            job = training.start(self._folder / f"run-{place.name}", *given, sizes=sizes).wait(TIMEOUT_S)
            assert job.code == 0, job.explain()
            check_clean(job)
            self._known[key] = place, job
        return self._known[key]

    def written(self, training: LaidOut) -> tuple[Path, Job]:
        """An undisturbed job in the layout of the launch, and where its versions are."""
        return self.of(training)


def replanned(job: Job) -> list[tuple[int, Sizes]]:
    """From which step on the job had which layouts, in order."""
    return [(event["step"], Sizes.parse(event["layout"])) for event in job.of("job_replanned")]


def check_goes_on(job: Job, training: Training, saved: Saved, changes: Sequence[tuple[int, Sizes]]) -> None:
    """The job has changed its layout so, and from each change on it is, bit for bit, a job that was started in the new
    layout from that step's state: losses of every rank, and the whole state, until the next change. Before the first
    change it is one that was not disturbed."""
    assert job.code == 0, job.explain()
    mine = Course.of(job)
    _, first = saved.written(training)
    before = Course.of(first)
    why = job.explain()
    assert replanned(job) == list(changes), why
    changes = list(dict(changes).items())  # of several before one step only the last one has taken it
    was = training.sizes
    check_same_steps(mine, before, 0, changes[0][0], was, why)
    for number, (step, sizes) in enumerate(changes):
        until = changes[number + 1][0] if number + 1 < len(changes) else STEPS
        begun = mine.states["begin", step, str(sizes)]
        assert len(begun) == 1, f"version {step} is begun with as {begun}\n{why}"
        known = before.states["state", step, str(was)]
        assert begun == known, f"version {step} is {begun} in {sizes}, and was {known} in {was}\n{why}"
        _, new = saved.of(training, changes[: number + 1])
        before, was = Course.of(new), sizes
        check_same_steps(mine, before, step, until, sizes, f"{why}\n--- started so\n{new.explain()}")
    assert {rank for rank, layout in mine.ends if layout == str(changes[-1][1])} == set(range(sizes.ranks)), why
    check_clean(job)
    assert not left_in_memory(), why


def left_in_memory() -> list[Path]:
    """State in memory whose agent is no more."""
    found = Path("/dev/shm").glob("flashrecovery-staging-*")
    return [path for path in found if not Path("/proc", path.name.split("-")[3]).exists()]


def check_same_steps(mine: Course, theirs: Course, first: int, until: int, sizes: Sizes, why: str) -> None:
    for step in range(first, until):
        for rank in range(sizes.ranks):
            losses = mine.losses[step, rank, str(sizes)]
            assert len(losses) == 1, f"step {step}, rank {rank}, {sizes}: {losses}\n{why}"
            assert losses == theirs.losses[step, rank, str(sizes)], f"step {step}, rank {rank}, {sizes}\n{why}"
        states = mine.states["state", step + 1, str(sizes)]
        assert len(states) == 1, f"the ranks differ in version {step + 1}: {states}\n{why}"
        assert states == theirs.states["state", step + 1, str(sizes)], f"version {step + 1}, {sizes}\n{why}"
