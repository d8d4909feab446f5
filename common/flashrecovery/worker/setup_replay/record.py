"""What a rank's script has drawn and written before its first step, for a replacement of this rank.

It is kept behind the record of the set-up collectives (:mod:`flashrecovery.groups.setup_log`), and goes where that
goes. Plain JSON; nothing in it is unpickled.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import asdict, dataclass, field

_TAIL = struct.Struct("<Q8s")
_MARK = b"FRDRAWN1"


@dataclass
class SetupRecord:
    """What the script's own files have asked for, up to its first step.

    Attributes:
        draws: kind and call site -> the values that were drawn there, in order.
        files: paths that were opened to be written -> size in bytes and time of change (ns) at the first step.
        folders: those that were made.
        random: state of Python's own stream of random numbers before the script's first line.
        numpy: that of numpy's old global stream, as :func:`numpy.random.get_state` gives it.
        torch: the seed with which torch's generator of the CPU begins in a script that seeds nothing.
        notes: what a framework's loop has noted for the process that takes over, by name.
        absent: files that were looked for and missing -> how often, until they were found.
        hides: a replacement made other collectives than were recorded, so the next one finds these missing, too.
    """

    draws: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    random: list[int] = field(default_factory=list)
    numpy: list[int] = field(default_factory=list)
    torch: list[int] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    hides: bool = False

    def begin_random(self, state: list[int]) -> None:
        """Python's own stream begins with this."""
        self.random = state

    def begin_numpy(self, state: list[int]) -> None:
        """numpy's old global stream begins with this; []: with something else than is written down."""
        self.numpy = state

    def begin_torch(self, seed: int) -> None:
        """torch's generator of the CPU begins with this seed."""
        self.torch = [seed]

    def note_absent(self, found: dict[str, int]) -> None:
        """These files were missing, so often."""
        self.absent = found

    def hide_absent(self) -> bool:
        """Let the next process find missing what was missing. False if it would make no difference."""
        if self.hides or all(file_at(path) is None for path in self.absent):
            return False
        self.hides = True
        return True

    def behind(self, log: bytes) -> bytes:
        """``log``, with this record behind it."""
        data = json.dumps(asdict(self)).encode()
        return log + data + _TAIL.pack(len(data), _MARK)


def file_at(path: str) -> tuple[int, ...] | None:
    """By what another file would be told from this one; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def split(log: bytes) -> tuple[bytes, SetupRecord]:
    """Undo :meth:`SetupRecord.behind`; an empty record if there is none."""
    if len(log) < _TAIL.size:
        return log, SetupRecord()
    size, mark = _TAIL.unpack_from(log, len(log) - _TAIL.size)
    end = len(log) - _TAIL.size
    if mark != _MARK or size > end:
        return log, SetupRecord()
    fields = json.loads(log[end - size : end])
    fields["files"] = {path: (seen[0], seen[1]) for path, seen in fields["files"].items()}
    return log[: end - size], SetupRecord(**fields)
