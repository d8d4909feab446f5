"""Optimizers that take steps and are registered by nobody: the job is refused, by name.

What such an optimizer steps on would not be rolled back on survivors, and would be as at the start in a replacement.
One that lives within a single step (an inner loop) is the script's business.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.local_state.own_hook import not_traced
from flashrecovery.worker.script_checks.stray_collectives import script_line


class OptimizerWatch:
    """Looks at every step of an optimizer of torch in this process.

    Args:
        known: the registered ones, and those that these step.
        modules: the registered models.
        version: of the step that is being taken.
    """

    def __init__(
        self, known: Iterable[Optimizer], modules: Iterable[torch.nn.Module], version: Callable[[], int]
    ) -> None:
        self._known = list(known)
        self._modules = list(modules)
        self._version = version
        self._first: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        self._handle = register_optimizer_step_pre_hook(not_traced(self._stepping))

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _stepping(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raises UnsupportedError in the second step in which it is used; in the first one where no optimizer is
        registered and it steps on a registered model."""
        if any(optimizer is known or optimizer.state is known.state for known in self._known):
            return
        version = self._version()
        if self._first.setdefault(optimizer, version) != version or (not self._known and self._is_for_model(optimizer)):
            one = "optimizer=optimizer" if not self._known else "optimizer=[first, second]"
            more = "" if not self._known else ", or one call for each model"
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() at {script_line(sys._getframe(1))}: this optimizer is not "
                f"registered. Write recovery.register(model=model, {one}){more}: else neither its state nor what it "
                "steps on would come back after a failure"
            )

    def _is_for_model(self, optimizer: Optimizer) -> bool:
        steps_on = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in steps_on for module in self._modules for parameter in module.parameters())
