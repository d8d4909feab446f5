"""Megatron in a job that changes its number of replicas: what cannot follow, and how the rest does.

A replica is what has the whole model (:mod:`fr_megatron.replicas`). Process groups keep their handles, and Megatron
asks them for size and rank at nearly all places. What it has noted instead:

==========================  ====================================================================================
``parallel_state``          lists of ranks
buffers and buckets         the (expert-)data-parallel size, and the factor of the gradients that follows from the
                            data-parallel one, of experts, too
attention                   Transformer Engine's: the ranks of its context-parallel peers
micro-batch calculator      micro-batches on a replica
tracked random streams      reseeded for each micro-batch and model chunk, as torch's own are
==========================  ====================================================================================

Buckets without the distributed optimizer are the same in every size (but ``bucket_size`` of Megatron's own choice
follows the size of the launch, from 41 ranks on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from flashrecovery.adapter.elastic import FrameworkBatch
from flashrecovery.adapter.loop import union
from fr_megatron.capabilities import FOLLOWED, REFORM
from fr_megatron.layout import is_expert
from fr_megatron.optimizers import dealt, inner_optimizers, trains_experts
from fr_megatron.replicas import computing, data_parallel_group, sharers, unknown_replicas
from fr_megatron.shard_layout import buffers_of, names_of

_LISTS = "_RANKS"
"""How the names of ``parallel_state``'s lists of ranks end."""
_NOTED = ("_MPU_DATA_PARALLEL_WORLD_SIZE", "_MPU_DATA_PARALLEL_RANK")
"""Numbers in place of those of the groups, which a script may set."""


def tied_to_size(chunks: Sequence[Any], optimizer: Any) -> Iterator[str]:
    """What of Megatron cannot change its number of replicas, by name, and what is allowed instead."""
    if FOLLOWED.way is None:
        yield f"this Megatron, which lacks {'; '.join(FOLLOWED.missing())}"
        return
    for chunk in chunks:
        if type(chunk).__name__ != "DistributedDataParallel":
            yield f"{type(chunk).__name__} (allowed: megatron-core's DistributedDataParallel)"
            return
    yield from dict.fromkeys(name for chunk in chunks for name in _of_chunk(chunk))
    if dealt(optimizer):
        yield f"{type(optimizer).__name__}, whose parameters are dealt out (allowed: the distributed optimizer)"
    distributed = any(chunk.ddp_config.use_distributed_optimizer for chunk in chunks)
    if distributed and several(inner_optimizers(optimizer)):
        yield "several distributed optimizers (allowed: one, and one of experts)"
    yield from of_several(chunks)
    yield from _of_layout()
    yield from of_calculator()


def of_several(chunks: Sequence[Any]) -> Iterator[str]:
    """What has not been tried with virtual stages, or computes something else in silence, by name; nothing of one
    chunk."""
    from megatron.core import parallel_state as state

    if len(chunks) == 1:
        return
    if any(getattr(chunk.config, "num_moe_experts", None) for chunk in chunks):
        yield "MoE layers in several model chunks (virtual pipelines; allowed: dense layers)"
    if (context := state.get_context_parallel_world_size()) > 1:
        yield f"context_parallel_size = {context} with several model chunks (virtual pipelines; allowed: 1)"
    if state.get_pipeline_model_parallel_world_size() == 2 and getattr(chunks[0].config, "batch_p2p_comm", False):
        # Both neighbours are one rank, and the schedule sends to both in one batch. Megatron-LM refuses it, too.
        yield (
            "batch_p2p_comm with two pipeline ranks and several model chunks (virtual pipelines), where activations "
            "and gradients are taken for each other (allowed: overlap_p2p_comm)"
        )


def _of_chunk(chunk: Any) -> Iterator[str]:
    config = chunk.ddp_config
    if config.use_distributed_optimizer:
        if REFORM.way is None:
            yield f"the distributed optimizer of this Megatron, which lacks {'; '.join(REFORM.missing())}"
        if config.overlap_param_gather:
            yield "overlap_param_gather (allowed: without it)"
    if getattr(config, "num_distributed_optimizer_instances", 1) > 1:
        yield "num_distributed_optimizer_instances > 1"
    yield from of_experts(chunk.config)


