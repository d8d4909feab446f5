"""Of which lines of an elastic job's output it is no wonder that no one has printed them."""

from __future__ import annotations

from typing import Any

from tests.support.elastic import completed_without

STARTED = {"event": "job_started", "world_size": 4}


def over(resume_step: int, *victims: int) -> dict[str, Any]:
    return {"event": "recovery_finished", "resume_step": resume_step, "victims": list(victims)}


def test_the_step_before_the_one_from_which_a_replaced_rank_goes_on() -> None:
    assert completed_without([STARTED, over(8, 2)]) == {(7, 2, 4)}


def test_ranks_are_counted_as_in_the_groups() -> None:
    resized = {"event": "job_resized", "ranks": [0, 2, 3]}
    assert completed_without([STARTED, resized, over(8, 1), over(12, 3)]) == {(11, 2, 3)}


def test_nothing_is_excused_without_a_victim() -> None:
    assert completed_without([STARTED, over(8)]) == set()
