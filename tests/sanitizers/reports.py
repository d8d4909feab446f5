"""Reads what a sanitizer has written, and tells reports of our code from others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# ThreadSanitizer names the library of each frame; AddressSanitizer does not where it knows the line.
OURS = re.compile(r"flashrecovery_(?:groups_native|fake_nccl)\.so|\bflashrecovery::|\bfake_nccl::|/groups/native/")
_HEAD = re.compile(r"^(?:==\d+==)?(?:WARNING|ERROR|FATAL)?:? ?(?:ThreadSanitizer|AddressSanitizer):(?! reported)")


@dataclass(frozen=True)
class Report:
    """One report. ``ours``: a frame of it is in one of our extensions, as what accesses, frees, locks or starts."""

    text: str

    @property
    def ours(self) -> bool:
        return OURS.search(self.text) is not None

    @property
    def title(self) -> str:
        """The line that says what has been found."""
        return self.text.splitlines()[0]


def parse(text: str) -> list[Report]:
    """The reports of one process's log. What stands before the first of them is none."""
    reports: list[list[str]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            reports.append([])
        if reports:
            reports[-1].append(line)
    return [Report("\n".join(lines)) for lines in reports]


class Folder:
    """Where all processes of a run write their logs, one file for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[Path, int] = {}

    def new(self) -> list[Report]:
        """What has been reported since the last call."""
        found: list[Report] = []
        for file in sorted(self._path.glob("report.*")):
            text = file.read_text(errors="replace")
            found += parse(text[self._read.get(file, 0) :])
            self._read[file] = len(text)
        return found
