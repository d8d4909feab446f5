"""Histories that hypothesis thinks of, against the controller's machine: see machine_model for what must hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flashrecovery import events as ev
from tests.support.machine_model import OVER, Layout, Model

LAYOUTS = st.builds(
    Layout,
    ranks=st.integers(2, 5),
    unique=st.booleans(),
    undo=st.booleans(),
    gather=st.booleans(),
)


class Rules(RuleBasedStateMachine):
    """What can happen to a job."""

    model: Model

    @initialize(layout=LAYOUTS, seed=st.integers(0, 2**32))
    def launch(self, layout: Layout, seed: int) -> None:
        self.model = Model(layout, seed)

    def going(self) -> bool:
        return self.model.machine.job.state not in OVER

    @rule(moves=st.integers(1, 40))
    def go_on(self, moves: int) -> None:
        for _ in range(moves if self.going() else 0):
            if not self.model.act():
                break

    @precondition(going)
    @rule()
    def heartbeat(self) -> None:
        self.model.heartbeat()

    @precondition(going)
    @rule(seconds=st.sampled_from([0.05, 1.5, 11.0, 45.0]))
    def time(self, seconds: float) -> None:
        self.model.wait(seconds)

    @precondition(going)
    @rule(data=st.data(), number=st.integers(1, 3))
    def kill(self, data: st.DataObject, number: int) -> None:
        for _ in range(number):
            if living := self.model.living():
                self.model.kill(data.draw(st.sampled_from(living)))

    @precondition(going)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        if living := self.model.living():
            self.model.mute(data.draw(st.sampled_from(living)))

    @precondition(going)
    @rule()
    def a_message_comes_again(self) -> None:
        self.model.again()

    @precondition(going)
    @rule()
    def checkpoint(self) -> None:
        self.model.checkpoint()

    @precondition(going)
    @rule()
    def corrupt_the_next_transfer(self) -> None:
        self.model.corrupt += 1

    @invariant()
    def one_generation_trains(self) -> None:
        if hasattr(self, "model"):
            training = {w.generation for w in self.model.workers.values() if w.place == "training"}
            assert all(g <= self.model.machine.job.generation for g in training)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.settle()


def test_whatever_happens_to_a_job() -> None:
    run_state_machine_as_test(
        Rules,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def history(seed: int) -> Model:
    """Forty things at random, and then peace. Quicker than hypothesis, and a seed is told apart as easily."""
    pick = random.Random(seed)
    unique, undo, gather = (pick.random() < 0.5 for _ in range(3))
    model = Model(Layout(ranks=pick.randint(2, 5), unique=unique, undo=undo, gather=gather), seed)
    for _ in range(40):
        if model.machine.job.state in OVER:
            break
        what = pick.choice(["moves"] * 4 + ["beat", "wait", "kill", "mute", "again", "checkpoint", "corrupt"])
        living = model.living()
        if what == "moves":
            for _ in range(pick.randint(1, 40)):
                if not model.act():
                    break
        elif what == "beat":
            model.heartbeat()
        elif what == "wait":
            model.wait(pick.choice([0.05, 1.5, 11.0, 45.0]))
        elif what == "kill" and living:
            for rank in pick.sample(living, pick.randint(1, min(2, len(living)))):
                model.kill(rank)
        elif what == "mute" and living and pick.random() < 0.4:
            model.mute(pick.choice(living))
        elif what == "again":
            model.again()
        elif what == "checkpoint" and pick.random() < 0.3:
            model.checkpoint()
        elif what == "corrupt" and pick.random() < 0.3:
            model.corrupt += 1
    model.settle()
    return model


@pytest.mark.parametrize("block", range(4))
def test_histories_of_random_faults(block: int) -> None:
    ends, recoveries = dict.fromkeys(OVER, 0), 0
    for seed in range(100 * block, 100 * (block + 1)):
        try:
            model = history(seed)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        ends[model.machine.job.state] += 1
        recoveries += sum(isinstance(e, ev.RecoveryFinished) for e in model.events)
    assert recoveries >= 20 and all(count >= 10 for count in ends.values()), f"{ends}, {recoveries} recoveries"
