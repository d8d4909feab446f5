"""Optimizers that take steps and are not registered: the job is refused, by name.

What such an optimizer steps on would not be rolled back on survivors, and would be as at the start in a replacement.
One that lives within a single step (an inner loop) is the script's business.

Parameters that a registered one gets while training goes on are named: a replacement does not have them, and the
recovery would fail.
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
        tell: called once for each registered one whose parameter groups have changed since; None: not checked.
    """

    def __init__(
        self,
        known: Iterable[Optimizer],
        modules: Iterable[torch.nn.Module],
        version: Callable[[], int],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._known = list(known)
        self._sizes = [_sizes(optimizer) for optimizer in self._known]
        self._tell = tell
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
        for number, known in enumerate(self._known):
            if optimizer is known or optimizer.state is known.state:
                if self._tell is not None and _sizes(optimizer) != self._sizes[number]:
                    self._tell_groups(optimizer, number, self._tell)
                return
        if self._is_container(optimizer):
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

    def _is_container(self, optimizer: Optimizer) -> bool:
        """Whether it has neither state nor parameters itself, and steps others that are registered, each of which is
        looked at itself (torchtitan's ``OptimizersContainer``)."""
        inner = vars(optimizer).get("optimizers")
        if optimizer.state or not isinstance(inner, (list, tuple)) or not inner:
            return False
        if not all(any(one is known for known in self._known) for one in inner):
            return False
        return _parameters(optimizer) <= frozenset().union(*map(_parameters, inner))

    def _tell_groups(self, optimizer: Optimizer, number: int, tell: Callable[[str], None]) -> None:
        before, self._sizes[number] = self._sizes[number], _sizes(optimizer)
        tell(
            f"{script_line(sys._getframe(2))}: the parameter groups of {type(optimizer).__name__} have changed since "
            f"the first step (parameters in each: {before}, now {self._sizes[number]}). A replacement does not have "
            "these, and the recovery from a failure would end the job: add all of them before the first step, with a "
            "learning rate of 0 where they are to wait"
        )

    def _is_for_model(self, optimizer: Optimizer) -> bool:
        steps_on = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in steps_on for module in self._modules for parameter in module.parameters())


def _sizes(optimizer: Optimizer) -> list[int]:
    """The size of each parameter group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
