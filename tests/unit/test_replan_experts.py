"""Context and expert parallelism in a job whose layout may change: which layouts there are, what a script is told."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery import layout
from flashrecovery.controller.membership.relayout_slots import facts_now
from flashrecovery.errors import ConfigError
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.strategy.relayout import (
    LayoutFacts,
    StayingFacts,
    best,
    layout_text,
    parse_layout,
    why_another_job,
    why_not,
    with_most_replicas,
)
from flashrecovery.plan.strategy.strategy import NothingFitsError, Strategy
from flashrecovery.runtime import parallel_layout
from flashrecovery.runtime.environment import LAYOUT_ENV
from flashrecovery.runtime.parallel_layout import layout_ranks, layout_replicas, layout_sizes

DENSE = LayoutFacts({"tp": 1, "pp": 1, "cp": 2, "ep": 1, "dp": 2}, 4, 64, 4, 4, 256, 512, 32, 12, 1, takes="cp")
EXPERTS = LayoutFacts(
    *({"tp": 1, "pp": 1, "cp": 1, "ep": 2, "dp": 4}, 4, 64, 4, 4, 256, 512, 32, 12, 1),
    experts=4,
    chosen=2,
    expert_inner=128,
    takes="cp,ep",
)


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_layout, "_taken", set())


@pytest.mark.parametrize("facts", [DENSE, EXPERTS])
def test_facts_travel_as_text(facts: LayoutFacts) -> None:
    assert LayoutFacts.parse(facts.text()) == facts
    old = {name: value for name, value in json.loads(facts.text()).items() if name not in ("experts", "takes")}
    assert LayoutFacts.parse(json.dumps(old)).takes == ""  # as one of a version before said them


@pytest.mark.parametrize(
    ("strategy", "text", "ranks", "replicas"),
    [
        (Strategy(2, 2, dp=1), "tp=2,pp=2,dp=1", 4, 1),
        (Strategy(cp=2, dp=3), "tp=1,pp=1,cp=2,dp=3", 6, 3),
        (Strategy(tp=2, cp=2, ep=4, dp=2), "tp=2,pp=1,cp=2,ep=4,dp=2", 8, 1),
        (Strategy(ep=2, dp=6), "tp=1,pp=1,ep=2,dp=6", 6, 3),
        (Strategy(cp=4, ep=2, dp=3), "tp=1,pp=1,cp=4,ep=2,dp=3", 12, 3),
    ],
)
def test_layouts_as_text(strategy: Strategy, text: str, ranks: int, replicas: int) -> None:
    assert layout_text(strategy) == text and layout_ranks(text) == ranks == strategy.ranks
    assert layout_replicas(text) == replicas
    assert Strategy(**layout_sizes(text)) == strategy


@pytest.mark.parametrize(
    ("facts", "text", "ranks", "expected"),
    [
        (DENSE, "cp=2", 4, Strategy(cp=2, dp=2)),
        (DENSE, "cp=2", 6, Strategy(cp=2, dp=3)),
        (DENSE, "", 4, None),
        (DENSE, "tp=1", 4, Strategy(dp=4)),
        (DENSE, "cp=4,dp=1", 4, Strategy(cp=4)),
        (EXPERTS, "ep=2", 4, Strategy(ep=2, dp=4)),
        (EXPERTS, "ep=2", 3, Strategy(ep=2, dp=2)),  # three replicas would not have each expert equally often
        (EXPERTS, "ep=4,cp=2", 4, Strategy(cp=2, ep=4, dp=2)),
        (EXPERTS, "ep=2,cp=2,dp=1", 4, Strategy(cp=2, ep=2)),
    ],
)
def test_sizes_are_read(facts: LayoutFacts, text: str, ranks: int, expected: Strategy | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="sizes as"):
            parse_layout(text, facts, ranks)
    else:
        assert parse_layout(text, facts, ranks) == expected


@pytest.mark.parametrize(
    ("facts", "text", "reason"),
    [
        (DENSE, "cp=3", "2 x cp = 6 does not divide 32 tokens"),
        (DENSE, "ep=2", "the model has no experts"),
        (replace(DENSE, takes=""), "cp=1", "not asked flashrecovery.layout\\(\\) for cp, so it stays 2"),
        (EXPERTS, "ep=3", "does not divide 4 experts"),
        (EXPERTS, "ep=4,dp=2", "ep = 4 does not divide the 2 ranks of cp x dp"),
        (EXPERTS, "ep=4,cp=2,dp=1", "ep = 4 does not divide the 2 ranks"),
        (replace(EXPERTS, takes="cp"), "ep=1", "for ep, so it stays 2"),
        (replace(EXPERTS, expert_inner=129), "tp=2,dp=1", "does not divide 129 MLP rows of an expert"),
        (replace(EXPERTS, shared_inner=129), "tp=2,dp=1", "does not divide 129 MLP rows of the shared experts"),
        (replace(DENSE, heads_over_cp=True), "tp=2,cp=4,dp=1", "tp x cp = 8 does not divide 4 heads"),
        (replace(EXPERTS, sequence=18), "tp=4,dp=1", "tp x cp = 4 does not divide 18 tokens, which is needed for seq"),
        (replace(DENSE, sequence=4, sequence_parallel=True), "tp=4,cp=2,dp=1", "tp x cp = 8 does not divide 4 tokens"),
        (EXPERTS, "cp=2,cp=2", "each once"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(facts: LayoutFacts, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_layout(text, facts, 8 if "tp x cp = 8" in reason else 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8, 16])
@pytest.mark.parametrize("facts", [DENSE, EXPERTS, replace(EXPERTS, dense_layers=2), replace(EXPERTS, sharded=True)])
def test_what_is_chosen_fits(facts: LayoutFacts, ranks: int) -> None:
    choice = best(facts, ranks, 1, step_s=0.2)
    assert all(why_not(facts, estimate.strategy, ranks) == "" for estimate in choice.ranked)
    sizes = {(estimate.strategy.cp, estimate.strategy.ep) for estimate in choice.ranked}
    assert (1, 1) in sizes
    if ranks >= 2:
        assert (2, 1) in sizes
    if ranks >= 4 and facts.experts:
        assert {(1, 2), (1, 4), (2, 2)} <= sizes


@pytest.mark.parametrize("rooms", [[2, 2], [3, 3], [1, 1, 1, 1], [4, 1], [2, 3, 2]])
def test_what_is_chosen_for_several_nodes_fits(rooms: list[int]) -> None:
    for estimate in best(EXPERTS, rooms, 1).ranked:
        s = estimate.strategy
        assert why_not(EXPERTS, s, sum(rooms)) == "" and s.ranks <= sum(room // s.tp for room in rooms) * s.tp


def test_tensor_parallel_groups_within_nodes_leave_room_for_fewer_replicas() -> None:
    """Four nodes of three ranks: one group of two on each, and a replica with context parallelism takes two of them."""
    facts = replace(EXPERTS, sequence_parallel=True)
    found = [estimate.strategy for estimate in best(facts, [3, 3, 3, 3], 1).ranked]
    assert Strategy(tp=2, cp=2, dp=2, micro_batch=1) in found
    assert Strategy(tp=2, cp=2, ep=4, dp=2, micro_batch=1) in found


@pytest.mark.parametrize("now", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_experts_get_tensor_parallelism_only_where_the_script_is_known_to_divide_sequences(
    now: int, ranks: int
) -> None:
    """megatron-core trains MoE layers with it in no other way, and the script's first step there would be its last."""
    facts = replace(EXPERTS, layout={**EXPERTS.layout, "tp": now}, sequence_parallel=now > 1)
    sizes = {estimate.strategy.tp for estimate in best(facts, ranks, 1).ranked}
    assert 1 in sizes and (max(sizes) > 1) == (now > 1)
    assert parse_layout("tp=2,dp=1", facts, ranks).tp == 2  # on command, also where it has not been seen
    assert max(estimate.strategy.tp for estimate in best(replace(DENSE, sequence_parallel=False), ranks, 1).ranked) > 1


