"""Which TCPStores a job uses, and which of them each process group. Pure.

A TCPStore is one thread: what thousands of ranks ask of one in a row, several answer side by side. Nothing has to be
agreed upon. The controller names the servers, the same to everybody, and a group's ranks, which all of its members
know, say which server is the group's. A rank connects to the servers of its own groups only.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import xxhash

RANKS_A_STORE = 1000
"""Number of ranks whose connections one server accepts in about a second."""
MOST = 32


def store_count(ranks: int, nodes: int) -> int:
    """How many servers a job of this size uses; 1 up to :data:`RANKS_A_STORE` ranks."""
    return max(1, min(-(-ranks // RANKS_A_STORE), nodes, MOST))


def choose(homes: Sequence[str], living: Set[str], count: int, known: Sequence[str] = ()) -> list[str]:
    """The nodes of ``count`` servers, in order.

    The world is cut into ``count`` blocks of ranks, and each block's server is on a different node. ``homes``: each
    rank's node. A server that is already ``known`` stays where it is as long as its node is ``living`` and holds ranks,
    so that survivors keep their connections. None if no node is left; a node serves twice if there are too few.
    """
    usable = living & set(homes)
    kept = list(known) if len(known) == count else [""] * count
    used = {node for node in kept if node in usable}
    chosen = []
    for i, node in enumerate(kept):
        if node not in usable:
            block = homes[-(-i * len(homes) // count) : -(-(i + 1) * len(homes) // count)]
            candidates = [n for n in (*block, *homes) if n in usable]
            node = next((n for n in candidates if n not in used), candidates[0] if candidates else "")
            used.add(node)
        chosen.append(node)
    return [node for node in chosen if node]


def server_of(ranks: Sequence[int], world: int, servers: int) -> int:
    """Which of the ``servers`` the group of these ``ranks`` uses; the same on all of them.

    A group over all ranks uses the first server: spreading would not help. A group within one block of ranks uses the
    block's server, which is on a nearby node. Other groups, whose members are far apart anyway, are spread by their
    members; groups with the same members share a connection.
    """
    if servers == 1 or len(ranks) >= world:
        return 0
    first, last = (rank * servers // world for rank in (min(ranks), max(ranks)))
    if first == last < servers:
        return first
    return int(xxhash.xxh3_64_intdigest(",".join(map(str, ranks)).encode()) % servers)
