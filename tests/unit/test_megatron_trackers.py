"""Which group the losses that layers sum up for the log are reduced over, in a process that gets them from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from flashrecovery.errors import RestoreError
from fr_megatron import trackers

pytest.importorskip("megatron.core")


@dataclass
class Known:
    """A group of this rank."""

    name: str
    launched: tuple[int, ...]

    def process_group(self) -> str:
        return f"handle of {self.name}"


@pytest.fixture(autouse=True)
def of_this_rank(monkeypatch: pytest.MonkeyPatch) -> list[Known]:
    mine = [Known("0", (0, 1, 2, 3)), Known("5", (2, 3)), Known("8", (1, 3))]
    monkeypatch.setattr(trackers, "own_groups", lambda: mine)
    names = {group.name: group.process_group() for group in mine}
    monkeypatch.setattr(trackers, "named_group", names.__getitem__)
    return mine


def test_a_group_of_the_same_name() -> None:
    assert trackers._group("5", 1, [2, 3]) == "handle of 5"


def test_a_group_that_has_lost_members_is_still_the_same(of_this_rank: list[Known]) -> None:
    """What is compared is as the job was launched."""
    assert trackers._group("0", 0, [0, 1, 2, 3]) == "handle of 0"


def test_that_of_the_same_place_in_another_replica() -> None:
    """A process that comes in gets it from there: made in the same order, by another name."""
    assert trackers._group("4", 1, [0, 1]) == "handle of 5"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (("5", 1, [0, 1]), RestoreError),  # of the same name, with other ranks
        (("4", 1, [0, 1, 2]), KeyError),  # as many have none here
        (("4", -1, [0, 1]), KeyError),
        (("4", 9, [0, 1]), KeyError),
    ],
)
def test_others_are_not_taken(said: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        trackers._group(*said)
