"""Whether the state fits into the nodes' memory while the layout changes."""

from __future__ import annotations

import pytest

from flashrecovery.plan.strategy.staging_room import StagingRoom

GB = 10**9


@pytest.mark.parametrize(
    ("nodes", "free", "refused", "warned"),
    [
        (1, 40, False, False),
        (1, 39, False, True),
        (1, 9, True, True),
        (2, 40, False, False),
        (2, 39, False, True),
        (4, 20, False, False),
        (4, 19, False, True),
        (4, 3, False, True),
        (4, 2, True, True),
    ],
)
def test_what_each_node_has_to_keep(nodes: int, free: int, refused: bool, warned: bool) -> None:
    room = StagingRoom(now=10 * GB, expected=40 * GB, nodes=nodes, free=free * GB, free_in_all=nodes * free * GB)
    assert (bool(room.refusal), bool(room.warning)) == (refused, warned)


def test_the_numbers_are_told() -> None:
    why = StagingRoom(now=10 * GB, expected=40 * GB, nodes=4, free=2 * GB, free_in_all=9 * GB).refusal
    assert "2.50 GB on a node" in why and "2.00 GB are free on the node with least" in why and "--shm-size" in why
