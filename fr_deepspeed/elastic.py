"""An engine in a job that changes its number of replicas: what cannot follow, and how the rest does.

Afterwards an engine is as one that was made in a job of the new size: the same ``train_batch_size`` and micro-batch,
other accumulation steps, its numbers of ranks, which rank writes checkpoints and monitors. Sizes that do not divide the
global batch are none of an engine's: DeepSpeed counts as many micro-batches on every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from flashrecovery.adapter.elastic import FrameworkBatch
from flashrecovery.errors import ConfigError
from fr_deepspeed import offload, slices
from fr_deepspeed.capabilities import REFORM, REFORM3, RESIZE
from fr_deepspeed.muon import is_muon


def tied_to_size(engine: Any) -> Iterator[str]:
    """What of ``engine`` cannot change its number of replicas, by name, and what is allowed instead."""
    if RESIZE.way is None:
        yield f"this DeepSpeed, which lacks {'; '.join(RESIZE.missing())}"
        return
    if engine.pipeline_parallelism:
        yield "a PipelineEngine (allowed: DeepSpeedEngine)"
        return
    stage = engine.zero_optimization_stage()
    if stage > 2:
        if REFORM3.way is None:
            yield f"ZeRO-3 of this DeepSpeed, which lacks {'; '.join(REFORM3.missing())}"
            return
        yield from slices.tied_to_size(engine)
    elif stage > 0:
        yield from _zero12(engine)
        if is_muon(engine.basic_optimizer):
            yield "the optimizer Muon, whose momentum is of the matrices that this size's partitions touch"
    if engine.has_moe_layers:
        yield "MoE layers, whose experts are on some of the ranks"
    if offload.offloads(engine):
        yield "zero_optimization.offload_optimizer"
    if engine.training_dataloader is not None:
        yield "training_data of deepspeed.initialize() (allowed: elastic_batches())"
    if not engine.gradient_average:
        yield 'gradient_allreduce_op = "sum" (allowed: "mean")'
    if any(getattr(module, "sparse", False) for module in engine.module.modules()):
        yield "an embedding with sparse gradients"
    if engine._is_gradient_accumulation_boundary is not None:
        yield "set_gradient_accumulation_boundary() (allowed: engine.step() after each micro-batch)"
    if engine.is_compiled:
        yield "engine.compile()"
    if _moved_away(engine.optimizer):
        yield "engine.offload_states(), whose copies are as long as this size's partitions (allowed: without it)"
    if engine.autotuning_enabled():
        yield "autotuning"
    writer = type(engine.checkpoint_engine).__name__
    if writer != "TorchCheckpointEngine":
        yield f"the checkpoint engine {writer} (allowed: DeepSpeed's default)"


_MOVED = (
    *("hp_params_pin_buffers", "lp_params_pin_buffers", "lp_param_contiguous_pin_buffer"),
    "lp_grad_partitions_flat_pin_buffers",
)
"""Where ``engine.offload_states`` keeps host copies for ``reload_states``; with ZeRO-3 they stay after it."""


def _moved_away(optimizer: Any) -> bool:
    """Whether the script has moved a ZeRO optimizer's state to the host, by a method."""
    return bool(getattr(optimizer, "offloaded_states", None)) or any(hasattr(optimizer, name) for name in _MOVED)


def _zero12(engine: Any) -> Iterator[str]:
    if REFORM.way is None:
        yield f"ZeRO-1 and 2 of this DeepSpeed, which lacks {'; '.join(REFORM.missing())}"
        return
    zero = engine.optimizer
    if zero.round_robin_gradients:
        yield "zero_optimization.round_robin_gradients, which orders parameters by the number of ranks"
    if getattr(zero, "parameter_alignment", False):
        yield "zero_optimization.parameter_alignment"
    if zero.optimizer is not engine.basic_optimizer:
        yield f"the optimizer {type(zero.optimizer).__name__}, which DeepSpeed creates again"


def batch_of(engine: Any, forwards: Callable[[], int] | None = None) -> FrameworkBatch:
    """The engine's global batch and micro-batch, and the sizes that its ``elasticity`` block allows."""
    batch, micro_batch = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
    return FrameworkBatch(batch, micro_batch, _elasticity(engine), forwards=forwards)


def _elasticity(engine: Any) -> frozenset[int] | None:
    """The numbers of replicas of DeepSpeed's ``elasticity`` block (to DeepSpeed 0.18); None without one.

    Raises ConfigError if this DeepSpeed does not know the block any more: what it asks for would not be kept to.
    """
    block = engine.config.get("elasticity", {}) if isinstance(engine.config, Mapping) else {}
    if not block.get("enabled", False):
        return None
    try:
        from deepspeed.elasticity import compute_elastic_config
        from deepspeed.version import version
    except ImportError as e:
        raise ConfigError(
            "DeepSpeed config: elasticity: this DeepSpeed has no elastic training; remove the block, the sizes are "
            "--elastic MIN:MAX of flashrecovery run"
        ) from e
    sizes = compute_elastic_config(ds_config=engine.config, target_deepspeed_version=version)[1]
    return frozenset(sizes)


def resize_engine(engine: Any) -> None:
    """Bring the engine's own numbers of ranks, and what it has made of them, to those of its groups.

    Not what belongs to its optimizer, and not the counters: see :func:`in_this_size`.
    """
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.utils import groups

    was_first = engine.global_rank == 0
    engine.world_size, engine.global_rank = dist.get_world_size(), dist.get_rank()
    engine.dp_world_size = groups._get_data_parallel_world_size()
    engine.seq_dp_world_size = groups._get_sequence_data_parallel_world_size()
    config = engine._config
    config.world_size, config.global_rank = engine.dp_world_size, engine.global_rank
    config.gradient_accumulation_steps = config.train_batch_size // (
        config.train_micro_batch_size_per_gpu * engine.dp_world_size
    )
    engine.save_non_zero_checkpoint = engine.save_zero_checkpoint = False
    engine._configure_checkpointing()
    if engine.global_rank == 0 and not was_first:
        engine.monitor = MonitorMaster(config.monitor_config)


def in_this_size(engine: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The common state of a job of perhaps another size as an engine of this one would have it.

    Between two steps all of an engine's micro-batches belong to whole steps, each of which has as many as there are
    accumulation steps.
    """
    replicas, batch = state["replicas"], state["batch"]
    if replicas == engine.dp_world_size or not batch:
        return state
    before = batch["gradient_accumulation_steps"]
    now = batch["train_batch_size"] // (batch["train_micro_batch_size_per_gpu"] * engine.dp_world_size)
    micro_steps = state["counters"]["micro_steps"] // before * now
    return {
        **state,
        "replicas": engine.dp_world_size,
        "batch": {**batch, "gradient_accumulation_steps": now},
        "counters": {**state["counters"], "micro_steps": micro_steps},
    }
