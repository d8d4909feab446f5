"""Many clients of one or several TCPStores, for :mod:`stores`: what ranks do when they establish the store.

    python store_clients.py PORTS FIRST LAST GROUP

PORTS with commas; the ranks FIRST to LAST - 1 are played. Each connects to the servers of its groups, one after the
other: of GROUP neighbouring ranks, and of those with its place in their group. In each group it leaves its address and
reads that of one peer. Then it writes how many seconds that has taken, how many connections there are, and keeps them
until standard input ends.
"""

from __future__ import annotations

import resource
import sys
import time
from datetime import timedelta

from flashrecovery.groups.peer_names import stop_asking
from flashrecovery.groups.torch_private import TCPStore
from flashrecovery.plan.membership.stores import server_of


def main() -> None:
    ports = [int(p) for p in sys.argv[1].split(",")]
    first, last, size, world = map(int, sys.argv[2:6])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    servers = {place: server_of(range(place, world, size), world, len(ports)) for place in range(size)}
    stop_asking()  # as every rank does
    sys.stdin.readline()  # the imports are done; wait for the others
    began = time.monotonic()
    kept = []
    for rank in range(first, last):
        block = rank // size * size
        near = server_of(range(block, min(block + size, world)), world, len(ports))
        clients: dict[int, TCPStore] = {}
        for group, server in ((f"near{block}", near), (f"far{rank % size}", servers[rank % size])):
            if server not in clients:
                clients[server] = TCPStore(
                    "127.0.0.1", ports[server], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=300)
                )
            clients[server].set(f"{began}/{group}/{rank}", "here")
            clients[server].get(f"{began}/{group}/{rank}")
        kept.append(clients)
    print(f"{time.monotonic() - began:.6f} {sum(map(len, kept))}", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
