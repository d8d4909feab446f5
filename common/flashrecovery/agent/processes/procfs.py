"""What /proc says of a process: whether it is dying, how it ended, whether it is stopped.

A killed process with much memory stays visible to pidfd and to its sockets for 50 ms to 2 s, while the kernel frees its
pages. Its resident size reads 0 about a millisecond after the kill, and its exit status is there at the same moment.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

_STATE, _SESSION, _FLAGS, _STARTED, _EXIT_CODE = 0, 3, 6, 19, 49  # fields after "pid (comm) "
_PF_EXITING = 0x4


def handles(pid: int, number: int) -> bool:
    """Whether the process handles this signal itself, so that it does not end at once. False if it is
    gone."""
    try:
        with open(f"/proc/{pid}/status") as f:
            caught = next((line.split()[1] for line in f if line.startswith("SigCgt:")), "0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


class Statm:
    """The open /proc/<pid>/statm of one process: one pread tells whether it still has memory."""

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY)

    def dead(self) -> bool:
        try:
            fields = os.pread(self._fd, 128, 0).split()
        except ProcessLookupError:
            return True
        return len(fields) < 2 or fields[1] == b"0"

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class Exit:
    """How a process ended: an exit code, or the signal that killed it (exactly one is not None)."""

    code: int | None
    signal: int | None

    @staticmethod
    def from_wait_status(status: int) -> Exit:
        number = status & 0x7F
        return Exit(None, number) if number else Exit(status >> 8 & 0xFF, None)

    @staticmethod
    def from_returncode(code: int) -> Exit:
        return Exit(None, -code) if code < 0 else Exit(code, None)

    @property
    def returncode(self) -> int:
        """As ``Popen.returncode``."""
        return -self.signal if self.signal is not None else self.code or 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def exit_of(pid: int) -> Exit | None:
    """How the dying process ``pid`` (our own child, not reaped) ended; None if /proc no longer says."""
    fields = _stat(pid)
    return None if fields is None else Exit.from_wait_status(int(fields[_EXIT_CODE]))


@dataclass(frozen=True)
class ProcessEntry:
    """One process in the kernel's table. ``started``: when, in ticks since the host's start; with the pid it names one
    process and no other. ``ended``: how, None while it runs."""

    started: int
    ended: Exit | None


def entry_of(pid: int) -> ProcessEntry | None:
    """The entry of any process, a child of this one or not; None if no process has this pid."""
    fields = _stat(pid)
    if fields is None:
        return None
    over = fields[_STATE] in ("Z", "X")
    return ProcessEntry(int(fields[_STARTED]), Exit.from_wait_status(int(fields[_EXIT_CODE])) if over else None)


def is_exiting(pid: int) -> bool:
    """True once the main thread of ``pid`` has begun to exit, for whatever reason."""
    fields = _stat(pid)
    return fields is None or bool(int(fields[_FLAGS]) & _PF_EXITING)


def uninterruptible(pid: int) -> dict[tuple[int, int], str]:
    """Which threads of a process are in uninterruptible sleep (state D: a mount that does not answer, a driver), and
    where in the kernel. One is so for a moment in any input or output, and again and again on a slow disk: ask twice.

    Returns:
        From each thread, and how often it has been switched out since its start, to words about it. The same key in a
        later answer: the thread has not run in between.
    """
    try:
        threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    asleep = [thread for thread in sorted(threads) if (fields := _stat(thread)) is not None and fields[_STATE] == "D"]
    return {
        (thread, _switches(thread)): f"thread {thread} is in uninterruptible sleep ({_waits_in(thread)})"
        for thread in asleep
    }


def _switches(thread: int) -> int:
    """Of its own will or not."""
    try:
        with open(f"/proc/{thread}/status") as f:
            return sum(int(line.split()[1]) for line in f if "ctxt_switches:" in line)
    except (FileNotFoundError, ProcessLookupError):
        return -1


def _waits_in(thread: int) -> str:
    """The kernel function."""
    try:
        with open(f"/proc/{thread}/wchan") as f:
            return f.read().strip("\0\n") or "unknown"
    except OSError:  # PermissionError in a container, or it is gone
        return "unknown"


def session_members(session: int) -> list[int]:
    """The pids of the processes of this session that have not ended; one that waits to be reaped has. Reads all of
    /proc."""
    members = []
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is not None and fields[_SESSION] == str(session) and fields[_STATE] not in ("Z", "X"):
            members.append(int(entry))
    return members


def is_stopped(pid: int) -> bool:
    """True in state T (SIGSTOP) or t (ptrace stop)."""
    fields = _stat(pid)
    return fields is not None and fields[_STATE] in ("T", "t")
