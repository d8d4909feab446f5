"""How often models go forward: to see whether a step computes each micro-batch before it takes the next one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flashrecovery.worker.own_hook import OwnHook


class Forwards:
    """Counts the forward passes of all of these models as they begin. Those within ``torch.compile`` are not seen."""

    def __init__(self, models: Iterable[Any]) -> None:
        self._begun = 0
        for model in models:
            model.register_forward_pre_hook(OwnHook(self._begins))

    def _begins(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph would be guarded by the number
            self._begun += 1

    def __call__(self) -> int:
        return self._begun
