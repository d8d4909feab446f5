"""What a device plugin is, and what it says.

FlashRecovery (section III-C) detects failures with two witnesses: a monitor for every training process, and *device
plugins*, one component a node that reports the state of chips and network. Of the hardware failures of its cluster
(Fig. 9) 57 % were the network's and 20 % the device memory's. Such a failure is known to the driver or the kernel
seconds to minutes before a collective times out or a process gets an error, so a plugin's report begins the recovery
earlier than any look at processes could.

A plugin is asked periodically, in a separate thread, and answers with what is wrong *now*:

* ``FATAL``: the device cannot go on with this job. Its worker is killed and replaced at once.
* ``WARNING``: the job goes on; the node is marked as suspect, to be replaced at the next failure.

A plugin judges from codes and counters, never from texts. What it does not know for sure is a warning: a wrong FATAL
costs a recovery, a wrong WARNING costs nothing now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable


class Severity(str, Enum):
    """FATAL: replace the device's worker now. WARNING: replace the node at the next opportunity."""

    WARNING = "warning"
    FATAL = "fatal"


@dataclass(frozen=True)
class HealthFinding:
    """One thing that is wrong. ``device``: the local rank whose device it is, None for the whole node.

    ``code`` is for machines ("xid_79"), ``text`` for people, ``evidence`` is what was read, as it was read. Findings
    that are equal but for text and evidence are the same one.
    """

    severity: Severity
    plugin: str
    subject: str
    device: int | None
    code: str
    text: str
    evidence: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return self.severity, self.plugin, self.subject, self.device, self.code

    def __str__(self) -> str:
        read = f" ({self.evidence})" if self.evidence else ""
        return f"{self.plugin}: {self.subject}: {self.text} [{self.code}]{read}"


@dataclass(frozen=True)
class HealthContext:
    """What a plugin may want to know of the job: its directory, the local ranks (0..n-1), the agent's environment."""

    run_dir: Path
    local_ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class HealthPlugin(Protocol):
    """Watches some devices of this node. Every method is called from one thread at a time.

    A factory (``factory(context: HealthContext) -> HealthPlugin | None``) makes it; None: there is nothing to watch.
    """

    name: str

    def health(self) -> Sequence[HealthFinding]:
        """What is wrong now, or has happened since the last call. Returns soon (well under a second), and waits for
        nothing. May raise anything: a plugin that keeps failing is switched off, and the job goes on without it."""
        ...

    def close(self) -> None:
        """Give back what the plugin holds. Not called if :meth:`health` is stuck."""
        ...
