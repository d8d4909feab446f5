"""Which stores a job uses, and which of them a group."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.outbox import Send
from flashrecovery.plan.membership.stores import MOST, choose, server_of, store_count
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import STORES_ENV, rank_env
from tests.unit.test_machine import World


@pytest.mark.parametrize(
    ("ranks", "nodes", "count"), [(1, 1, 1), (1000, 125, 1), (1001, 126, 2), (18000, 2250, 18), (5000, 3, 3)]
)
def test_how_many_follows_from_the_size(ranks: int, nodes: int, count: int) -> None:
    assert store_count(ranks, nodes) == count
    assert store_count(10**6, 10**5) == MOST


def test_each_block_of_ranks_has_a_server_on_a_node_of_its_own() -> None:
    homes = [f"n{r // 2}" for r in range(16)]
    assert choose(homes, set(homes), 4) == ["n0", "n2", "n4", "n6"]


def test_a_server_stays_where_it_is_until_its_node_is_lost() -> None:
    homes = [f"n{r // 2}" for r in range(16)]
    known = ["n1", "n3", "n4", "n6"]
    assert choose(homes, set(homes), 4, known) == known
    assert choose(homes, set(homes) - {"n4"}, 4, known) == ["n1", "n3", "n5", "n6"]
    moved = [home if home != "n3" else "spare" for home in homes]  # fenced, alive again, but without ranks
    assert choose(moved, {*homes, "spare"}, 4, known) == ["n1", "n2", "n4", "n6"]


def test_too_few_nodes_serve_twice_and_none_serve_nobody() -> None:
    assert choose(["a", "a", "b", "b"], {"b"}, 2, ["a", "b"]) == ["b", "b"]
    assert choose(["a", "a", "b", "b"], set(), 2) == []
    assert choose(["", "", "b", "b"], {"b", "spare"}, 2) == ["b", "b"]
    assert choose(["a", "b"] * 3, {"a", "b"}, 3) == ["a", "b", "a"]


def test_no_node_serves_twice_while_another_serves_nobody() -> None:
    assert choose(["a", "b", "a", "c"], {"a", "b", "c"}, 2, ["a", "gone"]) == ["a", "c"]
    assert choose(["a", "b"] * 2, {"a", "b"}, 2) == ["a", "b"]
    # no node of the second block is left: the first of all that serves no one, and none that the third block needs
    assert choose(["a", "e", "b", "b", "c", "c"], {"a", "e", "c"}, 3) == ["a", "e", "c"]


def test_groups_are_spread_and_near_ones_stay_near() -> None:
    world, servers = 4096, 4
    tensor = [list(range(first, first + 8)) for first in range(0, world, 8)]
    assert [server_of(g, world, servers) for g in tensor] == [g[0] * servers // world for g in tensor]
    data = Counter(server_of(range(first, world, 64), world, servers) for first in range(64))
    assert set(data) == set(range(servers)) and max(data.values()) < 32
    assert server_of(range(world), world, servers) == 0 == server_of([5, 9], world, 1)
    assert server_of([world - 2, world - 1], world, 2) == 1
    assert server_of([0, world - 1], world, servers) == server_of((0, world - 1), world, servers)


class Job:
    """Nodes with a store each, and what the machine tells their ranks."""

    def __init__(self, nnodes: int, **config: object) -> None:
        settings = {"nproc_per_node": 2, "nnodes": nnodes, "controller": "h:1", **config}
        self.config = RunConfig.model_validate(settings)
        self.machine = Machine(self.config)

    def join(self, *names: str) -> list[pb.Command]:
        for name in names:
            register = pb.Register(
                node=name, host=name, slots=2, node_rank=-1, peer_port=1, store_port=7, incarnation=name
            )
            self.machine.on_register(register, 0.0)
        return [a.command for a in self.machine.job.take_actions() if isinstance(a, Send)]


def test_a_start_names_all_servers_and_the_first_is_torchs() -> None:
    job = Job(4, stores=2)
    replaces = [c.replace for c in job.join("a", "b", "c", "d")]
    assert len(replaces) == 8
    for replace in replaces:
        env = rank_env(job.config, 0, 0, replace)
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("a", "7")
        assert json.loads(env[STORES_ENV]) == [["a", 7], ["c", 7]]


def test_a_small_job_has_one() -> None:
    job = Job(2)
    for command in job.join("a", "b"):
        assert STORES_ENV not in rank_env(job.config, 0, 0, command.replace)


def test_ranks_that_get_their_node_late_start_with_the_same_store() -> None:
    job = Job(2)
    job.join("a", "b")
    job.machine.on_node_lost("a", "test", 0.0, 1.0)
    first = [a.command.replace for a in job.machine.job.take_actions() if isinstance(a, Send) and a.node == "b"]
    late = [c.replace for c in job.join("c")]
    assert {(r.store_host, r.store_port) for r in first + late} == {("b", 7)} and len(late) == 2


def test_with_all_nodes_lost_the_first_that_comes_serves() -> None:
    job = Job(2, stores=2)
    job.join("a", "b")
    job.machine.on_node_lost("a", "test", 0.0, 1.0)
    job.machine.on_node_lost("b", "test", 0.0, 1.0)
    job.machine.job.take_actions()
    job.join("c")
    replaces = [c.replace for c in job.join("d")]
    assert replaces and {r.store_host for r in replaces} == {"c"}


def test_a_regroup_takes_a_living_server_and_keeps_the_others() -> None:
    world = World(2, nnodes=3, spare_nodes=1, controller="h:1", stores=3, steps=6)
    for name in ("a", "b", "c", "spare"):
        world.join(name, store_port=7, spare=name == "spare")
    while world.version[0] < 2:
        world.step()
    world.machine.on_node_lost("b", "test", 0.0, world.now)
    world.collect()
    regroups: list[list[str]] = []
    while world.machine.job.state is not State.FINISHED and world.step():
        regroups += [[s.host for s in c.regroup.stores] for _, c in world.inbox if c.HasField("regroup")]
    assert world.machine.job.state is State.FINISHED
    assert regroups and all(hosts == ["a", "spare", "c"] for hosts in regroups)
