"""``DistributedDataParallel``: whole parameters on every data-parallel rank, gradients reduced in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flashrecovery.adapter import ParamRecord, ParamShard, Shard, faults, global_rank
from fr_megatron.capabilities import BUCKETS
from fr_megatron.layout import ShardedParameters, holders
from fr_megatron.optimizers import (
    Names,
    SteppedPair,
    dealt,
    group_text,
    is_distributed,
    members,
    of_all,
    owned,
    record,
    weights,
)
from fr_megatron.wrapper import FaultPoint, Wrapper


class Buckets(Wrapper):
    """``DistributedDataParallel``, with and without the distributed optimizer."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any = None) -> None:
        super().__init__(chunks)
        self._dealt = {id(parameter): parameter for parameter in dealt(optimizer)}
        self._names = Names(chunks)
        self._sharded: dict[bool, ShardedParameters] = {}  # by whether it is of the experts
        self._groups = {expert: group_text(holders(chunks[0], expert=expert)) for expert in (False, True)}

    def sharded_for(self, sharded: ShardedParameters, *, expert: bool) -> None:
        self._sharded[expert] = sharded
        self._names = Names(self.chunks, self._sharded)

    def stepped(self, pair: SteppedPair) -> ParamRecord:
        return owned(pair, self._names, global_rank()) if id(pair[0]) in self._dealt else record(pair, self._names)

    def kept(self, parameter: nn.Parameter) -> ParamRecord:
        return of_all(parameter, parameter, self._names)

    def group(self, *, expert: bool) -> str:
        """What names say of those that have the dense parameters, or the experts, as the job was launched."""
        return self._groups[expert]

    def weights(self) -> Iterator[Shard]:
        yield from weights(self.chunks, self._sharded)
        for parameter in self._dealt.values():
            yield ParamShard(self.kept(parameter), {})

    def before_reduction(self, callback: Callable[[], None]) -> bool:
        return call_before_reduction(self.chunks, callback)

    def reset(self, inner: Sequence[Any]) -> None:
        reset_buckets(self.chunks, inner)

    def gathering(self, inner: Sequence[Any], optimizer: Optimizer) -> FaultPoint | None:
        if not self._dealt and not any(is_distributed(each) for each in inner):
            return None
        return lambda callback: faults.before_gather_operation(optimizer, callback)


def bucket_groups(chunks: Sequence[Any], inner_optimizers: Sequence[Any]) -> Iterator[Any]:
    """All bucket groups of the chunks; the distributed optimizer has a second set over the same buffers."""
    for chunk in chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups
    for inner in inner_optimizers:
        for groups in getattr(inner, "per_model_bucket_groups", {}).values():
            yield from groups


def call_before_reduction(chunks: Sequence[Any], callback: Callable[[], None]) -> bool:
    """Call ``callback`` before each group of buckets is reduced: at its last gradient, or after the backward pass.
    False if there is no group."""

    def told(reduce: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(reduce)
        def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
            callback()
            return reduce(*args, **kwargs)

        return start_grad_sync

    groups = list(bucket_groups(chunks, ()))
    for group in groups:
        group.start_grad_sync = told(group.start_grad_sync)
    return bool(groups)


def reset_buckets(chunks: Sequence[Any], inner_optimizers: Sequence[Any]) -> None:
    """Drop gradients and handles. The first batch comes again for every bucket on all ranks: what it learns (how often
    a gradient gets ready) a replacement does not know. The rest of what a group and a buffer note in a step is dropped
    by their own ``reset()``: from core 0.18 on that a reduction has ended, with which the step that is done again would
    leave it out."""
    counting = BUCKETS.takes("counting")
    for group in bucket_groups(chunks, inner_optimizers):
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        if counting:
            group.per_param_grad_ready_counts = {}  # of a part of the parameters, reset() would refuse it
        group.reset()
        if counting:
            group.golden_per_param_grad_ready_counts = {}
            group.is_first_batch = True
        for bucket in group.buckets:
            if hasattr(bucket, "layerwise_gather_list"):  # core 0.17: where whole parameters are gathered to
                bucket.layerwise_gather_list = None
    for chunk in chunks:
        for parameter in chunk.params_with_grad:
            parameter.grad = None
            parameter.grad_added_to_main_grad = False
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.reset()


def forget_answers(optimizer: Any) -> None:
    """Drop the results of reductions that core 0.20 makes only once, in the first step. A replacement makes these
    reductions again, so all ranks have to."""
    for each in (optimizer, *members(optimizer)):
        vars(each).pop("_has_grad_norm_group_cache", None)
