"""Gradients that live from one step to the next: the step is refused, by name.

A script that treats each micro-batch as a step adds up its gradients across steps; another one steps on
those of the step before. A recovery drops the gradients of the step that was cut short, and a replacement has none; the
result would be another one on all ranks alike, so that no comparison could find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flashrecovery.adapter.placement import local_tensor
from flashrecovery.errors import UnsupportedError

ACROSS_STEPS = (
    "this step uses gradients of an earlier step, which no recovery could bring back: put all micro-batches of one "
    "optimizer step, and the optimizer step itself, into one `with step:`, and set the gradients to zero in it before "
    "its first backward pass (docs/limits.md)"
)
_SAMPLES = 3


class GradientWatch:
    """Looks at a few parameters' gradients, from the beginning of a step to their first use.

    What an earlier step has left is used by an optimizer that steps on it. That a backward pass adds to it says little
    yet: a generator's adds to its critic's gradients, which the critic sets to zero later in the step, and
    ``torch.autograd.grad`` adds to none.

    Args:
        parameters: gives those that the backward pass adds gradients to.
        attribute: of a parameter, where its gradient is added up.
        at_once: a backward pass that finds gradients of an earlier step is refused.
    """

    def __init__(
        self, parameters: Callable[[], Sequence[nn.Parameter]], attribute: str = "grad", *, at_once: bool = False
    ) -> None:
        self._parameters = parameters
        self._attribute = attribute
        self._at_once = at_once
        self._left: list[_Left] = []
        self._added: list[_Left] = []
        self._stepped = True

    def begin(self, closely: bool) -> None:
        """A step begins. It is looked at if the one before took no optimizer step, or ``closely``. Raises
        UnsupportedError if the one before has only added to the gradients of an earlier one."""
        if not self._stepped and any(self._is_there(one) for one in self._added):
            raise UnsupportedError(ACROSS_STEPS)
        self._left, self._added = [], []
        if closely or not self._stepped:
            found = [(p, getattr(p, self._attribute, None)) for p in self._parameters()]
            left = [(parameter, gradient) for parameter, gradient in found if isinstance(gradient, torch.Tensor)]
            self._left = [_Left(p, g, _versions(g)) for p, g in left[:: max(1, len(left) // _SAMPLES)]]
        self._stepped = False

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._stepped = True

    def backward(self) -> None:
        """A backward pass begins. Raises UnsupportedError if it may not find what it finds."""
        if not self._left and not self._added:
            return
        self._added = [one for one in self._added if self._is_there(one)]
        left, self._left = self._left, []
        self._added += [one for one in left if self._is_untouched(one)]
        if self._added and self._at_once:
            raise UnsupportedError(ACROSS_STEPS)

    def stepping(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """An optimizer with these parameter groups is about to step. Raises UnsupportedError if what an earlier step
        has left is still in their gradients."""
        if not self._left and not self._added:
            return
        own = {id(p) for group in groups for p in group["params"]}
        if any(self._is_untouched(one) for one in self._left if id(one.parameter) in own) or any(
            self._is_there(one) for one in self._added if id(one.parameter) in own
        ):
            raise UnsupportedError(ACROSS_STEPS)
        self._left = [one for one in self._left if id(one.parameter) not in own]
        self._added = [one for one in self._added if id(one.parameter) not in own]

    def _is_there(self, one: _Left) -> bool:
        """Whether it is the same tensor, and not zero."""
        return getattr(one.parameter, self._attribute, None) is one.gradient and bool(local_tensor(one.gradient).any())

    def _is_untouched(self, one: _Left) -> bool:
        return _versions(one.gradient) == one.versions and self._is_there(one)


@dataclass(frozen=True)
class _Left:
    """A gradient that was there when the step began."""

    parameter: nn.Parameter
    gradient: torch.Tensor
    versions: tuple[int, ...]


def _versions(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor._version, local_tensor(tensor)._version
