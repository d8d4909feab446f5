"""What a script draws before its first step to name things: a replacement is given what its predecessor drew.

A replacement runs the script from its first line. A run's id, or a folder's name with the time in it, would be another
one there: logs would go on elsewhere. So what the script's own files draw, and trackers of experiments for them, is
recorded for each call site in order, and answered from that record in a replacement:

* bytes of the system's randomness: ``os.urandom``, and what is made of it in Python (``uuid.uuid4``, ``secrets``,
  ``random.SystemRandom``), and ``uuid.uuid1``;
* the time, where the text makes a name of it (:mod:`flashrecovery.worker.script_text.clock_names`);
* the names of ``tempfile.mkdtemp``, and the numbers that Lightning's loggers give the folders of runs;
* the state in which Python's, numpy's and torch's own streams of random numbers begin, and ``torch.seed()``.

Where a replacement asks more often, or from another line, it gets new values. Clocks that measure (``monotonic``,
``perf_counter``) are never answered from the record.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import os
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from flashrecovery.runtime import process_end
from flashrecovery.util.import_hooks import install
from flashrecovery.worker.script_text.clock_names import ClockNames
from flashrecovery.worker.setup_replay.call_sites import CallSites, text_of
from flashrecovery.worker.setup_replay.record import SetupRecord

T = TypeVar("T")
_MOST, _BYTES = 4096, 256
"""Draws that are recorded, and bytes of one; what is longer is no name."""
_OF_FOLDERS = frozenset({"now", "utcnow", "strftime"})
"""What trackers name folders with. Files they name by ``time.time()``, and each process needs its own."""
_NUMBERED = ("lightning.fabric.loggers.csv_logs", "lightning.fabric.loggers.tensorboard")
_BETWEEN = frozenset({"uuid", "secrets", "random", "tempfile"})
"""Other modules of Python's own draw for themselves: names of sockets, keys."""
_UTC = datetime.timezone.utc


