"""ZeRO-0: every rank holds everything. fp32 steps on the module's parameters, bf16 and fp16 on fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flashrecovery.adapter import ParamRecord, constant, replicated
from fr_deepspeed.engine import EngineAdapter
from fr_deepspeed.layout import ranks_of


class PlainEngineAdapter(EngineAdapter):
    """fp32: DeepSpeed uses the basic optimizer as it is."""

    name = "deepspeed-zero0"

    @property
    def _optimized(self) -> Sequence[nn.Parameter]:
        return self._weights

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        trained = {id(p) for p in self._weights}
        return tuple(
            ParamRecord(fqn, *replicated(fqn, ranks_of(self.engine, p)), constant(p))
            for fqn, p in self.inner.named_parameters()
            if id(p) in trained
        )

    def _reset_optimizer(self) -> None:
        """Torch's optimizers keep nothing half-finished."""


class MasterWeightsAdapter(EngineAdapter):
    """bf16, fp16: the shards are the fp32 masters; the module's weights are their rounded copies."""

    name = "deepspeed-zero0-masters"

    def __init__(self, engine: Any, optimizer: Optimizer) -> None:
        wrapper = engine.optimizer
        self._pairs = [
            (low, master)
            for lows, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for low, master in zip(lows, masters, strict=True)
        ]
        super().__init__(engine, optimizer)

    @property
    def _optimized(self) -> Sequence[nn.Parameter]:
        return [low for low, _ in self._pairs]

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        names = {id(p): fqn for fqn, p in self.inner.named_parameters()}
        return tuple(
            ParamRecord(names[id(low)], *replicated(names[id(low)], ranks_of(self.engine, low)), constant(master))
            for low, master in self._pairs
        )

    def _reset_optimizer(self) -> None:
        self.engine.optimizer.overflow = False

    def _derive_weights(self) -> None:
        for low, master in self._pairs:
            low.copy_(master)
