"""Many clients of one TCPStore, for :mod:`scale`: what ranks do when they establish the store.

    python store_clients.py PORT COUNT

Connects COUNT clients one after the other, each sets and gets a key of its own, and writes how many seconds that has
taken. Then it keeps the connections until standard input ends.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from flashrecovery.groups.torch_private import TCPStore


def main() -> None:
    port, count = map(int, sys.argv[1:3])
    sys.stdin.readline()  # the imports are done; wait for the others
    began = time.monotonic()
    clients = []
    for i in range(count):
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=120))
        client.set(f"{began}/{i}", "here")
        client.get(f"{began}/{i}")
        clients.append(client)
    print(f"{time.monotonic() - began:.6f}", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
