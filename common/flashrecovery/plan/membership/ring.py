"""The nodes as a ring, in the order of their names: which nodes are asked about a silent one.

The controller asks the next nodes in the ring about a silent one, and a node that does not hear the controller asks the
same ones; so both sides reach the same answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

OBSERVERS = 2
"""How many of the next nodes are asked."""


def following(node: str, ring: Sequence[str]) -> Iterator[str]:
    """The other nodes of ``ring`` (ascending), beginning with the one after ``node``, which need not be in it."""
    start = bisect.bisect_right(ring, node)
    for i in range(len(ring)):
        other = ring[(start + i) % len(ring)]
        if other != node:
            yield other


def preceding(node: str, ring: Sequence[str]) -> Iterator[str]:
    """The other nodes of ``ring`` (ascending) backwards, beginning with the one before ``node``: those that ``node``
    follows."""
    start = bisect.bisect_left(ring, node)
    for i in range(1, len(ring) + 1):
        other = ring[(start - i) % len(ring)]
        if other != node:
            yield other
