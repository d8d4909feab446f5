"""Ranks that should be equal are not: which are alike, since when, and what is left to go on from."""

from __future__ import annotations

import pytest

from flashrecovery.plan.divergence import Divergence, Past, from_before, judge


@pytest.mark.parametrize(
    ("camps", "agree", "differ"),
    [
        pytest.param([[0, 2], [1]], (0, 2), (1,), id="two of three"),
        pytest.param([[1], [0, 2, 3]], (0, 2, 3), (1,), id="three of four"),
        pytest.param([[0], [1]], (), (), id="two ranks"),
        pytest.param([[0, 1], [2, 3]], (), (), id="a tie"),
        pytest.param([[0], [1], [2]], (), (), id="three kinds"),
        pytest.param([[0, 1], [2], [3]], (), (), id="the largest of three kinds, not more than half"),
        pytest.param([[0, 1, 4], [2], [3]], (0, 1, 4), (2, 3), id="three of five, two others"),
    ],
)
def test_a_majority_is_more_than_half(camps: list[list[int]], agree: tuple[int, ...], differ: tuple[int, ...]) -> None:
    verdict = judge({"param/w": camps}, [Past()] * 5)
    assert (verdict.agree, verdict.differ, verdict.suspects) == (agree, differ, differ)


def test_one_rank_and_nothing_that_differs() -> None:
    assert judge({}, [Past()]) == Divergence()


def test_shards_of_hsdp_are_each_compared_in_their_own_group() -> None:
    """Three replicas of two shards."""
    one = judge({"w#0": [[0, 2], [4]]}, [Past()] * 6)
    assert (one.agree, one.differ) == ((0, 2), (4,)), "ranks 1, 3 and 5 have nothing that differs"
    both = judge({"w#0": [[0, 2], [4]], "w#1": [[1, 3], [5]]}, [Past()] * 6)
    assert (both.agree, both.differ) == ((0, 1, 2, 3), (4, 5))
    apart = judge({"w#0": [[0, 2], [4]], "w#1": [[1], [3], [5]]}, [Past()] * 6)
    assert (apart.agree, apart.differ) == ((), ()), "of the second shard no process knows which one is right"
    two = judge({"w#0": [[0], [2]], "w#1": [[1], [3]]}, [Past()] * 4)
    assert two.agree == (), "two replicas"


def test_majorities_of_several_things_are_of_the_same_ranks() -> None:
    verdict = judge({"a": [[0, 1], [2]], "b": [[0, 2], [1]]}, [Past()] * 3)
    assert verdict.agree == (), "rank 0 alone is in both"
    verdict = judge({"a": [[0, 1, 2, 3], [4]], "b": [[0, 1, 2, 4], [3]]}, [Past()] * 5)
    assert (verdict.agree, verdict.differ) == ((0, 1, 2), (3, 4))


def test_a_majority_of_replacements_makes_nobody_suspect() -> None:
    """They have begun with the same, and may all lack what no one has registered."""
    verdict = judge({"a": [[0], [1, 2]]}, [Past(), Past(joined=4), Past(joined=4)])
    assert (verdict.agree, verdict.differ, verdict.suspects) == ((1, 2), (0,), ())
    assert judge({"a": [[0, 1], [2]]}, [Past(), Past(joined=4), Past()]).suspects == (2,)


def test_since_when_they_differ() -> None:
    """A replacement begins with what its peers have: if it alone differs, this is later than that."""
    old, new = Past(alike=8), Past(joined=12)
    assert judge({"a": [[0, 2], [1]]}, [old, new, old]).alike == 12
    assert judge({"a": [[0], [1]]}, [old, new]).alike == 12, "also where there is no majority"
    assert judge({"a": [[0, 1], [2]]}, [old, new, old]).alike == 8, "a survivor may have differed before that"
    assert judge({"a": [[0], [1, 2]]}, [old, new, Past(joined=10)]).alike == 10
    assert judge({"a": [[0], [1]]}, [Past(alike=14), Past(12, 14)]).alike == 14, "they were compared since"
    assert judge({"a": [[0], [1]]}, [Past(), Past()]).alike == 0


def test_a_comparison_of_parts_is_weaker_than_one_of_everything() -> None:
    old, new = Past(alike=128, whole=32), Past(joined=130, alike=128)
    survivor = judge({"a": [[0, 1], [2]]}, [old, new, old])
    assert (survivor.alike, survivor.partly) == (128, True)
    assert "What was compared of each tensor was alike at version 128" in str(survivor)
    replacement = judge({"a": [[0, 2], [1]]}, [old, new, old])
    assert (replacement.alike, replacement.partly) == (130, False)
    whole = Past(alike=128, whole=128)
    assert not judge({"a": [[0, 1], [2]]}, [whole, new, whole]).partly


def test_what_was_compared_after_the_version_to_which_the_job_goes_back_does_not_count() -> None:
    assert Past(-1, 64, 32).resumed(40, replacement=False) == Past(-1, 40, 32)
    assert Past(-1, 64, 32).resumed(20, replacement=False) == Past(-1, 20, 20)
    assert Past().resumed(7, replacement=True) == Past(7)
    assert Past(7, 8, 8).resumed(12, replacement=True) == Past(7, 8, 8)
    assert Past(7, 8, 8).resumed(5, replacement=True) == Past(5, 5, 5)


def test_in_words() -> None:
    verdict = judge({"a": [[0, 2], [1]]}, [Past(alike=8), Past(joined=12), Past(alike=8)])
    assert str(verdict) == (
        "The majority is alike, ranks 0 and 2; rank 1 differs (rank 1: a replacement). All were alike at version 12"
    )
    assert str(judge({"a": [[0], [1]]}, [Past(), Past()])) == (
        "No majority is alike, so whose state is right is not known"
    )


def test_checkpoints_from_before() -> None:
    made = [(4, "ck/4"), (8, "ck/8"), (12, "ck/12")]
    assert from_before(made, 8) == made[:2]
    assert from_before(made, 0) == []
