"""Forks again and again while a thread of gloo drops tensors that have a Python object, for which it enters Python.

``fork_while_entering.py SECONDS`` ends with "stuck" if a child never comes back from its fork.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from forks import fork_until

from flashrecovery.groups.native_build import native

THREADS = 2


def reduce_until(deadline: float) -> None:
    """No process waits for these, so the thread that carries them out has them last."""
    while time.monotonic() < deadline:
        dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(0)


def main() -> None:
    native()  # compiled, if need be; this is what makes forks safe
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    deadline = time.monotonic() + float(sys.argv[1])
    threads = [threading.Thread(target=reduce_until, args=(deadline,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    forks = fork_until(deadline, lambda: os._exit(0))
    for thread in threads:
        thread.join()
    dist.destroy_process_group()
    print(f"{forks} children got through")


if __name__ == "__main__":
    main()
