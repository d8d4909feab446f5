"""Which optimizer a script gets that asks for ``torch.optim.AdamW``: ``TEST_OPTIMIZER``, one of :func:`choose`."""

from __future__ import annotations

import functools
import os

import torch


def choose() -> None:
    """``fused`` (torch's own), ``apex`` or ``transformer-engine``; unset: what the script asks for."""
    kind = os.environ.get("TEST_OPTIMIZER", "")
    if kind == "fused":
        torch.optim.AdamW = functools.partial(torch.optim.AdamW, fused=True)  # type: ignore[misc,assignment]
    elif kind == "apex":
        from apex.optimizers import FusedAdam  # type: ignore[import-not-found]

        torch.optim.AdamW = FusedAdam  # type: ignore[misc]
    elif kind == "transformer-engine":
        from transformer_engine.pytorch.optimizers import FusedAdam  # type: ignore[import-not-found,no-redef]

        torch.optim.AdamW = FusedAdam  # type: ignore[misc]
    elif kind:
        raise ValueError(f"TEST_OPTIMIZER = {kind!r}: fused, apex and transformer-engine are allowed")
