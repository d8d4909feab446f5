"""How the distributed optimizer divides its state, in any number of replicas.

Parameters lie in flat buffers, which are cut into buckets. Which parameters are in a bucket, and where in it, is the
same in every size; how far a bucket is padded at its end depends on the size, and so does where the next one begins.
Each rank has an equal range of every bucket: of the parameters in it, that part of what is stepped on, and of the
optimizer's state. What the module computes with, the flat buffer, is on all ranks, with paddings that are of one size.
Each model chunk of a rank (virtual pipelines) has its own buffers, which are counted through all chunks here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import ParamShard
from flashrecovery.adapter.elastic import (
    BufferRange,
    FlatBuffer,
    InBuffer,
    Naming,
    ReadyTensors,
    RuledShardLayout,
    ShardPlace,
    TensorRule,
    WithRange,
)
from flashrecovery.errors import UnsupportedError
from fr_megatron.optimizers import part_beginning, part_name, weights_beginning

PARAM, DATA = "param", "data"
"""Keys of the tensors of a :class:`ParamShard` and of a fixed one."""
WEIGHTS = "/weights"
"""How the names of sharded tensors end that are parts of a flat buffer."""
_ALIGNMENT, _BANDWIDTH = 128, 1 << 16
"""Elements of which a bucket's length is a multiple, and with ``pad_buckets_for_high_nccl_busbw``."""


@dataclass(frozen=True)
class Stored:
    """A parameter in its buffer.

    Attributes:
        buffer, bucket: their numbers; the buffer's through all chunks.
        start: its first element in the bucket.
        group: the optimizer's parameter group that it belongs to.
        wide: what is stepped on is the parameter itself, and no fp32 copy.
    """

    fqn: str
    buffer: int
    bucket: int
    start: int
    length: int
    group: int
    wide: bool


@dataclass(frozen=True)
class FlatLayout:
    """All buffers of a model, and what is in them. ``stored``: in the order of buffers and buckets."""

    buffers: tuple[FlatBuffer, ...]
    stored: tuple[Stored, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Stored]:
        return {one.fqn: one for one in self.stored}

    def range_of(self, one: Stored, place: int, size: int) -> tuple[int, int]:
        """Which elements of a parameter the rank at ``place`` steps on; an empty range if none."""
        return self.pattern(one).range_at(one.length, place, size)

    def start_of(self, one: Stored, size: int) -> int:
        """A parameter's first element in its buffer."""
        return self.in_buffer(one).first(size)

    def pattern(self, one: Stored) -> BufferRange:
        """How what is stepped on is sharded."""
        return BufferRange(self.buffers[one.buffer], one.bucket, one.start)

    def in_buffer(self, one: Stored) -> InBuffer:
        """Where the weights lie."""
        return InBuffer(self.buffers[one.buffer], one.bucket, one.start)

    @cached_property
    def in_order(self) -> Sequence[str]:
        """The parameters as they would stand in the optimizer's groups, one after another, on a rank that steps on all
        of them."""
        return [one.fqn for one in sorted(self.stored, key=lambda one: (one.group, not one.wide))]

    def order(self, place: int, size: int) -> list[str]:
        """What the rank at ``place`` steps on, as it stands in the optimizer's groups, one after another."""
        ranges = {fqn: self.range_of(self.by_name[fqn], place, size) for fqn in self.in_order}
        return [fqn for fqn, (low, high) in ranges.items() if low < high]

    def without_part(self, most: int) -> tuple[int, int] | None:
        """A place that has nothing to step on, and among how many; None if there is none among up to ``most``."""
        places = ((place, size) for size in range(1, most + 1) for place in range(size))
        return next((one for one in places if not self.order(*one)), None)


def state_of(number: int) -> str:
    """With which the keys of a :class:`ParamShard` begin that are state of the n-th optimizer."""
    return f"state{number}/" if number else "state/"


def buffers_of(chunks: Sequence[Any], *, expert: bool) -> Sequence[Any]:
    """The flat buffers of their dense parameters, or of their experts, in the order of the chunks."""
    return [buffer for chunk in chunks for buffer in (chunk.expert_parallel_buffers if expert else chunk.buffers)]


def numbered_buffers(chunks: Sequence[Any], *, expert: bool) -> list[tuple[int, int]]:
    """For each of :func:`buffers_of`: the number of its chunk, and its own number in that."""
    return [(at, own) for at, chunk in enumerate(chunks) for own in range(len(buffers_of([chunk], expert=expert)))]


