"""Forks again and again while other threads bury process-group backends; each child buries one, too.

``fork_while_burying.py SECONDS`` ends with "stuck" if a child never gets through: it inherited a lock that a thread of
its parent held when it forked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import FakeProcessGroup

from flashrecovery.groups.native_build import native

THREADS = 3
CHILD_S = 20.0


def backend() -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(0, 1, FakeProcessGroup.Options())


def bury_until(deadline: float) -> None:
    while time.monotonic() < deadline:
        native().bury(backend())


def child() -> None:
    native().bury(backend())
    os._exit(0 if native().wait_buried(timedelta(seconds=5)) else 1)


def main() -> None:
    native()  # compiled, if need be
    deadline = time.monotonic() + float(sys.argv[1])
    threads = [threading.Thread(target=bury_until, args=(deadline,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    forks = 0
    while time.monotonic() < deadline:
        pid = os.fork()
        if pid == 0:
            child()
        forks += 1
        until = time.monotonic() + CHILD_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > until:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                os.write(1, f"stuck: child {forks}\n".encode())
                os._exit(1)
            time.sleep(0.001)
        if ended[1] != 0:
            os.write(1, f"child {forks} ended with {ended[1]}\n".encode())
            os._exit(1)
    for thread in threads:
        thread.join()
    print(f"{forks} children got through")


if __name__ == "__main__":
    main()
