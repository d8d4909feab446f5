"""How the distributed optimizer divides its state, in any number of replicas.

Parameters lie in flat buffers, which are cut into buckets. Which parameters are in a bucket, and where in it, is the
same in every size; how far a bucket is padded at its end depends on the size, and so does where the next one begins.
Each rank has an equal range of every bucket: of the parameters in it, that part of what is stepped on, and of the
optimizer's state. What the module computes with, the flat buffer, is on all ranks, with paddings that are of one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import (
    DividedTensor,
    Division,
    DivisionPlace,
    LocalBox,
    ParamShard,
    Prepared,
    ReadyTensors,
    layouts,
)
from flashrecovery.errors import UnsupportedError
from fr_megatron.optimizers import part_name, weights_name

PARAM, STATE, DATA = "param", "state/", "data"
"""Keys of the tensors of a :class:`ParamShard` and of a fixed one."""
WEIGHTS = "/weights"
"""How the names of divided tensors end that are parts of a flat buffer."""
_ALIGNMENT, _BANDWIDTH = 128, 1 << 16
"""Elements of which a bucket's length is a multiple, and with ``pad_buckets_for_high_nccl_busbw``."""


@dataclass(frozen=True)
class Stored:
    """A parameter in its buffer.

    Attributes:
        buffer, bucket: their numbers.
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
class FlatBuffer:
    """A flat buffer: the elements of each of its buckets without the padding at their ends, and of what their lengths
    are multiples besides the number of ranks."""

    buckets: tuple[int, ...]
    multiple: int

    def lengths(self, size: int) -> list[int]:
        """Of the buckets, for so many ranks."""
        multiple = math.lcm(size, self.multiple)
        return [-(-elements // multiple) * multiple for elements in self.buckets]

    def begin(self, bucket: int, size: int) -> int:
        """The first element of a bucket."""
        return sum(self.lengths(size)[:bucket])


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
        share = self.buffers[one.buffer].lengths(size)[one.bucket] // size
        low, high = place * share - one.start, (place + 1) * share - one.start
        return min(max(low, 0), one.length), min(max(high, 0), one.length)

    def start_of(self, one: Stored, size: int) -> int:
        """A parameter's first element in its buffer."""
        return self.buffers[one.buffer].begin(one.bucket, size) + one.start

    def order(self, place: int, size: int) -> list[str]:
        """What the rank at ``place`` steps on, as it stands in the optimizer's groups, one after another."""

        def mine(one: Stored) -> bool:
            low, high = self.range_of(one, place, size)
            return low < high

        groups = sorted({one.group for one in self.stored})
        return [
            one.fqn
            for group in groups
            for wide in (True, False)
            for one in self.stored
            if one.group == group and one.wide is wide and mine(one)
        ]


def layout_of(chunk: Any, membership: Mapping[str, int]) -> FlatLayout:
    """Of a chunk as it is now; ``membership``: of each trained parameter the optimizer's group, by its name."""
    names = {id(p): f"0.{name}" for name, p in chunk.named_parameters()}
    multiple = math.lcm(_ALIGNMENT, _BANDWIDTH if chunk.ddp_config.pad_buckets_for_high_nccl_busbw else 1)
    stored = [
        Stored(fqn, number, bucket, start - of_bucket, stop - start, membership[fqn], parameter.dtype == torch.float32)
        for number, buffer in enumerate(chunk.buffers)
        for parameter, (start, stop, bucket) in buffer.param_index_map.items()
        for fqn, of_bucket in [(names[id(parameter)], buffer.buckets[bucket].offset)]
    ]
    buffers = [FlatBuffer(tuple(b.numel_unpadded for b in buffer.buckets), multiple) for buffer in chunk.buffers]
    return FlatLayout(tuple(buffers), tuple(stored))


