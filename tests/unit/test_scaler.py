"""A gradient scaler comes back as one between two steps."""

from __future__ import annotations

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from flashrecovery.worker.local_state.grad_scaler import BetweenSteps, settled


def a_step(scaler: GradScaler, optimizer: torch.optim.Optimizer, *, cut_short: bool = False) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    if not cut_short:
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("scale", [8.0, 2.0**127])  # of the second, gradients are not finite
def test_a_step_that_was_cut_short_is_done_again_from_its_beginning(scale: float) -> None:
    results = []
    for cut_short in (False, True):
        parameter = torch.nn.Parameter(torch.full((4,), 8.0))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
        kept = settled(scaler)
        state = kept.state_dict()
        if cut_short:
            a_step(scaler, optimizer, cut_short=True)
            kept.load_state_dict(state)
        for _step in range(3):
            a_step(scaler, optimizer)
        results.append((parameter.tolist(), scaler.state_dict()))
    assert results[0] == results[1]


def test_without_that_torch_refuses_or_goes_wrong() -> None:
    """Else there would be nothing to forget, and this module could go."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler("cpu", init_scale=8.0)
    state = scaler.state_dict()
    a_step(scaler, optimizer, cut_short=True)
    scaler.load_state_dict(state)
    with pytest.raises(RuntimeError, match="unscale_"):
        a_step(scaler, optimizer)


def test_a_scaler_that_is_switched_off() -> None:
    scaler = settled(GradScaler("cpu", enabled=False))
    scaler.load_state_dict(scaler.state_dict())


def test_other_objects_are_themselves() -> None:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 2)
    assert settled(schedule) is schedule
    assert isinstance(settled(GradScaler("cpu")), BetweenSteps)
