"""Pre-warmed processes: they have imported what the live workers have imported, and wait to fill a rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.proto import flashrecovery_pb2 as pb


class StandbyPool:
    """Keeps ``size`` standbys. They are started once the modules of a live worker are known, so that they do not
    compete with the launch; a used or dead one is replenished in the background.

    ``spawn`` gets the log, and the local rank whose GPU the standby uses at once: None unless there is one ``for_each``
    local rank. It gives None if the standby is not wanted any more when it is there."""

    def __init__(
        self,
        size: int,
        spawn: Callable[[Path, int | None], Awaitable[WorkerProcess | None]],
        log_dir: Path,
        *,
        for_each: bool = False,
    ) -> None:
        self.size = size
        self._spawn = spawn
        self._log_dir = log_dir
        self._for_each = for_each
        self._places: dict[WorkerProcess, int | None] = {}
        self._processes: list[WorkerProcess] = []
        self._coming: list[int | None] = []  # the places of those that are being started
        self._modules = pb.Modules()
        self._count = 0
        self.open = False

    def keep_at_least(self, size: int) -> None:
        """Keep this many standbys, or as many as before if that is more."""
        self.size = max(self.size, size)

    def set_modules(self, modules: pb.Modules) -> None:
        """The modules that a live worker has loaded by now."""
        self._modules = modules
        self.open = True

    def missing(self) -> int:
        return self.size - len(self._processes) - len(self._coming) if self.open else 0

    async def start_one(self) -> WorkerProcess | None:
        """None if it is not wanted any more when it is there."""
        self._count += 1
        place = next((p for p in range(self.size) if p not in self._taken()), None) if self._for_each else None
        self._coming.append(place)
        try:
            process = await self._spawn(self._log_dir / f"standby{self._count}.log", place)
        finally:
            self._coming.remove(place)
        if process is None:
            return None
        self._places[process] = place
        self._processes.append(process)
        return process

    def warm(self, process: WorkerProcess) -> None:
        """The process is up: have it import, unless it fills a rank already."""
        if process.rank is None:
            process.send(pb.ToWorker(warm=pb.Warm(modules=self._modules)))

    def _taken(self) -> set[int | None]:
        self._places = {p: place for p, place in self._places.items() if p in self._processes}
        return {*self._places.values(), *self._coming}

    def take(self, local_rank: int) -> WorkerProcess | None:
        """A ready standby, or else one that is still importing (it is ahead of a cold one), or None. One that uses
        another rank's GPU would go on doing so, and is not taken."""
        for process in sorted(self._processes, key=lambda p: not p.ready):
            if not process.dead and self._places[process] in (None, local_rank):
                self._processes.remove(process)
                return process
        return None

    def take_all(self) -> list[WorkerProcess]:
        """Take all standbys; new ones are started once the modules to import are known again."""
        taken, self._processes, self.open = self._processes, [], False
        return taken

    def discard(self, process: WorkerProcess) -> bool:
        """True if ``process`` was one of ours."""
        if process in self._processes:
            self._processes.remove(process)
            return True
        return False

    def counts(self) -> tuple[int, int]:
        """(ready, starting)"""
        ready = sum(p.ready for p in self._processes)
        return ready, len(self._processes) - ready + len(self._coming)

    def processes(self) -> list[WorkerProcess]:
        return list(self._processes)
