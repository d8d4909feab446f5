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
from typing import NoReturn

from forks import fork_until
from torch._C._distributed_c10d import FakeProcessGroup

from flashrecovery.groups.native_build import native

THREADS = 3


def backend() -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(0, 1, FakeProcessGroup.Options())


def bury_until(deadline: float) -> None:
    while time.monotonic() < deadline:
        native().bury(backend())


def child() -> NoReturn:
    native().bury(backend())
    os._exit(0 if native().wait_buried(timedelta(seconds=5)) else 1)


def main() -> None:
    native()  # compiled, if need be
    deadline = time.monotonic() + float(sys.argv[1])
    threads = [threading.Thread(target=bury_until, args=(deadline,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    forks = fork_until(deadline, child)
    for thread in threads:
        thread.join()
    print(f"{forks} children got through")


if __name__ == "__main__":
    main()
