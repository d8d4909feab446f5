"""``FullyShardedDataParallel``: Megatron-FSDP (``--use-megatron-fsdp``).

It joins the parameters of a layer in flat buffers and cuts those into one range a rank, which may end inside of a
parameter or leave a rank nothing of it. What the optimizer steps on is this rank's range, as DTensors; it exists once
and travels to the neighbour in every step. ``copy_main_weights_to_model_weights`` makes this rank's range of the
model's weights from it, and the next forward pass gathers the others': weights are no state.

All that is private to ``megatron_fsdp`` stands in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flashrecovery.adapter import faults
from fr_megatron.wrapper import FaultPoint, OnMesh

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
"""Supported values of ``data_parallel_sharding_strategy``. With ``no_shard``, megatron-core 0.16 skips the gradient
reduction of every buffer that exists (``all_reduce_gradients``)."""


class MegatronFSDP(OnMesh):
    """The chunks show their DTensors between the gradient reduction and the end of a step; else, whole parameters."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._fsdp = [chunk.module for chunk in chunks]
        for fsdp in self._fsdp:
            fsdp._replace_param_with_distributed_if_needed()
        super().__init__(chunks)

    def computing(self) -> Sequence[nn.Parameter]:
        return ()

    def reset(self, inner: Sequence[Any]) -> None:
        for fsdp in self._fsdp:
            _reset_gathering(fsdp.all_gather_pipeline)
            _reset_reduction(fsdp.grad_reduce_pipeline)
            _reset_hooks(fsdp)
            fsdp.zero_grad_buffer()
            fsdp._replace_param_with_distributed_if_needed()

    def gathering(self, inner: Sequence[Any], optimizer: Optimizer) -> FaultPoint | None:
        return lambda callback: faults.before_gather_operation(optimizer, callback)


def _reset_gathering(pipeline: Any) -> None:
    """No weights are gathered: the next forward pass gathers all of them, on all ranks."""
    empty = _empty()
    pipeline.param_gather_event_map.clear()
    for key in pipeline.bucket_status:
        pipeline.bucket_status[key] = empty
        pipeline.bucket_can_be_released[key] = False
    for group in pipeline.buffer.parameter_groups:
        if group.model_weight_buffer is not None:
            group.model_weight_buffer.free_bucket_storage()


def _reset_reduction(pipeline: Any) -> None:
    """No gradient is on its way."""
    empty = _empty()
    pipeline.grad_reduce_queue.clear()
    pipeline.bucket_grad_ready_params = [set() for _ in pipeline.bucket_grad_ready_params]
    for number in pipeline.bucket_status:
        pipeline.bucket_status[number] = empty
        pipeline.get_fsdp_buffer(number).free_bucket_storage()


def _empty() -> Any:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import BucketStatus

    return BucketStatus.EMPTY


def _reset_hooks(fsdp: Any) -> None:
    """Set what the hooks of modules and parameters remember from one to the next back to what it is after the
    construction."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import TrainingState

    for module in fsdp.module.modules():
        module._training_state = TrainingState.IDLE
    for parameter in fsdp.raw_param.values():
        parameter.grad = None
        parameter.grad_added_to_main_grad = False
    fsdp._params_require_handle_grad = set()
    fsdp._root_pre_backward_hook_issued = False
    fsdp.microbatch_count = 0
    vars(fsdp).pop("is_last_microbatch", None)  # no_sync() makes it, in every step in which it matters


def whole_state(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of the parameters and of the weights, by name, once the gathering in flight has ended."""
    fsdp = chunk.module
    for key in list(fsdp.all_gather_pipeline.param_gather_event_map):
        fsdp.all_gather_pipeline.wait_bucket_ready(*key)
    fsdp.synchronize_param_gather()
    yield from chunk.named_parameters()
    for number, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
        weights = group.model_weight_buffer
        for item in weights.param_idx.values():  # the padding between and behind them is not initialised
            yield f"weights.{number}.{item}", weights.get_item(item, only_shard=True)
