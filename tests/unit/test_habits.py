"""What the core learns of a script's steps: pure decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.worker.local_state.step_profile import StepProfile


def test_the_first_step_keeps_a_copy_and_does_not_seal_early() -> None:
    habits = StepProfile()
    assert habits.needs_undo and not habits.seals_early
    habits.known = True
    assert not habits.needs_undo and habits.seals_early


def test_after_a_late_step_any_other_may_be() -> None:
    habits = StepProfile(known=True, late=True)
    assert habits.needs_undo and not habits.seals_early


def test_own_state_that_changes_before_the_mutation_needs_a_copy_until_all_seal_again() -> None:
    habits = StepProfile(known=True, changed=True)
    assert habits.needs_undo and not habits.seals_early
    habits.reseal = True
    assert not habits.needs_undo and habits.seals_early


def test_touched_tensors_need_a_copy_but_what_is_sealed_early_counts() -> None:
    habits = StepProfile(known=True, touched=True)
    assert habits.needs_undo and habits.seals_early


@given(st.data())
def test_going_back_to_a_version_forgets_nothing_that_protects(data: st.DataObject) -> None:
    flags = st.booleans()
    made = st.builds(
        StepProfile, known=flags, undo=flags, changed=flags, touched=flags, late=flags, own=st.just([]), reseal=flags
    )
    mine, version = data.draw(made), data.draw(made)
    before = StepProfile(**vars(mine))
    mine.restore(version)
    for name in ("known", "undo", "changed", "touched", "late"):
        assert getattr(mine, name) == (getattr(before, name) or getattr(version, name))
    assert mine.reseal == version.reseal, "a barrier is made by all ranks or by none"
