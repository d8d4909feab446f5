"""How ZeRO-1 and 2 divide an engine's state, in any number of replicas.

A parameter group is one flat tensor: its parameters end to end, at the same offsets in every size (including padding
between them, if ``parameter_alignment`` requests it). Padding at the end makes the length divisible; it depends on the
size, belongs to no parameter, and is 0. Each place has a range of the master weights and of the optimizer state of the
same length, and all of the rest: 16-bit weights, numbers such as a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from flashrecovery.adapter import ParamShard, hand_over_state, settle_state
from flashrecovery.adapter.elastic import (
    EqualRanges,
    Naming,
    Pattern,
    Prepared,
    ReadyTensors,
    RuledShardLayout,
    ShardPlace,
    TensorRule,
    Whole,
    padded,
)
from flashrecovery.errors import UnsupportedError

_ALIGNMENT = 2
"""Elements, for each rank, of which a padded group is a multiple (deepspeed's nccl_start_alignment_factor)."""
PARAM, STATE, DATA = "param", "state/", "data"
"""Keys of the tensors of a :class:`ParamShard` and of a fixed one."""


def partition_beginning(group: int) -> str:
    """With which the names of the shards begin that have a partition's master weights and optimizer state."""
    return f"partition/{group}#dp="


def weights_beginning(group: int) -> str:
    """The beginning of the names of the shards with the weights that the module computes with, padding left out."""
    return f"weights/{group}#dp="


def partition_name(group: int, place: int, size: int) -> str:
    return f"{partition_beginning(group)}{place}/{size}"


def weights_name(group: int, size: int) -> str:
    return f"{weights_beginning(group)}{size}"


def length_of(zero: Any, group: int) -> int:
    """Elements of a group's flat tensor, without the padding at its end."""
    return int(zero.round_robin_bit16_offsets[group][-1] + zero.round_robin_bit16_meta[group][-1].numel())


def ranges(length: int, size: int) -> list[tuple[int, int]]:
    """The range of each place. The last ones may reach into the padding, or lie in it."""
    return padded(length, size, _ALIGNMENT)


class PartitionShardLayout(RuledShardLayout):
    """The sharding of one engine.

    Args:
        shards: gives the shard of each group's partition on this rank.
        install: puts other partitions, of this place, in the place of those that there are.
    """

    def __init__(
        self,
        zero: Any,
        shards: Callable[[], Sequence[ParamShard]],
        install: Callable[[ShardPlace, Mapping[str, torch.Tensor], Mapping[str, Any]], None],
    ) -> None:
        self._zero = zero
        self._shards = shards
        self._install = install

    @property
    def size(self) -> int:
        return int(self._zero.partition_count[0])

    def describe(self) -> dict[str, Any]:
        """Raises UnsupportedError if there is optimizer state that is neither a number nor as long as the partition:
        how it would be sharded is not known."""
        return {"groups": [self._describe(number, shard) for number, shard in enumerate(self._shards())]}

    def check(self) -> None:
        """Raises UnsupportedError as :meth:`describe` does."""
        for shard in self._shards():
            check_state(shard.tensors())

    def _describe(self, number: int, shard: ParamShard) -> dict[str, Any]:
        return {
            "length": length_of(self._zero, number),
            "content": content_of(self._zero, self._zero.bit16_groups[number]),
            "weights": name_of(self._zero.bit16_groups_flat[number].dtype),
            **describe_state(shard),
        }

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        named = ("length", "content", "weights")
        return [[*(group[name] for name in named), group["flat"][PARAM]] for group in description["groups"]]

    def ruled(self, description: Mapping[str, Any]) -> Sequence[tuple[TensorRule, torch.dtype]]:
        found = []
        for number, group in enumerate(description["groups"]):
            length = group["length"]
            found += partition_rules(number, group, (length,), EqualRanges(_ALIGNMENT))
            dtype = dtype_of(group["weights"])
            whole = TensorRule(
                f"{number}/weights",
                (length,),
                dtype.itemsize,
                Whole(),
                shard=weights_beginning(number),
                key=DATA,
                naming=Naming.SIZE,
                content=group["content"],
            )
            found.append((whole, dtype))
        return found

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        device = self._zero.device
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Mapping[str, Any]] = {}
        for number, group in enumerate(description["groups"]):
            start, stop = ranges(group["length"], size)[place]
            for key in group["order"]:
                shape = (stop - start,) if key in group["flat"] else ()
                dtype = dtype_of(group["flat"][key] if key in group["flat"] else group["single"][key])
                host = key in group["single"]  # torch's optimizers keep their step there
                tensors[f"{number}/{key}"] = torch.zeros(shape, dtype=dtype, device="cpu" if host else device)
            weights = self._zero.bit16_groups_flat[number]
            tensors[f"{number}/weights"] = torch.zeros(group["length"], dtype=weights.dtype, device=weights.device)
            values[partition_name(number, place, size)] = group["values"]
        return ReadyTensors(tensors, values, lambda: self._install(ShardPlace(place, size), tensors, description))


