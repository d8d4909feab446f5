"""The systems that recovery is compared with, one module each, launcher and worker in one file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness import Launch
from workload import Job


@dataclass(frozen=True)
class Peer:
    """How one system runs the job.

    Attributes:
        name: as printed.
        start: starts all processes of the job.
        settings: what of it is not the system's default, in words.
        first: ranks that must have finished a step for training to count as going on again.
        world: ranks that train before the kill.
        whole: ranks that the job has when it is as large as before; None if it stays smaller.
        kill_at: see ``Job.kill_at``.
        ready: says whether all is in place for the kill (a standby is warm); None if nothing is waited for.
        tend: called again and again while the job runs (some systems leave restarts to their user).
    """

    name: str
    start: Callable[[Job, Launch], None]
    settings: str
    first: int
    whole: int | None
    world: int = 4
    kill_at: str = "backward"
    ready: Callable[[Job], bool] | None = None
    tend: Callable[[Job, Launch], None] | None = None
