"""Files that a script's loops write: a step that is done again finds them as they were when it began.

What the script opens to write is noted, with its length, before the first change of a step. The note stands in the
rank's page, which outlives it (:meth:`flashrecovery.runtime.page.Page.write_file_notes`). When a step is done again, by
this process or by its replacement, what has been added since is cut off, and a file that was made since is removed.
A small file that a step reads and then rewrites gets its old content. What a process has in the buffers of open files
is written out with each version.

On its way to a place (a replacement from its first line, any rank through the rounds of an outer loop) the script opens
once more what it has opened before. That leads nowhere, until the place is reached; from there on it is added to the
file's end.

What the script's own file objects write is counted. A file that is longer than that explains has been written by
another, too. It is left as it is, and named: no line of another process is ever cut off.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import io
import operator
import os
import pathlib
import stat
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from flashrecovery.runtime import process_end
from flashrecovery.runtime.page import Page
from flashrecovery.state import codec
from flashrecovery.worker.preimport.own_files import is_own_file

_STEPS_KEPT = 4
_CONTENT = 256 << 10
"""Most bytes of a file that is read and rewritten."""
_SIZES_KEPT = 1024
_NOT_THERE = (0, 0)
_PACKERS = frozenset({"bz2", "gzip", "lzma", "tarfile", "zipfile"})
"""Python's modules that keep what they have been given in a state of their own."""
_FOR_THE_SCRIPT = frozenset({"jsonlines", "numpy", "pandas"})
"""Installed packages that open a file for the script's line that calls them, and write all of it there."""


@dataclass(frozen=True, slots=True)
class _Before:
    """A file as a step found it.

    Attributes:
        inode: device and number; ``_NOT_THERE``: it was not there.
        size: in bytes.
        position: of the object by which it is open; -1: it is not.
        content: the old content of a file that the step has read and rewrites.
        added: bytes that the step's own file objects may have made it longer by; less than 0: it was cleared.
        made: device and number of the file that the step has made.
        cleared: the step makes it with ``"w"``, and so from its beginning when it is done again.
    """

    inode: tuple[int, int]
    size: int
    position: int = -1
    content: bytes | None = None
    added: int = 0
    made: tuple[int, int] = _NOT_THERE
    cleared: bool = False


@dataclass(frozen=True)
class _Held:
    """A file object of the script's. ``pending``: it leads nowhere until the place is reached. ``packed``: one of
    Python's modules writes to it that compress."""

    reference: weakref.ref[Any]
    path: str
    pending: bool
    packed: bool = False

    def file(self) -> Any:
        """None: it is closed, or gone."""
        found = self.reference()
        return None if found is None or found.closed else found


