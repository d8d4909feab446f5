"""Histories that hypothesis thinks of, against the worker's gate: training thread and control thread in any order.

What must hold is worked out a second time, from what has been announced and done, without the gate's own variables. The
two threads take turns here; that one of them waits for the other is in ``test_gate.py``.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flashrecovery.errors import StepInterrupted
from flashrecovery.runtime.page import TAG_MUTATING, Page
from flashrecovery.worker.control.gate import Gate

NOTHING = -1
AHEAD = st.sampled_from((1, 1, 1, 2, 0, -1, -2))
"""How much newer a command is than the newest one before it; below 1 it has been on its way for long."""


class Rules(RuleBasedStateMachine):
    """A worker's life. ``where``: what the training thread does, which the gate is not asked for."""

    @initialize()
    def launch(self) -> None:
        self.page = Page.create("rules")
        self.gate = Gate(self.page)
        self.where = "recovering"  # body | mutating | outside | between | recovering | done
        self.version = 0
        self.whole = False  # the live state is one version
        self.generation = 0
        self.announced = 0  # the newest generation that has been called off
        self.stopped = False
        self.held = False
        self.finish_to = NOTHING

    def teardown(self) -> None:
        if hasattr(self, "page"):
            self.page.close()

    def void(self) -> bool:
        return self.stopped and self.where != "mutating" and self.version >= self.finish_to

    # -- the training thread --------------------------------------------------------------------------

    @precondition(lambda self: self.where in ("between", "outside"))
    @rule()
    def next_step(self) -> None:
        self.gate.leave_outside()
        self.where = "between"
        if not self.stopped:
            self.gate.enter_block()
            self.gate.begin()
            self.where = "body"
            assert self.page.health().tag == self.version

    @precondition(lambda self: self.where == "body" and (self.stopped or not self.held))
    @rule()
    def mutate(self) -> None:
        """A held rank waits here, so it does not come to this rule."""
        void = self.void()
        try:
            self.gate.mutate()
        except StepInterrupted:
            assert void
        else:
            assert not void, "a step that is called off begins to change the state"
            self.where, self.whole = "mutating", False

    @precondition(lambda self: self.where in ("body", "mutating"))
    @rule(outside=st.booleans())
    def commit(self, outside: bool) -> None:
        void = self.void()
        try:
            go_on = self.gate.commit(outside=outside)
        except StepInterrupted:
            assert void
            return
        assert not void, "a step that is called off is committed"
        self.version += 1
        self.whole = True
        self.where = "outside" if outside else "between"
        self.gate.leave_block()
        assert go_on is not self.stopped
        assert self.page.committed == self.version

    @precondition(lambda self: self.where == "body")
    @rule()
    def check(self) -> None:
        try:
            self.gate.check()
        except StepInterrupted:
            assert self.void()
        else:
            assert not self.void()

    @precondition(lambda self: self.where in ("outside", "between", "recovering", "done"))
    @rule()
    def check_outside_of_a_step(self) -> None:
        """No process would catch it there."""
        self.gate.check()

    @precondition(lambda self: self.stopped and self.where not in ("recovering", "mutating"))
    @rule()
    def leave_the_step(self) -> None:
        """The training thread has noticed the stop and carries out commands."""
        self.gate.leave_outside()
        self.gate.leave_step()
        self.gate.leave_block()
        self.where = "recovering"

    @precondition(lambda self: self.stopped and self.where == "mutating")
    @rule()
    def a_collective_fails_while_the_state_changes(self) -> None:
        self.gate.torn()
        self.gate.leave_step()
        self.gate.leave_block()
        self.where, self.whole = "recovering", False

    @precondition(lambda self: self.where == "recovering" and self.whole)
    @rule()
    def a_restore_begins(self) -> None:
        self.gate.torn()
        self.whole = False

    @precondition(lambda self: self.where in ("between", "outside") and not self.stopped)
    @rule()
    def all_steps_are_taken(self) -> None:
        self.gate.leave_outside()
        self.gate.leave_step(done=True)
        self.where = "done"

    @precondition(lambda self: self.where == "recovering")
    @rule(behind=st.integers(0, 1), late=st.integers(0, 2))
    def resume(self, behind: int, late: int) -> None:
        """``late``: the command is that of an earlier generation, and was on its way."""
        version, generation = max(self.version - behind, 0), max(self.announced - late, self.generation)
        resumed = self.gate.resume(version, generation)
        assert resumed is (generation >= self.announced), "it goes on although something newer has been called off"
        self.version, self.whole = version, True
        if resumed:
            self.generation = generation
            self.stopped = self.held = False
            self.finish_to = NOTHING
            self.where = "between"
            health = self.page.health()
            assert (health.generation, health.committed) == (generation, version)

    # -- the control thread ---------------------------------------------------------------------------

    def too_late(self, generation: int) -> bool:
        return generation <= self.generation or generation < self.announced

    @rule(ahead=AHEAD)
    def hold(self, ahead: int) -> None:
        generation = self.announced + ahead
        settled, mutating, version = self.gate.hold(generation)
        assert (settled, mutating, version) == (self.where != "recovering", self.where == "mutating", self.version)
        if not self.too_late(generation):
            self.announced, self.held = generation, True

    @rule(ahead=AHEAD, more=st.integers(0, 1))
    def stop(self, ahead: int, more: int) -> None:
        generation = self.announced + ahead
        may_finish = self.gate.stop(generation, self.version + more)
        if not self.too_late(generation):
            self.announced, self.stopped, self.finish_to = generation, True, self.version + more
        steps = self.where not in ("recovering", "done")
        assert may_finish is (steps and (self.where == "mutating" or self.version < self.finish_to))

    @precondition(lambda self: self.stopped)
    @rule()
    def give_up(self) -> None:
        self.gate.give_up()
        self.finish_to = NOTHING

    # -- always ---------------------------------------------------------------------------------------

    @invariant()
    def it_says_what_it_holds(self) -> None:
        if hasattr(self, "gate"):
            assert self.gate.version == self.version
            assert self.gate.live == (self.version if self.whole else -1)
            assert self.gate.mutating is (self.where == "mutating")
            assert self.gate.stopped is self.stopped
            assert self.gate.held is self.held
            assert self.gate.generation == self.generation

    @invariant()
    def the_tag_says_when_the_state_changes(self) -> None:
        if hasattr(self, "gate") and self.where in ("body", "mutating"):
            assert (self.page.health().tag == TAG_MUTATING) is (self.where == "mutating")

    @invariant()
    def it_knows_whose_code_runs(self) -> None:
        if hasattr(self, "gate"):
            assert self.gate.outside is (self.where == "outside")
            assert self.gate.between is (self.where in ("outside", "between"))


def test_whatever_the_two_threads_do() -> None:
    run_state_machine_as_test(Rules, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
