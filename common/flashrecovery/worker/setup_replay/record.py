"""What a rank's script has drawn and written before its first step, for a replacement of this rank.

It is kept behind the record of the set-up collectives (:mod:`flashrecovery.groups.setup_log`), and goes where that
goes. Plain JSON; nothing in it is unpickled.
"""

from __future__ import annotations

import json
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
    """

    draws: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    random: list[int] = field(default_factory=list)
    numpy: list[int] = field(default_factory=list)
    torch: list[int] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def begin_random(self, state: list[int]) -> None:
        """Python's own stream begins with this."""
        self.random = state

    def begin_numpy(self, state: list[int]) -> None:
        """numpy's old global stream begins with this; []: with something else than is written down."""
        self.numpy = state

    def begin_torch(self, seed: int) -> None:
        """torch's generator of the CPU begins with this seed."""
        self.torch = [seed]

    def behind(self, log: bytes) -> bytes:
        """``log``, with this record behind it."""
        data = json.dumps(asdict(self)).encode()
        return log + data + _TAIL.pack(len(data), _MARK)


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
