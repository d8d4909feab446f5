"""Adam's powers of its betas, where they are kept in C++: DeepSpeed's ``FusedAdam`` on the CPU (``{"type": "Adam"}``).

The op multiplies them on from step to step, in one object of the process, and computes them again (by ``pow``, which
rounds otherwise) when step or betas are not the next ones. So a replacement's powers, and its weights, would differ in
their last bits from its peers'. Here every call is noted; a recovery makes the calls again, on a tensor of one element.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from fr_deepspeed.muon import is_muon

Betas = tuple[float, float]

_INSIGNIFICANT = 2.0**-30
"""For a power this small, ``1 - power`` is 1 in fp32, whatever its last bits are."""


@dataclass(frozen=True)
class Powers:
    """What the op keeps: the powers of ``betas`` that ``pow`` gave at step ``first``, multiplied on up to ``step``."""

    first: int
    step: int
    betas: Betas

    def after(self, step: int, betas: Betas) -> Powers:
        """The powers after a call of the op for ``step``. Several calls for one step (one for each parameter group) are
        as good as one."""
        if betas != self.betas:
            return Powers(step, step, betas)
        if step in (self.step, self.step + 1):
            return replace(self, step=step)
        return Powers(step, step, betas)

    def calls(self) -> Iterator[int]:
        """The steps with which a new op has to be called to have the same powers, as far as it makes a difference."""
        insignificant = max(self.betas) ** self.step < _INSIGNIFICANT
        yield from range(self.step if insignificant else self.first, self.step + 1)


NEW = Powers(0, 0, (0.0, 0.0))
"""The powers of an op that has not been called yet."""


class BetaPowers:
    """The powers in the op of one optimizer, which is the only ``FusedAdam`` that there is (of those with, or of those
    without decoupled decay)."""

    def __init__(self, optimizer: Any) -> None:
        self._op = optimizer.multi_tensor_adam
        self._mode: int = optimizer.adam_w_mode
        self.now = NEW
        self._fault: Callable[[], None] | None = None
        self._forget()
        optimizer.multi_tensor_adam = self._noted

    def capture(self) -> tuple[int, int, Betas]:
        first, step, betas = astuple(self.now)
        return first, step, betas

    def restore(self, saved: tuple[int, int, Betas]) -> None:
        """Bring the op to what :meth:`capture` returned, here or in another process."""
        first, step, (beta1, beta2) = saved
        wanted = Powers(first, step, (beta1, beta2))
        if wanted == self.now:
            return
        self._forget()
        if wanted != NEW:
            for each in wanted.calls():
                self._call(each, wanted.betas)
        self.now = wanted

    def arm(self, callback: Callable[[], None]) -> None:
        """For fault injection: call it once, after the op's next call; other parameter groups have not been stepped on
        then."""
        self._fault = callback

    def _noted(
        self,
        chunk: int,
        flag: torch.Tensor,
        tensors: Any,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        *others: Any,
    ) -> Any:
        self.now = self.now.after(step, (_float(beta1), _float(beta2)))
        returned = self._op(chunk, flag, tensors, lr, beta1, beta2, eps, step, *others)
        callback, self._fault = self._fault, None
        if callback is not None:
            callback()
        return returned

    def _forget(self) -> None:
        """Set the op back as if it had never been called: with betas unlike any before, and the powers of step 0."""
        self._call(NEW.step, NEW.betas)

    def _call(self, step: int, betas: Betas) -> None:
        nothing = [[torch.zeros(1)] for _ in ("gradient", "parameter", "first moment", "second moment")]
        self._op(1, torch.zeros(1, dtype=torch.int), nothing, 0.0, *betas, 1.0, step, self._mode, 0, 0.0)


def beta_powers(optimizer: Any) -> BetaPowers | None:
    """The powers of the engine's basic optimizer, if it keeps them in C++; None for all other optimizers."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import FusedAdam

    on_cpu = get_accelerator().device_name() == "cpu"
    adam = optimizer.aux_optimizer if is_muon(optimizer) else optimizer
    return BetaPowers(adam) if isinstance(adam, FusedAdam) and on_cpu else None


def _float(value: float) -> float:
    """``value`` as C++ computes with it."""
    return ctypes.c_float(value).value
