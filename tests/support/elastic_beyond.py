"""Elastic jobs of :class:`~tests.support.elastic_sharded.Kind` that are launched with two replicas and grow beyond
that: each as a job that was resized by command at the same steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.plan.elastic.replicas import ReplicaShape
from tests.support import elastic_replicas
from tests.support.controllers import WithController
from tests.support.elastic import AHEAD, changes, command, grow, inject, sizes_of
from tests.support.elastic_sharded import END, Kind, Resized, check_as_commanded, resized_once
from tests.support.jobs import Job, RunningJob, check_clean, check_fired, marked_processes

LAUNCHED = 2
"""Replicas."""
STATES = ("regrouping", "restoring", "reshaping", "verifying", "resuming")
DISTRIBUTED = "--use-distributed-optimizer"
SLOWLY = ("--step-time", "100")


def of_replicas(name: str, *flags: str) -> Kind:
    """``tests/scripts/elastic_replicas.py``."""
    alike, goes_on = elastic_replicas.check_steps_alike, elastic_replicas.check_goes_on_alike
    return Kind(name, elastic_replicas.SCRIPT, flags, alike, goes_on, each=elastic_replicas.EACH)


@dataclass(frozen=True)
class Beyond:
    """How far the jobs grow, and the steps at which something happens: they grow at ``at``, a rank is lost in ``lost``,
    and they grow again at ``back``."""

    most: int
    at: int
    lost: int
    back: int

    def config(self, kind: Kind, **more: Any) -> dict[str, Any]:
        return {"elastic": {"min": 1, "max": self.most, **more}, "slots": self.most * kind.each}

    def everybody(self, kind: Kind) -> set[int]:
        return set(range(self.most * kind.each))

    def launch(self, kind: Kind, folder: Path, *flags: str, inject: Sequence[str] = (), **elastic: Any) -> RunningJob:
        """It is held before the step at which it is to grow."""
        running = kind.start(
            folder,
            *(*SLOWLY, *flags),
            config=self.config(kind, **elastic),
            nproc=LAUNCHED * kind.each,
            inject=inject,
        )
        running.hold(max(self.at - AHEAD, 0))
        running.wait_for("job_started", 120)
        return running

    def resized_once(self, factory: pytest.TempPathFactory) -> Resized:
        """The jobs that are resized by command, undisturbed."""
        made: dict[str, Resized] = {}

        def job(kind: Kind, sizes: Sequence[tuple[int, int]]) -> Job:
            if kind.name not in made:
                launched = LAUNCHED * kind.each
                made[kind.name] = resized_once(factory, *SLOWLY, launched=launched, config=self.config(kind))
            return made[kind.name](kind, sizes)

        return job

    # -- what is tried ----------------------------------------------------------------------------

    def in_each_size_as_started_in_it(self, kind: Kind, victim: int, folder: Path) -> None:
        """Grown and shrunk again: on each part of the way bit for bit a job that is started with as many from that
        step's state."""
        end = self.lost + 15
        flags = ("--steps", str(end), "--save-to", str(folder))
        running = self.launch(kind, folder / "run", *flags, replace="never")
        grow(running, self.most, self.at, then=self.lost - 2)
        inject(running, rank=victim, at="backward", step=self.lost)
        running.hold(None)
        job = running.wait(300)
        assert job.code == 0, job.explain()
        check_fired(job)
        check_clean(job)
        larger, smaller = changes(job)
        assert (larger.step, set(larger.ranks)) == (self.at, self.everybody(kind)), job.explain()
        assert smaller.step in (self.lost - 1, self.lost, self.lost + 1), job.explain()
        assert set(smaller.ranks) == self.everybody(kind) - replica_of(kind, victim), job.explain()
        _as_started(kind, job, larger.step, smaller.step, len(larger.ranks), folder, end)
        _as_started(kind, job, smaller.step, end, len(smaller.ranks), folder, end)

    def there_and_killed_and_back(self, kind: Kind, victims: Sequence[int], folder: Path, resized: Resized) -> None:
        """Grown, shrunk and grown again: replicas of the launch may leave as well as the others."""
        everybody, lost = self.everybody(kind), set[int]().union(*(replica_of(kind, victim) for victim in victims))
        running = self.launch(kind, folder / "run", replace="never")
        grow(running, self.most, self.at, then=self.lost - 2)
        for victim in victims:
            inject(running, rank=victim, at="backward", step=self.lost)
        running.hold(self.back - AHEAD)
        running.wait_for("recovery_finished", count=2)
        grow(running, self.most, self.back)
        job = running.wait(300)
        check_fired(job, len(victims))
        first, *middle, last = (set(change.ranks) for change in changes(job))
        assert (first, middle[-1], last) == (everybody, everybody - lost, everybody), job.explain()
        assert set(job.of("job_resized")[-1]["came"]) == lost, job.explain()
        check_as_commanded(kind, job, resized)

    def there_and_replaced(self, kind: Kind, victims: Sequence[int], folder: Path, resized: Resized) -> None:
        """They die one after the other in the larger size, and are filled again."""
        running = self.launch(kind, folder / "run")
        grow(running, self.most, self.at, then=self.lost - 2)
        for number, victim in enumerate(victims):
            inject(running, rank=victim, at="backward", step=self.lost + 5 * number)
        running.hold(None)
        job = running.wait(300)
        check_fired(job, len(victims))
        assert [e["victims"] for e in job.of("recovery_finished")] == [[], *([v] for v in victims)], job.explain()
        check_as_commanded(kind, job, resized)

    def _grows_and(self, kind: Kind, victim: int, state: str, folder: Path, **elastic: Any) -> Job:
        """This rank dies in that state of the recovery in which the others come."""
        fault = f"rank={victim},fault=sigkill,at=recovery:{state}"
        running = self.launch(kind, folder / "run", inject=[fault], **elastic)
        assert command(running, self.most, self.at) == ""
        running.wait_for_joining_processes()
        running.hold(None)
        job = running.wait(300)
        check_fired(job)
        return job

    def one_dies_while_it_comes_in(
        self,
        kind: Kind,
        state: str,
        folder: Path,
        resized: Resized,
        undisturbed: Callable[[Kind], Job] | None = None,
    ) -> None:
        """The last one: its replica has left again before it has taken a step, as a whole."""
        victim = self.most * kind.each - 1
        job = self._grows_and(kind, victim, state, folder, replace="never")
        (*_, last) = changes(job)
        assert set(last.ranks) == self.everybody(kind) - replica_of(kind, victim), job.explain()
        launched = LAUNCHED * kind.each
        if undisturbed is not None and sizes_of(job) == [(last.step, launched)]:  # no rank has taken a step with it
            assert job.code == 0, job.explain()
            kind.goes_on_alike(job, undisturbed(kind), 0, launched, END)
            check_clean(job)
        else:
            check_as_commanded(kind, job, resized)

    def one_dies_on_the_way_in_and_is_replaced(
        self, kind: Kind, victim: int, state: str, folder: Path, resized: Resized
    ) -> None:
        """Where there is room it is filled again, in the old size or in the new one."""
        job = self._grows_and(kind, victim, state, folder)
        assert set(changes(job)[-1].ranks) == self.everybody(kind), job.explain()
        check_as_commanded(kind, job, resized)

    def one_dies_before_its_first_step(self, kind: Kind, folder: Path, undisturbed: Callable[[Kind], Job]) -> None:
        """The other joining processes of its replica end, too, and no rank has paused."""
        running = self.launch(kind, folder / "run")
        assert command(running, self.most, self.at) == ""
        os.kill(_joining_process(running, self.most * kind.each - 1), signal.SIGKILL)
        running.wait_for("notice", kind="joining_process_given_up", count=kind.each)
        running.hold(None)
        job = running.wait(300)
        assert len(job.notices("joining_process_given_up")) == kind.each, job.explain()
        assert job.code == 0 and not job.of("failure_detected") and not job.of("job_resized"), job.explain()
        kind.goes_on_alike(job, undisturbed(kind), 0, LAUNCHED * kind.each, END)
        check_clean(job)

    def another_controller_knows_them(self, kind: Kind, victim: int, folder: Path, resized: Resized) -> None:
        """It is lost while all train in the larger size; then a rank is."""
        flags = ("--steps", str(END), *kind.flags, *SLOWLY)
        config = self.config(kind, replace="never")
        job = WithController(folder / "job", kind.script, config, *flags, nproc=LAUNCHED * kind.each, env=kind.env)
        job.job.hold(self.at - 2)
        job.wait_for("job_started")
        assert job.command(self.most, self.at) == ""
        _slowly_until(
            lambda: any(event["event"] == "recovery_finished" for event in job.events()), job.job, self.at - 2, END - 14
        )
        job.wait_for("recovery_finished")
        grown = max(step for step, _, _ in job.course.losses)
        job.job.hold(grown + 6)
        job.wait_for_step(grown + 4)
        job.kill()
        job.begin()
        job.wait_for("notice", kind="taken_over")
        job.job.hold(None)
        job.wait_for_step(grown + 7)
        os.kill(job.pid(victim), signal.SIGKILL)
        ended = job.result()
        left = self.everybody(kind) - replica_of(kind, victim)
        assert set(changes(ended)[-1].ranks) == left, ended.explain()
        check_as_commanded(kind, ended, resized)


