"""Files that a script opens to write, and folders that it makes, before its first step: a replacement loses nothing.

A replacement runs ``open("log.csv", "w")`` again, which would truncate its predecessor's log. So it is
recorded which files the script's own lines have opened so, and how each was left at the first step. Where a file has
changed since, a replacement keeps it: what set-up writes goes nowhere, since it is there already, and from the first
step on it is added at the end. A file that is as set-up has left it (a configuration) is written as ever.
"""

from __future__ import annotations

import builtins
import fcntl
import functools
import io
import os
import pathlib
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from flashrecovery.runtime import process_end
from flashrecovery.worker.script_text.caught_errors import catches_existing
from flashrecovery.worker.setup_replay.call_sites import CallSites, text_of
from flashrecovery.worker.setup_replay.record import SetupRecord

_MOST = 1024
"""Files, and folders, that are recorded."""
_PLAIN = frozenset({"logging", "pathlib", "codecs", "contextlib"})
"""Modules of Python's own that open a file as it is for the script; others write a format that nothing is added to."""


class WrittenFiles:
    """Records into ``record``, or with ``replays`` keeps what is there, between :meth:`start` and :meth:`stop`."""

    def __init__(self, record: SetupRecord, sites: CallSites, *, replays: bool) -> None:
        self._record, self._sites, self._replays = record, sites, replays
        self._opened: list[str] = []
        self._kept: list[tuple[weakref.ref[Any], str]] = []
        self._undo: Callable[[], None] = lambda: None
        self._on = False
        self.kept: list[str] = []
        """Where a file was kept, and which."""
        self.truncated: list[str] = []
        """Where one that had been written to was cut off, and which."""

    def start(self) -> None:
        open_before, mkdir_before, symlink_before = io.open, os.mkdir, os.symlink
        self._on = True

        @functools.wraps(open_before)
        def open_(file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
            cuts = isinstance(mode, str) and ("w" in mode or "x" in mode)
            if not cuts or not self._on or process_end.is_fork() or not isinstance(file, (str, os.PathLike)):
                return open_before(file, mode, *arguments, **more)
            return self._open(open_before, file, mode, *arguments, **more)

        @functools.wraps(mkdir_before)
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            try:
                mkdir_before(path, mode, dir_fd=dir_fd)
            except FileExistsError:
                if dir_fd is not None or not self._made_before(path):
                    raise
            else:
                if dir_fd is None:
                    self._note_folder(path)

        @functools.wraps(symlink_before)
        def symlink(source: Any, path: Any, *arguments: Any, **more: Any) -> None:
            try:
                symlink_before(source, path, *arguments, **more)
            except FileExistsError:
                if not self._made_before(path):
                    raise
            else:
                self._note_folder(path)

        accessor = getattr(pathlib, "_normal_accessor", None)  # of Python 3.10, which asks it and not io and os
        of_names = (("open", open_), ("mkdir", mkdir), ("symlink", symlink))
        of_paths: list[tuple[Any, str, Any]]
        of_paths = [] if accessor is None else [(accessor, n, f) for n, f in of_names]
        places: list[tuple[Any, str, Any]] = [
            (builtins, "open", open_),
            (io, "open", open_),
            (os, "mkdir", mkdir),
            (os, "symlink", symlink),
        ]
        places += of_paths
        replaced = [(module, name, ours, getattr(module, name)) for module, name, ours in places]

        def undo() -> None:
            for module, name, ours, before in replaced:
                if getattr(module, name) is ours:
                    setattr(module, name, before)

        for module, name, ours in places:
            setattr(module, name, ours)
        self._undo = undo

    def stop(self) -> None:
        """The first step begins. Idempotent."""
        if not self._on:
            return
        self._on = False
        self._undo()
        for reference, path in self._kept:
            _go_on_at_end(reference(), path)
        for path in self._opened:
            found = _state(path)
            if found is not None:
                self._record.files[path] = found

    # -- files ------------------------------------------------------------------------------------

    def _open(self, before: Callable[..., Any], file: Any, mode: str, *arguments: Any, **more: Any) -> Any:
        frame = _behind_loops(sys._getframe(2))
        caller = self._sites.own(frame)
        path = None if caller is None else _absolute(file)
        if caller is None or path is None:
            return before(file, mode, *arguments, **more)
        if not self._replays:
            if len(self._opened) < _MOST:
                self._opened.append(path)
            return before(file, mode, *arguments, **more)
        left, now = self._record.files.get(path), _state(path)
        if left is None or now is None:
            return before(file, mode, *arguments, **more)
        if "x" in mode and _catches(caller):
            return before(file, mode, *arguments, **more)
        mode = mode.replace("x", "w")  # it is the predecessor's
        said = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} ({os.path.basename(path)})"
        if now == left:
            return before(file, mode, *arguments, **more)
        plain = caller is frame or str(frame.f_globals.get("__name__")).partition(".")[0] in _PLAIN
        if not plain or len(arguments) > 5 or more.get("opener") is not None:
            self.truncated.append(said)
            return before(file, mode, *arguments, **more)
        opened = before(file, mode, *arguments, **more, opener=_nowhere)
        self._kept.append((weakref.ref(opened), path))
        self.kept.append(said)
        return opened

    # -- folders ----------------------------------------------------------------------------------

    def _made_before(self, path: Any) -> bool:
        """Whether the predecessor's set-up has made this folder or link, and this line would have made it."""
        if not self._on or not self._replays:
            return False
        caller, found = self._sites.own(sys._getframe(2)), _absolute(path)
        if caller is None or _catches(caller):
            return False
        return found in self._record.folders and os.path.lexists(found)

    def _note_folder(self, path: Any) -> None:
        if not self._on or self._replays or process_end.is_fork() or len(self._record.folders) >= _MOST:
            return
        found = _absolute(path)
        if found is not None and self._sites.own(sys._getframe(2)) is not None:
            self._record.folders.append(found)


def _behind_loops(frame: FrameType) -> FrameType:
    """What has called ``open()``, where the files of a script's loops are looked after, too
    (:mod:`flashrecovery.worker.own_loops.files`)."""
    while frame.f_back is not None and frame.f_globals.get("__name__") == "flashrecovery.worker.own_loops.files":
        frame = frame.f_back
    return frame


def _catches(caller: FrameType) -> bool:
    """Whether the script's own text deals with what is there already."""
    tree = text_of(caller.f_code.co_filename)
    return tree is not None and catches_existing(tree, caller.f_lineno)


def _nowhere(_path: str, flags: int) -> int:
    return os.open(os.devnull, (flags & (os.O_WRONLY | os.O_RDWR)) | os.O_CLOEXEC)


def _go_on_at_end(file: Any, path: str) -> None:
    """What ``file`` writes from now on is added to what is there."""
    if file is None or file.closed:
        return
    file.flush()
    fd = file.fileno()
    both = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_RDWR
    end = os.open(path, (both or os.O_WRONLY) | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.dup2(end, fd, inheritable=False)
    os.close(end)


def _absolute(file: Any) -> str | None:
    path = os.fspath(file)
    return os.path.abspath(path) if isinstance(path, str) else None


def _state(path: str) -> tuple[int, int] | None:
    """Size and time of the last change; None if it is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
