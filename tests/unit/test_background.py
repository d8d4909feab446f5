"""The thread of copies beside training, at the end of a process that has not closed it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

ENDED = {
    "busy": ("0.5", "pass", ""),
    "idle": ("0", "background.wait()", ""),
    "closed": ("0.1", "background.close(5)", ""),
    "in a forked child": ("0.5", "fork()", "0"),
}
SCRIPT = """
    import os, sys, threading, time, torch
    from flashrecovery.redundancy.memory.background import Background

    def job():
        until = time.monotonic() + {seconds}
        began.set()
        while time.monotonic() < until:
            torch.ones(1).add_(1)  # gives up the interpreter for the operation
        ended.append(1)

    def fork():
        child = os.fork()
        if child:
            print(os.waitpid(child, 0)[1], flush=True)

    torch.ones(1).add_(1)  # what torch sets up with its first operation is not to be cut in half by the fork
    began, ended = threading.Event(), []
    background = Background("test")
    background.submit(job)
    began.wait()
    {then}
    sys.exit(0)
"""


@pytest.mark.parametrize(("seconds", "then", "printed"), ENDED.values(), ids=ENDED)
def test_a_process_ends_while_its_thread_is(seconds: str, then: str, printed: str) -> None:
    """Where the interpreter ended under a thread that is in torch, the process would be aborted."""
    script = textwrap.dedent(SCRIPT).format(seconds=seconds, then=then)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
