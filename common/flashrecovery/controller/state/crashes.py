"""Is it a crash loop, or bad luck? How often one rank has failed, by cause and by step.

A rank whose process fails by its own doing will mostly do so again, and soon the job had better end. One that is ended
from outside has done nothing wrong: a node is being drained, an administrator kills, and three times in a row is no
pattern yet. Only an out-of-memory killer comes back for ever; so there is a limit for that, too, but a higher one.

A failure of a replacement before its first step has no step number. It is counted separately, until the recovery
is over.

A failure may take other ranks along: where GPUs read each other's memory, the end of one process can leave the others
with contexts in which every call fails. Only the failure that this follows from counts. A rank is taken along once in a
recovery, so no script gets round its limit in this way.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from flashrecovery.config import RunConfig
from flashrecovery.kinds import TRAITS, FailureKind
from flashrecovery.proto import flashrecovery_pb2 as pb

_BY_ITSELF = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGPIPE,
        signal.SIGALRM,
        signal.SIGXCPU,
        signal.SIGXFSZ,
    }
)
"""Signals that a process gets because of what it has done itself."""


class Cause(str, Enum):
    """Whose fault a failure is, see :class:`~flashrecovery.kinds.FailureTraits`."""

    OWN = "own"
    OUTSIDE = "outside"


def cause_of(kind: FailureKind, number: int) -> Cause:
    """``kind``: of the failure; ``number``: of the signal that has ended the process, 0 if none has."""
    if kind is FailureKind.KILLED:
        return Cause.OWN if number in _BY_ITSELF else Cause.OUTSIDE
    return Cause.OWN if TRAITS[kind].own else Cause.OUTSIDE


def taken_along(failure: pb.Failure, by: str) -> pb.Failure:
    """The failure of a rank whose device has become useless because of an earlier one, ``by``: no fault of the script,
    whatever the script has raised at that."""
    device = failure.last_words.device
    evidence = f"every call to its device fails: {device}; after {by.partition(chr(10))[0]}"
    along = pb.Failure()
    along.CopyFrom(failure)
    along.kind, along.evidence = FailureKind.CONTEXT_LOST, evidence
    along.ClearField("last_words")
    return along


def option_of(cause: Cause) -> str:
    """The option that has the limit."""
    return "max_failures_per_step" if cause is Cause.OWN else "max_kills_per_step"


def limit_of(cause: Cause, config: RunConfig) -> int:
    """The number of failures of this cause at which the job ends."""
    return config.max_failures_per_step if cause is Cause.OWN else config.max_kills_per_step


@dataclass
class Crashes:
    """The failures of one rank so far."""

    _at_step: Counter[tuple[Cause, int]] = field(default_factory=Counter)
    _on_the_way: Counter[Cause] = field(default_factory=Counter)

    def count(self, cause: Cause, step: int | None) -> int:
        """Count one more failure; returns how many there are of this kind. ``step`` None: of a replacement before its
        first step."""
        if step is None:
            self._on_the_way[cause] += 1
            return self._on_the_way[cause]
        self._at_step[cause, step] += 1
        return self._at_step[cause, step]

    def arrived(self) -> None:
        """The rank has taken a step since."""
        self._on_the_way.clear()
