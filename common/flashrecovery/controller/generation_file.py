"""The number of the newest generation, on disk before it is used: so no number is used a second time.

Agents and ranks know the number. But all who know it may lose power at once, the controller among them: of two nodes,
say, one has been given up, and then the other one goes. Who begins as controller there later would count on from what
the rest still knows, and give a generation a number that has been used. Its own disk says better.

The file is in the run directory that a controller holds alone, and the newest of all that are in the job's directory
counts (an elected controller may have one of its own in ``term<n>``). Where nodes do not share the run directory each
has its own file, of what has been led from it; what others have led since, only agents know there (docs/nodes.md).

A disk may be slow, or full, and a recovery does not wait for it for long: what could not be written is said once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flashrecovery.replace_file import replace_file

FILE_NAME = "generation.json"
_PATIENCE_S = 0.5
"""So long the use of a number is put off until it is on disk."""

log = logging.getLogger("flashrecovery")


@dataclass(frozen=True, order=True)
class Numbers:
    """``generation``: the newest one. ``restarts``: starts from the script's first line among them."""

    generation: int = 0
    restarts: int = 0


def newest_numbers(home: Path) -> Numbers:
    """Of the job whose run directory this is, as its controllers have written them down; 0 where they have not.

    Raises OSError, and ValueError if a file is damaged (it is only ever replaced as a whole).
    """
    found = Numbers()
    for path in (home / FILE_NAME, *home.glob(f"term*/{FILE_NAME}")):
        try:
            said = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        if not isinstance(said, dict) or not all(isinstance(said.get(name), int) for name in asdict(found)):
            raise ValueError(f"{path}: generation and restarts are needed")
        found = max(found, Numbers(said["generation"], said["restarts"]))
    return found


def write_numbers(path: Path, home: Path, numbers: Numbers, *, launch: bool) -> None:
    """Write them down in ``path``, and wait for the disk. ``launch``: the job begins, and what an earlier one has left
    in its directory ``home`` counts no more. Raises OSError."""
    if launch:
        for old in home.glob(f"term*/{FILE_NAME}"):
            old.unlink(missing_ok=True)
    replace_file(path / FILE_NAME, json.dumps(asdict(numbers)), 0o644)
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too, outlives the machine
    finally:
        os.close(directory)


class GenerationFile:
    """Of one controller.

    Args:
        path: of its own run directory.
        home: the job's run directory, in which ``path`` may be one of several.
        trouble: is told in words, once, if the file cannot be used.
    """

    def __init__(self, path: Path, home: Path, trouble: Callable[[str], None]) -> None:
        self._path, self._home, self._trouble = path, home, trouble
        self._asked: Numbers | None = None
        self._kept: Numbers | None = None
        self._told = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generation-file")
        self._timer: asyncio.TimerHandle | None = None

    def read(self) -> Numbers:
        """What there is at the start of this controller."""
        try:
            return newest_numbers(self._home)
        except (OSError, ValueError) as e:
            self._tell(f"the number of the newest generation cannot be read: {e}")
            return Numbers()

    def kept(self, numbers: Numbers, then: Callable[[], None]) -> bool:
        """Whether these may be used: they are on disk, or that has taken too long. If not yet, ``then`` is called when
        they may. The first ones with generation 0 are of a launch."""
        if self._kept == numbers:
            return True
        if self._asked != numbers:
            launch, self._asked = self._asked is None and numbers.generation == 0, numbers
            loop = asyncio.get_running_loop()
            writing = loop.run_in_executor(
                self._thread, lambda: write_numbers(self._path, self._home, numbers, launch=launch)
            )
            writing.add_done_callback(lambda done: self._written(numbers, done, then))
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(_PATIENCE_S, self._late, numbers, then)
        return False

    def _written(self, numbers: Numbers, done: asyncio.Future[None], then: Callable[[], None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, OSError):
            self._tell(f"generation {numbers.generation} cannot be written down: {error.strerror or error}")
        elif error is not None:
            raise error
        self._use(numbers, then)

    def _late(self, numbers: Numbers, then: Callable[[], None]) -> None:
        self._tell(f"generation {numbers.generation} is used before it is written down: the disk takes too long")
        self._use(numbers, then)

    def _use(self, numbers: Numbers, then: Callable[[], None]) -> None:
        if self._asked != numbers or self._kept == numbers:
            return  # there is a newer one
        if self._timer is not None:
            self._timer.cancel()
        self._kept = numbers
        then()

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._trouble(f"{text} ({self._path / FILE_NAME}); after a loss of all nodes it may be used again")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with suppress(RuntimeError):
            self._thread.shutdown(wait=False, cancel_futures=True)