def of_experts(config: Any) -> Iterator[str]:
    """What of MoE layers is not equal on all ranks, or not known to follow."""
    if not getattr(config, "num_moe_experts", None):
        return
    if getattr(config, "moe_router_enable_expert_bias", False):
        yield "moe_router_enable_expert_bias (biases follow counts of tokens that are each rank's own)"
    kinds = getattr(config, "moe_router_load_balancing_type", "none")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "quantile_balancing" in kinds:
        yield "quantile_balancing (biases follow a mean over the micro-batches of each rank)"
    if "global_aux_loss" in kinds:
        yield "global_aux_loss (it sums up tokens of all ranks; allowed: the other kinds of load balancing)"
    if getattr(config, "moe_enable_routing_replay", False):
        yield "moe_enable_routing_replay"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        yield "overlap_moe_expert_parallel_comm (two micro-batches are computed at once, which are seeded one by one)"


def _of_layout() -> Iterator[str]:
    from megatron.core import parallel_state as state

    yield from unknown_replicas()
    for name in _NOTED:
        if getattr(state, name, None) is not None:
            yield f"parallel_state.{name}, set by the script"


def of_calculator() -> Iterator[str]:
    """What of the script's calculator of micro-batches has not one global batch."""
    calculator = _calculator()
    if calculator is None:
        return
    if type(calculator).__name__ != "ConstantNumMicroBatchesCalculator":
        yield f"{type(calculator).__name__} (rampup_batch_size; allowed: one global batch size)"
    elif calculator.current_running_global_batch_size != calculator.current_global_batch_size:
        yield "decrease_batch_size_if_needed, with which the global batch follows the number of ranks"


def batch_of(chunks: Sequence[Any], forwards: Callable[[], int] | None = None) -> FrameworkBatch:
    """The global batch and the micro-batch of the calculator, if the script has one. Schedules divide by the number of
    micro-batches on a replica, so all of them have as many."""
    calculator = _calculator()
    common: dict[str, Any] = {"counted": True, "seed": seed_tracked, "replicas": data_parallel_group}
    common |= {"computing": computing(), "chunks": len(chunks), "runs": schedule_of(chunks), "forwards": forwards}
    if calculator is None or list(of_calculator()):  # which is refused
        return FrameworkBatch(None, None, **common)
    return FrameworkBatch(calculator.current_global_batch_size, calculator.micro_batch_size, **common)


def schedule_of(chunks: Sequence[Any]) -> Callable[[int], bool] | None:
    """A function that says whether the schedule of a rank with these model chunks can compute a number of
    micro-batches. None: any number."""
    from megatron.core import parallel_state

    if len(chunks) == 1:
        return None
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return partial(interleaves, chunks[0].config.microbatch_group_size_per_vp_stage, stages)


def interleaves(at_once: int, stages: int, micro_batches: int) -> bool:
    """Whether the interleaved schedule can compute that many micro-batches on ``stages`` pipeline ranks. It takes turns
    between the chunks after ``at_once`` of them; a last, smaller run has to keep all ranks busy
    (``forward_backward_pipelining_with_interleaving`` in megatron-core 0.16)."""
    last = micro_batches % at_once
    return stages <= at_once <= micro_batches and (not last or last >= stages)