def fill(zero: Any, basic: Optimizer, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
    """Put what was prepared into an optimizer that has just been built in this size."""
    for number, partition in enumerate(zero.single_partition_of_fp32_groups):
        group = description["groups"][number]
        with torch.no_grad():
            zero.bit16_groups_flat[number][: group["length"]].copy_(tensors[f"{number}/weights"])
        fill_partition(basic, partition, number, tensors, group)
    settle_state(basic)


def fill_partition(
    basic: Optimizer,
    partition: torch.Tensor,
    number: int,
    tensors: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
) -> None:
    """Master weights, and the state of the basic optimizer, of which :func:`settle_state` is to be called at last."""
    with torch.no_grad():
        partition.copy_(tensors[f"{number}/{PARAM}"])
    others = group["values"].get("plain", {})
    keys = group["values"].get("order") or [key for key in group["order"] if key != PARAM]
    state = {key.removeprefix(STATE): others[key] if key in others else tensors[f"{number}/{key}"] for key in keys}
    hand_over_state(basic, partition, state, group["values"].get("places", {}).get(STATE, number))


def describe_state(shard: ParamShard) -> dict[str, Any]:
    """What there is of a partition: which tensors are as long as it, which are numbers, and the plain values. Raises
    UnsupportedError as :func:`check_state` does."""
    tensors = shard.tensors()
    check_state(tensors)
    flat: dict[str, str] = {}
    single: dict[str, str] = {}
    for key, tensor in tensors.items():
        (flat if tensor.dim() else single)[key] = name_of(tensor.dtype)
    return {"flat": flat, "single": single, "order": list(tensors), "values": shard.values()}


def check_state(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedError if there is optimizer state that is neither a number nor as long as the partition."""
    whole = tensors[PARAM].shape
    for key, tensor in tensors.items():
        if tensor.dim() and tensor.shape != whole:
            raise UnsupportedError(
                f"an elastic job in which optimizer state {key!r} has the shape {tuple(tensor.shape)}: numbers, and "
                f"what is as long as the partition {tuple(whole)}, are allowed"
            )


def partition_rules(
    number: int, group: Mapping[str, Any], shape: tuple[int, ...], pattern: Pattern
) -> list[tuple[TensorRule, torch.dtype]]:
    """The rules for the tensors of a partition: one as long as the partition follows ``pattern``, numbers are on all
    ranks."""
    found = []
    for key in group["order"]:
        flat = key in group["flat"]
        dtype = dtype_of(group["flat"][key] if flat else group["single"][key])
        rule = TensorRule(
            f"{number}/{key}",
            shape if flat else (),
            dtype.itemsize,
            pattern if flat else Whole(),
            shard=partition_beginning(number),
            key=key,
            content=group["content"] if flat else "",
        )
        found.append((rule, dtype))
    return found


def content_of(zero: Any, parameters: Sequence[Any]) -> str:
    """A digest of the names and shapes of a group's parameters, in their order, which alone says what is where in its
    flat tensor."""
    shapes = [p.ds_shape if hasattr(p, "ds_shape") else p.shape for p in parameters]
    found = [[zero.param_names.get(p, ""), *shape] for p, shape in zip(parameters, shapes, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps(found).encode())


def name_of(dtype: torch.dtype) -> str:
    """A dtype as a plain value."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found
