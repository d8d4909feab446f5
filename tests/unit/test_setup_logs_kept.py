"""Which ranks keep the set-up logs of ranks that have left, and of which start of the job they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.agent.peers.client import UNREACHED, KeptLog, fetch_from, keep_there
from flashrecovery.agent.processes.setup_logs import SetupLogs
from flashrecovery.controller.state.rank_table import Parts, RankTable
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support.peers import peer_service
from tests.unit.test_impostors import ACCESS


class Node(SetupLogs):
    """An agent that gives logs to the others without a network."""

    def __init__(self, name: str, nodes: dict[str, Node]) -> None:
        super().__init__(ACCESS)
        self._name, self._nodes = name, nodes

    async def _give(self, peer: str, rank: int, data: bytes, whose: tuple[int, int]) -> None:
        if peer in self._nodes:
            self._nodes[peer]._kept[rank] = KeptLog(whose[0], data)
            self._given[rank, peer] = whose


def page(rank: int) -> Any:
    return SimpleNamespace(page=SimpleNamespace(read_setup_log=lambda: b"%d" % rank), dead=False, pid=rank, attempt=0)


def spread(nodes: Mapping[str, Node], homes: Mapping[int, str], stride: int, world: int) -> None:
    entries = tuple(pb.RankEntry(rank=rank, node=home, peer=home) for rank, home in homes.items())
    parts = Parts(RankTable(entries, stride, (), world))
    for name, node in nodes.items():
        processes = {rank: page(rank) for rank, home in homes.items() if home == name}
        asyncio.run(node.spread(parts.part_for(name), processes, name, tuple(homes)))


@pytest.mark.parametrize("per_node", [1, 2])
def test_nodes_are_lost_one_after_the_other_in_any_order(per_node: int) -> None:
    """Those that are left have the logs of all ranks that have left: these can come back."""
    world = 4 * per_node
    launched = {rank: f"n{rank // per_node}" for rank in range(world)}
    for order in permutations(sorted({*launched.values()})):
        nodes: dict[str, Node] = {}
        nodes.update({name: Node(name, nodes) for name in order})
        homes = dict(launched)
        spread(nodes, homes, per_node, world)
        for lost in order[:-1]:
            del nodes[lost]
            homes = {rank: home for rank, home in homes.items() if home != lost}
            spread(nodes, homes, per_node, world)
            for rank in launched.keys() - homes.keys():
                having = [name for name, node in nodes.items() if node.own(rank, 0) == b"%d" % rank]
                assert len(having) >= min(2, len(nodes)), f"{order}, without {lost}: rank {rank} is with {having}"


def test_a_log_is_given_once() -> None:
    nodes: dict[str, Node] = {}
    nodes.update({name: Node(name, nodes) for name in ("n0", "n1", "n2")})
    nodes["n0"].keep(3, b"3", 0)
    for _ in range(2):
        spread(nodes, {0: "n0", 1: "n1", 2: "n2"}, 1, 4)
        nodes["n1"]._kept.pop(3, None)
    assert nodes["n1"].own(3, 0) is None and nodes["n2"].own(3, 0) == b"3"


def test_a_log_of_another_start_is_not_taken() -> None:
    """Its node was cut off while all ranks were started again: what their set-up returned then is another thing."""

    async def main() -> None:
        own = SetupLogs(ACCESS)
        keeper = peer_service(ACCESS, logs=own)
        await keeper.start("127.0.0.1")
        at = f"127.0.0.1:{keeper.port}"
        try:
            await keep_there(at, ACCESS, 1, b"first", 0)
            assert own.own(1, 0) == b"first" and own.own(1, 1) is None
            with pytest.raises(UNREACHED):
                await fetch_from(at, ACCESS, 1, 1)
            assert "not_found" in str(await own.fetch([at], 1, 1))
            await keep_there(at, ACCESS, 1, b"second", 1)
            await keep_there(at, ACCESS, 1, b"first", 0)  # it comes late
            assert await fetch_from(at, ACCESS, 1, 1) == b"second" == await own.fetch([at], 1, 1)
        finally:
            await keeper.stop()

    asyncio.run(main())


def test_a_log_of_an_older_start_does_not_take_the_place_of_a_newer_one() -> None:
    """A rank has left in the layout before, which its agent hears late: in the next one its number is another's."""
    logs = SetupLogs(ACCESS)
    logs.keep(1, b"newer", 2)
    logs.keep(1, b"older", 1)
    assert logs.own(1, 2) == b"newer"
