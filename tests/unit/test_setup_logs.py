"""Which agents keep a rank's set-up log, and that two nodes may be lost at once."""

from __future__ import annotations

import pytest

from flashrecovery.controller.rank_table import Parts, RankTable
from flashrecovery.plan.placement import setup_log_keepers
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
