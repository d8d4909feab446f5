"""State that turns out to be each rank's own: its names, and when a difference is believed."""

from __future__ import annotations

import pytest

from flashrecovery.plan.ownership import base_name, drifted, own_name, owner_of, renamed, turned_out_own


def test_names_there_and_back() -> None:
    for name in ("param/weight", "param/weight#group=2", "model1/param/0.bias"):
        own = own_name(name, 3)
        assert base_name(own) == name and owner_of(own) == 3
        assert base_name(name) == name and owner_of(name) == -1


def test_one_that_has_not_heard_of_it_is_named_as_the_others() -> None:
    """The newest word of a rank that has died, and the first one of its replacement, are of before."""
    needs = {"param/a": 4, "param/b": 8, "capsule@1": 0}
    own = turned_out_own(["param/a#own=0", "param/b", "common"])
    assert own == {"param/a"}
    assert renamed(needs, 1, own) == {"param/a#own=1": 4, "param/b": 8, "capsule@1": 0}
    assert renamed(renamed(needs, 1, own), 1, own) == renamed(needs, 1, own)


@pytest.mark.parametrize(
    ("camps", "replaced", "expected"),
    [
        ([[0, 1], [2]], [], True),
        ([[0], [1], [2]], [], True),
        ([[0, 1], [2]], [2], False),  # the replacement alone has gone another way
        ([[0], [1, 2]], [2], True),  # survivors differ, too
        ([[0], [1], [2]], [2], True),
        ([[0], [1], [2]], [1, 2], False),
        ([[0, 1, 2]], [1], False),
    ],
)
def test_ranks_that_have_gone_ways_of_their_own(camps: list[list[int]], replaced: list[int], expected: bool) -> None:
    assert drifted(camps, replaced) is expected
