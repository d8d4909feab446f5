"""What the core learns of a script's steps: pure decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.worker.habits import Habits


def test_the_first_step_keeps_a_copy_and_does_not_seal_early() -> None:
    habits = Habits()
    assert habits.needs_undo(0) and not habits.seals_early(0)
    habits.known = True
    assert not habits.needs_undo(1) and habits.seals_early(1)


def test_one_late_step_makes_all_later_ones_suspect() -> None:
    habits = Habits(known=True)
    assert habits.was_late(8)
    assert all(habits.needs_undo(step) and not habits.seals_early(step) for step in range(9, 30))


@given(first=st.integers(0, 50), period=st.integers(1, 40), count=st.integers(2, 8))
def test_late_steps_in_a_period_are_expected(first: int, period: int, count: int) -> None:
    habits = Habits(known=True)
    late = [first + period * i for i in range(count)]
    news = [habits.was_late(step) for step in late]
    assert news == [True, True] + [False] * (count - 2)
    following = late[-1] + period
    assert habits.expects_late(following) and habits.needs_undo(following) and not habits.seals_early(following)
    between = range(late[-1] + 1, following)
    assert not any(habits.needs_undo(step) for step in between) and all(habits.seals_early(step) for step in between)


def test_late_steps_without_a_period_need_a_copy_always() -> None:
    habits = Habits(known=True)
    assert [habits.was_late(step) for step in (10, 20, 27)] == [True, True, True]
    assert habits.undo and all(habits.needs_undo(step) for step in range(28, 40))


def test_the_same_step_is_no_news_from_a_peer() -> None:
    habits = Habits(known=True)
    assert habits.was_late(4) and not habits.was_late(4)


def test_own_state_that_changes_before_the_mutation_needs_a_copy_until_all_seal_again() -> None:
    habits = Habits(known=True, changed=True)
    assert habits.needs_undo(3) and not habits.seals_early(3)
    habits.reseal = True
    assert not habits.needs_undo(3) and habits.seals_early(3)


def test_touched_tensors_need_a_copy_but_what_is_sealed_early_counts() -> None:
    habits = Habits(known=True, touched=True)
    assert habits.needs_undo(3) and habits.seals_early(3)


@given(st.data())
def test_going_back_to_a_version_forgets_nothing_that_protects(data: st.DataObject) -> None:
    flags = st.booleans()
    steps = st.lists(st.integers(0, 30), unique=True, max_size=3).map(sorted)
    made = st.builds(
        Habits, known=flags, undo=flags, changed=flags, touched=flags, late=steps, own=st.just([]), reseal=flags
    )
    mine, version = data.draw(made), data.draw(made)
    before = Habits(**vars(mine))
    mine.restore(version)
    for name in ("known", "undo", "changed", "touched"):
        assert getattr(mine, name) == (getattr(before, name) or getattr(version, name))
    assert mine.reseal == version.reseal, "a barrier is made by all ranks or by none"
    assert set(mine.late) <= set(before.late) | set(version.late)
