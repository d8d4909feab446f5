"""What a trainer's subclass keeps, as bytes and back: in place where the object is still there."""

from __future__ import annotations

import collections
import copy
import enum
import random
import threading
from typing import Any

import numpy as np
import torch

from flashrecovery.state import codec
from flashrecovery.trainer.own_values import MISSING, ValueReader, ValueWriter


class Mood(enum.Enum):
    GOOD = 1
    BAD = 2


class Note:
    def __init__(self, text: str) -> None:
        self.text, self.more = text, {"a": [1, 2]}


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

    def seen(values: dict[str, Any]) -> bytes:
        return ValueWriter({}, None).write(values)

    values, fresh = make(), make()
    before = {id(v) for v in values.values()}
    writer = ValueWriter({}, {})
    saved, wanted = _written(writer, values), seen(values)
    change(values)
    assert seen(values) != wanted
    restored = ValueReader(writer.objects).read(saved, values)
    assert restored is values and seen(values) == wanted
    for name in ("tensor", "generator", "object", "default", "deque"):
        assert id(values[name]) in before, name
    change(fresh)
    assert seen(ValueReader(None).read(saved, fresh)) == wanted, "as a replacement's script has made them"


def test_what_has_been_exchanged_since_is_not_written_to() -> None:
    """The tensor that stands there now may belong to somebody else: a batch that is given once more."""
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
    restored = ValueReader(None).read(saved, other)
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
    ValueReader(None).read(saved, other)
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
    made = ValueReader(None).read(saved, MISSING)
    assert isinstance(made, Note) and made.text == "one" and made.more == {"a": [1, 2]}
