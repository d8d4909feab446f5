"""Optimizer steps that are taken before the first protected one: a forgotten ``recovery.steps()``. No torch in here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashrecovery.util.import_hooks import install

_UNPROTECTED_STEPS = 5
"""With this many optimizer steps before the first protected one, they are not a warm-up."""


def is_made_by_step() -> bool:
    """Whether the step that an optimizer is taking only makes its state: torch's ``get_state_dict()`` and
    ``set_state_dict()`` take one, with gradients of 0 and a learning rate of 0, where there is none."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    making = getattr(module, "_init_optim_state", None)
    code = getattr(making, "__code__", None)
    frame = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class UnprotectedSteps:
    """Counts the steps of torch's optimizers before this process's first protected step, so that a user who forgot
    ``recovery.steps()`` is reported within a few steps.

    Args:
        tell: called once, with the line of the script that takes the steps.
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
