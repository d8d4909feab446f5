"""Mixture of experts: what is refused, and what an interrupted step leaves. Which rank holds which expert:
:mod:`.layout`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def unsupported(engine: Any) -> Iterator[str]:
    """What cannot be protected of the expert layers of ``engine``."""
    from deepspeed.moe.layer import MoE

    if not engine.has_moe_layers:
        return
    if engine.pipeline_parallelism:
        yield "MoE layers in a pipeline"
    layers = [m for m in engine.module.modules() if isinstance(m, MoE)]
    if len(layers) < len(engine.num_experts):
        yield "expert_parallel (AutoEP); use deepspeed.moe.layer.MoE"
    if any(layer.deepspeed_moe.use_tutel for layer in layers):
        yield "MoE layers with use_tutel"


def reset_experts(engine: Any) -> None:
    """Drop the graph of an interrupted forward pass, and timers, which refuse to be started twice."""
    for layer in engine.moe_layers:
        layer.l_aux = layer.exp_counts = None
        layer.timers.timers.clear()
    for gate in engine.gate_modules:
        gate.timers.timers.clear()
