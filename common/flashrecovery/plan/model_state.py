"""Model and optimizer state: bytes of a parameter, and which ranks hold what."""

from __future__ import annotations

from enum import Enum

OPTIMIZER_BYTES = 12
"""A parameter: fp32 master weight and Adam's two moments."""
WEIGHT_BYTES = 2
"""A parameter as it is computed with, where that is kept beside the master weight."""


class Sharding(Enum):
    """Which ranks hold what of the state."""

    REPLICATED = "replicated"
    """DDP, Megatron without the distributed optimizer: every data-parallel rank holds everything."""
    OPTIMIZER = "optimizer"
    """ZeRO-1 and 2, Megatron's distributed optimizer: optimizer state is cut over the data-parallel ranks."""
    FULL = "full"
    """FSDP, ZeRO-3: weights and optimizer state are cut over the data-parallel ranks."""
