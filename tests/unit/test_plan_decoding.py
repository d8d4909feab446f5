"""From what the ranks say of parity to what can be decoded, against a count of what is lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan import Kind
from flashrecovery.plan.parity.decodable import Decodable, EncodingHeld, ParityHeld, Told, decodable, needed, why_not
from flashrecovery.plan.parity.decode import DecodePlan, decode_plan
from flashrecovery.rpc.parity_messages import decode_message, decode_order, parity_held, parity_message

KEY = 77
VERSION = 5


def shards_of(rank: int) -> tuple[tuple[str, int], ...]:
    return ((f"weight#{rank}", 60), (f"bias#{rank}", 40))


def group(ranks: tuple[int, ...], losses: int, version: int = VERSION) -> dict[int, ParityHeld]:
    """Everything is whole at ``version`` and at the one before."""
    n = len(ranks)
    versions = frozenset({version - 1, version})
    encoding = EncodingHeld(KEY, (512,) * n, losses, 64, versions, versions if losses == 2 else frozenset())
    found = {}
    for member, rank in enumerate(ranks):
        owners = [ranks[(member - step) % n] for step in range(1, losses + 1)]
        told = tuple(Told(owner, v, shards_of(owner)) for owner in owners for v in sorted(versions))
        found[rank] = ParityHeld(rank, ranks, losses, 8, dict.fromkeys(versions, 512), (encoding,), told)
    return found


def at(found: list[Decodable], version: int) -> list[Decodable]:
    return [one for one in found if one.order.version == version]


def test_nothing_is_lost() -> None:
    assert decodable(group((0, 1, 2), 1).values()) == []


def test_one_is_lost() -> None:
    held = group((0, 2, 4), 1)
    del held[2]
    (one,) = at(decodable(held.values()), VERSION)
    assert one.order.lost == (1,) and one.order.p == (0, 2) and one.order.tellers == (4,)
    assert {(h.rank, h.shard, h.version, h.kind, h.nbytes) for h in one.holdings} == {
        (2, name, VERSION, Kind.PARITY, nbytes) for name, nbytes in shards_of(2)
    }


def test_orders_are_for_what_is_lacking_only() -> None:
    first, second = group((0, 2, 4), 1), group((1, 3, 5), 1)
    del first[2], second[3]
    found = decodable([*first.values(), *second.values()])
    assert [o.ranks for o in needed(found, VERSION, {(3, "bias#3")})] == [(1, 3, 5)]
    assert [o.ranks for o in needed(found, VERSION, {(3, "bias#3"), (2, "weight#2")})] == [(0, 2, 4), (1, 3, 5)]
    assert needed(found, VERSION + 1, {(3, "bias#3")}) == () and needed(found, VERSION, {(3, "other")}) == ()


def test_who_lives_but_does_not_have_the_version_is_given_it_too() -> None:
    held = group((0, 1, 2), 1)
    held[1] = ParityHeld(1, (0, 1, 2), 1, 8, {VERSION - 1: 512}, held[1].encodings, held[1].told)
    assert [one.order.lost for one in decodable(held.values())] == [(1,)]


def test_own_shards_of_another_length_are_not_those_that_parity_is_of() -> None:
    held = group((0, 1, 2), 1)
    del held[1]
    held[2] = ParityHeld(2, (0, 1, 2), 1, 8, {VERSION: 511}, held[2].encodings, held[2].told)
    assert decodable(held.values()) == []


def test_a_doubted_version_does_not_count() -> None:
    held = group((0, 1, 2), 1)
    del held[1]
    held[0] = ParityHeld(0, (0, 1, 2), 1, 8, held[0].own, held[0].encodings, held[0].told, frozenset({VERSION}))
    assert [one.order.version for one in decodable(held.values())] == [VERSION - 1]


def test_why_a_group_cannot_give_back_what_it_has_lost() -> None:
    held = group((0, 2, 4, 6), 1)
    assert why_not(held.values()) == ""
    del held[2]
    assert why_not(held.values()) == ""
    del held[6]
    why = why_not(held.values())
    assert why.startswith("the parity group of ranks 0, 2, 4 and 6: version 5 cannot be decoded: stripe ")
    assert "lacks the shards of members 1, 3" in why


def test_the_layout_is_known_at_another_version_only() -> None:
    """At the other one it may have been laid out otherwise."""
    held = group((0, 1, 2), 1)
    del held[1]
    told = tuple(t for t in held[2].told if t.version != VERSION)
    held[2] = ParityHeld(2, (0, 1, 2), 1, 8, held[2].own, held[2].encodings, told)
    assert [one.order.version for one in decodable(held.values())] == [VERSION - 1]


def test_nobody_knows_the_layout() -> None:
    held = group((0, 1, 2), 1)
    del held[1]
    held[2] = ParityHeld(2, (0, 1, 2), 1, 8, held[2].own, held[2].encodings, ())
    assert decodable(held.values()) == []


@settings(max_examples=300, deadline=None)
@given(st.integers(3, 8), st.sampled_from((1, 2)), st.randoms(use_true_random=False))
def test_as_many_as_parity_covers(n: int, losses: int, rng: random.Random) -> None:
    """A stripe lacks its lost members' units, and can do with as many parities as are left of it."""
    held = group(tuple(range(n)), losses)
    gone = set(rng.sample(range(n), rng.randrange(n)))
    unmade = {(m, part) for m in range(n) for part in "pq" if rng.random() < 0.15}
    for m in range(n):
        (encoding,) = held[m].encodings
        p = encoding.p - {VERSION} if (m, "p") in unmade else encoding.p
        q = encoding.q - {VERSION} if (m, "q") in unmade else encoding.q
        encoding = EncodingHeld(KEY, encoding.sizes, losses, 64, p, q)
        held[m] = ParityHeld(m, held[m].ranks, losses, 8, held[m].own, (encoding,), held[m].told)
    for m in gone:
        del held[m]

    def enough(stripe: int) -> bool:
        holders = [(stripe, "p"), ((stripe + 1) % n, "q")][:losses]
        left = sum(m not in gone and (m, part) not in unmade for m, part in holders)
        return len(gone - {m for m, _ in holders}) <= left

    known = all(any((owner + step) % n not in gone for step in range(1, losses + 1)) for owner in gone)
    found = at(decodable(held.values()), VERSION)
    assert bool(found) == bool(gone and known and all(map(enough, range(n))))
    for one in found:
        plan = decode_plan(one.order.layout, one.order.held, VERSION)
        assert isinstance(plan, DecodePlan) and plan.lost == tuple(sorted(gone)) == one.order.lost
        assert decode_order(decode_message(one.order), VERSION) == one.order


@given(st.sampled_from((1, 2)), st.integers(3, 6))
def test_what_ranks_say_travels_whole(losses: int, n: int) -> None:
    for rank, held in group(tuple(range(n)), losses).items():
        assert parity_held(rank, parity_message(held)) == held