class OptimizerDivision(Division):
    """The division of one chunk and its distributed optimizer.

    Args:
        shards: gives what this rank steps on, by the parameters' names.
        install: puts prepared tensors in the place of those that there are.
    """

    def __init__(
        self,
        chunk: Any,
        inner: Any,
        membership: Mapping[str, int],
        shards: Callable[[], Mapping[str, ParamShard]],
        install: Callable[[DivisionPlace, Mapping[str, torch.Tensor], Mapping[str, Any], FlatLayout], None],
    ) -> None:
        self._chunk, self._inner = chunk, inner
        self._layout = layout_of(chunk, membership)
        self._shards = shards
        self._install = install
        self._placements: dict[tuple[str, int, str], layouts.Placement] = {}
        self._largest = 0

    @property
    def size(self) -> int:
        return int(self._chunk.buffers[0].data_parallel_world_size)

    def check(self) -> None:
        """Raises UnsupportedError if the state cannot be divided otherwise, or is not divided as it is known here."""
        self.describe()
        if self._largest >= self.size:
            return
        self._largest = self.size
        self._check_as_known()
        for size in range(1, self.size + 1):
            for place in range(size):
                if not self._layout.order(place, size):
                    raise UnsupportedError(
                        f"an elastic job with the distributed optimizer and so small a model that rank {place} of "
                        f"{size} would have no part of it"
                    )

    def _check_as_known(self) -> None:
        """Raises UnsupportedError unless Megatron has laid everything out as it is computed here."""
        layout, size, place = self._layout, self.size, dist.get_rank()
        computed = {one.fqn: layout.start_of(one, size) for one in layout.stored}
        lengths = [sum(buffer.lengths(size)) for buffer in layout.buffers]
        cut = {fqn: layout.range_of(layout.by_name[fqn], place, size) for fqn in layout.order(place, size)}
        for what, here, there in (
            ("parameters elsewhere in its buffers", computed, dict(self._starts())),
            ("buffers of other lengths", lengths, [buffer.numel for buffer in self._chunk.buffers]),
            ("parameters cut elsewhere", cut, dict(self._held())),
        ):
            if here != there:
                raise UnsupportedError(f"an elastic job with a distributed optimizer that has {what} than are known")

    def _starts(self) -> Iterator[tuple[str, int]]:
        names = {id(p): f"0.{name}" for name, p in self._chunk.named_parameters()}
        for buffer in self._chunk.buffers:
            for parameter, (start, _, _) in buffer.param_index_map.items():
                yield names[id(parameter)], start

    def _held(self) -> Iterator[tuple[str, tuple[int, int]]]:
        names = {id(p): f"0.{name}" for name, p in self._chunk.named_parameters()}
        for parameter in self._inner.model_param_gbuf_map:
            part = self._inner._get_model_param_range_map(parameter)["param"]
            yield names[id(parameter)], (part.start, part.end)

    def describe(self) -> dict[str, Any]:
        """Raises UnsupportedError if there is optimizer state that is neither a number nor as long as the part, or that
        parameters do not have alike."""
        found = [_described(fqn, shard) for fqn, shard in self._shards().items()]
        if any(one != found[0] for one in found):
            raise UnsupportedError(
                "an elastic job with the distributed optimizer in which some parameters have other optimizer state "
                "than others: all of the same kinds is allowed"
            )
        return found[0] if found else {"state": [], "layout": {}}

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        dtypes = [str(buffer.param_dtype) for buffer in self._chunk.buffers]
        return [[one.fqn, one.length, one.group, dtypes[one.buffer]] for one in self._layout.stored]

    def tensors(self, description: Mapping[str, Any], size: int) -> Sequence[DividedTensor]:
        found: list[DividedTensor] = []
        for one in self._layout.stored:
            pieces = [self._layout.range_of(one, place, size) for place in range(size)]
            mine = [part_name(one.fqn, place, size) if low < high else "" for place, (low, high) in enumerate(pieces)]
            parts = self._placement(one, size, PARAM)
            found.append(DividedTensor(f"{one.fqn}/{PARAM}", (one.length,), torch.float32, parts, mine, PARAM))
            for key, dtype, single, _ in description["state"]:
                shape, placement = ((), self._placement(one, size, "")) if single else ((one.length,), parts)
                found.append(DividedTensor(f"{one.fqn}/{key}", shape, getattr(torch, dtype), placement, mine, key))
            flat = [weights_name(0, "dense", one.buffer, size)] * size
            whole, dtype = self._placement(one, size, DATA), self._chunk.buffers[one.buffer].param_dtype
            found.append(DividedTensor(one.fqn + WEIGHTS, (one.length,), dtype, whole, flat, DATA))
        return found

    def _placement(self, one: Stored, size: int, kind: str) -> layouts.Placement:
        """Of what is stepped on (PARAM), of a number that goes with it (""), or of the weights (DATA)."""
        known = (one.fqn, size, kind)
        if known not in self._placements:
            pieces = [self._layout.range_of(one, place, size) for place in range(size)]
            owners = tuple(place for place, (low, high) in enumerate(pieces) if low < high)
            self._placements[known] = (
                layouts.sharded((one.length,), 0, pieces, [(place,) for place in range(size)])
                if kind == PARAM
                else layouts.replicated((one.length,) if kind == DATA else (), range(size) if kind == DATA else owners)
            )
        return self._placements[known]

    def parts(self, tensor: DividedTensor, place: int, local: torch.Tensor) -> list[LocalBox]:
        if not tensor.name.endswith(WEIGHTS):
            return super().parts(tensor, place, local) if tensor.shards[place] else []
        one = self._layout.by_name[tensor.name.removesuffix(WEIGHTS)]
        start = self._layout.start_of(one, len(tensor.shards))
        (box,) = tensor.boxes(place)
        return [LocalBox(box, local.view(-1)[start : start + one.length])]

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        flats = [
            torch.zeros(sum(of.lengths(size)), dtype=buffer.param_dtype, device=buffer.param_data.device)
            for of, buffer in zip(self._layout.buffers, self._chunk.buffers, strict=True)
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
                places = {STATE: order[one.fqn]}
                values[part_name(one.fqn, place, size)] = {"layout": description["layout"], "places": places}
        return ReadyTensors(
            tensors, values, lambda: self._install(DivisionPlace(place, size), tensors, description, self._layout)
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
