"""What the members of a parity group conclude from what they tell each other at the beginning of an exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrecovery.errors import ProtocolError
from flashrecovery.plan.parity.code import ParityLayout, StripePart
from flashrecovery.plan.parity.groups import groups_of_all, launch_domains
from flashrecovery.redundancy.parity.frames import NO_BASE
from flashrecovery.redundancy.parity.making import MemberState, key_of, to_make

P, Q = StripePart.P, StripePart.Q
KEY = 9


def states(n: int, newest: int, before: int, losses: int = 1) -> list[MemberState]:
    held = {KEY: (newest, newest if losses == 2 else -1)}
    return [MemberState(True, 100, 1, before, -1, 10, held) for _ in range(n)]


def layout(n: int, losses: int = 1) -> ParityLayout:
    return ParityLayout((100,) * n, losses, 64)


@pytest.mark.parametrize("losses", [1, 2])
def test_in_most_steps_all_parities_are_made_from_the_version_before(losses: int) -> None:
    making = to_make(layout(4, losses), KEY, 8, states(4, 7, 7, losses))
    assert making.base == 7 and len(making.places) == 4 * losses


def test_at_first_and_with_another_layout_everything_is_sent() -> None:
    assert to_make(layout(3), KEY, 0, states(3, -1, -1)).base == NO_BASE
    assert to_make(layout(3), KEY + 1, 8, states(3, 7, 7)).base == NO_BASE


def test_what_is_whole_is_left_alone() -> None:
    """After a recovery the same version comes again, and only a replacement has to be given its parity."""
    said = states(4, 7, 6)
    said[2] = replace(said[2], before=-1, held={})
    making = to_make(layout(4), KEY, 7, said)
    assert making.base == NO_BASE and making.places == {(2, P)}
    assert to_make(layout(4), KEY, 7, states(4, 7, 6)).places == frozenset()


def test_a_second_parity_is_made_again_alone() -> None:
    said = states(4, 7, 6, losses=2)
    said[2] = replace(said[2], held={KEY: (7, -1)})
    assert to_make(layout(4, 2), KEY, 7, said).places == {(1, Q)}


@pytest.mark.parametrize("member", range(3))
def test_a_member_without_the_base_makes_all_send_everything(member: int) -> None:
    said = states(3, 7, 7)
    said[member] = replace(said[member], before=-1)
    assert to_make(layout(3), KEY, 8, said).base == NO_BASE
    said[member] = replace(said[member], before=6)
    assert to_make(layout(3), KEY, 8, said).base == NO_BASE


def test_parities_of_different_versions_have_no_common_base() -> None:
    said = states(3, 7, 7)
    said[1] = replace(said[1], held={KEY: (6, -1)})
    making = to_make(layout(3), KEY, 8, said)
    assert making.base == NO_BASE and len(making.places) == 3


def test_a_newer_parity_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="version 9"):
        to_make(layout(3), KEY, 8, states(3, 9, 9))


def test_what_a_member_says_travels_whole() -> None:
    state = MemberState(True, 100, 1, 6, 12345, 10, {KEY: (7, 6), 11: (-1, 3)})
    assert MemberState.of(state.words()) == state and len(state.words()) == MemberState.LENGTH
    none = MemberState(False, 0, 0, -1, -1, 0)
    assert MemberState.of(none.words()) == none


def test_a_key_says_all() -> None:
    first = key_of([0, 1], [1, 2], [3, 4], 1, 64)
    assert first == key_of([0, 1], [1, 2], [3, 4], 1, 64) >= 0
    others = {
        key_of([0, 2], [1, 2], [3, 4], 1, 64),
        key_of([0, 1], [1, 3], [3, 4], 1, 64),
        key_of([0, 1], [1, 2], [3, 5], 1, 64),
        key_of([0, 1], [1, 2], [3, 4], 2, 64),
        key_of([0, 1], [1, 2], [3, 4], 1, 128),
    }
    assert first not in others and len(others) == 5


@pytest.mark.parametrize(
    ("nodes", "shared", "domains"),
    [
        (1, (), ["rank 0", "rank 1", "rank 2", "rank 3"]),
        (2, (), ["node 0", "node 0", "node 1", "node 1"]),
        (4, (0, 0, 1, 1), ["domain 0", "domain 0", "domain 1", "domain 1"]),
    ],
)
def test_the_failure_domains_of_the_launch(nodes: int, shared: tuple[int, ...], domains: list[str]) -> None:
    assert launch_domains(4, nodes, shared) == domains


def test_on_one_node_a_group_has_no_two_ranks_whose_gpus_are_lost_together() -> None:
    domains = launch_domains(4, 1, (), (0, 0, 1, 1))
    assert domains == ["GPUs 0", "GPUs 0", "GPUs 1", "GPUs 1"]
    assert groups_of_all(domains, 1, 8) == ((0, 2), (1, 3))
    assert launch_domains(4, 1, (), (0,) * 4) == [f"rank {rank}" for rank in range(4)], "there are no others"
    assert launch_domains(4, 2, (), (0, 0, 1, 1)) == ["node 0", "node 0", "node 1", "node 1"]


def test_groups_of_all_ranks_stay_as_long_as_their_members_are_apart() -> None:
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert groups_of_all(nodes, 1, 8) == ((0, 2, 4), (1, 3, 5))
    moved = ["a", "a", "s", "s", "c", "c"]
    assert groups_of_all(moved, 1, 8, [(0, 2, 4), (1, 3, 5)]) == ((0, 2, 4), (1, 3, 5))
    together = ["a", "a", "c", "s", "c", "s"]
    now = groups_of_all(together, 1, 8, [(0, 2, 4), (1, 3, 5)])
    assert not isinstance(now, str) and sorted(rank for ranks in now for rank in ranks) == list(range(6))
    assert all(len({together[rank] for rank in ranks}) == len(ranks) for ranks in now)
    current = [(0, 3, 4), (1, 2, 5)]
    stale = [(0, 2, 4), *current * 2]
    assert groups_of_all(nodes, 1, 8, stale) == tuple(current), "a rank that has just come knows only of the launch"
    reason = groups_of_all(["a", "a", "a", "b"], 1, 8)
    assert isinstance(reason, str) and "there are 1" in reason
