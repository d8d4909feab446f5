"""The distributed optimizer and the buffers below it for another number of replicas: rebuilt, into the objects that
there are, by Megatron's own ``__init__``.

So all that they derive from the size is what it would be in a job that was started so: paddings, buckets, ranges,
views. What has a handle of the optimizer, of the basic one or of a parameter keeps it. Weights stay as they are; what
is stepped on is made of them, and optimizer state is empty: both are filled by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashrecovery.adapter import give_up_state, hand_over_state, settle_state
from flashrecovery.adapter.elastic import ShardPlace
from fr_megatron import elastic
from fr_megatron.buckets import bucket_groups
from fr_megatron.capabilities import REFORM
from fr_megatron.layout import is_expert
from fr_megatron.optimizers import pairs
from fr_megatron.shard_layout import PARAM, WEIGHTS, FlatLayout, buffers_of, names_of


def reform(
    chunks: Sequence[Any], inner: Any, membership: Mapping[str, int], place: ShardPlace, *, expert: bool, each: int
) -> None:
    """Build the buffers of all ``chunks``, of their dense parameters or their experts, and their optimizer ``inner``
    for this ``place``. No communication. ``each``: that many data-parallel ranks have the experts together.

    It need not be the one in the process groups: a replacement takes on the sharding that the others have before all of
    them go over to another one. So the place stands for the group while they are built."""
    basic = inner.optimizer
    for _, main in pairs(inner):
        give_up_state(basic, main)
    for chunk in chunks:
        buffers = buffers_of([chunk], expert=expert)
        factor = elastic.scaling(chunk, place.size() * each, each if expert else 1)
        for buffer in buffers:
            _rebuild(chunk, buffer, place, factor)
        _regroup(buffers, chunk.expert_parallel_bucket_groups if expert else chunk.bucket_groups)
    names = names_of(chunks)
    parameters = {names[id(p)]: p for chunk in chunks for p in chunk.parameters()}
    trained = {fqn: p for fqn, p in parameters.items() if fqn in membership and is_expert(p) == expert}
    for number, group in enumerate(basic.param_groups):
        group["params"] = [p for fqn, p in trained.items() if membership[fqn] == number]
    type(inner).__init__(
        *(inner, basic, inner.config, inner.grad_scaler, inner.init_state_fn),
        model_chunks=inner.model_chunks,
        per_model_buffers=inner.per_model_buffers,
        data_parallel_group=inner.data_parallel_group,
        data_parallel_group_gloo=inner.data_parallel_group_gloo,
        data_parallel_group_idx=inner.data_parallel_group_idx,
        distributed_optimizer_instance_id=inner.distributed_optimizer_instance_id,
    )
    for buffer in buffers_of(chunks, expert=expert):
        buffer.data_parallel_group = inner.data_parallel_group
    for group in bucket_groups(chunks, [inner]):
        if group.intra_distributed_optimizer_instance_group is place:
            group.intra_distributed_optimizer_instance_group = inner.data_parallel_group


def _rebuild(chunk: Any, buffer: Any, place: ShardPlace, factor: float) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    for parameter in buffer.params:
        parameter.data = parameter.data.clone()  # of its own, as before the first time
    groups = ProcessGroupCollection()
    groups.tp, groups.dp_cp = buffer.tp_group, buffer.dp_cp_group
    names = {p: name for name, p in chunk.module.named_parameters()}
    type(buffer).__init__(
        buffer,
        ddp_config=buffer.ddp_config,
        param_dtype=buffer.param_dtype,
        grad_dtype=buffer.grad_dtype,
        data_parallel_group=place,
        bucket_size=chunk.bucket_size,
        param_to_name=names,
        gradient_scaling_factor=factor,
        param_indices=buffer.param_indices,
        nccl_ub=buffer.nccl_ub,
        pg_collection=groups,
        **_of_version(chunk, buffer, names, place.size()),
    )


def _of_version(chunk: Any, buffer: Any, names: Mapping[Any, str], size: int) -> dict[str, Any]:
    """What a buffer is made with, where versions differ: its parameters, and where they lie among ``size`` ranks, which
    the chunk keeps, too."""
    if REFORM.takes("there"):
        return {"params": buffer.params}
    named = [(parameter, names[parameter]) for parameter in buffer.params]
    if REFORM.takes("named"):
        return {"params_with_names": named}
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        buffer.params, chunk.bucket_size, size, buffer.ddp_config, buffer.param_indices
    )
    layouts = getattr(chunk.full_param_layout, "layouts", {})
    for key, known in layouts.items():
        if known.param_index_map.keys() == layout.param_index_map.keys():
            layouts[key] = layout
    return {"params_with_names": named, "param_layout": layout}


def _regroup(buffers: Sequence[Any], bucket_groups: Sequence[Any]) -> None:
    """The groups of buckets keep their places: what waits for one in a backward pass has it. So do the links between
    them."""
    from megatron.core.distributed.param_and_grad_buffer import partition_buckets

    buckets = sum(len(buffer.buckets) for buffer in buffers)
    single = len(bucket_groups) == 1 and buckets > 1
    made = partition_buckets(buffers, force_single_bucket_group=single)
    for old, new in zip(bucket_groups, made, strict=True):
        links = {name: value for name, value in vars(old).items() if isinstance(value, type(old))}
        vars(old).update({**vars(new), **links})


def fill(
    chunks: Sequence[Any],
    inner: Any,
    tensors: Mapping[str, torch.Tensor],
    description: Mapping[str, Any],
    layout: FlatLayout,
    *,
    expert: bool,
) -> None:
    """Put what was prepared into an optimizer that has just been built in this size."""
    basic = inner.optimizer
    names = names_of(chunks)
    with torch.no_grad():
        for number, buffer in enumerate(buffers_of(chunks, expert=expert)):
            flat = next(tensors[one.fqn + WEIGHTS] for one in layout.stored if one.buffer == number)
            buffer.param_data.copy_(flat)
        of = {names[id(model)]: main for model, main in pairs(inner)}
        for fqn, main in of.items():
            main.copy_(tensors[f"{fqn}/{PARAM}"])
    for place, main in enumerate(p for group in basic.param_groups for p in group["params"]):
        fqn = next(name for name, other in of.items() if other is main)
        state = {key.partition("/")[2]: tensors[f"{fqn}/{key}"] for key, *_ in description["state"]}
        hand_over_state(basic, main, state, place)
    settle_state(basic)
