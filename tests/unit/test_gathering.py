"""Members that wait for each other before a change."""

from __future__ import annotations

from flashrecovery.controller.elastic.join import PauseBarrier


def test_all_are_there_when_the_last_has_come() -> None:
    waiting = PauseBarrier()
    waiting.come(0, 10.0)
    assert not waiting.complete({0, 2}) and waiting.since == 10.0
    waiting.come(0, 11.0)
    assert not waiting.complete({0, 2}) and waiting.since == 10.0
    waiting.come(2, 12.0)
    assert waiting.complete({0, 2}) and waiting.since == 10.0


def test_one_that_has_died_meanwhile_is_not_waited_for() -> None:
    waiting = PauseBarrier()
    waiting.come(0, 10.0)
    waiting.come(1, 10.5)
    assert waiting.complete({0}) and not waiting.complete({0, 2})


def test_patience_counts_from_the_first() -> None:
    waiting = PauseBarrier()
    assert not waiting.overdue(1e9, 2.0)
    waiting.come(0, 10.0)
    waiting.come(1, 11.9)
    assert not waiting.overdue(11.99, 2.0) and waiting.overdue(12.0, 2.0)


def test_who_goes_on_does_not_count_the_next_time() -> None:
    waiting = PauseBarrier()
    waiting.come(0, 10.0)
    waiting.dissolve()
    assert not waiting.complete({0}) and waiting.since is None and not waiting.overdue(99.0, 2.0)
    waiting.come(1, 20.0)
    assert waiting.since == 20.0
