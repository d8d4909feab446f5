"""Another sharding of state on one rank: made ready, put in place or dropped, as the controller has decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from flashrecovery.contract.adapter import Shard, ShardSpec
from flashrecovery.contract.elastic_adapter import ElasticAdapter
from flashrecovery.contract.shard_layout import Prepared, ShardedTensor, ShardLayout
from flashrecovery.errors import JobFailedError, RestoreError
from flashrecovery.plan import Kind
from flashrecovery.plan.reshard.boxes import NoHolderError
from flashrecovery.plan.reshard.layouts import chunked, sharded
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import TensorSpec
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.reshard.reshard import Reshaping

ROWS = torch.arange(14.0).view(7, 2)


class Rows(Shard):
    def __init__(self, place: int, size: int) -> None:
        self.be(place, size)

    def be(self, place: int, size: int) -> None:
        low, high = chunked(7, size)[place]
        self.data = ROWS[low:high].clone()
        self.name, self.holders = f"rows#shard={place}/{size}", (place,)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"data": self.data}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


class InRows(ShardLayout):
    def __init__(self, shard: Rows, size: int) -> None:
        self.shard, self._size = shard, size

    @property
    def size(self) -> int:
        return self._size

    def describe(self) -> dict[str, Any]:
        return {"rows": 7}

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        return [description["rows"]]

    def tensors(self, description: Mapping[str, Any], size: int) -> Sequence[ShardedTensor]:
        places = [(place,) for place in range(size)]
        names = [f"rows#shard={place}/{size}" for place in range(size)]
        placement = sharded((7, 2), 0, chunked(description["rows"], size), places)
        return [ShardedTensor("rows", (7, 2), torch.float32, placement, names, "data")]

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        return NewRows(self, place, size)


class NewRows(Prepared):
    def __init__(self, shard_layout: InRows, place: int, size: int) -> None:
        low, high = chunked(7, size)[place]
        self.shard_layout, self.place, self.size = shard_layout, place, size
        self.tensors, self.values = {"rows": torch.zeros(high - low, 2)}, {}

    def install(self) -> None:
        shard = self.shard_layout.shard
        shard.be(self.place, self.size)
        shard.data = self.tensors["rows"]
        self.shard_layout._size = self.size


class OneAdapter(ElasticAdapter):
    name = "rows"

    def __init__(self, place: int, size: int) -> None:
        self.shard = Rows(place, size)
        self._shard_layout = InRows(self.shard, size)

    def watch(self, hooks: Any) -> None: ...

    def shards(self) -> Sequence[Shard]:
        return [self.shard]

    def sync_spans_world(self) -> bool:
        return True

    def reset(self) -> None: ...

    def shard_layout(self) -> ShardLayout:
        return self._shard_layout


class Kept:
    """The copies that a rank keeps: of the one that leaves."""

    def __init__(self, place: int, size: int) -> None:
        self.of_other = Rows(place, size)
        self.said: list[str] = []

    def source(self, kind: str, shard: str, version: int) -> ShardSource:
        assert (kind, shard, version) == (Kind.COPY.value, self.of_other.name, 5)
        data = self.of_other.data
        return ShardSource(shard, ShardSpec({"data": TensorSpec(tuple(data.shape), data.dtype)}), [data])

    def make_ready(self, shards: Sequence[Shard], *_: object) -> None:
        self.said.append("ready " + " ".join(shard.name for shard in shards))

    def drop_ready(self) -> None:
        self.said.append("dropped")

    def put_in_place(self, shards: Sequence[Shard]) -> None:
        self.said.append("placed " + " ".join(shard.name for shard in shards))


def rank_of_two() -> tuple[Reshaping, Registry, OneAdapter, Kept]:
    """Rank 0, whose peer has left, and whose copies it keeps."""

    def never(*_: object) -> Any:
        raise AssertionError

    registry = Registry(0, 2, never, never)
    adapter = OneAdapter(0, 2)
    registry.adapters.append(adapter)
    registry.close()
    kept = Kept(1, 2)
    return Reshaping(registry, cast(Copies, kept), 0, (0, 1)), registry, adapter, kept


def message(*, custody: bool = True) -> pb.Reshape:
    found = pb.Reshape(before=[0, 1], after=[0])
    if custody:
        found.custody.add(shard="rows#shard=1/2", owner=1, holder=0, kind=Kind.COPY.value)
    return found


def ready() -> tuple[Reshaping, Registry, OneAdapter, Kept]:
    reshaping, registry, adapter, kept = rank_of_two()
    registry.resize((0,), 0)
    moved, needs = reshaping.make_ready(message(), 5, 1, corrupt=False)
    assert (moved.received, moved.lacking) == (0, 0), "it has everything itself"
    assert {need.name: need.nbytes for need in needs} == {"rows#shard=0/1": 56, "common": 0, "capsule@0": 0}
    return reshaping, registry, adapter, kept


def test_nothing_changes_until_it_is_put_in_place() -> None:
    reshaping, registry, adapter, kept = ready()
    assert torch.equal(adapter.shard.data, ROWS[:4]) and "rows#shard=0/2" in registry.shards
    assert adapter.shard.holders == (0,) and reshaping.layout == (0, 1)
    assert kept.said == ["dropped", "ready rows#shard=0/1"]


def test_put_in_place_with_the_resume() -> None:
    reshaping, registry, adapter, kept = ready()
    reshaping.put_in_place()
    reshaping.check((0,))
    assert torch.equal(adapter.shard.data, ROWS) and "rows#shard=0/1" in registry.shards
    assert set(registry.shards) == {"rows#shard=0/1", "common", "capsule@0"}
    assert kept.said[-1] == "placed rows#shard=0/1"
    reshaping.put_in_place()  # nothing is left to do
    assert kept.said[-1] == "placed rows#shard=0/1"


def test_put_in_place_with_a_stop_that_says_so() -> None:
    """The controller had decided for it, and this rank has not heard of it."""
    reshaping, _, adapter, _ = ready()
    assert reshaping.settle((0,)) == 5 and torch.equal(adapter.shard.data, ROWS)
    assert reshaping.settle((0,)) == -1, "once"


@pytest.mark.parametrize("layout", [(0, 1), (), (1,)])
def test_dropped_with_any_other_stop(layout: tuple[int, ...]) -> None:
    reshaping, _, adapter, kept = ready()
    assert reshaping.settle(layout) == -1 and kept.said[-1] == "dropped"
    assert torch.equal(adapter.shard.data, ROWS[:4])
    reshaping.put_in_place()
    assert torch.equal(adapter.shard.data, ROWS[:4])
    with pytest.raises(JobFailedError, match=r"sharded among ranks \[0, 1\], and the job is to go on with \[0\]"):
        reshaping.check((0,))


def test_what_nobody_keeps() -> None:
    reshaping, registry, _, _ = rank_of_two()
    registry.resize((0,), 0)
    with pytest.raises(NoHolderError, match=r"\[4:7, 0:2\]"):
        reshaping.make_ready(message(custody=False), 5, 1, corrupt=False)
    assert reshaping.settle((0,)) == -1


def test_a_shard_that_is_not_in_place_takes_nothing() -> None:
    reshaping, _, _, kept = rank_of_two()
    shards: list[Shard] = []
    kept.make_ready = lambda some, *_: shards.extend(some)  # type: ignore[method-assign]
    reshaping.make_ready(message(), 5, 1, corrupt=False)
    assert shards[0].spec().tensors["data"].shape == (7, 2)
    with pytest.raises(RestoreError, match="not in place yet"):
        shards[0].allocate(shards[0].spec())
