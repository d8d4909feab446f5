"""ZeRO-3 for another number of replicas: slices, partitions and buffers are re-created, in the objects that there are.

Everything of the optimizer wrapper that depends on the size is made by DeepSpeed's own methods, as its ``__init__``
calls them: each parameter's slice, the flat tensors of the slices, master weights, gradient buffers, and where what
begins. The rest stays: hooks at parameters and modules, which belong to parameters and not to slices, persistent
parameters, which are chosen by their whole size, and the coordinator, whose trace a reset has dropped. Their makers
would communicate: each parameter is gathered for its hook.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from flashrecovery.adapter import give_up_state
from flashrecovery.adapter.elastic import ShardPlace
from fr_deepspeed.reform import as_member_at


def reform3(engine: Any, place: ShardPlace) -> None:
    """Rebuild all of the engine's slices and partitions for this ``place``, which need not be that in its groups. No
    communication.

    The engine's own numbers of ranks must be right already (:func:`fr_deepspeed.elastic.resize_engine`), nothing may be
    half-finished, and no parameter may be whole. Slices have any content, partitions that of the slices, and there is
    no optimizer state: all three are filled by the caller.
    """
    from deepspeed.runtime.zero import partition_parameters, stage3

    zero, basic = engine.optimizer, engine.basic_optimizer
    for partition in zero.fp32_partitioned_groups_flat:
        give_up_state(basic, partition)
    zero.partition_count = place.ranks
    zero.gradient_accumulation_steps = engine.gradient_accumulation_steps()
    with as_member_at(place, stage3, partition_parameters):
        for parameter in engine.module.parameters():
            _slice_again(parameter, place)
        for name in _LISTS:
            getattr(zero, name).clear()
        zero._create_fp16_partitions_with_defragmentation(zero.trainable_param_groups)
        zero._setup_for_real_optimizer()
        zero.set_grad_positions()
    zero.debug_fp16_grads = [{} for _ in zero.fp16_groups]


_LISTS = (
    *("fp16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat", "fp16_partitioned_groups_flat_numel"),
    *("fp16_partitioned_groups_flat_id", "fp32_partitioned_groups_flat", "next_swappable_fp32_partitioned_groups"),
    *("groups_padding", "sub_group_to_group_id", "sub_group_process_groups", "sub_group_partition_counts"),
    *("grad_position", "averaged_gradients"),
)
"""What the methods that are called add to."""


def _slice_again(parameter: Any, place: ShardPlace) -> None:
    """Have DeepSpeed cut a whole parameter, of any content, for this ``place``."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    _resize_maker(parameter, place)
    parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size = place.number, place.ranks
    parameter.ds_secondary_tensor_group_size = place.ranks
    device = parameter.ds_tensor.device
    parameter.ds_tensor = None
    parameter.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=device)
    parameter.ds_status = ZeroParamStatus.AVAILABLE
    parameter.partition(has_been_updated=True)


def _resize_maker(parameter: Any, place: ShardPlace) -> None:
    """What has made the parameter one of ZeRO-3 (``deepspeed.zero.Init``) cuts and gathers it."""
    maker = inspect.getclosurevars(parameter.partition_numel).nonlocals["self"]
    maker.rank = maker.rank_in_group = place.number
    maker.dp_world_size = maker.num_ranks_in_param_group = place.ranks
