"""Gradients that live from one step to the next: the step is refused, by name.

A script that takes each micro-batch for a step of its own adds up its gradients across steps; another one steps on
those of the step before. A recovery drops the gradients of the step that was cut short, and a replacement has none; the
result would be another one on all ranks alike, so that no comparison could find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    Args:
        parameters: gives those that the backward pass adds gradients to.
        attribute: of a parameter, where its gradient is added up.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]], attribute: str = "grad") -> None:
        self._parameters = parameters
        self._attribute = attribute
        self._left: list[tuple[nn.Parameter, torch.Tensor, tuple[int, ...]]] = []
        self._stepped = True

    def begin(self, closely: bool) -> None:
        """A step begins. It is looked at if the one before took no optimizer step, or ``closely``."""
        self._left.clear()
        if closely or not self._stepped:
            found = [(p, getattr(p, self._attribute, None)) for p in self._parameters()]
            left = [(parameter, gradient) for parameter, gradient in found if isinstance(gradient, torch.Tensor)]
            self._left = [(p, g, _versions(g)) for p, g in left[:: max(1, len(left) // _SAMPLES)]]
        self._stepped = False

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._stepped = True

    def used(self) -> None:
        """The backward pass begins, or an optimizer is about to step. Raises UnsupportedError if what an earlier step
        has left is still there."""
        left, self._left = self._left, []
        for parameter, gradient, versions in left:
            same = getattr(parameter, self._attribute, None) is gradient and _versions(gradient) == versions
            if same and bool(local_tensor(gradient).any()):
                raise UnsupportedError(ACROSS_STEPS)


def _versions(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor._version, local_tensor(tensor)._version
