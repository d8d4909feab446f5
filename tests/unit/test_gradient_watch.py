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
        self.watch.used()
        self.model(torch.ones(1, 2)).sum().backward()

    def step(self) -> None:
        self.watch.used()
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
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.backward()


def test_a_script_that_never_sets_them_to_zero_is_refused_in_a_step_that_is_looked_at() -> None:
    it = Script()
    it.begin()
    it.backward()
    it.step()
    it.begin(closely=False)
    it.backward()
    it.step()
    it.begin()
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.backward()


def test_a_step_on_the_gradients_of_the_step_before_is_refused() -> None:
    it = Script()
    it.begin()
    it.backward()
    it.begin()
    with pytest.raises(UnsupportedError, match="uses gradients of an earlier step"):
        it.step()


def test_where_a_framework_adds_them_up() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    watch = GradientWatch(lambda: [parameter], "main_grad")
    watch.begin(True)
    watch.used()
    parameter.main_grad += 1  # type: ignore[attr-defined]
    watch.begin(True)
    parameter.main_grad.zero_()  # type: ignore[attr-defined]
    watch.used()
    parameter.main_grad += 1  # type: ignore[attr-defined]
    watch.begin(True)
    with pytest.raises(UnsupportedError):
        watch.used()
