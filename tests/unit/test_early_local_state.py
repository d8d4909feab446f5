"""Rank-local state that was sealed early counts unless a living rank says that the step was late after all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.controller.state.restore_plan import Decision, decide
from flashrecovery.errors import JobFailedError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import Page
from flashrecovery.state import witness

NEEDS = {"param/w": 16, "common": 10}


def survivor(rank: int, live: int, late: Sequence[int] = (), undo: Sequence[int] = ()) -> RankRecord:
    record = RankRecord(rank)
    record.inventory.needs = {**NEEDS, f"capsule@{rank}": 1}
    held = [pb.Held(kind="undo", version=v) for v in undo]
    record.inventory.take(live, held)
    record.inventory.late = frozenset(late)
    record.place = Place.STOPPED
    return record


def victim(rank: int, final: Sequence[int], early: Sequence[int], *, joined: bool = False) -> RankRecord:
    record = RankRecord(rank)
    record.inventory.needs = {**NEEDS, f"capsule@{rank}": 1}
    record.inventory.local_states, record.inventory.early = (*final, *early), frozenset(early)
    if joined:
        pages = [(v, False) for v in final] + [(v, True) for v in early]
        held = [pb.Held(kind="page", version=v, shards=[f"capsule@{rank}"], nbytes=[1], early=e) for v, e in pages]
        record.inventory.take(-1, held)
    return record


def decided(*records: RankRecord) -> Decision:
    return decide({r.rank: r for r in records}, (2, "/checkpoint"))


@pytest.mark.parametrize("joined", [False, True])
def test_it_counts_where_nobody_was_late(joined: bool) -> None:
    decision = decided(survivor(0, 6), survivor(1, 6), victim(2, [4, 5], [6], joined=joined))
    assert (decision.round.version, decision.checkpoint) == (6, "")


@pytest.mark.parametrize("joined", [False, True])
def test_it_does_not_count_where_one_was_late(joined: bool) -> None:
    decision = decided(survivor(0, 6), survivor(1, 6, late=[6]), victim(2, [4, 5], [6], joined=joined))
    assert decision.checkpoint == "/checkpoint"
    assert "rank 2 had sealed early for version 6 does not count" in decision.round.reason


def test_then_all_go_back_a_step_where_they_can() -> None:
    both = [survivor(rank, 6, late=[6], undo=[5]) for rank in (0, 1)]
    decision = decided(*both, victim(2, [4, 5], [6], joined=True))
    assert (decision.round.version, decision.checkpoint) == (5, "")


def test_a_late_step_is_no_reason_against_another_ones_local_state() -> None:
    decision = decided(survivor(0, 6, late=[5]), victim(1, [4, 5], [6], joined=True))
    assert (decision.round.version, decision.checkpoint) == (6, "")


def test_a_final_local_state_counts_although_the_step_was_late() -> None:
    decision = decided(survivor(0, 6, late=[6]), victim(1, [5, 6], [], joined=True))
    assert (decision.round.version, decision.checkpoint) == (6, "")


def test_without_a_checkpoint_the_job_says_why_it_ends() -> None:
    records = [survivor(0, 6, late=[6]), victim(1, [4, 5], [6], joined=True)]
    with pytest.raises(JobFailedError, match="had sealed early for version 6 does not count"):
        decide({r.rank: r for r in records}, None)


def test_a_neighbours_copy_of_it_does_not_count_either() -> None:
    neighbour = survivor(0, 6, late=[6])
    copy = pb.Held(kind="copy", version=6, shards=["capsule@1"], nbytes=[1], early=True)
    neighbour.inventory.take(6, [copy])
    neighbour.inventory.late = frozenset([6])
    assert decided(neighbour, victim(1, [], [])).checkpoint == "/checkpoint"


def test_a_page_says_which_of_its_local_states_are_final_and_so_does_its_heirs() -> None:
    page, heir = Page.create("early"), Page.create("heir")
    try:
        page.write_local_state(4, b"four")
        page.write_local_state(5, b"five", early=True)
        page.write_local_state(6, b"six", early=True)
        assert page.early_local_states() == [5, 6]
        page.finish_local_state(5)
        page.finish_local_state(7)  # not there
        assert page.local_state_versions() == [4, 5, 6] and page.early_local_states() == [6]
        heir.inherit(page)
        assert heir.local_state_versions() == [4, 5, 6] and heir.early_local_states() == [6]
        heir.write_local_state(6, b"six, later")
        assert heir.early_local_states() == []
    finally:
        page.close()
        heir.close()


def test_a_page_keeps_the_end_of_a_local_state_that_was_sealed_before_its_end_was_known() -> None:
    page, heir = Page.create("early"), Page.create("heir")
    sealed, end = b"sealed" + witness.UNKNOWN, witness.of({"best": "0"})
    try:
        page.write_local_state(4, sealed, early=True)
        page.finish_local_state(4, end)
        assert page.read_local_state(4) == b"sealed" + end and page.early_local_states() == []
        heir.inherit(page)
        assert heir.read_local_state(4) == b"sealed" + end
        page.write_local_state(7, sealed)  # in the same place
        assert page.read_local_state(7) == sealed
    finally:
        page.close()
        heir.close()


def test_a_transfer_of_which_nobody_says_anything_has_not_arrived() -> None:
    """Also where neither side has named a digest: two that are missing are not equal."""
    decision = decided(survivor(0, 6), survivor(1, 6), victim(2, [6], []))
    moved = {t.shard for t in decision.round.plan.transfers}
    assert moved >= {"param/w", "common"}
    assert {shard for shard, _ in decision.round.mismatches()} == moved
