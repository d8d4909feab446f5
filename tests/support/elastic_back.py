"""Elastic jobs that lose replicas and get them back by command: as one that was resized by command at the same steps,
undisturbed, which goes on as one that was started in the size of the launch from that step's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.elastic import AHEAD, Change, changes, grow, resize_by_command
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

WAIT_S = 300.0


@dataclass(frozen=True)
class Way:
    """How jobs of a kind are started and compared.

    Attributes:
        begin: starts one, with folder, flags, ``config=``, ``inject=`` and ``nproc=`` (else the launch's).
        alike: compares two jobs from a step until before another one (-1: their end), in which both have that many
            ranks.
        state: of which number the state is with which a step begins, in the file of that name.
    """

    begin: Callable[..., RunningJob]
    alike: Callable[[Job, Job, int, int, int], None]
    state: Callable[[int], int]
    replicas: int
    each: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the launch."""
        return tuple(range(self.replicas * self.each))

    def config(self, **more: Any) -> dict[str, Any]:
        """All replicas but one may leave."""
        return {"elastic": {"min": 1, "max": self.replicas, **more}}

    def check_back(self, folder: Path, victims: Sequence[int], left: Sequence[int], at: int, back: int) -> None:
        """These ranks are killed in step ``at``, those leave, and all come back before step ``back``."""
        faults = [f"rank={rank},fault=sigkill,at=backward,step={at}" for rank in victims]
        running = self.begin(folder / "run", config=self.config(replace="never"), inject=faults)
        running.hold(self.state(back - AHEAD))
        running.wait_for("recovery_finished", WAIT_S)
        grow(running, self.replicas, back, wait_s=WAIT_S)
        job = running.wait(WAIT_S)
        assert job.code == 0, job.explain()
        check_fired(job, len(victims))
        check_clean(job)
        smaller = tuple(rank for rank in self.ranks if rank not in left)
        step = changes(job)[0].step
        assert changes(job) == [Change(step, smaller), Change(back, self.ranks)], job.explain()
        assert job.of("job_resized")[-1]["came"] == list(left), job.explain()
        other = self.commanded(folder, [(step, len(smaller) // self.each), (back, self.replicas)])
        self.alike(job, other, step, back, len(smaller))
        self.alike(job, other, back, -1, len(self.ranks))

    def commanded(self, folder: Path, sizes: Sequence[tuple[int, int]]) -> Job:
        """The job that is resized at these steps to that many replicas."""
        running = self.begin(folder / "other", f"--save-to={folder}", config=self.config())
        resize_by_command(running, sizes, self.replicas, WAIT_S, self.state)
        job = running.wait(WAIT_S)
        assert job.code == 0 and not job.of("failure_detected"), job.explain()
        assert [(c.step, len(c.ranks)) for c in changes(job)] == [(s, n * self.each) for s, n in sizes], job.explain()
        check_clean(job)
        step, replicas = sizes[-1]
        state = f"--start-from={folder}/{self.state(step)}.pt"
        of_that_size = {"elastic": {"min": 1, "max": replicas}}
        new = self.begin(folder / "new", state, config=of_that_size, nproc=replicas * self.each).wait(WAIT_S)
        assert new.code == 0, new.explain()
        self.alike(job, new, step, -1, replicas * self.each)
        check_clean(new)
        return job
