"""The powers of Adam's betas that DeepSpeed's op for CPUs keeps, with a stand-in for it. No deepspeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fr_deepspeed.beta_powers import NEW, BetaPowers, Powers

BETAS = (0.9, 0.99)
OTHER = (0.8, 0.95)


class Op:
    """``Adam_Optimizer::IncrementStep`` and what it is for, in the same precision."""

    def __init__(self) -> None:
        self.step, self.betas, self.powers = 0, (np.float32(0), np.float32(0)), (np.float32(1), np.float32(1))
        self.calls = 0

    def __call__(self, _chunk: int, _flag: Any, _tensors: Any, _lr: float, b1: float, b2: float, *rest: Any) -> None:
        _eps, step, *_ = rest
        self.calls += 1
        betas = (np.float32(b1), np.float32(b2))
        if betas == self.betas and step == self.step:
            return
        if betas == self.betas and step == self.step + 1:
            self.powers = (self.powers[0] * betas[0], self.powers[1] * betas[1])
        else:
            self.powers = (np.float32(float(betas[0]) ** step), np.float32(float(betas[1]) ** step))
        self.step, self.betas = step, betas

    def corrections(self) -> tuple[float, float]:
        """What the parameters are computed with."""
        one = np.float32(1)
        return float(one - self.powers[0]), float(one / np.sqrt(one - self.powers[1]))


def made() -> tuple[Op, BetaPowers, Any]:
    op = Op()
    optimizer = SimpleNamespace(multi_tensor_adam=op, adam_w_mode=1)
    return op, BetaPowers(optimizer), optimizer


def train(optimizer: Any, *steps: int, betas: tuple[float, float] = BETAS) -> None:
    for step in steps:
        optimizer.multi_tensor_adam(2048, None, [], 0.1, *betas, 1e-8, step, 1, 1, 0.0)


@pytest.mark.parametrize("steps", [1, 2, 30, 1000, 5000])
def test_a_replacement_has_the_powers_of_its_peers(steps: int) -> None:
    op, powers, optimizer = made()
    train(optimizer, *range(1, steps + 1))
    other, replaced, fresh = made()
    replaced.restore(powers.capture())
    assert other.corrections() == op.corrections()
    assert other.calls < 2500, "of a long training, only what makes a difference is computed again"
    train(optimizer, steps + 1)
    train(fresh, steps + 1)
    assert other.corrections() == op.corrections()


def test_computing_them_again_would_not_do() -> None:
    op, _, optimizer = made()
    train(optimizer, *range(1, 31))
    other, _, fresh = made()
    train(fresh, 30)
    assert other.corrections() != op.corrections()


def test_a_survivor_goes_back_any_number_of_steps() -> None:
    op, powers, optimizer = made()
    train(optimizer, *range(1, 8))
    saved, then = powers.capture(), op.corrections()
    train(optimizer, *range(8, 30))
    powers.restore(saved)
    assert op.corrections() == then
    calls = op.calls
    powers.restore(saved)
    assert op.calls == calls, "nothing to do"


def test_back_to_the_start() -> None:
    op, powers, optimizer = made()
    saved = powers.capture()
    train(optimizer, 1, 2, 3)
    powers.restore(saved)
    train(optimizer, 1)
    fresh, _, other = made()
    train(other, 1)
    assert op.powers == fresh.powers


def test_jumps_and_other_betas_are_noted() -> None:
    """Steps of a checkpoint; parameter groups with their own betas, which the op computes again in every call."""
    op, powers, optimizer = made()
    train(optimizer, 100, 101, 102)
    assert powers.now == Powers(100, 102, powers.now.betas)
    train(optimizer, 103, betas=OTHER)
    train(optimizer, 103)
    other, replaced, _ = made()
    replaced.restore(powers.capture())
    assert other.powers == op.powers


def test_an_op_that_somebody_has_used_begins_again() -> None:
    op = Op()
    train(SimpleNamespace(multi_tensor_adam=op), 5, 6)
    assert BetaPowers(SimpleNamespace(multi_tensor_adam=op, adam_w_mode=0)).now == NEW
    assert op.step == 0 and [float(power) for power in op.powers] == [1.0, 1.0]