class DrawnValues:
    """Records into ``record``, or with ``replays`` answers from it, between :meth:`start` and :meth:`stop`."""

    def __init__(self, record: SetupRecord, sites: CallSites, *, replays: bool) -> None:
        self._record, self._sites, self._replays = record, sites, replays
        self._asked: Counter[str] = Counter()
        self._left = _MOST
        self._undo: list[Callable[[], None]] = []
        self._on = False
        self.new: list[str] = []
        """Call sites at which a replacement has drawn more than its predecessor, or something else."""

    def start(self) -> None:
        self._on = True
        self._begin_streams()
        self._replace_urandom()
        self._put(uuid, "uuid1", self._uuid1(uuid.uuid1))
        self._put(tempfile, "_get_candidate_names", self._candidates(tempfile._get_candidate_names))  # type: ignore[attr-defined]
        for name in ("time", "time_ns", "strftime", "localtime", "gmtime", "ctime"):
            self._put(time, name, self._clock(name, getattr(time, name)))
        self._replace_dates()
        install(dict.fromkeys(_NUMBERED, self._number_versions))

    def stop(self) -> None:
        """Everything as it was; what the script has taken by its name asks the system from now on. Idempotent."""
        self._on = False
        while self._undo:
            self._undo.pop()()

    # -- one draw ---------------------------------------------------------------------------------

    def _draw(
        self,
        kind: str,
        caller: FrameType,
        fresh: Callable[[], T],
        to: Callable[[T], str],
        back: Callable[[str], T],
        *,
        quiet: bool = False,
    ) -> T:
        """The next value of this kind at this call site, as it is recorded ("to" a text, and "back")."""
        key = f"{kind}|{self._sites.key(caller)}"
        number = self._asked[key]
        self._asked[key] += 1
        if not self._replays:
            value = fresh()
            self._left -= 1
            if self._left >= 0:
                self._record.draws.setdefault(key, []).append(to(value))
            else:
                self._on = False  # a script that never comes to a step
            return value
        known = self._record.draws.get(key, [])
        if number < len(known):
            return back(known[number])
        if not quiet and number == len(known) and self._sites.is_own(caller):
            self.new.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} ({kind})")
        return fresh()

    def _caller(self, frame: FrameType) -> FrameType | None:
        if not self._on or process_end.is_fork():
            return None
        return self._sites.naming(frame, _BETWEEN)

    # -- randomness -------------------------------------------------------------------------------

    def _begin_streams(self) -> None:
        """Scripts that seed nothing draw names from Python's own stream or numpy's, too, and the parts of a data set
        from torch's."""
        if not self._replays:
            version, internal, _ = random.getstate()
            self._record.begin_random([version, *internal])
        elif self._record.random:
            version, *internal = self._record.random
            random.setstate((version, tuple(internal), None))
        install({"numpy.random": self._begin_numpys, "torch": self._begin_torchs})

    def _begin_numpys(self, module: Any) -> None:
        """Called once it is imported, which may be later."""
        if not self._on:
            return
        if not self._replays:
            name, key, position, *_ = module.get_state()
            self._record.begin_numpy([*map(int, key), int(position)] if name == "MT19937" else [])
        elif self._record.numpy:
            *key, position = self._record.numpy
            module.set_state(("MT19937", key, position, 0, 0.0))

    def _begin_torchs(self, module: Any) -> None:
        if not self._on:
            return
        if not self._replays:
            self._record.begin_torch(module.default_generator.initial_seed())
        elif self._record.torch:
            module.default_generator.manual_seed(self._record.torch[0])
        for owner in (module, module.random):
            self._put(owner, "seed", self._torch_seed(module, owner.seed))

    def _torch_seed(self, module: Any, before: Callable[[], int]) -> Callable[[], int]:
        """It gets the seed from the system, not through Python."""

        def back(text: str) -> int:
            module.manual_seed(int(text))
            return int(text)

        @functools.wraps(before)
        def seed() -> int:
            caller = self._caller(sys._getframe(1))
            return before() if caller is None else self._draw("torch.seed", caller, before, str, back)

        return seed

    def _replace_urandom(self) -> None:
        """All of ``uuid4``, ``secrets`` and ``SystemRandom`` come down to it, by one of two names."""
        before = os.urandom

        def urandom(size: int, /) -> bytes:
            caller = self._caller(sys._getframe(1)) if 0 < size <= _BYTES else None
            if caller is None:
                return before(size)
            return self._draw(f"urandom({size})", caller, lambda: before(size), bytes.hex, bytes.fromhex)

        self._put(os, "urandom", urandom)
        self._put(random, "_urandom", urandom)

    def _uuid1(self, before: Callable[..., uuid.UUID]) -> Callable[..., uuid.UUID]:
        @functools.wraps(before)
        def uuid1(*arguments: Any, **more: Any) -> uuid.UUID:
            caller = self._caller(sys._getframe(1))
            if caller is None:
                return before(*arguments, **more)
            return self._draw("uuid1", caller, lambda: before(*arguments, **more), str, uuid.UUID)

        return uuid1

    def _candidates(self, before: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
        """Names for temporary folders and files. What is there already is passed over, but not a folder that the
        predecessor has made (:mod:`.files`). A TemporaryDirectory begins empty, so it gets a new name."""

        def candidates() -> Iterator[str]:
            caller = self._caller(sys._getframe(1))
            if caller is None or _within(sys._getframe(1), "TemporaryDirectory"):
                return before()
            names = before()

            def one_by_one() -> Iterator[str]:
                while True:
                    yield self._draw("tempfile", caller, lambda: next(names), str, str, quiet=True)

            return one_by_one()

        return candidates

    def _number_versions(self, module: Any) -> None:
        """Lightning's loggers number the folders of runs by those that are there."""
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "_get_next_version" in vars(kind):
                self._put(kind, "_get_next_version", self._next_version(kind._get_next_version))  # type: ignore[attr-defined]

    def _next_version(self, before: Callable[[Any], int]) -> Callable[[Any], int]:
        @functools.wraps(before)
        def next_version(logger: Any) -> int:
            if not self._on or process_end.is_fork():
                return before(logger)
            return self._draw("version", sys._getframe(1), lambda: before(logger), str, int, quiet=True)

        return next_version

    # -- the time ---------------------------------------------------------------------------------

    def _clock(self, name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        """A function of :mod:`time`. With an argument (``localtime(seconds)``) it reads no clock."""
        texts: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]]
        texts = {"time": (repr, float), "time_ns": (str, int), "strftime": (str, str), "ctime": (str, str)}
        to, back = texts.get(name, (_seconds_of(name), lambda text: before(int(text))))
        own = 1 if name == "strftime" else 0  # arguments that are no time

        @functools.wraps(before)
        def clock(*arguments: Any) -> Any:
            caller = self._naming_caller(sys._getframe(1), name) if len(arguments) <= own else None
            if caller is None:
                return before(*arguments)
            return self._draw(f"time.{name}", caller, lambda: before(*arguments), to, back)

        return clock

    def _naming_caller(self, frame: FrameType, function: str) -> FrameType | None:
        caller = self._caller(frame)
        if caller is None or caller is not frame:
            return None
        if function not in _OF_FOLDERS and not self._sites.is_own(caller):
            return None
        text = _clock_names(caller.f_code.co_filename)
        return caller if text is not None and text.names(caller.f_lineno, function) else None

    def _replace_dates(self) -> None:
        """The classes stay the same ones, since values are asked for theirs; their methods are replaced, as those of
        classes in C can only be patched through their dictionary."""

        def now(cls: Any, tz: datetime.tzinfo | None = None) -> Any:
            caller = self._naming_caller(sys._getframe(1), "now")
            if caller is None:
                return now_before(cls, tz)

            def to(value: datetime.datetime) -> str:
                return (value if tz is None else value.astimezone(_UTC)).isoformat()

            def back(text: str) -> Any:
                value = cls.fromisoformat(text)
                return value if tz is None else value.astimezone(tz)

            return self._draw("now", caller, lambda: now_before(cls, tz), to, back)

        def utcnow(cls: Any) -> Any:
            caller = self._naming_caller(sys._getframe(1), "utcnow")
            fresh = functools.partial(utcnow_before, cls)
            if caller is None:
                return fresh()
            return self._draw("utcnow", caller, fresh, lambda v: v.isoformat(), cls.fromisoformat)

        def today(cls: Any) -> Any:
            caller = self._naming_caller(sys._getframe(1), "today")
            fresh = functools.partial(today_before, cls)
            if caller is None:
                return fresh()
            return self._draw("today", caller, fresh, lambda v: v.isoformat(), cls.fromisoformat)

        now_before = self._put_in_class(datetime.datetime, "now", now)
        utcnow_before = self._put_in_class(datetime.datetime, "utcnow", utcnow)
        today_before = self._put_in_class(datetime.date, "today", today)

    # -- what is replaced -------------------------------------------------------------------------

    def _put(self, module: Any, name: str, new: object) -> None:
        before = getattr(module, name)
        setattr(module, name, new)

        def undo() -> None:
            if getattr(module, name) is new:  # else other code has replaced it since
                setattr(module, name, before)

        self._undo.append(undo)

    def _put_in_class(self, kind: type, name: str, new: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what calls the method as it was, with the class in front."""
        (names,) = gc.get_referents(kind.__dict__)
        before = names[name]

        def put(method: object) -> None:
            names[name] = method
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

        put(classmethod(new))
        self._undo.append(lambda: put(before))
        return lambda cls, *arguments: before.__get__(None, cls)(*arguments)


def _seconds_of(name: str) -> Callable[[time.struct_time], str]:
    if name == "localtime":
        return lambda value: str(int(time.mktime(value)))

    def seconds(value: time.struct_time) -> str:
        import calendar

        return str(calendar.timegm(value))

    return seconds


@functools.lru_cache(maxsize=64)
def _clock_names(file: str) -> ClockNames | None:
    tree = text_of(file)
    return None if tree is None else ClockNames(tree)


def _within(frame: FrameType | None, kind: str) -> bool:
    """Whether an object of this class of :mod:`tempfile` is being made."""
    while frame is not None and frame.f_globals.get("__name__") == "tempfile":
        if type(frame.f_locals.get("self")).__name__ == kind:
            return True
        frame = frame.f_back
    return False
