"""What is said of settings that differ between the ranks."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch

from flashrecovery.worker.consistency.all_equal import _text, check_equal, differences, split


class Color(Enum):
    RED = 1


def test_a_difference_names_values_and_ranks() -> None:
    ranks = [("", {"lr": text, "seed": "1"}) for text in ("0.1", "0.2", "0.1", "0.2")]
    assert differences(ranks) == ["lr is 0.1 on ranks 0, 2 and 0.2 on ranks 1, 3"]


def test_a_name_that_one_rank_does_not_have() -> None:
    assert differences([("", {"lr": "0.1"}), ("", {})]) == ["lr is 0.1 on rank 0 and not there on rank 1"]


def test_the_camps_of_ranks_that_do_not_agree() -> None:
    assert split([{"a": "1", "b": "2"}] * 3) == {}
    assert split([{"a": "1"}, {"a": "2"}, {"a": "1"}, {"b": "7"}]) == {"a": [[0, 2], [1]]}


def test_only_ranks_of_a_kind_are_compared() -> None:
    ranks = [("a", {"width": "8"}), ("b", {"width": "16"}), ("a", {"width": "8"}), ("b", {"width": "32"})]
    assert differences(ranks) == ["width is 16 on rank 1 and 32 on rank 3"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("x", "'x'"),
        (None, "None"),
        (torch.float32, "torch.float32"),
        (Color.RED, "Color.RED"),
        ((1, [True]), "[1, [True]]"),
        ({"b": 1, "a": 2}, "['a', 2, 'b', 1]"),
        ([], "[]"),
    ],
)
def test_values_have_a_text(value: Any, text: str) -> None:
    assert _text(value) == text


@pytest.mark.parametrize("value", [print, object(), [object()], {"a": print}])
def test_what_has_no_stable_text_is_left_out(value: Any) -> None:
    assert _text(value) is None


def test_alone_nothing_is_compared() -> None:
    check_equal("settings", {"a": 1})