def test_where_nothing_else_is_left_the_reason_is_said() -> None:
    with pytest.raises(NothingFitsError, match="need sequence_parallel, and it has not been seen"):
        best(replace(EXPERTS, layers=1, memory_bytes=1), 2, 2)


def test_what_the_script_does_not_take_is_kept() -> None:
    for facts in (replace(EXPERTS, takes=""), replace(DENSE, takes="")):
        for estimate in best(facts, 8, 1).ranked:
            assert (estimate.strategy.cp, estimate.strategy.ep) == (facts.now.cp, facts.now.ep)
    with pytest.raises(NothingFitsError, match="for cp, so it stays 2"):
        best(replace(DENSE, takes=""), 1, 1)


@pytest.mark.parametrize("takes", ["", "cp"])
def test_sizes_that_are_no_powers_of_two_are_kept(takes: str) -> None:
    """A context-parallel size of three, and micro-batches of six samples: after a loss there has to be a layout."""
    now = {**DENSE.layout, "cp": 3}
    facts = replace(DENSE, layout=now, sequence=48, global_batch=72, micro_batch=6, takes=takes)
    ranked = [estimate.strategy for estimate in best(facts, 5, 1).ranked]
    assert Strategy(cp=3, micro_batch=6) in ranked and {s.micro_batch for s in ranked} == {6}
    assert ("cp" in takes) == any(s.cp == 2 for s in ranked)


def test_a_layout_for_18000_ranks_is_chosen_at_once() -> None:
    sizes = {"tp": 8, "pp": 16, "cp": 2, "ep": 8, "dp": 64}
    facts = LayoutFacts(
        *(sizes, 48, 8192, 64, 64, 32768, 128000, 8192, 16384, 1),
        sharded=True,
        memory_bytes=80 << 30,
        experts=64,
        chosen=8,
        expert_inner=2048,
        takes="cp,ep",
    )
    began = time.process_time()
    choice = best(facts, [8] * 2250, 1, step_s=10.0)
    assert time.process_time() - began < 2 and len(choice.ranked) > 500


