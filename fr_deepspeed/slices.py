"""How ZeRO-3 divides an engine's state, in any number of replicas.

A parameter is cut into as many slices as there are ranks, all of the same length. The surplus at the end is padding; it
depends on the size, belongs to no parameter, and is 0. The slices of a parameter group are one flat tensor on each
rank, with padding in its middle, too: the master weights, and optimizer state of the same length. The parameters end to
end, gathered from all ranks, are the same in every size. 16-bit slices are rounded copies; only those of frozen
parameters are state.

A group may consist of several such tensors (``sub_group_size``). Their boundaries depend on the size, so this is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import ParamShard
from flashrecovery.adapter.elastic import Prepared, ReadyTensors, RuledShardLayout, ShardPlace, Slices, TensorRule
from fr_deepspeed.shard_layout import (
    DATA,
    PARAM,
    check_state,
    content_of,
    describe_state,
    dtype_of,
    name_of,
    partition_name,
    partition_rules,
)


def slice_beginning(fqn: str) -> str:
    """With which the names of the shards begin that have a frozen parameter's slices."""
    return f"param/{fqn}#dp="


def frozen_name(fqn: str) -> str:
    """The name, in the sharding, of a frozen parameter."""
    return f"frozen/{fqn}"


class SliceShardLayout(RuledShardLayout):
    """The sharding of one engine.

    Args:
        shards: gives the shard of each sub-group's partition on this rank.
        frozen: gives the parameters that are not trained, by name.
        install: puts other slices, of this place, in the place of those that there are.
    """

    def __init__(
        self,
        zero: Any,
        shards: Callable[[], Sequence[ParamShard]],
        frozen: Callable[[], Mapping[str, Any]],
        install: Callable[[ShardPlace, Mapping[str, torch.Tensor], Mapping[str, Any]], None],
    ) -> None:
        self._zero = zero
        self._shards = shards
        self._frozen = frozen
        self._install = install

    @property
    def size(self) -> int:
        return int(self._zero.partition_count)

    def check(self) -> None:
        """Raises UnsupportedError as :meth:`describe` does."""
        for shard in self._shards():
            check_state(shard.tensors())

    def describe(self) -> dict[str, Any]:
        """Raises UnsupportedError if there is optimizer state that is neither a number nor as long as the partition:
        how it would be sharded is not known."""
        groups = [
            {
                "numels": [int(p.ds_numel) for p in group],
                "content": content_of(self._zero, group),
                **describe_state(shard),
            }
            for group, shard in zip(self._zero.fp16_groups, self._shards(), strict=True)
        ]
        frozen = [[fqn, int(p.ds_numel), name_of(p.ds_tensor.dtype)] for fqn, p in self._frozen().items()]
        weights = [name_of(group[0].ds_tensor.dtype) for group in self._zero.fp16_groups]
        return {"groups": groups, "frozen": frozen, "weights": weights}

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        groups = [[group["numels"], group["content"], group["flat"][PARAM]] for group in description["groups"]]
        return [groups, description["frozen"], description["weights"]]

    def ruled(self, description: Mapping[str, Any]) -> Sequence[tuple[TensorRule, torch.dtype]]:
        found = []
        for number, group in enumerate(description["groups"]):
            numels = tuple(group["numels"])
            found += partition_rules(number, group, (sum(numels),), Slices(numels))
        for fqn, numel, dtype_name in description["frozen"]:
            dtype, pattern = dtype_of(dtype_name), Slices((numel,))
            rule = TensorRule(frozen_name(fqn), (numel,), dtype.itemsize, pattern, shard=slice_beginning(fqn), key=DATA)
            found.append((rule, dtype))
        return found

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        device = self._zero.device
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Mapping[str, Any]] = {}
        for number, group in enumerate(description["groups"]):
            length = sum(Slices.length(numel, size) for numel in group["numels"])
            for key in group["order"]:
                if key in group["flat"]:
                    tensor = torch.zeros(length, dtype=dtype_of(group["flat"][key]), device=device)
                else:  # torch's optimizers keep their step on the host
                    tensor = torch.zeros((), dtype=dtype_of(group["single"][key]))
                tensors[f"{number}/{key}"] = tensor
            values[partition_name(number, place, size)] = group["values"]
        for fqn, numel, dtype_name in description["frozen"]:
            tensor = torch.zeros(Slices.length(numel, size), dtype=dtype_of(dtype_name), device=device)
            tensors[frozen_name(fqn)] = tensor
        return ReadyTensors(tensors, values, lambda: self._install(ShardPlace(place, size), tensors, description))


def tied_to_size(engine: Any) -> Iterator[str]:
    """What of an engine with ZeRO-3 cannot change its number of replicas, by name, and what is allowed instead."""
    zero, config = engine.optimizer, engine._config.zero_config
    kind = type(zero).__name__
    if kind != "DeepSpeedZeroOptimizer_Stage3":
        yield f"the ZeRO-3 optimizer {kind} (allowed: DeepSpeedZeroOptimizer_Stage3)"
        return
    if config.zero_hpz_partition_size > 1:
        yield "zero_optimization.zero_hpz_partition_size, which divides parameters among some of the ranks, too"
    if getattr(zero, "use_muon", False):
        yield "the optimizer Muon"
    if zero.optimizer is not engine.basic_optimizer:
        yield f"the optimizer {type(zero.optimizer).__name__}, which DeepSpeed creates again"
    largest = max(sum(int(p.ds_numel) for p in group["params"]) for group in zero.trainable_param_groups)
    if zero.sub_group_size < largest or len(zero.fp16_groups) != len(zero.trainable_param_groups):
        yield (
            f"zero_optimization.sub_group_size = {zero.sub_group_size}, where a parameter group of {largest} elements "
            f"would be cut otherwise in another size (allowed: {largest} and more)"
        )
    world = dist.get_world_size()
    if any(dist.get_world_size(p.ds_process_group) != world for p in engine.module.parameters()):
        yield "parameters that are sharded among some of the ranks only"
