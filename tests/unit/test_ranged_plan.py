"""Which shards come in ranges from several hosts, and from which ranks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.plan import Holding, Kind, Need, plan_restore
from flashrecovery.plan.restore.ranged import LEAST_BYTES, MOST_HOLDERS

LIVE, UNDO, COPY, PARITY, PAGE, LENT, CHECKPOINT = Kind
LARGE = LEAST_BYTES
VERSION = 5


def held(shard: str, *ranks: int, kind: Kind = LIVE, nbytes: int = LARGE) -> list[Holding]:
    return [Holding(rank, shard, VERSION, kind, nbytes) for rank in ranks]


def alone(*ranks: int) -> dict[int, str]:
    """Each on its own host."""
    return {rank: f"host{rank}" for rank in ranks}


def test_two_hosts_send_ranges_of_the_same_shards() -> None:
    needs = [Need(2, "a", LARGE), Need(2, "b", LARGE)]
    holdings = [*held("a", 0, 1), *held("b", 0, 1)]
    plan = plan_restore(needs, holdings, VERSION, hosts=alone(0, 1, 2))
    (ranged,) = plan.ranged
    assert (ranged.dest, ranged.number, ranged.holders, ranged.kind) == (2, 0, (0, 1), LIVE)
    assert ranged.shards == ("a", "b")
    assert {t.shard: t.dest for t in plan.transfers} == {"a": 2, "b": 2} and plan.bytes_on_wire == 2 * LARGE
    assert {t.source for t in plan.transfers} == {0, 1}


def test_one_other_host_sends_ranges_too() -> None:
    """Over several streams."""
    plan = plan_restore([Need(1, "a", LARGE)], held("a", 0), VERSION, hosts=alone(0, 1))
    assert [one.holders for one in plan.ranged] == [(0,)]


def test_memory_of_the_same_host_is_read_instead() -> None:
    plan = plan_restore([Need(3, "a", LARGE)], held("a", 0, 1, 2), VERSION, hosts={**alone(0, 1), 2: "x", 3: "x"})
    assert plan.ranged == () and [t.source for t in plan.transfers] == [2]


def test_what_is_known_of_no_host_comes_whole() -> None:
    needs, holdings = [Need(2, "a", LARGE)], held("a", 0, 1)
    for hosts in ({}, alone(0, 2), alone(0, 1)):
        plan = plan_restore(needs, holdings, VERSION, hosts=hosts)
        assert plan.ranged == () and len(plan.transfers) == 1, hosts


def test_little_comes_whole_and_many_little_shards_are_much() -> None:
    few = plan_restore([Need(1, "a", LARGE - 1)], held("a", 0, nbytes=LARGE - 1), VERSION, hosts=alone(0, 1))
    assert few.ranged == ()
    names = [f"s{i}" for i in range(64)]
    needs = [Need(1, name, LARGE // 64) for name in names]
    many = [h for name in names for h in held(name, 0, nbytes=LARGE // 64)]
    assert [len(one.shards) for one in plan_restore(needs, many, VERSION, hosts=alone(0, 1)).ranged] == [64]


def test_only_what_ranks_have_in_their_own_memory_comes_in_ranges() -> None:
    for kind in Kind:
        plan = plan_restore([Need(1, "a", LARGE)], held("a", 0, kind=kind), VERSION, hosts=alone(0, 1))
        assert bool(plan.ranged) is (kind in (LIVE, UNDO, COPY)), kind


def test_holders_have_the_same_kind() -> None:
    """One order names the kind that all of them send."""
    holdings = [*held("a", 0, 1), *held("a", 2, kind=UNDO)]
    (ranged,) = plan_restore([Need(3, "a", LARGE)], holdings, VERSION, hosts=alone(0, 1, 2, 3)).ranged
    assert (ranged.holders, ranged.kind) == ((0, 1), LIVE)


def test_ranks_of_one_host_share_its_link() -> None:
    hosts = {0: "x", 1: "x", 2: "y", 3: "z"}
    (ranged,) = plan_restore([Need(3, "a", LARGE)], held("a", 0, 1, 2), VERSION, hosts=hosts).ranged
    assert ranged.holders == (0, 2)


def test_a_holder_whose_digest_was_wrong_is_none() -> None:
    plan = plan_restore([Need(2, "a", LARGE)], held("a", 0, 1), VERSION, frozenset({("a", 0)}), hosts=alone(0, 1, 2))
    assert [one.holders for one in plan.ranged] == [(1,)]


def test_victims_take_from_other_hosts_as_long_as_there_are_some() -> None:
    replicas, victims = range(4 * MOST_HOLDERS), range(100, 104)
    needs = [Need(rank, "a", LARGE) for rank in victims]
    plan = plan_restore(needs, held("a", *replicas), VERSION, hosts=alone(*replicas, *victims))
    assert [len(one.holders) for one in plan.ranged] == [MOST_HOLDERS] * 4
    assert max(Counter(rank for one in plan.ranged for rank in one.holders).values()) == 1


def test_transfers_of_one_destination_are_numbered() -> None:
    """Their messages are told apart by that."""
    needs = [Need(rank, shard, LARGE) for rank in (2, 3) for shard in ("a", "b")]
    plan = plan_restore(needs, [*held("a", 0, 1), *held("b", 0)], VERSION, hosts=alone(0, 1, 2, 3))
    assert sorted((one.dest, one.number) for one in plan.ranged) == [(2, 0), (2, 1), (3, 0), (3, 1)]


@given(st.data())
def test_every_shard_comes_once_from_ranks_that_have_it(data: st.DataObject) -> None:
    ranks = range(6)
    hosts = {rank: data.draw(st.sampled_from("xyz"), label=f"host of {rank}") for rank in ranks}
    victims = data.draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=3), label="victims")
    living = [rank for rank in ranks if rank not in victims]
    holdings, needs = [], []
    for shard in "abcd":
        having = data.draw(st.sets(st.sampled_from(living), min_size=1), label=shard)
        nbytes = data.draw(st.sampled_from([1, LARGE // 2, LARGE]), label=f"size of {shard}")
        holdings += held(shard, *having, nbytes=nbytes)
        needs += [Need(rank, shard, nbytes) for rank in victims]
    plan = plan_restore(needs, holdings, VERSION, hosts=hosts)
    assert sorted((t.dest, t.shard) for t in plan.transfers) == sorted((n.rank, n.shard) for n in needs)
    has = {(h.rank, h.shard) for h in holdings}
    ranged = {(one.dest, shard): one for one in plan.ranged for shard in one.shards}
    assert len(ranged) == sum(len(one.shards) for one in plan.ranged)
    for t in plan.transfers:
        assert (t.source, t.shard) in has
        near = {rank for rank, shard in has if shard == t.shard and hosts[rank] == hosts[t.dest]}
        assert not near or t.source in near
        if (t.dest, t.shard) in ranged:
            one = ranged[t.dest, t.shard]
            assert not near and t.source in one.holders
            assert len({hosts[rank] for rank in one.holders}) == len(one.holders)
            assert all((rank, t.shard) in has for rank in one.holders)
