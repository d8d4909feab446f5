"""Optimizer steps that are taken before the first protected one: a forgotten ``recovery.steps()``. No torch in here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashrecovery.util.import_hooks import install

_UNPROTECTED_STEPS = 5
"""So many optimizer steps before the first protected one are no warm-up."""


class UnprotectedSteps:
    """Counts the steps of torch's optimizers until this process has come to its first protected step: whoever has
    forgotten ``recovery.steps()`` hears of it within a few steps.

    Args:
        tell: gets the line of the script that takes them, once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._count = 0
        self._handle: Any = None

    def watch(self) -> None:
        """As soon as torch has been imported."""

        def hook(module: ModuleType) -> None:
            self._handle = module.register_optimizer_step_pre_hook(self._stepping)

        install({"torch.optim.optimizer": hook})

    def over(self) -> None:
        """The process has come to its first protected step. Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _stepping(self, *_: Any) -> None:
        self._count += 1
        if self._count == _UNPROTECTED_STEPS:
            from flashrecovery.worker.script_checks.stray_collectives import script_line  # it imports torch

            self._tell(script_line(sys._getframe(1)))
