"""Which call of ``engine.step()`` ends a step of a script's own loop."""

from __future__ import annotations

import pytest

from flashrecovery.errors import UnsupportedError
from fr_deepspeed.own_loops import EngineSteps


class FakeEngine:
    def __init__(self) -> None:
        self.micro_steps = 0
        self.boundary = True

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary

    def gradient_accumulation_steps(self) -> int:
        return 2

    def step(self) -> None:
        self.micro_steps += 1


def test_a_call_in_the_text_without_one_of_the_engine_ends_no_step() -> None:
    """accelerate calls the engine's ``step()`` in an accumulation's last round only."""
    engine = FakeEngine()
    steps = EngineSteps(engine)
    engine.step()
    assert steps.is_whole()
    assert not steps.is_whole()


def test_a_round_that_is_no_boundary_ends_no_step() -> None:
    engine = FakeEngine()
    steps = EngineSteps(engine)
    engine.boundary = False
    engine.step()
    assert not steps.is_whole()
    engine.boundary = True
    engine.step()
    assert steps.is_whole()


def test_what_was_interrupted_behind_the_engines_call_ends_no_step_that_is_done_again() -> None:
    engine = FakeEngine()
    steps = EngineSteps(engine)
    engine.step()
    engine.micro_steps -= 1  # a recovery has taken it back
    assert not steps.is_whole()


def test_a_step_of_two_engines_ends_when_either_has_been_stepped() -> None:
    first, second = FakeEngine(), FakeEngine()
    one = EngineSteps(first)
    both = EngineSteps(second, one)
    first.step()
    assert both.is_whole() and not both.is_whole()
    second.step()
    assert both.is_whole() and not both.is_whole()
    assert (one.number, both.number) == (1, 2)


def test_two_engines_that_accumulate_differently_are_refused() -> None:
    class Other(FakeEngine):
        def gradient_accumulation_steps(self) -> int:
            return 4

    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps of 2 and 4"):
        EngineSteps(Other(), EngineSteps(FakeEngine()))
