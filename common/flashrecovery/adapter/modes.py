"""``module.train()`` and ``module.eval()``: a step that was interrupted in an evaluation leaves the model in the wrong
mode, and doing it again would leave dropout out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from flashrecovery.errors import RestoreError


class ModeTracker:
    """Captures and restores the mode of every module below ``root``, as they are when it is made."""

    def __init__(self, root: nn.Module) -> None:
        self._modules: Sequence[nn.Module] = list(root.modules())

    def capture(self) -> dict[str, Any]:
        """``{"modules": how many, "eval": indices of those in evaluation mode}``."""
        return {"modules": len(self._modules), "eval": [i for i, m in enumerate(self._modules) if not m.training]}

    def mark(self) -> int:
        """Another number when a module's mode has changed."""
        return hash(tuple([m.training for m in self._modules]))

    def restore(self, state: dict[str, Any]) -> None:
        """Set every module's mode. Raises RestoreError if the model has another number of modules."""
        if state["modules"] != len(self._modules):
            raise RestoreError(
                f"the model has {len(self._modules)} modules, that of the failed process had {state['modules']}"
            )
        evaluating = frozenset(state["eval"])
        for index, module in enumerate(self._modules):
            module.training = index not in evaluating
