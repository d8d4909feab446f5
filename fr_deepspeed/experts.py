"""Mixture of experts: each rank of an expert-parallel group holds other experts, under equal names.

An expert is replicated (ZeRO-0) or partitioned (ZeRO-1 and 2) over its expert-data-parallel group only, and so say the
names and holders of its shards; all other parameters live on all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def ranks_of(engine: Any, parameter: torch.Tensor) -> Sequence[int]:
    """The global ranks over which DeepSpeed averages the gradient of ``parameter``: they hold it, or its partitions."""
    import torch.distributed as dist
    from deepspeed.moe.utils import is_moe_param

    group = engine.data_parallel_group
    if is_moe_param(parameter):
        group = engine.expert_data_parallel_group[parameter.group_name]  # type: ignore[attr-defined]
    return dist.get_process_group_ranks(group)


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