def replica_of(kind: Kind, rank: int) -> set[int]:
    """All ranks of the replica of this one."""
    apart = kind.name.startswith(("pp", "hsdp-stride"))  # the ranks of a replica do not follow on each other
    shape = ReplicaShape(LAUNCHED, 1, kind.each) if apart else ReplicaShape(LAUNCHED, kind.each)
    return {*shape.ranks(shape.replica(rank))}


def _as_started(kind: Kind, job: Job, step: int, until: int, ranks: int, folder: Path, end: int) -> None:
    """From ``step`` until before ``until`` the job is as one that is started with that many ranks from its state."""
    begin = ("--start-from", str(folder / f"{step}.pt"), "--steps", str(end))
    config = {"elastic": {"min": 1, "max": ranks // kind.each}}
    new = kind.start(folder / f"from-{step}", *begin, config=config, nproc=ranks).wait(240)
    assert new.code == 0, new.explain()
    kind.steps_alike(job, new, step, until, ranks)
    if until == end:
        kind.goes_on_alike(job, new, step, ranks, end)
    check_clean(new)


def _joining_process(running: RunningJob, rank: int) -> int:
    """The process that is being built up as this rank."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in marked_processes(running.marker):
            with suppress(OSError):  # it has ended meanwhile
                if Path(f"/proc/{pid}/fd/1").readlink().match(f"{running.run_dir}/logs/rank{rank}.gen*.log"):
                    return pid
        time.sleep(0.05)
    raise AssertionError(f"no process for rank {rank}")


def _slowly_until(true: Callable[[], bool], running: RunningJob, first: int, last: int) -> None:
    """Let one step after the other end. It is not known when joining processes are there."""
    for step in range(first, last):
        running.hold(step)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            if true():
                return
            time.sleep(0.05)
    running.hold(None)