class LoopFiles:
    """The files of one process."""

    def __init__(self) -> None:
        self._notes: Page | None = None
        self._tell: Callable[[str], None] = lambda text: None
        self._before: dict[int, dict[str, _Before]] = {}
        """By step."""
        self._earlier: tuple[int, bytes] | None = None
        """A step, and the notes of all others, encoded; None: they have changed since."""
        self._noted = False
        self._held: list[_Held] = []
        self._sizes: dict[str, tuple[tuple[int, int], int]] = {}
        """Inode and size of what this process has added to, when its newest step was over."""
        self._left: set[str] = set()
        """What is not brought back."""
        self._lost: set[str] = set()
        """What the process before had open and this one has not."""
        self._read: set[str] = set()
        self._opened: list[str] = []
        """What the step under way has opened, to read and to write."""
        self._step = -1
        self._thread = 0
        self._lock = threading.RLock()
        """Around the notes: other threads may write to what the script has opened."""
        self._on = self._void = self._restored = False
        self._undo: Callable[[], None] = lambda: None

    # -- set-up -----------------------------------------------------------------------------------

    def take(self, *, replacement: bool) -> None:
        """The script has loops that are led back. From now on its calls of ``open()`` come here."""
        if self._on:
            return
        self._on, self._void, self._thread = True, replacement, threading.get_ident()
        before = io.open

        @functools.wraps(before)
        def open_(file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
            if not self._on or not isinstance(mode, str):
                return before(file, mode, *arguments, **more)
            return self._open(before, file, mode, *arguments, **more)

        accessor = getattr(pathlib, "_normal_accessor", None)  # of Python 3.10, which asks it and not io
        modules: list[Any] = [module for module in (builtins, io, accessor) if module is not None]
        places = [(module, module.open) for module in modules]
        for module in modules:
            module.open = open_

        def undo() -> None:
            for module, its in places:
                if module.open is open_:
                    module.open = its

        self._undo = undo

    def protect(self, notes: Page, tell: Callable[[str], None]) -> None:
        """The script's loops are protected.

        Args:
            tell: names what is not brought back.
        """
        self._notes, self._tell = notes, tell
        data = notes.read_file_notes()
        if data:
            self._noted = True
            earlier, newest, of_newest = codec.loads(data)
            steps = {**codec.loads(earlier), newest: of_newest}
            self._before = {n: {path: _before(one) for path, one in files.items()} for n, files in steps.items()}

    # -- what the script opens --------------------------------------------------------------------

    def _open(self, before: Callable[..., Any], file: Any, mode: str, *arguments: Any, **more: Any) -> Any:
        if process_end.is_fork() or threading.get_ident() != self._thread or not _is_scripts(sys._getframe(2)):
            return before(file, mode, *arguments, **more)
        path = _absolute(file)
        if not any(letter in mode for letter in "wxa+"):
            if path is not None and self._step >= 0:
                self._read.add(path)
            return before(file, mode, *arguments, **more)
        there = None if path is None else _regular(path)
        if path is not None and there is not None and len(arguments) <= 5 and more.get("opener") is None:
            if self._leads_nowhere(mode):
                opened = before(file, mode, *arguments, **more, opener=_nowhere)
                self._hold(opened, path, pending=True)
                return opened
            if path in self._lost and ("w" in mode or "x" in mode) and not self._void:
                return self._open_again(path, before(file, mode, *arguments, **more, opener=_nowhere))
        if path is not None and self._step >= 0 and not self._void:
            self._note(path, there, mode)
        opened = before(file, mode, *arguments, **more)
        if path is not None and there is None:
            self._note_made(path, opened)
        held = path or _path_of(opened)
        if held is not None:
            self._hold(opened, held, pending=False, packed=_package(sys._getframe(2)) in _PACKERS)
        return opened

    def _hold(self, opened: Any, path: str, *, pending: bool, packed: bool = False) -> None:
        self._held.append(_Held(weakref.ref(opened), path, pending, packed))
        _count_writes(opened, lambda count: self._wrote(path, count))

    def _leads_nowhere(self, mode: str) -> bool:
        """Whether the script opens on its way what it has opened before. What it clears before its first step is looked
        after by :class:`flashrecovery.worker.setup_replay.files.WrittenFiles`."""
        return self._void and "+" not in mode and (self._restored or "a" in mode)

    def _open_again(self, path: str, opened: Any) -> Any:
        """A step of a replacement clears what the process before had opened in an earlier one, and kept open."""
        self._lost.discard(path)
        _go_on_at_end(opened, path)
        self._hold(opened, path, pending=False)
        self._tell(f"a replacement opens a file once more that has been written to, and goes on at its end: {path}")
        return opened

    def _note(self, path: str, there: os.stat_result | None, mode: str) -> None:
        """The step under way opens a file to write."""
        self._opened.append(path)
        of_step = self._before.setdefault(self._step, {})
        known = self._sizes.get(path)
        if "w" in mode:
            self._sizes.pop(path, None)
        if path in self._left:
            return
        if path in of_step:
            if "w" not in mode or there is None:
                return
            if not self._note_cleared(path, of_step[path], there):
                return
        elif there is None:
            of_step[path] = _Before(_NOT_THERE, 0, cleared="w" in mode)
        elif "w" in mode and path not in self._read:
            return  # the repeated step creates it again
        elif "w" in mode or "a" not in mode:
            if there.st_size > _CONTENT:
                self._leave(path, f"is read and rewritten in one step, and longer than {_CONTENT >> 10} KiB")
                return
            cleared = there.st_size if "w" in mode else 0
            of_step[path] = _Before(_inode(there), there.st_size, content=_content(path), added=-cleared)
        elif known is not None and known[0] == _inode(there) and known[1] != there.st_size:
            self._leave(path, _BY_OTHERS)
            return
        else:
            of_step[path] = _Before(_inode(there), there.st_size)
        self._write_notes()

    def _note_cleared(self, path: str, before: _Before, there: os.stat_result) -> bool:
        """The step clears what it has written to already. False if that is not brought back."""
        content = before.content
        if content is None and before.size:
            if before.size > _CONTENT:
                self._leave(path, f"is cleared in a step, and longer than {_CONTENT >> 10} KiB")
                return False
            content = _content(path)[: before.size]
        added = before.added - there.st_size
        self._before[self._step][path] = replace(before, content=content, added=added)
        return True

    def _note_made(self, path: str, opened: Any) -> None:
        before = self._before.get(self._step, {}).get(path)
        if before is not None and before.inode == _NOT_THERE and not self._void:
            self._before[self._step][path] = replace(before, made=_inode(_status(opened)))
            self._write_notes()

    def _wrote(self, path: str, count: int) -> None:
        """The script's own file object is about to write, in any thread. What a fork writes is another's."""
        if not self._on or process_end.is_fork():
            return
        with self._lock:
            of_step = self._before.get(max(self._before, default=-1), {})
            if path in of_step:
                of_step[path] = replace(of_step[path], added=of_step[path].added + count)
                self._write_notes(only_newest=True)

    def _leave(self, path: str, what: str) -> None:
        """It is not brought back."""
        with self._lock:
            for files in [*self._before.values()]:
                files.pop(path, None)
            self._earlier = None
        if path not in self._left:
            self._left.add(path)
            self._tell(f"a file that the loop writes {what}; a step that is done again writes to it again: {path}")

    # -- steps ------------------------------------------------------------------------------------

    def mark(self) -> tuple[int, list[int]]:
        """Changes with what the step under way writes, of which nothing is in a buffer then."""
        return len(self._opened), [_status(file).st_size for _, file in self._flushed()]

    def flush(self) -> None:
        """What has been written to open files outlives this process."""
        for _ in self._flushed():
            pass

    def go_back(self) -> None:
        """What comes now the script has done before."""
        self._void = True

    def handed_out(self, version: int) -> None:
        """The step that makes ``version`` + 1 begins, and its rank stands where it should."""
        if not self._on:
            return
        if self._void:
            self._arrive(version)
        flushed = [*self._flushed()]  # counted for the step that is over
        of_step = self._before.setdefault(version, {})
        for held, file in flushed:
            if held.packed:
                self._leave(held.path, "is kept open through a compressor, which cannot go back")
            elif self._by_others(held, file):
                self._leave(held.path, _BY_OTHERS)
            elif held.path not in self._left:
                of_step.setdefault(held.path, _found(file))
        self._look_at_sizes([*self._before.get(self._step, ()), *of_step])
        self._read.clear()
        self._opened.clear()
        self._step = version
        self._before = {n: files for n, files in self._before.items() if version - _STEPS_KEPT < n <= version}
        self._write_notes()

    def restore(self, version: int) -> None:
        """All steps from ``version`` on are done again."""
        if not self._on:
            return
        self._restored = True
        opened = {held.path: file for held, file in self._flushed()}
        first: dict[str, _Before] = {}
        for step in sorted((step for step in self._before if step >= version), reverse=True):
            for path, before in self._before[step].items():
                first[path] = replace(before, added=before.added + (first[path].added if path in first else 0))
        for path, before in [*first.items()]:
            try:
                not_ours = _bring_back(path, before, opened.get(path))
            except OSError as e:
                not_ours = f"cannot be brought back ({e.strerror})"
            if not_ours:
                self._leave(path, not_ours)
                del first[path]
            else:
                first[path] = replace(before, added=0, made=_NOT_THERE)
        for path, file in opened.items():
            if path not in self._left:
                first.setdefault(path, _found(file))
        self._look_at_sizes([*first])
        self._before = {step: files for step, files in self._before.items() if step < version}
        self._before[version] = first
        self._write_notes()

    def end(self) -> None:
        """Nothing is done again any more."""
        self.flush()
        self._on = False
        self._before.clear()
        self._write_notes()
        self._undo()

    def _arrive(self, version: int) -> None:
        """What was opened on the way goes on where the files end, and what was written on the way is cut off."""
        self._void = False
        for number, held in enumerate(self._held):
            file = held.file()
            if held.pending and file is not None:
                _go_on_at_end(file, held.path)
            self._held[number] = replace(held, pending=False)
        was_open = {path for path, before in self._before.get(version, {}).items() if before.position >= 0}
        self.restore(version)
        self._lost = was_open - {held.path for held, _ in self._flushed()}

    def _flushed(self) -> Iterator[tuple[_Held, Any]]:
        """The files that are open, with nothing in their buffers."""
        self._held = [held for held in self._held if held.file() is not None]
        for held in self._held:
            file = held.file()
            if held.pending or file is None:
                continue
            with contextlib.suppress(OSError, ValueError):  # a full disk is the script's to see
                file.flush()
                if stat.S_ISREG(_status(file).st_mode):
                    yield held, file

    def _by_others(self, held: _Held, file: Any) -> bool:
        """Whether something is behind what this process has added, and has come in the step that is over."""
        now, flags = _found(file), fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        adds = flags & os.O_APPEND and flags & os.O_ACCMODE == os.O_WRONLY  # its position is its own end
        if not adds or now.position >= now.size:
            return False
        ours = held.path in self._opened or sum(other.path == held.path for other in self._held) > 1
        return not ours and self._sizes.get(held.path) != (now.inode, now.size)

    def _look_at_sizes(self, paths: Iterable[str]) -> None:
        for path in paths:
            now = _regular(path)
            self._sizes.pop(path, None)
            if now is not None:
                self._sizes[path] = _inode(now), now.st_size
        if len(self._sizes) > _SIZES_KEPT:
            self._sizes = dict([*self._sizes.items()][-_SIZES_KEPT:])

    def _write_notes(self, *, only_newest: bool = False) -> None:
        """``only_newest``: of no other step have they changed since they were written. In any thread, also while the
        training thread comes to another step."""
        with self._lock:
            if self._notes is None or not (self._noted or any(self._before.values())):
                return
            self._noted = True
            steps = dict(self._before)
            newest = max(steps, default=-1)
            if self._earlier is None or self._earlier[0] != newest or not only_newest:
                earlier = {n: _all_plain(files) for n, files in steps.items() if n != newest}
                self._earlier = newest, codec.dumps(earlier)
            data = codec.dumps((self._earlier[1], newest, _all_plain(steps.get(newest, {}))))
            if not self._notes.write_file_notes(data):
                for path in [*self._before.pop(self._step, ())]:
                    self._leave(path, "is one of too many")


_BY_OTHERS = "is written by another process or thread, too, or past Python's file objects"


def _is_scripts(frame: types.FrameType | None) -> bool:
    """Whether ``open()`` was called there by the script's own lines, also by way of Python's modules."""
    while frame is not None and _package(frame) in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and (_package(frame) in _FOR_THE_SCRIPT or is_own_file(frame.f_code.co_filename))


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _content(path: str) -> bytes:
    with io.FileIO(path) as file:
        return file.readall()


_as_plain = operator.attrgetter(*(attribute.name for attribute in fields(_Before)))


def _all_plain(files: Mapping[str, _Before]) -> dict[str, Any]:
    return {path: _as_plain(one) for path, one in [*files.items()]}


def _before(plain: Sequence[Any]) -> _Before:
    one = _Before(*plain)
    return replace(one, inode=(one.inode[0], one.inode[1]), made=(one.made[0], one.made[1]))


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _status(file: Any) -> os.stat_result:
    return os.fstat(file.fileno())


def _found(file: Any) -> _Before:
    """As it is now, by the object that has it open."""
    now = _status(file)
    return _Before(_inode(now), now.st_size, os.lseek(file.fileno(), 0, os.SEEK_CUR))


def _count_writes(opened: Any, tell: Callable[[int], None]) -> None:
    """Tell how many bytes are about to be written, before each write to the file itself."""
    binary = getattr(opened, "buffer", opened)
    raw = getattr(binary, "raw", binary)
    if type(raw) is not io.FileIO:
        return
    reference = weakref.ref(raw)  # the file is closed as soon as the script has dropped it

    def write(data: Any) -> int | None:
        file = reference()
        if file is None:
            raise ValueError("write to a file object that the script has dropped")
        if stat.S_ISREG(_status(file).st_mode):
            tell(memoryview(data).nbytes)
        return file.__class__.write(file, data)

    raw.write = write  # type: ignore[method-assign]


def _bring_back(path: str, before: _Before, opened: Any) -> str:
    """Returns why it is left as it is; "": it is not. ``opened``: the object by which this process has it open; None:
    it has not."""
    now = _regular(path) if opened is None else _status(opened)
    if now is None:
        return ""
    is_new, just_made = before.inode == _NOT_THERE, before.made == _NOT_THERE and not now.st_size
    if _inode(now) != (before.made if is_new else before.inode) and not (is_new and just_made):
        return "" if before.cleared else "is another one than the step has begun with"
    if now.st_size > before.size + before.added:
        return "" if before.cleared else _BY_OTHERS
    if now.st_size < before.size and before.content is None:
        return "was cut short by the step"
    if before.content is not None:
        with io.FileIO(path, "w") as file:
            file.write(before.content)
    elif before.inode == _NOT_THERE and opened is None:
        os.unlink(path)
    elif opened is None:
        os.truncate(path, min(before.size, now.st_size))
    else:
        os.ftruncate(opened.fileno(), min(before.size, now.st_size))
        opened.seek(before.size if before.position < 0 else before.position)
    return ""


def _regular(path: str) -> os.stat_result | None:
    """None: there is no such regular file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _absolute(file: Any) -> str | None:
    """None: it is no path."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return None
    path: str = os.path.realpath(os.fsdecode(file))
    return path


def _path_of(opened: Any) -> str | None:
    """Of a file that was opened by its descriptor."""
    try:
        path = os.readlink(f"/proc/self/fd/{opened.fileno()}")
    except (OSError, ValueError):
        return None
    return path if path.startswith("/") and _regular(path) is not None else None


def _nowhere(_path: str, flags: int) -> int:
    return os.open(os.devnull, (flags & (os.O_WRONLY | os.O_RDWR)) | os.O_CLOEXEC)


def _go_on_at_end(file: Any, path: str) -> None:
    """What ``file`` writes from now on is added to what is there."""
    file.flush()
    end = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.dup2(end, file.fileno(), inheritable=False)
    os.close(end)
