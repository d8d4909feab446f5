"""An optimizer that is not registered is refused in its second step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.script_checks.optimizer_watch import OptimizerWatch

VERSION = [0]


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter])


@pytest.fixture
def known() -> Iterator[torch.optim.Optimizer]:
    VERSION[0] = 0
    mine = optimizer()
    watch = OptimizerWatch([mine], [], lambda: VERSION[0])
    watch.start()
    yield mine
    watch.stop()


def test_registered_ones_may_step(known: torch.optim.Optimizer) -> None:
    for VERSION[0] in range(3):
        known.step()


def test_another_one_is_named_with_its_place(known: torch.optim.Optimizer) -> None:
    stranger = optimizer()
    stranger.step()
    stranger.step()  # in the same step
    VERSION[0] = 1
    with pytest.raises(UnsupportedError, match=r"AdamW\.step\(\) at .*test_optimizer_watch\.py:\d+: .* not registered"):
        stranger.step()


def test_a_step_that_is_done_again_is_the_same_step(known: torch.optim.Optimizer) -> None:
    stranger = optimizer()
    for _attempt in range(3):
        stranger.step()


def test_an_inner_loop_has_a_new_one_in_each_step(known: torch.optim.Optimizer) -> None:
    for VERSION[0] in range(3):
        optimizer().step()


def test_one_that_shares_the_state_of_a_registered_one_is_its_wrapper(known: torch.optim.Optimizer) -> None:
    wrapper = optimizer()
    wrapper.state = known.state
    for VERSION[0] in range(3):
        wrapper.step()


def test_nothing_is_looked_at_afterwards() -> None:
    watch = OptimizerWatch([], [], lambda: VERSION[0])
    watch.start()
    watch.stop()
    stranger = optimizer()
    for VERSION[0] in range(3):
        stranger.step()


def test_where_none_is_registered_the_first_step_on_the_model_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    watch = OptimizerWatch([], [model], lambda: 0)
    watch.start()
    try:
        optimizer().step()  # on something else
        with pytest.raises(UnsupportedError, match=r"register\(model=model, optimizer=optimizer\)"):
            torch.optim.SGD(model.parameters()).step()
    finally:
        watch.stop()


def test_parameters_that_come_amid_training_are_named_once() -> None:
    model, more = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    mine, other = torch.optim.SGD(model.parameters()), torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    told: list[str] = []
    watch = OptimizerWatch([other, mine], [model], lambda: 0, told.append)
    watch.start()
    try:
        for _ in range(2):
            mine.step()
        assert told == []
        mine.add_param_group({"params": more.parameters()})
        for _ in range(2):
            mine.step()
            other.step()
        (text,) = told
        assert "test_optimizer_watch.py" in text and "SGD" in text and "[2], now [2, 2]" in text
        mine.param_groups[0]["params"].append(torch.zeros(1, requires_grad=True))
        mine.step()
        assert len(told) == 2 and "[2, 2], now [3, 2]" in told[1]
    finally:
        watch.stop()


class Container(torch.optim.Optimizer):
    """Steps others, as torchtitan's does."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], *more: torch.nn.Parameter) -> None:
        self.optimizers = optimizers
        inner = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        super().__init__([*inner, *more], {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


def test_a_container_of_registered_ones_may_step(known: torch.optim.Optimizer) -> None:
    container = Container([known])
    for VERSION[0] in range(3):
        container.step()


def test_a_container_of_others_or_with_parameters_of_its_own_is_named(known: torch.optim.Optimizer) -> None:
    for container in (Container([known, optimizer()]), Container([known], torch.nn.Parameter(torch.ones(1)))):
        container.step()
        VERSION[0] += 1
        with pytest.raises(UnsupportedError, match=r"Container\.step\(\)"):
            container.step()
