"""Which agents keep a rank's set-up log, and that two nodes may be lost at once."""

from __future__ import annotations

import pytest

from flashrecovery.controller.state.rank_table import Parts, RankTable
from flashrecovery.plan.membership.placement import setup_log_keepers, setup_log_keepers_among
from flashrecovery.proto import flashrecovery_pb2 as pb


@pytest.mark.parametrize(
    ("rank", "stride", "world", "keepers"),
    [
        (0, 2, 8, (2, 4)),
        (7, 2, 8, (1, 3)),
        (0, 2, 4, (2,)),  # the ring of two nodes ends where it began
        (1, 1, 2, (0,)),
        (0, 1, 1, ()),
    ],
)
def test_keepers(rank: int, stride: int, world: int, keepers: tuple[int, ...]) -> None:
    assert setup_log_keepers(rank, stride, world) == keepers


def test_an_agent_knows_where_its_ranks_logs_are_to_be_kept() -> None:
    entries = [pb.RankEntry(rank=r, node=f"n{r // 2}", peer=f"n{r // 2}:1") for r in range(12)]
    parts = Parts(RankTable(tuple(entries), stride=2))
    for rank, entry in enumerate(entries):
        known = {e.rank for e in parts.part_for(entry.node).ranks}
        assert {*setup_log_keepers(rank, 2, 12)} <= known
        concerned = {owner.node for owner in entries if rank in setup_log_keepers(owner.rank, 2, 12)}
        assert concerned <= parts.concerned_by(rank), "who must hear of another process there"


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("left", [(), (2, 3), (2, 3, 4, 5), (1,), (0, 3, 6)])
def test_where_ranks_have_left_others_keep_them(left: tuple[int, ...], stride: int) -> None:
    """Two other nodes of those that there are, if there are two; and each agent comes to the same ones from its part
    of the table."""
    entries = [pb.RankEntry(rank=r, node=f"n{r // 2}", peer=f"n{r // 2}:1") for r in range(8) if r not in left]
    nodes = {entry.rank: entry.node for entry in entries}
    parts = Parts(RankTable(tuple(entries), stride, (), 8))
    for rank, node in nodes.items():
        keepers = setup_log_keepers_among(rank, stride, 8, nodes)
        on = [nodes[keeper] for keeper in keepers]
        assert len({*on}) == len(on) == min(2, len({*nodes.values()} - {node})) and node not in on
        known = {entry.rank: entry.node for entry in parts.part_for(node).ranks}
        assert setup_log_keepers_among(rank, stride, 8, known) == keepers or not left


def test_where_none_has_left_they_are_those_of_the_launch() -> None:
    nodes = {rank: f"n{rank // 2}" for rank in range(8)}
    assert all(setup_log_keepers_among(rank, 2, 8, nodes) == setup_log_keepers(rank, 2, 8) for rank in nodes)