def seed_tracked(seed: int, chunk: int = 0) -> None:
    """Seed the streams that Megatron tracks, each in its own way. As with Megatron's own seeds, pipeline stages draw
    other numbers, and tensor-parallel ranks in those streams that are for that. Each model chunk of a rank is a stage
    of the whole model by itself, which are counted as Megatron lays them out."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as module

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    if stage := chunk * ranks + parallel_state.get_pipeline_model_parallel_rank():
        seed = _mixed(f"stage {stage}", seed)
        torch.manual_seed(seed)
    part = parallel_state.get_tensor_model_parallel_rank()
    tracker = module.get_cuda_rng_tracker()
    names = list(tracker.get_states())
    tracker.reset()
    for name in names:
        apart = part and name != module.get_data_parallel_rng_tracker_name()
        tracker.add(name, _mixed(f"{name} {part}" if apart else name, seed))


def _mixed(name: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{name} {seed}".encode()) >> 1


def membership(chunks: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """The group numbers of all parameters that the distributed optimizers of the chunks train; a collective,
    because a rank knows only those of its own parts. Empty where nothing could be divided otherwise."""
    mine: list[str] = []
    wrapped = all(hasattr(chunk, "expert_parallel_buffers") for chunk in chunks)
    peers = {expert: sharers(chunks[0], expert=expert) for expert in (False, True)} if wrapped else {}
    # Other slices, other stages and other experts have parameters of the same names.
    whose = {expert: f"{expert:d} {min(some)} " for expert, some in peers.items()}
    inner = inner_optimizers(optimizer)
    if wrapped and not several(inner) and all(hasattr(one, "model_param_group_index_map") for one in inner):
        known = names_of(chunks)
        for one in inner:
            for parameter, (group, _) in one.model_param_group_index_map.items():
                mine.append(f"{whose[is_expert(parameter)]}{group} {known[id(parameter)]}")
    beginnings = tuple(whose.values())
    ours = (line for line in union(mine) if beginnings and line.startswith(beginnings))
    return {name: int(group) for _, _, group, name in (line.split(" ", 3) for line in ours)}


def several(inner: Sequence[Any]) -> bool:
    """Whether there are several optimizers besides one of dense parameters and one of experts."""
    kinds = [trains_experts(one) for one in inner]
    return len({*kinds}) < len(kinds)


def lists_of_ranks() -> dict[str, list[int]]:
    """Those of ``parallel_state``."""
    return {name: list(ranks) for name, ranks in _lists()}


def resize(chunks: Sequence[Any], lists: Mapping[str, Sequence[int]]) -> None:
    """The groups have other members: bring what Megatron has noted of their size to what it would be in a job that was
    started so. Without communication.

    Args:
        lists: :func:`lists_of_ranks`, of the numbers that there are now.
    """
    from megatron.core import parallel_state as state

    for name, ranks in lists.items():
        setattr(state, name, list(ranks))
    for chunk in chunks:
        _follow_peers(chunk)
        if chunk.ddp_config.use_distributed_optimizer:
            continue  # its buffers are re-created with the state that is sharded
        size, each = chunk.dp_cp_group.size(), chunk.dp_cp_group.size() // chunk.expt_dp_group.size()
        for expert in (False, True):
            factor = scaling(chunk, size, each if expert else 1)
            for buffer in buffers_of([chunk], expert=expert):
                buffer.data_parallel_world_size = buffer.data_parallel_group.size()
                for scaled in (buffer, *buffer.buckets):
                    scaled.gradient_scaling_factor = factor


def _follow_peers(chunk: Any) -> None:
    """Transformer Engine's attention sends to its context-parallel peers by their ranks, which it has noted."""
    from megatron.core import parallel_state as state

    for module in chunk.modules():
        if vars(module).get("cp_global_ranks"):
            group = module.cp_group  # of a hierarchy several, of which those are no parts
            group = group if isinstance(group, dist.ProcessGroup) else state.get_context_parallel_group()
            module.cp_global_ranks = dist.get_process_group_ranks(group)


def scaling(chunk: Any, ranks: int, each: int = 1) -> float:
    """As ``DistributedDataParallel`` computes it, for that many data-parallel ranks (with the context-parallel ones).
    ``each``: of experts, which that many of these have together. Their gradients are summed over fewer ranks, and
    averaged over as many."""
    if chunk.config.calculate_per_token_loss:
        return 1.0
    if chunk.ddp_config.average_in_collective:
        return 1.0 / each
    return 1.0 / ranks


def resize_calculator() -> None:
    """As many micro-batches on a replica as make up the same global batch."""
    from megatron.core import parallel_state as state

    calculator = _calculator()
    if calculator is not None:
        at_once = calculator.micro_batch_size * state.get_data_parallel_world_size()
        calculator.num_micro_batches = calculator.current_running_global_batch_size // at_once


def _calculator() -> Any:
    from megatron.core import num_microbatches_calculator as module

    return module._GLOBAL_NUM_MICROBATCHES_CALCULATOR


def _lists() -> Iterator[tuple[str, Any]]:
    from megatron.core import parallel_state as state

    for name, value in list(vars(state).items()):
        if name.endswith((_LISTS, f"{_LISTS}_WITH_CP")) and value is not None:
            yield name, value
