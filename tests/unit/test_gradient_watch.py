"""Gradients that live from one step to the next are refused, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashrecovery.adapter.gradients import GradientWatch
from flashrecovery.errors import UnsupportedError


class Script:
    """A model, and how its script takes its steps."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.watch = GradientWatch(lambda: list(self.model.parameters()))

    def begin(self, *, closely: bool = True) -> None:
        self.watch.begin(closely)

    def backward(self) -> None:
        self.watch.backward()
        self.model(torch.ones(1, 2)).sum().backward()

    def step(self) -> None:
        self.watch.stepping(self.optimizer.param_groups)
        self.optimizer.step()
        self.watch.stepped()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_script_that_sets_them_to_zero(to_none: bool, at_the_end: bool) -> None:
    it = Script()
    for _step in range(4):
        it.begin()
        if not at_the_end:
            it.optimizer.zero_grad(set_to_none=to_none)
        it.backward()
        it.backward()  # a second micro-batch
        it.step()
        if at_the_end:
            it.optimizer.zero_grad(set_to_none=to_none)


def test_a_script_that_leaves_a_step_out() -> None:
    it = Script()
    for step in range(6):
        it.begin(closely=False)
        it.optimizer.zero_grad()
        it.backward()
        if step % 2:
            it.step()


@pytest.mark.parametrize("closely", [True, False])
def test_a_micro_batch_a_step_is_refused(closely: bool) -> None:
    it = Script()
    it.begin(closely=closely)
    it.backward()
    it.begin(closely=closely)
    it.backward()
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.step()


def test_micro_batches_as_steps_are_refused_before_the_third() -> None:
    it = Script()
    for _step in range(2):
        it.begin(closely=False)
        it.backward()
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.begin(closely=False)


def test_a_script_that_never_sets_them_to_zero_is_refused_in_a_step_that_is_looked_at() -> None:
    it = Script()
    it.begin()
    it.backward()
    it.step()
    it.begin(closely=False)
    it.backward()
    it.step()
    it.begin()
    it.backward()
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.step()


def test_a_step_on_the_gradients_of_the_step_before_is_refused() -> None:
    it = Script()
    it.begin()
    it.backward()
    it.begin()
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.step()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("overflows", [True, False])
def test_a_generator_that_adds_to_its_critics_gradients_first(to_none: bool, overflows: bool) -> None:
    it = Script()
    for step in range(4):
        it.begin()
        it.backward()  # the generator's loss, through the critic
        it.optimizer.zero_grad(set_to_none=to_none)
        it.backward()
        if not overflows or step > 1:  # a gradient scaler leaves the first steps out
            it.step()


def test_another_optimizer_steps_while_they_are_there() -> None:
    it = Script()
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for _step in range(3):
        it.begin()
        it.backward()
        it.watch.stepping(other.param_groups)
        it.optimizer.zero_grad()
        it.backward()
        it.step()


def test_gradients_that_are_added_to_nothing_come_before_they_are_set_to_zero() -> None:
    it = Script()
    for _step in range(3):
        it.begin()
        it.watch.backward()
        torch.autograd.grad(it.model(torch.ones(1, 2)).sum(), list(it.model.parameters()))  # a gradient penalty's
        it.optimizer.zero_grad()
        it.backward()
        it.step()


def test_where_a_framework_adds_them_up() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    watch = GradientWatch(lambda: [parameter], "main_grad", at_once=True)
    watch.begin(True)
    watch.backward()
    parameter.main_grad += 1  # type: ignore[attr-defined]
    watch.begin(True)
    parameter.main_grad.zero_()  # type: ignore[attr-defined]
    watch.backward()
    parameter.main_grad += 1  # type: ignore[attr-defined]
    watch.begin(True)
    with pytest.raises(UnsupportedError):
        watch.backward()