def names_of(chunks: Sequence[Any]) -> dict[int, str]:
    """The names of all parameters, with the number of the chunk before them, by the parameters' identities."""
    return {id(p): f"{at}.{name}" for at, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}


def layout_of(chunks: Sequence[Any], membership: Mapping[str, int], *, expert: bool = False) -> FlatLayout:
    """The layout of chunks as they are now; ``membership``: of each trained parameter the optimizer's group, by its
    name."""
    all_buffers = buffers_of(chunks, expert=expert)
    names = names_of(chunks)
    multiple = math.lcm(_ALIGNMENT, _BANDWIDTH if chunks[0].ddp_config.pad_buckets_for_high_nccl_busbw else 1)
    stored = [
        Stored(fqn, number, bucket, start - of_bucket, stop - start, membership[fqn], parameter.dtype == torch.float32)
        for number, buffer in enumerate(all_buffers)
        for parameter, (start, stop, bucket) in buffer.param_index_map.items()
        for fqn, of_bucket in [(names[id(parameter)], buffer.buckets[bucket].offset)]
    ]
    buffers = [FlatBuffer(tuple(b.numel_unpadded for b in of.buckets), multiple) for of in all_buffers]
    return FlatLayout(tuple(buffers), tuple(stored))


class OptimizerShardLayout(RuledShardLayout):
    """The sharding of all chunks' dense parameters, or of their experts, and their distributed optimizer.

    Args:
        group: what names say of those among which the state is sharded (:func:`.optimizers.group_text`).
        shards: gives what this rank steps on, by the parameters' names.
        install: puts prepared tensors in the place of those that there are.
        expert: it is of the experts.
        number: of the optimizer.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        inner: Any,
        membership: Mapping[str, int],
        group: str,
        shards: Callable[[], Mapping[str, ParamShard]],
        install: Callable[[ShardPlace, Mapping[str, torch.Tensor], Mapping[str, Any], FlatLayout], None],
        *,
        expert: bool = False,
        number: int = 0,
    ) -> None:
        self._state = state_of(number)
        self._chunks, self._inner = chunks, inner
        self._expert, self._buffers = expert, buffers_of(chunks, expert=expert)
        self._numbers = numbered_buffers(chunks, expert=expert)
        self._layout = layout_of(chunks, membership, expert=expert)
        self._group = group
        self._shards = shards
        self._install = install
        self._largest = 0

    @property
    def size(self) -> int:
        return int(self._buffers[0].data_parallel_world_size)

    def check(self) -> None:
        """Raises UnsupportedError if the state cannot be sharded otherwise, or is not sharded as it is known here."""
        self.describe()
        if self._largest >= self.size:
            return
        self._largest = self.size
        self._check_as_known()
        if why := self.too_small_for(self.size):
            raise UnsupportedError(f"an elastic job with {why}")

    def too_small_for(self, most: int) -> str:
        """Why the state cannot be sharded among that many ranks, or fewer; "" if it can."""
        found = self._layout.without_part(most)
        if found is None:
            return ""
        place, size = found
        return f"the distributed optimizer and so small a model that rank {place} of {size} would have no part of it"

    def _check_as_known(self) -> None:
        """Raises UnsupportedError unless Megatron has laid everything out as it is computed here."""
        layout, size, place = self._layout, self.size, dist.get_rank(self._inner.data_parallel_group)
        computed = {one.fqn: layout.start_of(one, size) for one in layout.stored}
        lengths = [sum(buffer.lengths(size)) for buffer in layout.buffers]
        cut = {fqn: layout.range_of(layout.by_name[fqn], place, size) for fqn in layout.order(place, size)}
        for what, here, there in (
            ("parameters elsewhere in its buffers", computed, dict(self._starts())),
            ("buffers of other lengths", lengths, [buffer.numel for buffer in self._buffers]),
            ("parameters cut elsewhere", cut, dict(self._held())),
        ):
            if here != there:
                raise UnsupportedError(f"an elastic job with a distributed optimizer that has {what} than are known")

    def _starts(self) -> Iterator[tuple[str, int]]:
        names = names_of(self._chunks)
        for buffer in self._buffers:
            for parameter, (start, _, _) in buffer.param_index_map.items():
                yield names[id(parameter)], start

    def _held(self) -> Iterator[tuple[str, tuple[int, int]]]:
        names = names_of(self._chunks)
        for parameter in self._inner.model_param_gbuf_map:
            part = self._inner._get_model_param_range_map(parameter)["param"]
            yield names[id(parameter)], (part.start, part.end)

    def describe(self) -> dict[str, Any]:
        """Raises UnsupportedError if there is optimizer state that is neither a number nor as long as the part, or that
        parameters do not have alike."""
        known = self._layout.by_name
        found = [_described(fqn, shard) for fqn, shard in self._shards().items() if fqn in known]
        if any(one != found[0] for one in found):
            raise UnsupportedError(
                "an elastic job with the distributed optimizer in which some parameters have other optimizer state "
                "than others: all of the same kinds is allowed"
            )
        return found[0] if found else {"state": [], "layout": {}}

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        dtypes = [str(buffer.param_dtype) for buffer in self._buffers]
        return [[one.fqn, one.length, one.group, dtypes[one.buffer]] for one in self._layout.stored]

    def ruled(self, description: Mapping[str, Any]) -> Sequence[tuple[TensorRule, torch.dtype]]:
        turns = {fqn: turn for turn, fqn in enumerate(self._layout.in_order)}
        return [
            found for one in self._layout.stored for found in self._ruled(one, turns[one.fqn], description["state"])
        ]

    def _ruled(self, one: Stored, turn: int, state: Sequence[Any]) -> Iterator[tuple[TensorRule, torch.dtype]]:
        of_part = self._layout.pattern(one)
        for key, dtype_name, single, _ in ((PARAM, "float32", False, False), *state):
            dtype: torch.dtype = getattr(torch, dtype_name)
            of_place = TensorRule(
                f"{one.fqn}/{key}",
                shape=() if single else (one.length,),
                itemsize=dtype.itemsize,
                pattern=WithRange(of_part, one.length) if single else of_part,
                shard=part_beginning(one.fqn),
                key=key,
                naming=Naming.PLACE_UNLESS_ALONE,
                turn=turn,
                suffix=self._group,
            )
            yield of_place, dtype
        dtype = self._buffers[one.buffer].param_dtype
        chunk, number = self._numbers[one.buffer]
        of_all = TensorRule(
            one.fqn + WEIGHTS,
            shape=(one.length,),
            itemsize=dtype.itemsize,
            pattern=self._layout.in_buffer(one),
            shard=weights_beginning(chunk, "expert" if self._expert else "dense", number),
            key=DATA,
            naming=Naming.SIZE,
            suffix=self._group,
        )
        yield of_all, dtype

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> ReadyTensors:
        flats = [
            torch.zeros(sum(of.lengths(size)), dtype=buffer.param_dtype, device=buffer.param_data.device)
            for of, buffer in zip(self._layout.buffers, self._buffers, strict=True)
        ]
        order = {fqn: number for number, fqn in enumerate(self._layout.order(place, size))}
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Mapping[str, Any]] = {}
        for one in self._layout.stored:
            low, high = self._layout.range_of(one, place, size)
            device = flats[one.buffer].device
            tensors[one.fqn + WEIGHTS] = flats[one.buffer]
            tensors[f"{one.fqn}/{PARAM}"] = torch.zeros(high - low, dtype=torch.float32, device=device)
            for key, dtype, single, host in description["state"]:
                shape = () if single else (high - low,)
                where = torch.device("cpu") if host else device
                tensors[f"{one.fqn}/{key}"] = torch.zeros(shape, dtype=getattr(torch, dtype), device=where)
            if low < high and description["state"]:
                places = {self._state: order[one.fqn]}
                values[part_name(one.fqn, place, size, self._group)] = {
                    "layout": description["layout"],
                    "places": places,
                }
        return ReadyTensors(
            tensors, values, lambda: self._install(ShardPlace(place, size), tensors, description, self._layout)
        )


def _described(fqn: str, shard: ParamShard) -> dict[str, Any]:
    tensors, values = shard.tensors_and_values()
    if values.get("plain"):
        raise UnsupportedError(
            f"an elastic job with the distributed optimizer and optimizer state {sorted(values['plain'])} of {fqn!r}: "
            "tensors are allowed"
        )
    whole = tensors[PARAM]
    for key, tensor in tensors.items():
        if tensor.dim() and tensor.shape != whole.shape:
            raise UnsupportedError(
                f"an elastic job with the distributed optimizer and optimizer state {key!r} of the shape "
                f"{tuple(tensor.shape)}: numbers, and what is as long as the part {tuple(whole.shape)}, are allowed"
            )
    state = [
        [key, str(t.dtype).removeprefix("torch."), t.dim() == 0, t.device != whole.device]
        for key, t in tensors.items()
        if key != PARAM
    ]
    return {"state": state, "layout": dict(values.get("layout", {}))}
