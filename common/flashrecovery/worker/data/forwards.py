"""Counts forward passes, to see whether a step computes each micro-batch before it takes the next one.

A hook counts. ``torch.compile`` traces the hook only once: a number that it reads would become a guard of the graph.
What a traced hook only *writes*, the compiled code writes each time it runs (Dynamo's side effects). So for compiled
models it is known whether there were passes since the last check, but not how many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flashrecovery.worker.local_state.own_hook import OwnHook


class Forwards:
    """Counts the forward passes of all of these models as they begin: those within ``torch.compile`` as one, however
    many of them there have been between two calls of this object. Not seen are those of a function that was compiled,
    and called, before this was made. (Where a function is compiled with ``fullgraph=True`` that checkpoints the whole
    model, by ``torch.utils.checkpoint``, Dynamo refuses what the hook writes.)

    Attributes:
        compiled: some have been within ``torch.compile``, so that the number is the least that there can have been.
    """

    def __init__(self, models: Iterable[Any]) -> None:
        self.compiled = False
        self._begun = 0
        self._compiled_since = False
        for model in models:
            model.register_forward_pre_hook(OwnHook(self._begins))

    def _begins(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled_since = True  # written, and never read here
        else:
            self._begun += 1

    def __call__(self) -> int:
        if self._compiled_since:
            self.compiled, self._compiled_since = True, False
            self._begun += 1
        return self._begun