def test_who_has_the_whole_state() -> None:
    one = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 4}
    assert DENSE.whole_everywhere  # context parallelism cuts samples only
    assert not EXPERTS.whole_everywhere and replace(EXPERTS, layout=one).whole_everywhere
    assert not replace(EXPERTS, layout=one, sharded=True).whole_everywhere


def test_as_many_replicas_as_there_is_room_for() -> None:
    assert with_most_replicas(EXPERTS, EXPERTS.now, 3) == replace(EXPERTS.now, dp=2)
    assert with_most_replicas(DENSE, DENSE.now, 7) == replace(DENSE.now, dp=3)


def test_another_job() -> None:
    before = StayingFacts(EXPERTS, "", 9)
    now = replace(EXPERTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 4, "dp": 4})
    assert why_another_job(before, StayingFacts(now, "", 9), "tp=1,pp=1,ep=4,dp=4") == ""
    assert "has made the layout" in why_another_job(before, StayingFacts(now, "", 9), "tp=1,pp=1,ep=2,dp=4")
    other = replace(now, experts=8)
    assert "experts is 8, and was 4" in why_another_job(before, StayingFacts(other, "", 9), "tp=1,pp=1,ep=4,dp=4")


def test_a_script_asks_for_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = layout(tp=2, cp=2, ep=2)
    assert (found.tp, found.pp, found.dp, found.cp, found.ep, found.changed) == (2, 1, 2, 2, 2, False)
    assert parallel_layout.taken() == {"cp", "ep"}
    with pytest.raises(ConfigError, match="divide the 8 ranks"):
        layout(cp=3)
    with pytest.raises(ConfigError, match="divides the 2 ranks of cp x dp"):
        layout(tp=4, ep=4)
    monkeypatch.setenv(LAYOUT_ENV, "tp=1,pp=1,cp=2,ep=4,dp=2")
    found = layout(tp=2, cp=1, ep=2)
    assert (found.tp, found.pp, found.dp, found.cp, found.ep, found.changed) == (1, 1, 2, 2, 4, True)
    monkeypatch.setenv(LAYOUT_ENV, "tp=1,pp=4,dp=2")
    assert (layout(cp=2).cp, layout(ep=2).ep) == (1, 1)


def test_a_script_that_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    layout(tp=2, pp=2)
    assert parallel_layout.taken() == frozenset()
    layout(cp=1)
    assert parallel_layout.taken() == {"cp"}


@pytest.mark.parametrize("elastic", [False, True])
def test_elastic_jobs_have_the_same_experts_at_the_same_places_of_all_replicas(elastic: bool) -> None:
    """Three context-parallel ranks, and two places of experts: which of these a rank has would follow its replica."""
    facts = replace(EXPERTS, sequence=48, elastic=elastic)
    why = why_not(facts, Strategy(cp=3, ep=2, dp=2, micro_batch=1), 6)
    assert ("neither of ep = 2 and cp = 3 divides the other" in why) is elastic
    assert why_not(facts, Strategy(cp=2, ep=2, dp=2, micro_batch=1), 4) == ""
    assert why_not(facts, Strategy(cp=4, ep=2, micro_batch=1), 4) == ""
    assert why_not(facts, Strategy(cp=2, ep=4, dp=2, micro_batch=1), 4) == ""
    found = best(replace(facts, experts=6, layout={**facts.layout, "cp": 3, "ep": 3, "dp": 2}), 6, 6)
    odd = [e.strategy for e in found.ranked if e.strategy.cp % e.strategy.ep and e.strategy.ep % e.strategy.cp]
    assert bool(odd) is not elastic


@pytest.mark.parametrize(
    ("layout", "replicas", "left", "dp"),
    [
        ({"cp": 2, "dp": 3}, 3, 2, 2),
        ({"ep": 2, "dp": 6}, 3, 2, 4),  # two of them have all experts together
        ({"ep": 2, "dp": 6}, 3, 1, 2),
        ({"cp": 2, "ep": 4, "dp": 6}, 3, 2, 4),
        ({"cp": 4, "ep": 2, "dp": 3}, 3, 1, 1),
        ({"tp": 2, "pp": 2, "ep": 2, "dp": 4}, 2, 1, 2),
    ],
)
def test_the_layout_of_fewer_replicas(layout: dict[str, int], replicas: int, left: int, dp: int) -> None:
    whole = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, **layout}
    inner = whole["tp"] * whole["cp"] * whole["dp"] // replicas
    shape = ReplicaShape(replicas, inner, whole["pp"])
    record = SimpleNamespace(shape=shape)
    facts = replace(EXPERTS, layout=whole)
    config = SimpleNamespace(elastic=object())
    parallel = SimpleNamespace(facts=facts.text())
    job: Any = SimpleNamespace(config=config, parallel=parallel, in_order=[record], replicas=left, shape=shape)
    assert facts_now(job).layout == {**whole, "dp": dp}
    job.config.elastic = None
    assert facts_now(job) == facts
