"""Linux process control that the standard library has no call for."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from flashrecovery.runtime.channel import CHANNEL_ENV, PAGE_ENV

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; end at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on this process is the parent of every descendant whose own parent ends (Linux 3.4)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def keep_to_cpus(cpus: Iterable[int]) -> None:
    """Every thread of this process runs on these CPUs only from now on. Where the kernel allows none of them any more,
    nothing changes."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except OSError:
            continue  # the thread has ended, or the control group has other CPUs


def name_thread(name: str) -> None:
    """What ``ps -o comm`` and ``py-spy dump`` call the calling thread: at most 15 bytes are kept."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


WORKER_PROGRAM = "flashrecovery.worker_main"
"""The module that a training process runs."""


def start_interpreter(
    role: str, command: Sequence[str], env: Mapping[str, str], channel: int, page: int, out: IO[bytes]
) -> subprocess.Popen[bytes]:
    """A process of the bootstrap, in a separate session, that prints into ``out``. ``role``: ``--worker`` or
    ``--standby``; ``command``: the script and its arguments; ``channel``, ``page``: descriptors that it gets, too."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", WORKER_PROGRAM, role, *command],
        env={**env, CHANNEL_ENV: str(channel), PAGE_ENV: str(page)},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        pass_fds=(channel, page),
        start_new_session=True,
    )


def redirect_output(descriptor: int) -> None:
    """From now on this process prints into this file, whose descriptor is closed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
