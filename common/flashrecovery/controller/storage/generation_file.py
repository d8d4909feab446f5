"""The number of the newest generation, on disk before anybody acts in it: so no number is used a second time.

Agents and ranks know the number. But all that know it may lose power at once, the controller among them: of two nodes,
say, one has been given up, and then the other one goes. A controller that begins there later would count on from what
the rest still knows, and give a generation a number that has been used. Its own disk says better.

The file is in the run directory that a controller holds alone, and the newest of all that are in the job's directory
counts (an elected controller may have its own one in ``term<n>``). Where nodes do not share the run directory each
has its own file, of what has been led from it; what others have led since, only agents know there (docs/nodes.md). What
an earlier job has left in the directory, of the same name perhaps, counts for nothing: a file says of which launch it
is.

A disk may be slow, or full. It is written to while ranks are stopped and replaced, and from there on a recovery does
not wait for it for long: what could not be written is said once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flashrecovery.runtime.durable import sync_folder
from flashrecovery.util.atomic_file import replace_file

FILE_NAME = "generation.json"
_PATIENCE_S = 0.5
"""So long the use of a number is put off until it is on disk."""

_LARGEST = 2**31 - 1

log = logging.getLogger("flashrecovery")


@dataclass(frozen=True, order=True)
class Numbers:
    """``generation``: the newest one. ``restarts``: starts from the script's first line among them. ``replans``: those
    in another parallel layout."""

    generation: int = 0
    restarts: int = 0
    replans: int = 0

    @property
    def attempts(self) -> int:
        """The number of the newest of all starts."""
        return self.restarts + self.replans


def newest_numbers(home: Path, trouble: Callable[[str], None]) -> Mapping[str, Numbers]:
    """The numbers recorded in this run directory, by launch. ``trouble`` is called with a text for each file that
    cannot be read; the others still count."""
    found: dict[str, Numbers] = {}
    for path in (home / FILE_NAME, *sorted(home.glob(f"term*/{FILE_NAME}"))):
        try:
            launch, numbers = _parsed(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as e:
            trouble(f"the number of the newest generation cannot be read: {path}: {e}")
            continue
        found[launch] = max(numbers, found.get(launch, numbers))
    return found


def _parsed(content: bytes) -> tuple[str, Numbers]:
    """Raises ValueError if it is damaged (a file is only ever replaced as a whole)."""
    said = json.loads(content)
    if not isinstance(said, dict) or not isinstance(said.get("launch"), str):
        raise ValueError("launch, generation and restarts are needed")
    replans = _number(said.get("replans", 0))  # which earlier versions did not write
    return said["launch"], Numbers(_number(said.get("generation")), _number(said.get("restarts")), replans)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ValueError(f"generation, restarts and replans are numbers from 0 to {_LARGEST}")
    return value


def write_numbers(path: Path, launch: str, numbers: Numbers) -> None:
    """Write them down in ``path``, and wait for the disk. Raises OSError."""
    replace_file(path / FILE_NAME, json.dumps({"launch": launch, **asdict(numbers)}), 0o644)
    sync_folder(path)  # the new name, too, outlives the machine


class GenerationFile:
    """The generation file of one controller.

    Args:
        path: in the controller's own run directory; None: a job of one node, where no other controller could take over.
        home: the job's run directory, in which ``path`` may be one of several.
        trouble: called with a text, once, if the file cannot be used.
    """

    def __init__(self, path: Path | None, home: Path, trouble: Callable[[str], None]) -> None:
        self._path, self._home, self._trouble = path, home, trouble
        self._asked: tuple[str, Numbers] | None = None
        self._kept: tuple[str, Numbers] | None = None
        self._told = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generation-file")
        self._timer: asyncio.TimerHandle | None = None

    def read(self) -> Mapping[str, Numbers]:
        """What there is at the start of this controller, by launch."""
        return {} if self._path is None else newest_numbers(self._home, self._tell)

    def kept(self, launch: str, numbers: Numbers, then: Callable[[], None]) -> bool:
        """Whether these may be used: they are on disk, or that has taken too long. If not yet, they are being written,
        and ``then`` is called when they may."""
        wanted = launch, numbers
        if self._path is None or self._kept == wanted:
            return True
        if self._asked != wanted:
            self._asked, path = wanted, self._path
            loop = asyncio.get_running_loop()
            writing = loop.run_in_executor(self._thread, lambda: write_numbers(path, launch, numbers))
            writing.add_done_callback(lambda done: self._written(wanted, done, then))
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(_PATIENCE_S, self._late, wanted, then)
        return False

    def _written(self, wanted: tuple[str, Numbers], done: asyncio.Future[None], then: Callable[[], None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, OSError):
            self._tell(f"generation {wanted[1].generation} cannot be written down: {error.strerror or error}")
        elif error is not None:
            raise error
        self._use(wanted, then)

    def _late(self, wanted: tuple[str, Numbers], then: Callable[[], None]) -> None:
        self._tell(f"generation {wanted[1].generation} is used before it is written down: the disk takes too long")
        self._use(wanted, then)

    def _use(self, wanted: tuple[str, Numbers], then: Callable[[], None]) -> None:
        if self._asked != wanted or self._kept == wanted:
            return  # there is a newer one
        if self._timer is not None:
            self._timer.cancel()
        self._kept = wanted
        then()

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._trouble(f"{text} ({FILE_NAME} in {self._path}); after a loss of all nodes it may be used again")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with suppress(RuntimeError):
            self._thread.shutdown(wait=False, cancel_futures=True)
