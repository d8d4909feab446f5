"""ZeRO-1 and 2: per parameter group one flat fp32 partition a rank, and flat weights that every rank holds.

``single_partition_of_fp32_groups[g]`` (elements of group g, padded, over dp) and its optimizer state exist on one rank
only: 12 bytes an element for Adam. ``bit16_groups_flat[g]`` is gathered at the end of each step and equal everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flashrecovery.adapter import FixedShard, Method, ParamRecord, ParamShard, Shard, world_size
from flashrecovery.adapter.elastic import ShardPlace
from fr_deepspeed.backward import reset_backward_hooks
from fr_deepspeed.capabilities import BUCKET_EVENTS, BUCKETS, FLAT_GRADIENTS, REFORM
from fr_deepspeed.elastic import resize_engine
from fr_deepspeed.engine import EngineAdapter
from fr_deepspeed.layout import partition_record
from fr_deepspeed.muon import make_momentum
from fr_deepspeed.offload import check_gradients, reset_accumulation
from fr_deepspeed.reform import reform
from fr_deepspeed.shard_layout import PartitionShardLayout, fill, length_of, weights_name

_NO_MICRO_STEP = -1
"""``micro_step_id`` between two steps (deepspeed's INITIAL_MICRO_STEP_ID)."""


class Stage12Adapter(EngineAdapter):
    """Protects an engine with ``DeepSpeedZeroOptimizer``."""

    name = "deepspeed-zero12"

    def __init__(self, engine: Any, optimizer: Optimizer) -> None:
        super().__init__(engine, optimizer)
        if self._muon:
            make_momentum(engine.optimizer)
        self._shard_layout = PartitionShardLayout(engine.optimizer, self._partitions, self._install)

    @property
    def _optimized(self) -> Sequence[nn.Parameter]:
        return [p for group in self.engine.optimizer.bit16_groups for p in group]

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        zero = self.engine.optimizer
        return tuple(
            partition_record(f"partition/{g}", partition, zero.real_dp_process_group[g], self._place)
            for g, partition in enumerate(zero.single_partition_of_fp32_groups)
        )

    def _record_shard(self, record: ParamRecord) -> Shard:
        return ParamShard(record, {0: self.basic})

    def _extra_shards(self) -> Sequence[Shard]:
        zero = self.engine.optimizer
        shards = []
        for g, flat in enumerate(zero.bit16_groups_flat):
            # Of experts: not all data-parallel ranks.
            ranks = dist.get_process_group_ranks(zero.real_dp_process_group[g])
            suffix = "" if len(ranks) == world_size() else f",group={min(ranks)}"
            if self._place is not None:
                ranks, suffix = list(range(self._place.ranks)), ""
            whole = flat[: length_of(zero, g)] if REFORM.way is not None else flat
            shards.append(FixedShard(weights_name(g, len(ranks)) + suffix, ranks, whole))
        return shards

    # -- another number of replicas ---------------------------------------------------------------

    def _partitions(self) -> Sequence[ParamShard]:
        return [shard for shard in self.shards() if isinstance(shard, ParamShard)][: len(self._records)]

    def _install(self, place: ShardPlace, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
        """Go on with these partitions, which are those of this place."""
        zero = self.engine.optimizer
        self._place = place
        resize_engine(self.engine)
        reform(self.engine, place)
        fill(zero, self.basic, tensors, description)
        self._weights = list(zero.single_partition_of_fp32_groups)
        self._records = self._find_parameters()
        self._all_shards = None
        self._looks = 0
        self._find_what_loading_makes()
        zero._hp_optimizer_states_linked = False
        self._derive_weights()

    def _setting(self) -> Iterable[Method]:
        return [*super()._setting(), *((parameter, "set_full_hp_param") for parameter in self._optimized)]

    def _computing(self) -> Sequence[nn.Parameter]:
        return self._optimized  # views of the flat weights

    def _gradients_ready(self) -> None:
        zero = self.engine.optimizer
        if zero.cpu_offload:
            check_gradients(zero, [p for group in zero.params_in_partition for p in group])

    def _reset_optimizer(self) -> None:
        zero = self.engine.optimizer
        reset_backward_hooks(zero)
        if zero.cpu_offload:
            reset_accumulation(zero)
        if FLAT_GRADIENTS.way is not None:
            zero._release_preflattened_grad_buffers()
        _reset_buckets(zero)
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        for g, group in enumerate(zero.bit16_groups):
            zero.averaged_gradients[g] = None
            if BUCKETS.takes("by dtype"):
                zero.all_grad_tensors[g] = None
            for parameter in group:
                parameter.grad = parameter.grad_accum = None
        if dist.get_world_size(zero.real_dp_process_group[0]) == zero.partition_count[0]:
            zero.reset_partition_gradient_structures()  # else the partitions are of another size, and are re-created
        zero.callback_queued = False
        zero.micro_step_id = _NO_MICRO_STEP
        # A roll-back to version 0 makes new state tensors, which DeepSpeed's accessors then have to find.
        zero._hp_optimizer_states_linked = False

    def _derive_weights(self) -> None:
        zero = self.engine.optimizer
        for g in range(len(zero.bit16_groups)):
            zero._update_model_bit16_weights(g)
        # The next step may begin with DeepSpeed's accessors, which find the state after a process's first step only.
        if all(self.basic.state.get(partition) for partition in zero.single_partition_of_fp32_groups):
            zero._lazy_init_hp_params_optimizer_state()


def _reset_buckets(zero: Any) -> None:
    """Drop what an interrupted backward pass has put into the buckets."""
    if BUCKETS.takes("by dtype"):
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
            bucket.buffer.clear()
            if BUCKET_EVENTS.way is not None:
                bucket.reuse_events.clear()
            bucket.index = 0
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
    else:
        zero.grads_in_ipg_bucket, zero.params_in_ipg_bucket = [], []
        zero.elements_in_ipg_bucket = zero.ipg_index = 0
        zero.ipg_bucket_has_moe_params = False
        zero.extra_large_param_to_reduce = zero.previous_reduced_grads = None
    zero._release_ipg_buffers()
