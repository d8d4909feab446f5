"""What a trainer's subclass keeps, as bytes and back: in place where the object is still there."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import pathlib
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec
from flashrecovery.trainer.own_state import AtStart
from flashrecovery.trainer.own_values import MISSING, ValueReader, ValueWriter


class Mood(enum.Enum):
    GOOD = 1
    BAD = 2


class Seen(NamedTuple):
    step: int
    losses: list[float]


class Slim:
    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Note:
    def __init__(self, text: str) -> None:
        self.text, self.more = text, {"a": [1, 2]}


def at_start(*values: Any) -> dict[int, object]:
    """By number, as another process has them at its first look."""
    writer = ValueWriter({}, {})
    for value in values:
        writer.write(value)
    return writer.objects


def _written(writer: ValueWriter, value: Any) -> Any:
    return codec.loads(writer.write(value))


def test_all_kinds_come_back_in_this_process_and_in_another() -> None:
    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        return {
            "list": [1, 2.5, "x", None],
            "nested": {"a": {"b": [torch.ones(2)]}},
            "default": collections.defaultdict(list, {"k": [1]}),
            "deque": collections.deque([1, 2, 3], maxlen=3),
            "tensor": torch.arange(4.0),
            "array": np.arange(3),
            "set": {1, 2},
            "tuple": (1, [2], torch.zeros(1)),
            "generator": generator,
            "python": random.Random(5),
            "mood": Mood.GOOD,
            "object": Note("one"),
            "slim": Slim("one"),
            "buffer": collections.deque([Seen(1, [0.5])]),
            "path": [pathlib.Path("one"), (datetime.timedelta(1), {})],
        }

    def change(values: dict[str, Any]) -> None:
        values["list"].append(3)
        values["nested"]["a"]["c"] = 1
        values["default"]["other"].append(2)
        values["deque"].append(4)
        values["tensor"].mul_(2)
        values["array"][0] = 9
        values["set"].add(3)
        values["generator"].manual_seed(9)
        values["python"].random()
        values["mood"] = Mood.BAD
        values["object"].text = "two"
        values["object"].more["a"].append(3)
        values["slim"].text = "two"
        values["buffer"][0].losses.append(1.0)
        values["path"][0] = pathlib.Path("two")
        values["path"][1][1]["a"] = 1

    def seen(values: dict[str, Any]) -> bytes:
        return ValueWriter({}, None).write(values)

    values, fresh = make(), make()
    before = {id(v) for v in [*values.values(), values["nested"]["a"], values["buffer"][0].losses, values["tuple"][1]]}
    writer = ValueWriter({}, {})
    saved, wanted = _written(writer, values), seen(values)
    change(values)
    assert seen(values) != wanted
    restored = ValueReader(writer.objects).read(saved, values)
    assert restored is values and seen(values) == wanted
    for name in ("tensor", "generator", "object", "default", "deque"):
        assert id(values[name]) in before, name
    assert all(id(one) in before for one in (values["nested"]["a"], values["buffer"][0].losses, values["tuple"][1]))
    there = at_start(fresh)
    change(fresh)
    assert seen(ValueReader(there).read(saved, fresh)) == wanted, "as a replacement's script has made them"
    assert seen(ValueReader({}).read(saved, MISSING)) == wanted, "what a replacement's script has not made"


def test_what_has_been_exchanged_since_is_not_written_to() -> None:
    """The tensor that stands there now may belong to something else: a batch that is given again."""
    holder = {"last": torch.ones(3)}
    writer = ValueWriter({}, {})
    saved = _written(writer, holder)
    batch = torch.zeros(3)
    holder["last"] = batch
    ValueWriter({}, writer.objects, writer.first).write(holder)  # a later look
    ValueReader({}).read(saved, holder)
    assert torch.equal(batch, torch.zeros(3))
    later = ValueWriter({}, writer.objects, writer.first)
    later.write(holder)
    assert torch.equal(ValueReader(later.objects).read(saved, holder)["last"], torch.ones(3))
    assert torch.equal(batch, torch.zeros(3))


def test_two_names_of_one_object_stay_two_names() -> None:
    queue = torch.ones(2)
    holder: dict[str, Any] = {"queue": queue, "view": [queue]}
    saved = _written(ValueWriter({}, {}), holder)
    other: dict[str, Any] = {"queue": torch.zeros(2), "view": [torch.zeros(2)]}
    restored = ValueReader({}, [saved]).read(saved, other)
    assert restored["queue"] is restored["view"][0] and torch.equal(restored["queue"], queue)


def test_variables_of_a_function_come_back() -> None:
    def counting() -> Any:
        calls, sums = 0, [0.5]

        def count(value: float) -> float:
            nonlocal calls
            calls += 1
            sums.append(value)
            return calls + sum(sums)

        return count

    count, other = counting(), counting()
    count(1.0)
    writer = ValueWriter({}, {})
    saved = _written(writer, count)
    wanted = copy.deepcopy([cell.cell_contents for cell in count.__closure__])
    count(2.0)
    ValueReader(writer.objects).read(saved, count)
    ValueReader(at_start(other)).read(saved, other)
    for function in (count, other):
        assert [cell.cell_contents for cell in function.__closure__] == wanted


def test_modules_and_what_cannot_be_brought_back_are_found() -> None:
    layer = torch.nn.Linear(1, 1)
    writer = ValueWriter({}, {})
    writer.write({"a": [layer], "b": iter([1]), "c": threading.Thread(), "d": torch.optim.SGD(layer.parameters())})
    assert writer.modules == [layer]
    assert sorted(writer.odd) == ["Thread", "list_iterator", "the optimizer SGD"]
    known = ValueWriter({id(layer): layer}, {})
    known.write(layer)
    assert not known.modules


def test_objects_that_lead_back_to_themselves() -> None:
    note = Note("one")
    note.more["self"] = note  # type: ignore[assignment]
    writer = ValueWriter({}, {})
    saved = _written(writer, note)
    note.text = "two"
    assert ValueReader(writer.objects).read(saved, note) is note
    assert note.text == "one" and note.more["self"] is note


def test_an_object_that_the_replacement_has_not_made() -> None:
    saved = _written(ValueWriter({}, {}), Note("one"))
    made = ValueReader({}).read(saved, MISSING)
    assert isinstance(made, Note) and made.text == "one" and made.more == {"a": [1, 2]}


def test_a_row_of_the_data_is_not_written_to() -> None:
    """It stood there when the script began; the other process held another one."""
    data = torch.arange(12.0).reshape(4, 3)
    there, other = {"last": data[0], "many": [data[1]]}, {"last": data[0], "many": [data[1]]}
    first = ValueWriter({}, {})
    first.write(other)
    other["last"] = data[3]
    other["many"][0] = data[2]
    saved = _written(ValueWriter({}, first.objects, first.first), other)
    restored = ValueReader(at_start(there), [saved]).read(saved, there)
    assert torch.equal(data, torch.arange(12.0).reshape(4, 3))
    assert restored is there
    assert torch.equal(there["last"], data[3]) and torch.equal(there["many"][0], data[2])


def test_parts_of_a_tensor_or_array_stay_parts_of_it() -> None:
    """Also those that have come about later, those of what is not held itself, and in the same process."""

    def make() -> dict[str, Any]:
        whole, counts = torch.zeros(4, 3), np.zeros(4)
        return {"row": whole[0], "whole": whole, "counts": counts, "same": counts, "part": [counts[1:3]]}

    values, fresh = make(), make()
    first = ValueWriter({}, {})
    first.write(values)
    hidden = torch.arange(6.0)
    values["row"] = values["whole"][2]
    values["new"] = [hidden[1:4], hidden[2:], values["counts"][::2]]
    values["row"] += 1
    values["counts"] += 2
    writer = ValueWriter({}, first.objects, first.first)
    saved = _written(writer, values)
    for restored in (
        ValueReader(writer.objects, [saved]).read(saved, values),
        ValueReader(at_start(fresh), [saved]).read(saved, fresh),
        ValueReader({}, [saved]).read(saved, MISSING),
    ):
        assert restored["whole"][2].tolist() == [1.0] * 3 and restored["counts"].tolist() == [2.0] * 4
        restored["row"] += 1
        assert restored["whole"][2].tolist() == [2.0] * 3 and not restored["whole"][:2].any()
        restored["same"][:] = [1, 2, 3, 4]
        assert restored["counts"].tolist() == [1, 2, 3, 4] and restored["part"][0].tolist() == [2, 3]
        assert restored["new"][2].tolist() == [1, 3]
        restored["new"][0][1:] = 7
        assert restored["new"][1].tolist() == [7.0, 7.0, 4.0, 5.0]


def test_what_stands_in_containers_and_cannot_be_written_is_found_by_its_number() -> None:
    def make() -> dict[str, Any]:
        one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        return {"all": [one, other], "chosen": [one], "function": torch.nn.functional.relu}

    values, fresh = make(), make()
    first = ValueWriter({}, {})
    first.write(values)
    values["chosen"] = [values["all"][1], torch.nn.functional.silu, Note]
    saved = _written(ValueWriter({}, first.objects, first.first), values)
    restored = ValueReader(at_start(fresh)).read(saved, fresh)
    assert restored["chosen"] == [fresh["all"][1], torch.nn.functional.silu, Note]
    values["chosen"] = [*values["all"], torch.nn.Linear(1, 1)]
    saved = _written(ValueWriter({}, first.objects, first.first), values)
    with pytest.raises(UnsupportedError, match="a container has got a Linear while the job was training"):
        ValueReader(at_start(make())).read(saved, MISSING)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_tensors_in_shards_come_back_where_one_like_them_stood(mesh: DeviceMesh) -> None:
    def make(value: float) -> dict[str, Any]:
        whole = distribute_tensor(torch.full((2, 2), value), mesh, [Shard(0)])
        return {"average": whole, "same": [whole], "newest": whole * 2}

    values, fresh = make(1.0), make(5.0)
    first = ValueWriter({}, {})
    first.write(values)
    values["average"].mul_(3)
    values["newest"] = values["average"] * 2
    writer = ValueWriter({}, first.objects, first.first)
    saved = _written(writer, values)
    values["average"].zero_()
    before = fresh["newest"]
    for objects, there in ((writer.objects, values), (at_start(fresh), fresh)):
        restored = ValueReader(objects, [saved]).read(saved, there)
        assert restored["average"] is there["average"] and restored["same"][0] is restored["average"]
        assert restored["average"].to_local().tolist() == [[3.0, 3.0]] * 2
        assert restored["newest"].to_local().tolist() == [[6.0, 6.0]] * 2
        assert restored["newest"].placements == (Shard(0),)
    assert before.to_local().tolist() == [[10.0, 10.0]] * 2, "another one is not written to"
    with pytest.raises(UnsupportedError, match="DTensor"):
        ValueReader({}, [saved]).read(saved, MISSING)


def test_a_process_that_began_with_other_things_writes_to_none_of_them() -> None:
    first, alike, other = [1], [2], collections.deque([3])
    start = AtStart({1: first})
    assert start.kinds == AtStart({1: alike}).kinds
    assert start.objects(AtStart({1: alike}).kinds) == {1: first}
    assert start.objects(AtStart({1: other}).kinds) == {}


def test_what_is_gone_since_the_start_is_not_kept() -> None:
    note = Note("one")
    start = AtStart({1: note, 2: torch.ones(1)})
    assert start.objects(start.kinds) == {1: note}
