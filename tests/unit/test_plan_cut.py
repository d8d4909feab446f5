"""The newest consistent cut: named cases of the paper and of every layout, and a brute-force oracle."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan import Cut, Holding, Kind, Need, NoCut, newest_cut
from flashrecovery.plan.words import missing_text, ranks_text, shard_text

LIVE, UNDO, COPY, PARITY, PAGE, _, CHECKPOINT = Kind


def needs(**by_shard: list[int]) -> list[Need]:
    return [Need(rank, shard, 8) for shard, ranks in by_shard.items() for rank in ranks]


def held(rank: int, version: int, kind: Kind, *shards: str) -> list[Holding]:
    return [Holding(rank, s, version, kind, 8) for s in shards]


def test_all_survivors_in_forward_or_backward_resume_at_i() -> None:
    """The paper's first rule: tags say i everywhere; the victim's replica is a survivor."""
    world = needs(model=[0, 1, 2, 3])
    assert newest_cut(world, [h for r in (0, 2, 3) for h in held(r, 41, LIVE, "model")]) == Cut(
        41, "every shard exists at 41, and none at a newer version"
    )


def test_survivors_that_finished_their_update_resume_at_i_plus_1() -> None:
    """The paper's second rule, with a straggler that still is at i and gets i+1 from a replica."""
    world = needs(model=[0, 1, 2])
    cut = newest_cut(world, held(0, 42, LIVE, "model") + held(2, 41, LIVE, "model"))
    assert isinstance(cut, Cut) and cut.version == 42


def test_zero_survivor_goes_back_to_its_undo_copy() -> None:
    """The victim's unique shard exists only at 41; a survivor that is already at 42 has its own 41."""
    world = needs(model=[0, 1], opt0=[0], opt1=[1])
    holdings = held(0, 42, LIVE, "model", "opt0") + held(0, 41, UNDO, "model", "opt0") + held(0, 41, COPY, "opt1")
    assert newest_cut(world, holdings) == Cut(41, "rank 1's shard 'opt1' exists only at 41, on rank 0 (neighbour copy)")


def test_torn_rank_holds_nothing_live() -> None:
    world = needs(model=[0, 1])
    holdings = held(0, -1, LIVE, "model") + held(0, 7, UNDO, "model")
    assert newest_cut(world, holdings) == Cut(7, "every shard exists at 7, and none at a newer version")


def test_local_state_of_a_dead_rank_comes_from_its_page() -> None:
    world = [Need(0, "model", 8), Need(1, "model", 8), Need(0, "capsule@0", 1), Need(1, "capsule@1", 1)]
    holdings = [
        *held(0, 5, LIVE, "model", "capsule@0"),
        *held(1, 5, PAGE, "capsule@1"),
        *held(1, 6, PAGE, "capsule@1"),
    ]
    cut = newest_cut(world, holdings)
    assert isinstance(cut, Cut) and cut.version == 5
    assert cut.reason == (
        "rank 0's shard 'capsule@0' exists only at 5, on rank 0 (live), and 1 other shard is not at 6 either"
    )


def test_expert_replica_lives_in_expert_data_parallelism() -> None:
    """Dense shards are replicated on all of 0..3, expert A on 0 and 2, expert B on 1 and 3."""
    world = needs(dense=[0, 1, 2, 3], expertA=[0, 2], expertB=[1, 3])
    survivors = held(0, 9, LIVE, "dense", "expertA") + held(3, 9, LIVE, "dense", "expertB")
    assert newest_cut(world, survivors) == Cut(9, "every shard exists at 9, and none at a newer version")
    lost = newest_cut(world, held(0, 9, LIVE, "dense", "expertA") + held(2, 9, LIVE, "dense", "expertA"))
    assert isinstance(lost, NoCut)
    assert lost.missing == ((1, "expertB"), (3, "expertB"))
    assert lost.best_version == 9
    assert "held by no living process or copy" in lost.reason and "rank 1: 'expertB'" in lost.reason


def test_no_common_version_names_what_is_missing_at_the_best_one() -> None:
    world = needs(a=[0], b=[1], c=[2])
    cut = newest_cut(world, held(0, 4, LIVE, "a") + held(1, 4, LIVE, "b") + held(0, 3, COPY, "c"))
    assert cut == NoCut(
        "no version exists for every shard: 1 shard is held only at 3, not at 4 like the rest (rank 2: 'c')",
        ((2, "c"),),
        4,
    )


def test_nothing_held_and_nothing_needed() -> None:
    assert newest_cut([Need(0, "a", 8)], []) == NoCut(
        "no version exists for every shard: 1 shard is held by no living process or copy at any version (rank 0: 'a')",
        ((0, "a"),),
        None,
    )
    empty = newest_cut([], held(0, 4, LIVE, "a"))
    assert isinstance(empty, NoCut) and empty.missing == ()


