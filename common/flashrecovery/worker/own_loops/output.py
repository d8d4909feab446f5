"""What a script prints while its own loops are led back: each line once, nearly always.

Lines of a step are held until the step cannot be done again: until the next but one is handed out. A rank that dies
takes none with it, because the newest ones are a part of its version. What a replacement prints before it has come to
its place, its predecessor has printed. (A rank that dies a step ahead of its peers may have shown a line that its
replacement shows again.)
"""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Output:
    """Standard output and standard error of one process."""

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._holding = False
        self._dropping = False
        self._lines: dict[int, list[tuple[int, str]]] = {}  # by the step in which they were printed: stream, text
        self._step = -1
        self._shown = -1  # the newest step of which all has been shown

    def take(self, *, replacement: bool) -> None:
        """From now on all that the script prints comes here. ``replacement``: it is not the first process of its
        rank."""
        if not self._streams:
            self._streams = [_Stream(self, 0, sys.stdout), _Stream(self, 1, sys.stderr)]
            sys.stdout, sys.stderr = self._streams
            self._holding = replacement

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

    def protect(self) -> None:
        """The script's loops are protected. Of what a replacement has printed so far nothing is shown."""
        if self._holding:
            self._lines.clear()
            self._dropping = True

    def handed_out(self, version: int) -> None:
        """The step that makes ``version`` + 1 begins, and its rank stands where it should."""
        self._dropping, self._holding, self._step = False, bool(self._streams), version
        self._show([step for step in sorted(self._lines) if step <= version - 2])
        self._shown = max(self._shown, version - 2)

    def printed(self) -> int:
        """Changes with each text of the step under way."""
        return len(self._lines.get(self._step, ()))

    def newest(self, version: int) -> list[tuple[int, str]]:
        """Printed in the step that made ``version``, as a part of that version."""
        return list(self._lines.get(version - 1, ()))

    def restore(self, version: int, lines: list[tuple[int, str]]) -> None:
        """All later steps are done again."""
        self._lines = {step: kept for step, kept in self._lines.items() if step < version - 1}
        if version - 1 > self._shown and lines:
            self._lines[version - 1] = [(stream, text) for stream, text in lines]
        self._step = version

    def show_all(self) -> None:
        """Nothing is done again any more."""
        self._show(sorted(self._lines))
        self._holding = self._dropping = False
        for stream in self._streams:
            stream.real.flush()

    def _show(self, steps: list[int]) -> None:
        for step in steps:
            for number, text in self._lines.pop(step):
                self._streams[number].real.write(text)
        for stream in self._streams if steps else ():
            stream.real.flush()


class _Stream:
    """Takes the place of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, output: Output, number: int, real: TextIO) -> None:
        self.real = real
        self._output = output
        self._number = number

    def write(self, text: str) -> int:
        self._output.write(self._number, text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._output.flush(self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
