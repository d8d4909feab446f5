"""Optimizers that take steps and are registered by nobody: the job is refused, by name.

What such an optimizer steps on would not be rolled back on survivors, and would be as at the start in a replacement.
One that lives within a single step (an inner loop) is the script's business.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.outside import script_line


class OptimizerWatch:
    """Looks at every step of an optimizer of torch in this process.

    Args:
        known: the registered ones, and those that these step.
        version: of the step that is being taken.
    """

    def __init__(self, known: Iterable[Optimizer], version: Callable[[], int]) -> None:
        self._known = list(known)
        self._version = version
        self._first: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._stepping)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _stepping(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raises UnsupportedError in the second step in which it is used."""
        if any(optimizer is known or optimizer.state is known.state for known in self._known):
            return
        version = self._version()
        if self._first.setdefault(optimizer, version) != version:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() at {script_line(sys._getframe(1))}: this optimizer is not "
                "registered, so neither its state nor what it steps on would come back after a failure: give it to "
                "recovery.register() with its model, "
                "recovery.register(model=model, optimizer=[first, second]) or one call for each model"
            )