def test_checkpoint_is_a_holder_like_any_other() -> None:
    world = needs(a=[0], b=[1])
    holdings = held(0, 50, LIVE, "a") + held(0, 40, CHECKPOINT, "a", "b")
    cut = newest_cut(world, holdings)
    assert cut == Cut(40, "rank 1's shard 'b' exists only at 40, on rank 0 (checkpoint)")


def test_older_versions_are_not_listed() -> None:
    world = needs(a=[0], b=[1])
    holdings = [h for v in (7, 8, 9) for h in held(0, v, UNDO, "a") + held(1, v, COPY, "b")] + held(1, 10, COPY, "b")
    assert newest_cut(world, holdings) == Cut(9, "rank 0's shard 'a' exists only up to 9, on rank 0 (undo copy)")


def test_each_newer_version_gets_its_witness() -> None:
    world = needs(a=[0], b=[1])
    holdings = held(0, 40, UNDO, "a") + held(0, 42, LIVE, "a") + held(1, 40, UNDO, "b") + held(1, 41, LIVE, "b")
    cut = newest_cut(world, holdings)
    assert isinstance(cut, Cut) and cut.version == 40
    assert "rank 1's shard 'b' exists only at 40 and 41" in cut.reason
    assert "rank 0's shard 'a' exists only at 40 and 42" in cut.reason


def test_words_stay_short_in_a_large_world() -> None:
    missing = [(rank, f"layer{i}") for rank in range(4000) for i in range(50)]
    text = missing_text(missing)
    assert len(text) < 400 and "and 47 more" in text and "3,996 more ranks" in text
    assert ranks_text([7]) == "rank 7"
    assert ranks_text(range(4000)) == "ranks 0, 1, 2, 3 and 3,996 more"
    assert shard_text("x", [1, 2, 1]) == "shard 'x' of ranks 1 and 2"


def test_4000_ranks_with_50_shards_take_less_than_2_seconds() -> None:
    world = [Need(r, f"r{r % 500}/s{i}", 1 << 20) for r in range(4000) for i in range(50)]
    alive = [n for n in world if n.rank >= 8]
    holdings = [Holding(n.rank, n.shard, 100, LIVE, n.nbytes) for n in alive]
    holdings += [Holding(n.rank, n.shard, 99, UNDO, n.nbytes) for n in alive]
    began = time.process_time()
    cut = newest_cut(world, holdings)
    assert isinstance(cut, Cut) and cut.version == 100
    assert time.process_time() - began < 2.0


# -- oracle ---------------------------------------------------------------------------------------

SHARDS = ("a", "b", "c", "d")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Need], list[Holding]]:
    ranks = range(draw(st.integers(1, 4)))
    need = st.builds(Need, st.sampled_from(ranks), st.sampled_from(SHARDS), st.just(8))
    holding = st.builds(
        Holding,
        st.sampled_from(ranks),
        st.sampled_from(SHARDS),
        st.integers(-1, 4),
        st.sampled_from(list(Kind)),
        st.just(8),
    )
    return draw(st.lists(need, min_size=1, max_size=8)), draw(st.lists(holding, max_size=20))


def oracle(needs: list[Need], holdings: list[Holding]) -> int | None:
    """The rule word for word."""
    for k in range(10, -1, -1):
        if all(any(h.shard == n.shard and h.version == k for h in holdings) for n in needs):
            return k
    return None


@given(worlds())
@settings(max_examples=400, deadline=None)
def test_equals_the_rule_word_for_word(world: tuple[list[Need], list[Holding]]) -> None:
    needs, holdings = world
    cut = newest_cut(needs, holdings)
    assert (cut.version if isinstance(cut, Cut) else None) == oracle(needs, holdings)
    if isinstance(cut, NoCut):
        at_best = {(h.shard, h.version) for h in holdings}
        assert cut.missing == tuple(
            sorted({(n.rank, n.shard) for n in needs if (n.shard, cut.best_version) not in at_best})
        )
        assert cut.missing
        fewest = min(len([n for n in needs if (n.shard, v) not in at_best]) for v in range(5))
        assert len([n for n in needs if (n.rank, n.shard) in set(cut.missing)]) == fewest


@given(worlds(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_order_does_not_matter(world: tuple[list[Need], list[Holding]], rng: random.Random) -> None:
    needs, holdings = world
    shuffled_needs, shuffled = rng.sample(needs, len(needs)), rng.sample(holdings, len(holdings))
    assert newest_cut(needs, holdings) == newest_cut(shuffled_needs, shuffled)


@given(worlds(), st.integers(0, 19))
@settings(max_examples=100, deadline=None)
def test_losing_a_holding_never_makes_the_cut_newer(world: tuple[list[Need], list[Holding]], i: int) -> None:
    needs, holdings = world
    less = newest_cut(needs, holdings[:i] + holdings[i + 1 :])
    full = newest_cut(needs, holdings)
    if isinstance(less, Cut):
        assert isinstance(full, Cut) and full.version >= less.version
