"""Plans of parity: which member protects which, what lies where, what travels, what can be decoded."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan.parity.code import HEADER_BYTES, ParityLayout, Route, StripePart, encode_traffic
from flashrecovery.plan.parity.decode import DecodePlan, Held, Undecodable, decode_plan, newest_decodable
from flashrecovery.plan.parity.groups import Grouping, ShardingGroup, UniqueShard, form_groups, regroup


def shards(counts: list[int], kind: str = "zero", nbytes: int = 1000) -> tuple[list[UniqueShard], list[str]]:
    """Ranks on nodes with that many ranks each."""
    domains = [f"node{i}" for i, count in enumerate(counts) for _ in range(count)]
    return [UniqueShard(rank, "optimizer", kind, nbytes) for rank in range(len(domains))], domains


def check(grouping: Grouping, ranks: int, parity: int) -> None:
    """Everybody is in one group, and its members are apart."""
    assert sorted(r for g in grouping.groups for r in g.ranks) == list(range(ranks)) and not grouping.uncovered
    for group in grouping.groups:
        assert len(group.members) > parity and group.ranks == tuple(sorted(group.ranks))
        assert len({m.domain for m in group.members}) == len(group.members)


# -- groups --------------------------------------------------------------------------------------


def test_rails_where_all_nodes_are_alike() -> None:
    grouping = form_groups(*shards([4] * 6))
    assert [g.ranks for g in grouping.groups] == [tuple(range(i, 24, 4)) for i in range(4)]
    check(grouping, 24, 1)


@pytest.mark.parametrize("parity", [1, 2])
def test_three_nodes(parity: int) -> None:
    grouping = form_groups(*shards([2, 2, 2]), parity)
    assert [g.ranks for g in grouping.groups] == [(0, 2, 4), (1, 3, 5)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.sampled_from((1, 2)), st.integers(3, 9))
def test_everybody_is_covered_exactly_where_that_is_possible(counts: list[int], parity: int, size: int) -> None:
    facts, domains = shards(counts)
    grouping = form_groups(facts, domains, parity, size)
    # Each rank of the fullest node needs a group, and each of these that many members.
    if max(counts) * (parity + 1) <= sum(counts):
        check(grouping, sum(counts), parity)
        sizes = [len(g.members) for g in grouping.groups]
        assert max(sizes) - min(sizes) <= 1
        fewest_groups = max(max(counts), -(-sum(counts) // size))
        if sum(counts) // fewest_groups > parity:
            assert max(sizes) <= size
    else:
        assert not grouping.groups and len(grouping.uncovered[0].ranks) == sum(counts)


def test_large_groups_are_divided() -> None:
    grouping = form_groups(*shards([8] * 16), max_size=8)
    assert Counter(len(g.members) for g in grouping.groups) == {8: 16}
    check(grouping, 128, 1)
    check(form_groups(*shards([1] * 5), parity=2, max_size=4), 5, 2)  # one of five, not three and two


def test_reasons_in_words() -> None:
    (one,) = form_groups(*shards([4])).uncovered
    assert one.ranks == (0, 1, 2, 3)
    assert one.reason == ("parity 1 of 'zero' needs ranks on 2 failure domains; ranks 0, 1, 2 and 3 are on 1 (node0)")
    (two,) = form_groups(*shards([1, 1]), parity=2).uncovered
    assert "needs ranks on 3 failure domains; ranks 0 and 1 are on 2 (node0 and node1)" in two.reason
    (three,) = form_groups(*shards([4, 2, 1])).uncovered
    assert (
        three.reason
        == "parity 1 of 'zero' needs 1 rank on other failure domains for each of the 4 on node0; there are 3"
    )
    for arguments in ({"parity": 0}, {"parity": 3}, {"parity": 2, "max_size": 2}):
        with pytest.raises(ValueError, match=r"parity = |max_size = "):
            form_groups(*shards([1, 1]), **arguments)
    with pytest.raises(ValueError, match="rank 2"):
        form_groups([UniqueShard(2, "x", "k", 1)], ["a", "b"])
    with pytest.raises(ValueError, match="one of each name"):
        form_groups([UniqueShard(0, "x", "k", 1)] * 2, ["a", "b"])


def test_kinds_are_apart_and_shards_are_laid_out_by_name() -> None:
    facts, domains = shards([1, 1, 1, 1])
    facts += [UniqueShard(r, name, "experts", n) for r in (1, 3) for name, n in (("z", 10), ("a", 65))]
    random.Random(1).shuffle(facts)
    grouping = form_groups(facts, domains)
    assert [(g.kind, g.ranks) for g in grouping.groups] == [("experts", (1, 3)), ("zero", (0, 1, 2, 3))]
    member = grouping.groups[0].members[0]
    assert (member.offsets, member.nbytes) == ({"a": 0, "z": 128}, 192)
    assert form_groups(reversed(facts), domains) == grouping


def test_large_ones_protect_each_other() -> None:
    """Two ranks a node, one with ten times the bytes, not always the same one."""
    domains = [f"node{r // 2}" for r in range(8)]
    big = {0, 3, 5, 6}
    facts = [UniqueShard(r, "x", "k", 6400 if r in big else 640) for r in range(8)]
    assert {frozenset(g.ranks) for g in form_groups(facts, domains).groups} == {
        frozenset(big),
        frozenset(set(range(8)) - big),
    }


def test_regroup_keeps_what_it_can() -> None:
    facts, domains = shards([2, 2, 2, 2])
    before = form_groups(facts, domains).groups
    same = regroup(before, facts, domains)
    assert same.groups == before and same.kept == frozenset(before)
    # Node 1 is replaced by another one: the groups stay, with the new node in them.
    moved = [d if d != "node1" else "spare" for d in domains]
    after = regroup(before, facts, moved)
    assert [g.ranks for g in after.groups] == [g.ranks for g in before] and len(after.kept) == 2
    assert {m.domain for m in after.groups[0].members} == {"node0", "spare", "node2", "node3"}
    # One of its ranks comes to node 0, where there is one of its group already: the other group is not touched.
    crowded = [*domains]
    crowded[2] = "node0"
    after = regroup(before, facts, crowded)
    assert after.kept == {before[1]} and not after.uncovered and len(after.groups) == 3
    for group in after.groups:
        assert len({m.domain for m in group.members}) == len(group.members)
    # Node 3 is lost for good: smaller groups.
    fewer = regroup(before, facts[:6], domains)
    assert [g.ranks for g in fewer.groups] == [(0, 2, 4), (1, 3, 5)] and not fewer.kept
    # Other shards: the group is re-created.
    bigger = [replace(s, nbytes=2000) if s.rank == 0 else s for s in facts]
    assert regroup(before, bigger, domains).kept == frozenset(before[1:])
    assert not regroup(before, facts, domains, parity=2).kept


def test_regroup_dissolves_no_more_than_it_must() -> None:
    facts, domains = shards([1] * 9)
    before = form_groups(facts, domains, max_size=3).groups
    assert [len(g.ranks) for g in before] == [3, 3, 3]
    # Two of a group are lost: the third one needs others, and the last group takes it in.
    alone = [s for s in facts if s.rank not in before[0].ranks[1:]]
    after = regroup(before, alone, domains, max_size=3)
    assert sorted(r for g in after.groups for r in g.ranks) == sorted(s.rank for s in alone)
    assert after.kept == {before[1]}


# -- layout --------------------------------------------------------------------------------------


def test_raid5_of_four() -> None:
    """REFT's figure 7: each node holds one parity, and units of the three other stripes."""
    layout = ParityLayout((300, 300, 300, 300))
    table = [[layout.part(stripe, member) for member in range(4)] for stripe in range(4)]
    assert table == [[StripePart.P if m == s else StripePart.DATA for m in range(4)] for s in range(4)]
    assert [[layout.column(0, m) for m in (1, 2, 3)], [layout.column(2, m) for m in (3, 0, 1)]] == [[0, 1, 2]] * 2
    assert [layout.data_stripes(m) for m in range(4)] == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert [layout.memory(m) for m in range(4)] == [128] * 4  # 300 / 3, in whole rows


