"""Hooks of ours on modules and optimizers of the script's, which may be copied, saved and compiled like any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class OwnHook:
    """Calls ``function``. In a copy of the module that has it (``copy.deepcopy(model)``, ``torch.save(model)``) it is
    one that does nothing, and to load that no package of ours is needed: what the function knows of is the process's
    own, and could not be copied."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and returns None


def not_traced(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as a hook of an optimizer, or of a module that the script calls. Where the script compiles
    ``optimizer.step``, or the wrapper around its model, Dynamo would trace what the hook does, agreements between the
    ranks included, and make it a part of its graph. It breaks the graph here instead; with ``fullgraph=True`` it raises
    its own error with this reason."""
    reason = (
        "flashrecovery has to know when a forward pass is over, and when an optimizer begins and ends its step; "
        "compile it without fullgraph=True"
    )
    result: Callable[..., None] = torch.compiler.disable(function, reason=reason)
    return result
