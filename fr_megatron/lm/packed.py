"""What Megatron-LM's loop counts of packed samples in an iteration, from core 0.18 on: real tokens, and squares of
their lengths, for the number of operations in the log.

A step's forward passes add to it, and the loop reduces it over the world after the step, outside of all calls. Here it
is reduced at the step's end, as a part of it; a step that is made again begins with nothing. (Of what an evaluation has
added, Megatron would make a part of the next iteration.)
"""

from __future__ import annotations

import importlib
from typing import Any

from fr_megatron.capabilities import PACKED

NONE = (None, None)
"""Samples are not packed."""


def forget() -> None:
    """Begin with nothing."""
    if PACKED.way is None:
        return
    training: Any = importlib.import_module("megatron.training.training")
    training._seqlen_stats_active = False
    if training._seqlen_stats_in_iteration is not None:
        training._seqlen_stats_in_iteration.zero_()
