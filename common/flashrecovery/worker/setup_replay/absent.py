"""Files that a script looks for and does not find before its first step, and which its job makes then.

A first process finds no cache file, computes it together with its peers and writes it. A replacement finds the file,
leaves that out, and its next collective is another one than its predecessor's
(:class:`~flashrecovery.errors.SetupDiffersError`). Its own replacement then looks for the same files and does not find
them either, as often as the first process did not, or until it has written them itself: it computes what that one has
computed, with the same collectives.

A replacement finds them at first, since most scripts make the same collectives in either case, and to compute a cache
again may take hours. Asked are ``os.path`` and ``pathlib.Path``; what is opened or listed is as it is. So are folders:
what is made in one that is said to be missing fails where it is there.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrecovery.runtime import process_end
from flashrecovery.worker.setup_replay.call_sites import CallSites
from flashrecovery.worker.setup_replay.record import SetupRecord, file_at

_MOST = 4096
"""Paths that are noted until the first step."""
_KEPT = 512
"""Paths that are recorded then."""
_ASKED = ("exists", "isfile", "lexists")
_OF_PATHS = ("exists", "is_file")


class AbsentFiles:
    """Records into ``record`` between :meth:`start` and :meth:`stop`; with ``replays`` and ``record.hides`` answers
    from it."""

    def __init__(self, record: SetupRecord, sites: CallSites, *, replays: bool) -> None:
        self._record, self._sites, self._replays = record, sites, replays
        self._missed: dict[str, int] = {}
        self._before: dict[str, tuple[int, ...]] = {}
        self._own: set[str] = set()
        self._found: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._asks = False

    def start(self) -> None:
        if self._replays:
            if not self._record.hides:
                return
            self._before = {path: found for path in self._record.absent if (found := file_at(path)) is not None}
            self._missed = {path: self._record.absent[path] for path in self._before}
        for owner, names in ((os.path, _ASKED), (Path, _OF_PATHS)):
            for name in names:
                self._put(owner, name)

    def stop(self) -> None:
        """The first step begins. Idempotent."""
        while self._undo:
            self._undo.pop()()
        if self._replays or not self._missed:
            return
        made = [path for path in self._missed if file_at(path) is not None]
        later = [path for path in self._missed if path in self._own and not os.path.lexists(path)]
        self._record.note_absent({path: self._missed[path] for path in (made + later)[:_KEPT]})
        self._missed.clear()

    def _put(self, owner: Any, name: str) -> None:
        """Ask :meth:`_answer` first."""
        before = getattr(owner, name)

        @functools.wraps(before)
        def asked(path: Any, *arguments: Any, **more: Any) -> Any:
            if self._asks or not self._undo or not isinstance(path, (str, os.PathLike)) or process_end.is_fork():
                return before(path, *arguments, **more)
            self._asks = True  # one of these may ask another one, as it has in the first process
            try:
                return self._answer(path, lambda: before(path, *arguments, **more))
            finally:
                self._asks = False

        def undo() -> None:
            if getattr(owner, name) is asked:
                setattr(owner, name, before)

        setattr(owner, name, asked)
        self._undo.append(undo)

    def _answer(self, path: Any, ask: Callable[[], Any]) -> Any:
        plain = os.fspath(path)
        where = os.path.abspath(plain) if isinstance(plain, str) else ""
        if self._replays:
            left = self._missed.get(where, 0)
            if left == 0 or file_at(where) != self._before[where]:
                return ask()
            self._missed[where] = left - 1
            return False
        there = ask()
        if there:
            self._found.add(where)
        elif where and where not in self._found and (where in self._missed or len(self._missed) < _MOST):
            self._missed[where] = self._missed.get(where, 0) + 1
            if self._sites.own(sys._getframe(2)) is not None:
                self._own.add(where)
        return there
