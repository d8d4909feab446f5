"""Which settings of Megatron can be protected, and with which of its inside. Everything else is refused at start, with
its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flashrecovery.errors import UnsupportedError
from fr_megatron.capabilities import EVERY_MODEL, MEGATRON, MEGATRON_FSDP
from fr_megatron.megatron_fsdp import STRATEGIES
from fr_megatron.optimizers import dealt, members

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "TorchFullyShardedDataParallel")
"""The wrappers in ``megatron.core.distributed``. FullyShardedDataParallel: from 0.14 on; in 0.20 it is a function, and
what it makes is refused."""
_GRAPHS = "a captured graph holds the communicators that a recovery frees"


def check_inside(version: str) -> None:
    """Raises UnsupportedError that names everything of megatron-core's inside that is needed, and that this ``version``
    lacks."""
    MEGATRON.require(EVERY_MODEL, version)


def check(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raises UnsupportedError that lists everything about chunks and optimizer that cannot be protected."""
    found = list(dict.fromkeys(_unsupported(chunks, optimizer)))
    if found:
        raise UnsupportedError("flash-recovery does not support: " + "; ".join(found))


def _unsupported(chunks: Sequence[Any], optimizer: Any) -> Iterator[str]:
    from megatron.core import distributed
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    for chunk in chunks:
        kind = type(chunk)
        if kind not in [getattr(distributed, name, None) for name in WRAPPERS]:
            yield f"a model chunk of type {kind.__name__}; allowed: the wrappers of megatron.core.distributed"
            continue
        if kind is not distributed.DistributedDataParallel:
            yield from _unsupported_sharding(kind.__name__)
        if kind.__name__ == "FullyShardedDataParallel":
            yield from _unsupported_megatron_fsdp(chunk.ddp_config)
        for name in ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", "fp4_param_gather", "nccl_ub"):
            if getattr(chunk.ddp_config, name, False):
                yield f"{name}"
        if getattr(chunk, "overlap_param_gather_with_optimizer_step", False):
            yield "overlap_param_gather_with_optimizer_step"
        yield from _unsupported_model(chunk.config)
    if not isinstance(optimizer, MegatronOptimizer):
        yield f"the optimizer {type(optimizer).__name__}; make it with megatron.core.optimizer.get_megatron_optimizer"
        return
    if type(optimizer.step).__name__ == "OptimizerCudaGraphWrapper":
        yield f"an optimizer whose step is an OptimizerCudaGraphWrapper ({_GRAPHS})"
    if dealt(optimizer) and any(chunk.ddp_config.overlap_param_gather for chunk in chunks):
        yield f"{type(optimizer).__name__} with overlap_param_gather (parameters that are gathered in the next step)"
    for inner in members(optimizer):
        yield from _unsupported_optimizer(inner)


def _unsupported_model(config: Any) -> Iterator[str]:
    """What layers keep outside of parameters and buffers from one step to the next, or in the middle of one."""
    recipe = getattr(config, "fp8_recipe", None)
    if getattr(config, "fp8", None) and str(getattr(recipe, "value", recipe)) in ("delayed", "custom"):
        yield f"fp8_recipe={recipe!r} (Transformer Engine keeps a history of largest values)"
    if getattr(config, "qk_clip", False):
        yield "qk_clip (it clips 16-bit weights and their fp32 copies each for itself)"
    for name in (
        *("delay_wgrad_compute", "defer_embedding_wgrad_compute"),
        "overlap_dispatch_backward_with_experts_wgrad",
    ):
        if getattr(config, name, False):
            yield f"{name} (gradients that an interrupted step has put off would be added to the next)"
    for name in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(config, name, False):
            yield f"{name} (activations that an interrupted step has moved away)"
    for name in ("moe_paged_stash", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None):
            yield f"{name} (tokens of an interrupted step stay in its pages)"
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            yield f"{name} > 1 (weights in shares that backward passes gather: not tried)"
    if getattr(config, "enable_mhc_connections", False):
        yield "enable_mhc_connections (hyper-connections: not tried)"
    yield from _unsupported_communication(config)


def _unsupported_communication(config: Any) -> Iterator[str]:
    """What communicates, or remembers how, without a process group that can be exchanged."""
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if getattr(config, name, False):
            yield f"{name} ({_GRAPHS})"
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation not in (None, "none"):
        yield f"cuda_graph_impl={implementation!r} ({_GRAPHS})"
    if getattr(config, "tp_comm_overlap", False):
        yield "tp_comm_overlap (Transformer Engine's userbuffers have their own communicators)"
    if getattr(config, "moe_enable_deepep", False) or getattr(config, "moe_token_dispatcher_type", None) == "flex":
        yield "moe_token_dispatcher_type='flex', DeepEP, HybridEP (they have their own communicators)"
    if getattr(config, "symmetric_ar_type", None):
        yield f"symmetric_ar_type={config.symmetric_ar_type!r} (symmetric memory is mapped by all ranks together)"


def _unsupported_sharding(wrapper: str) -> Iterator[str]:
    """Sharded parameters have not been tried together with these."""
    from megatron.core import parallel_state as state

    sizes = {
        "tensor": state.get_tensor_model_parallel_world_size(),
        "pipeline": state.get_pipeline_model_parallel_world_size(),
        "context": state.get_context_parallel_world_size(),
        "expert": state.get_expert_model_parallel_world_size(),
    }
    for kind, size in sizes.items():
        if size > 1:
            yield f"{wrapper} with {kind} parallelism"


def _unsupported_megatron_fsdp(config: Any) -> Iterator[str]:
    if missing := MEGATRON_FSDP.missing():
        yield f"Megatron-FSDP without {MEGATRON_FSDP.name} as they are known ({'; '.join(missing)})"
    if config.data_parallel_sharding_strategy not in STRATEGIES:
        yield f"data_parallel_sharding_strategy={config.data_parallel_sharding_strategy!r}"
    if config.num_distributed_optimizer_instances > 1:
        yield "num_distributed_optimizer_instances > 1 with Megatron-FSDP (HSDP)"
    for name in ("nccl_ub", "fsdp_double_buffer"):
        if getattr(config, name, False):
            yield name


def _unsupported_optimizer(inner: Any) -> Iterator[str]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if type(inner) not in (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer):
        yield f"the optimizer {type(inner).__name__}"
        return
    for name in (
        *("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"),
        "optimizer_cuda_graph",
    ):
        if getattr(inner.config, name, False):
            yield name
