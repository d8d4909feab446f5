"""The sum of losses since the Trainer's last log: where it is kept, and how it gets into a replacement.

transformers 5 keeps it in the Trainer. In 4.5x it is a local variable of the training loop, which shows it after every
step (where a log may be due), and adds to a new tensor in the next one. So it is set in place while it is the loop's
own, and the same sum is formed beside it meanwhile, of the losses that the loop is given.
"""

from __future__ import annotations

from typing import Any

import torch

from flashrecovery.capabilities.of_trainer import LOOP


class KeptLoss:
    """The sum in a Trainer of transformers 5."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def value(self) -> torch.Tensor:
        """A copy in host memory; a scalar."""
        value: torch.Tensor = self._trainer._tr_loss.detach().cpu().clone()
        return value

    def put(self, saved: torch.Tensor) -> None:
        """Go back to what :meth:`value` gave, before the loop gets a step's losses."""
        self._trainer._tr_loss.copy_(saved)  # the loop holds this very tensor

    def adds(self, loss: torch.Tensor) -> None:
        """The loop gets a micro-batch's loss."""

    def shows(self, total: torch.Tensor) -> None:
        """The loop shows its sum after a step."""


class LocalLoss:
    """The sum in a loop of transformers 4.5x."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._total = torch.tensor(0.0, device=trainer.args.device)

    def value(self) -> torch.Tensor:
        return self._total.detach().cpu().clone()

    def put(self, saved: torch.Tensor) -> None:
        self._total.copy_(saved)

    def adds(self, loss: torch.Tensor) -> None:
        """As the loop does it."""
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not bool(torch.isfinite(loss)):
            loss = self._total / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        self._total = self._total + loss

    def shows(self, total: torch.Tensor) -> None:
        self._total = total


RunningLoss = KeptLoss | LocalLoss


def running_loss(trainer: Any) -> RunningLoss:
    """That of a Trainer of the installed version."""
    return KeptLoss(trainer) if LOOP.takes("kept") else LocalLoss(trainer)
