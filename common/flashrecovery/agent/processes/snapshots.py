"""This node's snapshot process, as managed by its agent: found or started, watched, ended.

Its snapshot of a rank is meant for the next process that fills the rank *on this node*. A rank that comes from another
node, or starts from scratch, must not find an old snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from flashrecovery.config import RunConfig
from flashrecovery.errors import ConfigError
from flashrecovery.snapshot import address
from flashrecovery.snapshot.client import HeldMemory, SnapshotHost
from flashrecovery.snapshot.files import FOLDER, OF_PAGE, PARTIAL, listed, memory_name
from flashrecovery.snapshot.locking import has_swap, lock_limit
from flashrecovery.snapshot.memory import HEADER, SharedMemory

log = logging.getLogger("flashrecovery")
_SAID_BEFORE = 1 << 30
"""Above this many bytes, writing takes seconds, and a notice is given first."""
SHORT_LIFE_S = 2.0
"""A process that dies sooner may do so again; one death may also be chance (a kill, the kernel's OOM killer)."""
SHORT_LIVES = 3
"""After so many short lives in a row, the process is not started again."""


class NodeSnapshots:
    """Made before any process is started.

    Args:
        path: directory of the agent; the same for a later launch that resumes from the snapshots.
        notice: reports a notice to the user.
    """

    def __init__(self, config: RunConfig, path: Path, notice: Callable[[str], None]) -> None:
        """Raises ConfigError if there are snapshots of an earlier launch, and it is not said what to do with them, or
        if the process cannot be started."""
        self._config = config.snapshots
        self._resumes = config.resume
        self._world_size = config.world_size
        self._several_nodes = config.several_nodes
        self._folder = path / FOLDER
        self._log = path / "logs" / "snapshots.log"
        self._notice = notice
        self._name = address.name_for(path)
        self._started_at = float("-inf")
        self._short_lives = 0  # in a row
        self._here: set[int] = set()  # ranks that have been filled on this node
        self._host: SnapshotHost | None = None
        if self._config.keep == "never" or config.parallelism is not None:  # they are of one layout
            return
        self._host = SnapshotHost.find(self._name)
        on_disk = self._host is None and bool(listed(self._folder))
        if self._host is not None:
            self._take_on(self._host, config.several_nodes)
        elif on_disk and not self._resumes and not config.several_nodes:
            raise ConfigError(_undecided(f"{self._folder} has snapshots", f"remove {self._folder}"))
        if self._host is None:
            try:
                self._host = self._start()
            except OSError as e:
                raise ConfigError(
                    f"the snapshot process of this node cannot be started: {e} (see {self._log}); `--snapshots never` "
                    "goes without"
                ) from e
            if self._resumes and on_disk:
                for file in self._host.load(self._folder):
                    log.warning("%s is damaged; that snapshot is not used", self._folder / file)
        if has_swap() and (limit := lock_limit()) is not None:
            log.warning(
                "this host has swap space, and the snapshot process may lock %.0f MB in memory (ulimit -l): what is "
                "beyond that may be swapped out, and is slow to read then",
                limit / 1e6,
            )

    def _take_on(self, host: SnapshotHost, several_nodes: bool) -> None:
        """What an earlier launch has left."""
        held = [one for one in host.held() if one.version >= 0]
        if not held or self._resumes:
            return
        if several_nodes:  # an agent that has come back to a job that has gone on without it
            log.warning("%d old snapshots on this node are dropped", len(held))
            host.forget(None)
            return
        newest = max(one.version for one in held)
        host.close()
        raise ConfigError(
            _undecided(
                f"a process of an earlier launch in this run directory holds snapshots of version {newest}", "wait"
            )
        )

    def _start(self) -> SnapshotHost:
        folder = self._folder if self._config.persist else None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = time.monotonic()
        return SnapshotHost.start(self._name, self._log, folder, self._config.linger_s)

    def env(self) -> Mapping[str, str]:
        """For this node's ranks."""
        return {} if self._host is None else {address.SNAPSHOT_ENV: self._name}

    @property
    def pid(self) -> int | None:
        """The pid of the snapshot process, if this agent has started it."""
        return None if self._host is None else self._host.pid

    def filled(self, rank: int, *, detached: bool, was_here: bool) -> None:
        """``rank`` is about to be filled. ``detached``: with a replacement; ``was_here``: this node had its process."""
        self._here.add(rank)
        inherits = was_here if detached else self._resumes
        if not inherits:
            self.forget([rank])

    def placed(self, elsewhere: Collection[int]) -> None:
        """These ranks are on other nodes."""
        moved = self._here.intersection(elsewhere)
        if moved:
            self._here -= moved
            self.forget(moved)

    def forget(self, ranks: Collection[int] | None) -> None:
        """These ranks (None: all) are no longer this node's."""
        if self._host is not None:
            try:
                self._host.forget(ranks)
            except TimeoutError:
                self._host.kill()  # what should be forgotten must not be found; revive() starts a new one
            except OSError as e:
                log.debug("the snapshot process is gone: %s", e)  # and with it what was to be forgotten

    def revive(self) -> None:
        """Start the process again if it has died; the ranks register their memory with it again at their next step."""
        if self._host is None or self._host.alive():
            return
        self._host.close()
        self._host = None
        lived_s = time.monotonic() - self._started_at
        self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short_lives == SHORT_LIVES:
            why = f"the snapshot process has died {SHORT_LIVES} times within {SHORT_LIFE_S:g} s of its start"
            self._notice(f"{why}, see {self._log}; there are no snapshots from now on")
            return
        try:
            self._host = self._start()
        except OSError as e:
            self._notice(f"the snapshot process has died, and cannot be started again: {e}; no snapshots from now on")
            return
        self._notice(
            "the snapshot process died and was restarted; until every rank reaches its next step, a death of all "
            "processes at once would go back to a checkpoint"
        )

    def keep_for(self, rank: int, version: int, local_state: bytes | None, *, tensors: bool) -> str:
        """Keep the ``local_state`` of ``version`` from the page of a rank that is gone (None: the page had none).
        ``tensors``: the rank also had tensors that no other rank has. Returns what is missing; "": nothing."""
        if self._host is None:
            return "its node has no snapshot process"
        try:
            held = any(one.rank == rank and one.version == version for one in self._host.held())
            if held:
                return ""
            if local_state is None:
                return f"its own state (random numbers, data position) of step {version} is lost with its process"
            if tensors:
                return f"its own state of step {version} is lost with its process"
            memory = SharedMemory.create(len(local_state))
            memory.map[HEADER : HEADER + len(local_state)] = local_state
            memory.version = version
            self._host.keep(rank, memory_name(OF_PAGE, self._world_size), memory)
        except OSError as e:
            return f"the snapshot process of its node is gone: {e}"
        return ""

    async def end(
        self, *, unfinished: bool, version: int = 0, whole: bool = False, void: bool = False, saved: bool = False
    ) -> None:
        """Close after all ranks' processes have ended.

        Args:
            unfinished: the job has not reached its last step.
            version: the version that the snapshots hold, completely if ``whole``, else in part; 0: not examined.
            void: nothing may resume from the snapshots.
            saved: a checkpoint has all of it.
        """
        host, self._host = self._host, None
        if host is None:
            return
        try:
            if not unfinished and self._resumes:
                shutil.rmtree(self._folder, ignore_errors=True)  # from which this job has gone on, to its end
            if unfinished and not saved and self._config.persist:
                await asyncio.to_thread(self._persist, host, version, whole, void)
        except OSError as e:
            log.warning("flashrecovery: the snapshots are lost, because the process that held them is gone: %s", e)
        finally:
            await asyncio.to_thread(host.end)

    def _persist(self, host: SnapshotHost, version: int, whole: bool, void: bool) -> None:
        held = [one for one in host.held() if one.version > 0]
        if not held:
            if version:
                log.warning("flashrecovery: the state of step %d is lost: nothing of it is held here", version)
            return
        there = listed(self._folder)
        if {(one.rank, one.name, one.version) for one in held} == {(one.rank, one.name, one.version) for one in there}:
            log.warning("flashrecovery: %s is unchanged: no new step was completed", self._folder)
            return
        newest = 0 if void else version if whole else newest_of_all(held, self._here)
        folder = self._folder if newest or not (there or void) else self._folder.with_name(PARTIAL)
        nbytes = sum(one.nbytes for one in held)
        if nbytes > _SAID_BEFORE:
            log.warning("flashrecovery: writing the snapshots (%.1f GB) to %s", nbytes / 1e9, folder)
        _, wrong = host.save(folder)
        if wrong:
            text = f"the state of step {newest or held[0].version} could not be written and is lost: {wrong}"
        else:
            text = saved_text(folder, newest, nbytes, several_nodes=self._several_nodes)
        log.warning("flashrecovery: %s", text)


def newest_of_all(held: Collection[HeldMemory], ranks: Collection[int]) -> int:
    """The newest version of which each of these ranks has something: all that it has to add. 0: none."""
    by_version: dict[int, set[int]] = {}
    for one in held:
        by_version.setdefault(one.version, set()).add(one.rank)
    return max((v for v, some in by_version.items() if v > 0 and ranks and some >= set(ranks)), default=0)


def saved_text(folder: Path, version: int, nbytes: int, *, several_nodes: bool) -> str:
    """What was written, and how to go on. ``version``: that all ranks of the node have; 0: none."""
    if version and several_nodes:
        return (
            f"this node's part of the state of step {version} ({nbytes / 1e6:.1f} MB) is in {folder}; --resume goes on "
            "from the newest step that all nodes have"
        )
    if version:
        where = f"the state of step {version} ({nbytes / 1e6:.1f} MB) is in {folder}"
        return f"{where}; --run-dir {folder.parent} --resume goes on from there"
    return f"the saved state is incomplete; the parts that exist are in {folder}, from which --resume cannot continue"


def _undecided(what: str, otherwise: str) -> str:
    return f"{what}, and it would be lost: give --resume to go on from there, choose another --run-dir, or {otherwise}"