def test_two_parities_of_four() -> None:
    layout = ParityLayout((6400,) * 4, 2, 640)
    p, q, d = StripePart
    assert [[layout.part(s, m) for m in range(4)] for s in range(4)] == [
        [p, q, d, d],
        [d, p, q, d],
        [d, d, p, q],
        [q, d, d, p],
    ]
    # 2 W / (n - 2), and 64 (n - 3) more a bucket of Q.
    assert [layout.memory(m) for m in range(4)] == [2 * 3200 + 64 * 5] * 4


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from((1, 2)))
def test_each_byte_is_in_one_unit_and_each_member_holds_its_share(data: st.DataObject, parity: int) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=parity + 1, max_size=12))
    layout = ParityLayout(tuple(sizes), parity, data.draw(st.sampled_from((64, 192, 1024))))
    n = layout.members
    for stripe in range(n):
        members = [layout.member(stripe, c) for c in range(layout.columns)]
        holders = [layout.holder(stripe, part) for part in layout.parts()]
        assert sorted(members + holders) == list(range(n))
        assert [layout.column(stripe, m) for m in members] == list(range(layout.columns))
        assert [layout.part(stripe, m) for m in (*members, *holders)] == [StripePart.DATA] * len(members) + list(
            layout.parts()
        )
    for member, size in enumerate(sizes):
        stripes = layout.data_stripes(member)
        assert len(set(stripes)) == layout.columns and all(layout.part(s, member) is StripePart.DATA for s in stripes)
        ranges = [layout.data_bucket(s, b, member) for s in stripes for b in range(layout.buckets(s))]
        covered = [i for start, length in ranges for i in range(start, start + length)]
        assert sorted(covered) == list(range(size))
        assert all(start % 64 == 0 for start, length in ranges if length)
        lengths = [layout.unit(s, member)[1] for s in stripes]
        assert max(lengths) - min(lengths) < 128
    share = -(-max(sizes) // 64 // layout.columns) * 64 + 64
    overhang = (layout.columns - 1) * 64 * max(layout.buckets(s) for s in range(n)) if parity == 2 else 0
    assert max(layout.memory(m) for m in range(n)) <= parity * share + overhang


def test_wrong_layouts_are_refused() -> None:
    for sizes, parity, bucket in (((1,), 1, 64), ((1, 1), 2, 64), ((1, 1), 0, 64), ((1, 1), 1, 0), ((1, 1), 1, 100)):
        with pytest.raises(ValueError, match="allowed"):
            ParityLayout(sizes, parity, bucket)
    with pytest.raises(ValueError, match="0 bytes or more"):
        ParityLayout((1, -1))


# -- traffic -------------------------------------------------------------------------------------

W = 64 * 1000 * 9 * 8 * 7


@pytest.mark.parametrize("members", [3, 4, 8, 9, 10])
def test_bytes_of_a_step(members: int) -> None:
    """Without headers: W with parity 1; with parity 2 it is 2 W directly, W (n - 1) / (n - 2) and overhang relayed."""
    one = ParityLayout((W,) * members)
    traffic = encode_traffic(one)
    units = {one.unit(s, m)[1] for m in range(members) for s in one.data_stripes(m)}
    assert max(units) - min(units) <= 64
    assert traffic.total - traffic.frames == members * W and encode_traffic(one, (), Route.DIRECT).total == (
        members * (members - 1) * HEADER_BYTES
    )
    assert max(traffic.sent) - W <= traffic.frames and max(traffic.received) <= W + traffic.frames + 64 * members
    if members > 3:
        two = ParityLayout((W,) * members, 2)
        direct, relayed = encode_traffic(two, route=Route.DIRECT), encode_traffic(two)
        buckets = sum(two.buckets(s) for s in range(members))
        assert direct.total - direct.frames == 2 * members * W
        least = sum(max(two.unit(s, two.member(s, c))[1] for c in range(two.columns)) for s in range(members))
        assert relayed.total - relayed.frames == members * W + least + (members - 3) * 64 * buckets
        assert relayed.busiest < 1.01 * W * (members - 1) / (members - 2)


def test_only_what_has_changed_travels() -> None:
    layout = ParityLayout((6400,) * 4, 2, 640)
    nothing = encode_traffic(layout, ())
    one = encode_traffic(layout, [(2, 0, 1)])
    assert one.total - nothing.total == (64 + 640) + (64 + 16 * 2 + 640)
    two = encode_traffic(layout, [(2, 0, 1), (3, 0, 1)])
    assert two.total - one.total == (64 + 640) + 64, "one sum for both, moved by a row"
    assert nothing.total == 64 * (4 * 2 + 4)


# -- decoding ------------------------------------------------------------------------------------


def held(layout: ParityLayout, version: int, lost: tuple[int, ...] = ()) -> dict[int, Held]:
    return {
        m: Held(
            frozenset({version, version - 1}),
            {
                (s, p): frozenset({version, version - 1})
                for s in range(layout.members)
                for p in layout.parts()
                if layout.holder(s, p) == m
            },
        )
        for m in range(layout.members)
        if m not in lost
    }


@pytest.mark.parametrize("members", [3, 4, 6, 8])
def test_the_lost_receive_their_bytes_and_the_work_is_spread(members: int) -> None:
    size = (members - 1) * 64 * 1024 * 4
    layout = ParityLayout((size,) * members, 1, 1024)
    plan = decode_plan(layout, held(layout, 5, (1,)), 5, chunk=1024)
    assert isinstance(plan, DecodePlan) and plan.lost == (1,)
    assert sum(t.delivered for t in plan.data) == size and all(t.at != 1 for t in plan.data)
    unit = size // (members - 1)
    assert plan.traffic.received[1] == size + unit and plan.traffic.sent[1] == 0, "its shards, and its parity"
    assert plan.traffic.total == (members - 1) * (size + unit)
    survivors = [m for m in range(members) if m != 1]
    ideal = plan.traffic.total / len(survivors)
    assert max(plan.traffic.sent[m] for m in survivors) <= 1.05 * ideal
    assert plan.traffic.busiest <= 1.05 * (size + unit)
    assert plan.chunk_bytes == 1024


def test_two_lost_are_balanced_too() -> None:
    layout = ParityLayout((6 * 64 * 1024,) * 8, 2, 1024)
    for lost in itertools.combinations(range(8), 2):
        plan = decode_plan(layout, held(layout, 5, lost), 5, chunk=1024)
        assert isinstance(plan, DecodePlan)
        for m in lost:
            mine = layout.sizes[m] + layout.memory(m)
            assert plan.traffic.received[m] == mine and plan.traffic.sent[m] == 0
        sent = [plan.traffic.sent[m] for m in range(8) if m not in lost]
        assert max(sent) <= 1.1 * sum(sent) / 6


def test_one_too_many_is_refused_in_words() -> None:
    layout = ParityLayout((1000,) * 4)
    plan = decode_plan(layout, held(layout, 5, (0, 2)), 5)
    assert isinstance(plan, Undecodable)
    assert plan.reason.startswith(
        "version 5 cannot be decoded: stripe 0 lacks the shards of members 2, and of its parity"
    )
    assert "none is clean, not P of member 0 (lost)" in plan.reason
    two = ParityLayout((1000,) * 5, 2)
    assert isinstance(decode_plan(two, held(two, 5, (0, 2)), 5), DecodePlan)
    assert isinstance(decode_plan(two, held(two, 5, (0, 2, 3)), 5), Undecodable)


def test_parity_of_another_version_is_not_used() -> None:
    layout = ParityLayout((1000,) * 4)
    facts = held(layout, 5, (0,))
    behind = {place: frozenset({4}) for place in facts[2].parity}
    facts[2] = replace(facts[2], parity=behind)
    plan = decode_plan(layout, facts, 5)
    assert isinstance(plan, Undecodable) and "P of member 2 (clean at 4)" in plan.reason
    assert newest_decodable(layout, facts) == 4
    whole = held(layout, 5)
    whole[2] = facts[2]
    plan = decode_plan(layout, whole, 5)
    assert isinstance(plan, DecodePlan) and not plan.data, "no one's shards are lost"
    assert {t.stripe for t in plan.parity} == {2}, "but this parity has to be made"
    assert newest_decodable(layout, whole) == 5
    assert newest_decodable(layout, {}) is None


def test_a_survivor_without_that_version_counts_as_lost() -> None:
    layout = ParityLayout((1000,) * 4)
    facts = held(layout, 5)
    facts[3] = replace(facts[3], data=frozenset({4}))
    plan = decode_plan(layout, facts, 5)
    assert isinstance(plan, DecodePlan) and plan.lost == (3,)
    assert {r.member for t in plan.data for r in t.results} == {3} and not plan.parity, "its parity is there"
    facts[0] = replace(facts[0], data=frozenset({4}))
    assert isinstance(decode_plan(layout, facts, 5), Undecodable) and newest_decodable(layout, facts) == 4


def test_nothing_lost_means_nothing_to_do() -> None:
    layout = ParityLayout((1000, 900, 800, 0), 2)
    plan = decode_plan(layout, held(layout, 5), 5)
    assert isinstance(plan, DecodePlan) and (plan.data, plan.parity, plan.traffic.total) == ((), (), 0)


def test_a_group_knows_its_layout() -> None:
    (group,) = form_groups(*shards([1, 1, 1])).groups
    assert isinstance(group, ShardingGroup)
    assert ParityLayout(tuple(m.nbytes for m in group.members), group.parity).columns == 2
