"""The megatron-core example with an Adam that counts its steps in the parameter group, not for each parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # noqa: F401 - first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import megatron.core.optimizer
import torch

import pretrain_gpt


class FusedAdam(torch.optim.Optimizer):
    """Decoupled weight decay, in plain torch, with the state of FusedAdam of apex and Transformer Engine. A group that
    is empty on this rank is skipped, so that its counter does not exist. What it keeps in its attributes changes the
    learning rate of each step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_others: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.calls, self.noise = 0, torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.calls += 1
        self.factor = float(1 + 0.1 * torch.randn((), generator=self.noise)) / (1 + 0.01 * self.calls)
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        count = group["step"]
        denominator = (state["exp_avg_sq"] / (1 - second**count)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"] / (1 - first**count), denominator, value=-group["lr"] * self.factor)


if __name__ == "__main__":
    megatron.core.optimizer.Adam = FusedAdam  # the name that get_megatron_optimizer looks up
    pretrain_gpt.main()
