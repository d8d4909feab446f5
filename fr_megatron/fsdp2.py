"""``TorchFullyShardedDataParallel``: torch's FSDP2 around the layers of a chunk (``--use-torch-fsdp2``).

Each rank has its rows of every parameter and steps on them, or on an fp32 copy of them; the 16-bit rows are made from
that. No other rank has them, so they travel to the neighbour in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from flashrecovery.adapter import faults, fsdp2_state
from fr_megatron.wrapper import FaultPoint, OnMesh


class TorchFSDP2(OnMesh):
    """What is inside of FSDP2 is looked up in :mod:`flashrecovery.adapter.fsdp2_state`."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._roots = [chunk.module for chunk in chunks]
        for root in self._roots:
            fsdp2_state.check(root)
            fsdp2_state.initialise(root)
        super().__init__(chunks)

    def reset(self, inner: Sequence[Any]) -> None:
        for root in self._roots:
            fsdp2_state.reset(root)
            for parameter in root.parameters():
                parameter.grad = None

    def flags(self) -> Any:
        return [fsdp2_state.capture_flags(root) for root in self._roots]

    def set_flags(self, flags: Any) -> None:
        for root, values in zip(self._roots, flags, strict=True):
            fsdp2_state.restore_flags(root, values)

    def gathering(self, inner: Sequence[Any], optimizer: Optimizer) -> FaultPoint | None:
        unit = fsdp2_state.middle_unit(self._roots[0])
        return lambda callback: faults.before_gather(unit, callback)
