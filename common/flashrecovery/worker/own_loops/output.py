"""What a script prints while its own loops are led back: each line once.

Lines of a step are held until the step cannot be done again: until the next but one is yielded. A rank that dies
takes none with it, because those that may still be held are a part of its version. How much of them it had shown stands
in its page, which outlives it (:meth:`flashrecovery.runtime.page.Page.set_shown`). What a replacement prints before it
has come to its place, its predecessor has printed.

A process that is killed between a write and the note of it, about a microsecond, has shown lines that are shown again.
So has a process that the script has forked, as a loader's worker, if the step for which it prints is done again.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from flashrecovery.runtime.page import Page

_HELD = 2
"""Lines of this number of steps before a version may not have been shown yet."""

Printed = list[tuple[int, str]]
"""Texts, each with the number of its stream."""


class TextSink(Protocol):
    """Where the texts of a stream go in the end."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class Output:
    """Standard output and standard error of one process."""

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._holding = False
        self._dropping = False
        self._lines: dict[int, Printed] = {}  # by the step in which they were printed
        self._step = -1
        self._mark: Page | None = None

    def take(self, *, replacement: bool) -> None:
        """From now on all that the script prints comes here. ``replacement``: it is not the first process of its
        rank."""
        if not self._streams:
            self._streams = [_Stream(self, 0, sys.stdout), _Stream(self, 1, sys.stderr)]
            sys.stdout, sys.stderr = self._streams
            for stream in self._streams:
                _lead_loggers_to(stream)
            self._holding = replacement
            os.register_at_fork(after_in_child=self._pass_on)

    def _pass_on(self) -> None:
        """In a process that the script has forked, as a loader's worker: it shows what it prints at once, since no step
        of its own shows that later."""
        self._holding = self._dropping = False
        self._lines.clear()

    def add(self, real: TextSink) -> int:
        """One more stream; returns its number for :meth:`write`. Called once :meth:`take` was."""
        self._streams.append(_Stream(self, len(self._streams), real))
        return len(self._streams) - 1

    def write(self, stream: int, text: str) -> None:
        if self._dropping:
            return
        if self._holding:
            self._lines.setdefault(self._step, []).append((stream, text))
        else:
            self._streams[stream].real.write(text)

    def flush(self, stream: int) -> None:
        if not self._holding and not self._dropping:
            self._streams[stream].real.flush()

    # -- steps ------------------------------------------------------------------------------------

    def drop(self) -> None:
        """What comes now has been printed before."""
        self._dropping = True

    def protect(self, mark: Page) -> None:
        """The script's loops are protected. Of what a replacement has printed so far nothing is shown."""
        self._mark = mark
        if self._holding:
            self._lines.clear()
            self._dropping = True

    def handed_out(self, version: int) -> None:
        """The step that makes ``version`` + 1 begins, and its rank stands where it should."""
        self._dropping, self._holding, self._step = False, bool(self._streams), version
        self._show([step for step in sorted(self._lines) if step <= version - _HELD])

    def printed(self) -> int:
        """Changes with each text of the step under way."""
        return len(self._lines.get(self._step, ()))

    def newest(self, version: int) -> dict[int, Printed]:
        """What may not have been shown yet, as a part of ``version``: by steps before it."""
        return {step: list(lines) for step, lines in self._lines.items() if version - _HELD <= step < version}

    def restore(self, version: int, lines: dict[int, Printed]) -> None:
        """All later steps are done again."""
        own = {step: kept for step, kept in self._lines.items() if step < version - _HELD}
        of_version = {step: [(stream, text) for stream, text in kept] for step, kept in lines.items()}
        self._lines, self._step = own | of_version, version

    def show_all(self) -> None:
        """Nothing is done again any more."""
        self._show(sorted(self._lines))
        self._holding = self._dropping = False
        for stream in self._streams:
            stream.real.flush()

    def failed(self) -> None:
        """The script ends with an error, and the step under way may be done again: it is shown, and not noted."""
        self._show([step for step in sorted(self._lines) if step < self._step])
        self._mark = None
        self.show_all()

    def _show(self, steps: list[int]) -> None:
        """Each write is noted once it is done; one that has been noted before is left out."""
        mark = self._mark
        first, done = (-1, 0) if mark is None else mark.shown
        for step in steps:
            lines = self._lines.pop(step)
            if step < first:
                continue
            for number, (stream, text) in enumerate(_writes(lines)):
                if step == first and number < done:
                    continue
                real = self._streams[stream].real
                real.write(text)
                real.flush()
                if mark is not None:
                    mark.set_shown(step, number + 1)
            if mark is not None:
                mark.set_shown(step + 1, 0)


def _lead_loggers_to(stream: _Stream) -> None:
    """Loggers of packages that were imported before keep the stream that was there then: DeepSpeed's, loguru's."""
    for reference in list(logging._handlerList):  # type: ignore[attr-defined] # of no public name
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream.real:
            handler.setStream(stream)
    core = getattr(getattr(sys.modules.get("loguru"), "logger", None), "_core", None)
    for handler in getattr(core, "handlers", {}).values():
        sink = getattr(handler, "_sink", None)
        if sink is not None and getattr(sink, "_stream", None) is stream.real:
            sink._stream = stream


def _writes(lines: Printed) -> Iterator[tuple[int, str]]:
    """Neighbouring texts of one stream together."""
    for stream, texts in itertools.groupby(lines, key=lambda one: one[0]):
        yield stream, "".join(text for _, text in texts)


class _Stream:
    """Takes the place of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, output: Output, number: int, real: TextSink) -> None:
        self.real = real
        self._output = output
        self._number = number

    def write(self, text: str) -> int:
        self._output.write(self._number, str(text))  # of loguru it is a class of its own, which no version can hold
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._output.flush(self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
