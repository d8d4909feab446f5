"""For how long workers may go on without an answer of a controller, and that this ends in time for the next one."""

from __future__ import annotations

import time

import pytest

from flashrecovery.agent.controller_link.lease import ControllerLease
from flashrecovery.config import Timeouts
from flashrecovery.plan.membership.leases import works_for_s

LIMITS = Timeouts()
ALONE_S = 2 * LIMITS.node_silence_s
"""For so long a node works that has found its controller dead."""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "clock_gettime_ns", lambda _: int(self.now * 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def in_time_for(registered_at: float) -> float:
    """Until then at the most workers may go on whose node has registered at that time and is silent since: who got
    that gives its ranks away ``node_silence_s`` later at the earliest."""
    return registered_at + works_for_s(LIMITS.node_silence_s)


def test_a_node_without_a_controller_goes_on_for_longer(clock: Clock) -> None:
    hearing = ControllerLease(LIMITS)
    hearing.excuse(clock.now, ALONE_S)
    assert hearing.lent_until() == pytest.approx(clock.now + ALONE_S)


def test_what_was_lent_without_a_controller_ends_when_the_node_registers(clock: Clock) -> None:
    hearing = ControllerLease(LIMITS)
    hearing.excuse(clock.now, ALONE_S)
    clock.now += 0.1
    hearing.registers()
    assert hearing.lent_until() == pytest.approx(in_time_for(clock.now))


def test_so_it_is_with_a_verdict_that_comes_after_that_on_questions_from_before(clock: Clock) -> None:
    hearing = ControllerLease(LIMITS)
    asked_at = clock.now
    clock.now += 0.1
    hearing.registers()
    registered_at, clock.now = clock.now, clock.now + 0.1
    hearing.excuse(asked_at, ALONE_S)
    assert hearing.lent_until() == pytest.approx(in_time_for(registered_at))


def test_if_that_controller_is_found_dead_as_well_the_node_goes_on(clock: Clock) -> None:
    hearing = ControllerLease(LIMITS)
    hearing.registers()
    clock.now += LIMITS.lease_s
    hearing.excuse(clock.now, ALONE_S)
    assert hearing.lent_until() == pytest.approx(clock.now + ALONE_S)


def test_registering_does_not_take_what_an_answer_has_given(clock: Clock) -> None:
    """The same controller, on a new connection: what it has heard before still counts, and no excuse is made longer."""
    hearing = ControllerLease(LIMITS)
    hearing.heard(clock.now)
    before = hearing.lent_until()
    clock.now += 0.1
    hearing.registers()
    assert hearing.lent_until() == before and hearing.excused_until < clock.now


def cut_off(clock: Clock) -> ControllerLease:
    """Of a node that was cut off a while ago, and whose workers' time is over."""
    hearing = ControllerLease(LIMITS)
    clock.now += 2 * LIMITS.node_silence_s
    hearing.cut_off()
    assert hearing.lent_until() < clock.now
    return hearing


def test_following_another_controller_is_no_answer_for_a_node_that_was_cut_off(clock: Clock) -> None:
    hearing = cut_off(clock)
    hearing.begin()
    hearing.registers()
    assert hearing.lent_until() < clock.now


def test_nor_is_the_word_of_a_controller_that_gathers(clock: Clock) -> None:
    """The one before may have given this node's ranks away, and those that know have not come to it yet."""
    hearing = cut_off(clock)
    hearing.heard(clock.now, gathering=True)
    assert hearing.in_doubt and hearing.lent_until() < clock.now
    hearing.heard(clock.now)
    assert not hearing.in_doubt and hearing.lent_until() == pytest.approx(in_time_for(clock.now))


def test_nor_is_it_if_another_node_brings_that_word(clock: Clock) -> None:
    hearing = cut_off(clock)
    assert not hearing.vouched(clock.now, clock.now, found=True, gathering=True)
    assert hearing.in_doubt and hearing.lent_until() < clock.now
    assert hearing.vouched(clock.now, clock.now, found=True)
    assert not hearing.in_doubt and hearing.lent_until() == pytest.approx(in_time_for(clock.now))


def test_a_node_that_is_not_in_doubt_takes_the_word_of_a_controller_that_gathers(clock: Clock) -> None:
    hearing = ControllerLease(LIMITS)
    clock.now += LIMITS.lease_s
    assert hearing.vouched(clock.now, clock.now, found=True, gathering=True)
    assert hearing.lent_until() == pytest.approx(in_time_for(clock.now))
