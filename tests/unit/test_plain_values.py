"""Plain values of a script's variables, and objects of its own classes: taken down, encoded, and put back."""

from __future__ import annotations

import array
import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import io
import multiprocessing
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import tqdm

from flashrecovery.state import codec
from flashrecovery.worker.own_loops import variables
from flashrecovery.worker.own_loops.variables import Identities, LoopVariables, Saved, put_back, take_down
from flashrecovery.worker.script_text.held_state import referred_to_from
from flashrecovery.worker.script_text.plain_values import LONGEST, SMALL, References, copy_of, is_kept, put


@pytest.fixture(autouse=True)
def _no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "MODULES", types.SimpleNamespace(besides=lambda variables: iter(())))


class Smoothed:
    def __init__(self) -> None:
        self.recent, self.total = collections.deque([1.0], maxlen=3), 1.0


class Logger:
    def __init__(self) -> None:
        self.meters: collections.defaultdict[str, Smoothed] = collections.defaultdict(Smoothed)


@dataclasses.dataclass
class Record:
    step: int
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    step: int


class Place(NamedTuple):
    epoch: int
    step: int


class Window(collections.abc.Sized):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class History(list[float]):
    pass


class AttrDict(dict[str, Any]):
    pass


class SelfDict(dict[str, Any]):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


def made_meters() -> collections.defaultdict[str, Smoothed]:
    meters = collections.defaultdict(Smoothed)
    meters["loss"].total = 2.0
    return meters


def state_of(thing: Any) -> Any:
    """What two equal things have in common."""
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return type(thing), thing.tolist()
    if isinstance(thing, dict):
        return type(thing), [(key, state_of(value)) for key, value in thing.items()], _attributes(thing)
    if isinstance(thing, (list, tuple, collections.deque)):
        return type(thing), [state_of(part) for part in thing], _attributes(thing)
    return (type(thing), _attributes(thing)) if hasattr(thing, "__dict__") and not callable(thing) else thing


def _attributes(thing: Any) -> Any:
    found = getattr(thing, "__dict__", {})
    return {} if found is thing else {name: state_of(value) for name, value in found.items()}


VALUES: dict[str, Callable[[], Any]] = {
    "records": lambda: [Record(1, ["a"]), Record(2)],
    "meters": made_meters,
    "records by name": lambda: {"best": Record(3), "last": Frozen(4)},
    "frozen": lambda: collections.deque([Frozen(4)], maxlen=2),
    "named tuple": lambda: [Place(1, 2)],
    "list of its own": lambda: [History([1.0, 2.0])],
    "dictionary of its own": lambda: [AttrDict(n=1)],
    "items are attributes": lambda: [SelfDict(n=1)],
    "counters in a dictionary": lambda: {"a": collections.Counter("abca"), "b": collections.OrderedDict(x=1)},
    "nested lists": lambda: [[1], [2, [3]], {"a": [4]}],
    "device and dtype": lambda: [torch.device("cpu"), torch.float16, torch.Size([2]), range(3), slice(1, None)],
    "other values": lambda: [decimal.Decimal("1.5"), pathlib.Path("a"), datetime.timedelta(seconds=3)],
    "functions and classes": lambda: [made_meters, Record, len],
    "namespace": lambda: [types.SimpleNamespace(a=1, b=[2])],
    "tensors and arrays": lambda: [torch.ones(2), np.arange(3), {"a": torch.zeros(1)}],
    "a dictionary like a mark": lambda: {"pickled": 1},
    "frozen keys": lambda: {("a", Frozen(1)): [1], Frozen(2): 2},
    "classes and functions as keys": lambda: {Record: Record(1), made_meters: 2, Kind.GOOD: 3, pathlib.Path("a"): 4},
    "counted classes": lambda: {
        "n": collections.Counter([Record, Record]),
        "m": collections.defaultdict(int, {int: 1}),
    },
}


class Kind(enum.Enum):
    GOOD = "good"


def closed() -> io.StringIO:
    made = io.StringIO()
    made.close()
    return made


@pytest.mark.parametrize("what", VALUES)
def test_it_is_made_again_where_it_was_not(what: str) -> None:
    value = VALUES[what]()
    assert is_kept(value)
    saved = codec.loads(codec.dumps(copy_of(value)))
    assert state_of(put(None, saved)) == state_of(value)


@pytest.mark.parametrize("what", VALUES)
def test_a_copy_does_not_change_with_it(what: str) -> None:
    value = VALUES[what]()
    saved, before = copy_of(value), state_of(value)
    for part in value.values() if isinstance(value, dict) else list(value):
        for attribute in getattr(part, "__dict__", {}):
            if not isinstance(part, (type, types.FunctionType, SelfDict)):
                setattr(part, attribute, "other")
    value.clear()
    assert state_of(put(value, saved)) == before


def test_an_object_that_is_there_stays_the_same_object() -> None:
    records = [Record(1, ["a"]), Record(2)]
    first, tags = records[0], records[0].tags
    saved = copy_of(records)
    first.step, first.tags[:] = 7, ["b", "c"]
    assert put(records, saved) is records and records[0] is first and first.tags is tags
    assert records == [Record(1, ["a"]), Record(2)]


class Opened:
    def __init__(self) -> None:
        self.file = open  # of no name that leads to it in its module ...
        self.lines = iter([1])


NOT_KEPT: dict[str, Callable[[], Any]] = {
    "an open file": Opened,
    "a list with one": lambda: [Opened()],
    "a lambda": lambda: [lambda: 1],
    "an object as key": lambda: {("a", Smoothed()): 1},
    "a closed text": lambda: [closed()],
    "a sentinel": lambda: [object()],
}


@pytest.mark.parametrize("what", NOT_KEPT)
def test_what_cannot_be_made_again_is_not_kept(what: str) -> None:
    class Local:
        pass

    assert not is_kept(NOT_KEPT[what]()) and not is_kept([Local()]) and not is_kept([0] * (SMALL + 1))


def test_a_class_of_a_function_and_a_cycle_are_not_kept() -> None:
    cycle: list[Any] = [Record(1)]
    cycle.append(cycle)
    assert not is_kept(cycle)


# -- with variables -----------------------------------------------------------------------------------


def _frame(**values: Any) -> types.FrameType:
    return types.SimpleNamespace(f_locals=values, f_globals=values)  # type: ignore[return-value]


def _names(*own: str, read: tuple[str, ...] = ()) -> LoopVariables:
    return LoopVariables(frozenset(own), frozenset(), frozenset(), read=frozenset((*own, *read)))


def _saved(names: LoopVariables, **values: Any) -> Saved:
    return Saved.of(codec.loads(codec.dumps(take_down(_frame(**values), names, Identities()).plain())))


def test_a_logger_of_meters_that_the_training_makes() -> None:
    names, logger, new = _names(read=("logger",)), Logger(), Logger()
    logger.meters["loss"].total = 5.0
    logger.meters["loss"].recent.append(7.0)
    put_back(_frame(logger=new), names, Identities(), _saved(names, logger=logger))
    assert state_of(new) == state_of(logger)
    new.meters["accuracy"].total = 1.0  # it still makes new ones


def test_what_two_variables_lead_to_they_lead_to_afterwards() -> None:
    names, losses, first = _names("losses", "metrics", "best", "records"), [1.0], Record(1)
    values: dict[str, Any] = {
        "losses": losses,
        "metrics": {"loss": losses},
        "best": first,
        "records": [Record(0), first],
    }
    saved = _saved(names, **values)
    for made in ({"losses": [], "metrics": {}, "best": None, "records": []}, values):  # a replacement, a survivor
        if made is values:
            losses.append(2.0)
            values["records"].pop(0)
            values["records"].append(Record(2))
        found = put_back(_frame(**made), names, Identities(), saved)
        assert found["metrics"]["loss"] is found["losses"] and found["losses"] == [1.0]
        assert found["records"][1] is found["best"] and found["records"] == [Record(0), Record(1)]


MAKERS: dict[str, Callable[[int], Any]] = {
    "list": lambda n: [n],
    "dictionary": lambda n: {"n": n},
    "object": Record,
    "deque": lambda n: collections.deque([n]),
    "dictionary of its own": lambda n: AttrDict(n=n),
    "list of its own": lambda n: History([float(n)]),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_an_interrupted_step_lets_two_variables_lead_to_is_two_things_again(kind: str) -> None:
    """``before, now = now, {}`` had begun."""
    names = _names("before", "now")
    first, second = (MAKERS[kind](n) for n in (1, 2))
    saved = _saved(names, before=first, now=second)
    wanted = state_of(first), state_of(second)
    found = put_back(_frame(before=second, now=second), names, Identities(), saved)
    assert (state_of(found["before"]), state_of(found["now"])) == wanted and found["before"] is not found["now"]


def test_a_tensor_that_no_statement_sets_is_written_in_place_also_if_it_is_held_elsewhere() -> None:
    names, running = _names("running", "stats"), torch.ones(2)
    values: dict[str, Any] = {"running": running, "stats": {"running": running}}
    saved = _saved(names, **values)
    running.add_(1)
    found = put_back(_frame(**values), names, Identities(), saved)
    assert found["running"] is running and found["stats"]["running"] is running and running.tolist() == [1, 1]


def test_a_variable_leads_to_the_object_of_the_set_up() -> None:
    """``for one in callbacks: one.count += 1`` leaves ``one`` behind."""
    names = _names("one", read=("callbacks",))
    callbacks = [Record(3), Record(4)]
    saved = _saved(names, callbacks=callbacks, one=callbacks[1])
    new = [Record(0), Record(0)]
    found = put_back(_frame(callbacks=new), names, Identities(), saved)
    assert new == callbacks and found["one"] is new[1]


def test_an_attribute_that_has_come_since_is_gone_again() -> None:
    names, record = _names("record"), Record(1)
    saved = _saved(names, record=record)
    record.extra = 1  # type: ignore[attr-defined]
    found = put_back(_frame(record=record), names, Identities(), saved)
    assert found["record"] is record and not hasattr(record, "extra")


def test_what_an_object_or_a_function_has_got_since_is_gone_again() -> None:
    """``functools.cached_property``; a dictionary that has a model, too."""

    def function() -> None: ...

    names, record, model = _names(read=("record", "function", "registry")), Record(1), torch.nn.Linear(1, 1)
    function.calls = 1  # type: ignore[attr-defined]
    registry: dict[str, Any] = {"model": model, "count": 1}
    values: dict[str, Any] = {"record": record, "function": function, "registry": registry}
    saved = _saved(names, **values)
    record.noise = torch.ones(1)  # type: ignore[attr-defined]
    function.again = 1  # type: ignore[attr-defined]
    registry["best"] = 1.0
    put_back(_frame(**values), names, Identities(), saved)
    assert not hasattr(record, "noise") and vars(function) == {"calls": 1} and registry == {"model": model, "count": 1}


def test_texts_in_memory_and_shared_numbers_come_back_where_they_are() -> None:
    """With the place where the next write goes."""
    names = _names("lines", read=("text", "data", "count", "table", "record"))
    text, data, count, table = (
        io.StringIO(),
        io.BytesIO(b"abc"),
        multiprocessing.Value("i", 3),
        multiprocessing.Array("d", 2),
    )
    record = Record(1)
    record.log = io.StringIO()  # type: ignore[attr-defined]
    text.write("one ")
    values = {"text": text, "data": data, "count": count, "table": table, "record": record, "lines": [text]}
    saved = _saved(names, **values)
    text.write("two ")
    data.seek(1)
    data.write(b"xyz")
    count.value, table[1] = 7, 5.0
    record.log.write("more")  # type: ignore[attr-defined]
    found = put_back(_frame(**values), names, Identities(), saved)
    assert (text.getvalue(), data.getvalue(), data.tell(), count.value, table[:]) == ("one ", b"abc", 0, 3, [0.0, 0.0])
    text.write("three")
    assert text.getvalue() == "one three" and found["lines"] == [text]
    assert record.log.getvalue() == ""  # type: ignore[attr-defined]


def test_a_text_that_is_closed_or_too_long_is_left_out() -> None:
    names, long = _names(read=("closed", "long", "table")), io.StringIO("a" * (LONGEST + 1))
    table = multiprocessing.Array("d", SMALL + 1)
    saved = take_down(_frame(closed=closed(), long=long, table=table), names, Identities())
    assert not saved.attributes and sorted(saved.too_long) == ["closed", "long", "table"]


def test_low_discrepancy_points_go_on_where_they_were() -> None:
    names, points = _names(read=("points",)), torch.quasirandom.SobolEngine(2, scramble=True, seed=1)
    points.draw(3)
    saved = _saved(names, points=points)
    wanted = points.draw(2)
    new = torch.quasirandom.SobolEngine(2, scramble=True, seed=1)
    for engine in (points, new):
        put_back(_frame(points=engine), names, Identities(), saved)
        assert torch.equal(engine.draw(2), wanted)


def test_dictionaries_whose_keys_are_parameters_and_modules() -> None:
    names = _names("averages", "seen")

    def known(model: torch.nn.Module) -> Identities:
        return Identities.of(set(), (), References(referred_to_from([("model", model)])))

    model, new = (torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU()) for _ in range(2))
    values = {"averages": {p: torch.ones(2) for p in model.parameters()}, "seen": collections.Counter({model[0]: 2})}
    saved = Saved.of(codec.loads(codec.dumps(take_down(_frame(**values), names, known(model)).plain())))
    found = put_back(_frame(averages={}, seen=collections.Counter()), names, known(new), saved)
    assert [*map(id, found["averages"])] == [*map(id, new.parameters())] and found["seen"] == {new[0]: 2}
    assert not is_kept({torch.nn.Linear(1, 1): 1})


def test_variables_of_a_module_that_is_made_by_hand() -> None:
    names, tools = _names(read=("tools",)), types.ModuleType("tools")
    vars(tools).update(count=1, heads=[torch.nn.Linear(1, 1)], seen=[1])
    saved = _saved(names, tools=tools)
    vars(tools).update(count=2)
    tools.seen.append(2)
    put_back(_frame(tools=tools), names, Identities(), saved)
    assert (tools.count, tools.seen, len(tools.heads)) == (1, [1], 1)


def test_the_functions_of_a_progress_bar_are_its_own() -> None:
    """A new one is made for each epoch."""
    with tqdm.tqdm(range(3), file=io.StringIO()) as bar:
        assert not take_down(_frame(bar=bar), _names("bar"), Identities()).others


def test_an_object_that_is_a_default_argument() -> None:
    def smooth(state: types.SimpleNamespace = types.SimpleNamespace(value=1.0)) -> None:  # noqa: B008
        state.value += 1.0

    names = _names(read=("smooth",))
    saved = _saved(names, smooth=smooth)
    smooth()
    put_back(_frame(smooth=smooth), names, Identities(), saved)
    assert smooth.__defaults__ is not None and smooth.__defaults__[0].value == 1.0


def test_buffers_come_back_where_they_are() -> None:
    names = _names("losses", "held", "marks", read=())
    losses, marks = array.array("d", [1.0, 2.0]), bytearray(b"xy")
    saved = _saved(names, losses=losses, held=[losses], marks=marks)
    for made in ({"losses": array.array("d"), "held": [], "marks": bytearray()}, {"losses": losses, "held": [losses]}):
        losses.append(3.0)
        found = put_back(_frame(**made), names, Identities(), saved)
        assert found["losses"].tolist() == [1.0, 2.0] and found["held"][0] is found["losses"]
        assert found["marks"] == b"xy"
    assert found["losses"] is losses


def test_containers_of_the_standard_library_and_abstract_classes() -> None:
    user, chain = collections.UserDict(total=1.0), collections.ChainMap({"n": 1}, {"n": 0})
    names = _names("chain", read=("user",))
    saved = _saved(names, user=user, chain=chain)
    new: dict[str, Any] = {"user": collections.UserDict(), "chain": collections.ChainMap()}
    found = put_back(_frame(**new), names, Identities(), saved)
    assert new["user"] == user and found["chain"].maps == chain.maps
    assert is_kept(Window(3))


def test_a_dictionary_with_a_model_comes_back_but_for_that() -> None:
    model, new_model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state = {"model": model, "n": 3, "best": Record(1), 7: [1.0]}
    new: dict[Any, Any] = {"model": new_model, "n": 0, "best": None}
    names = _names("state")
    put_back(_frame(state=new), names, Identities(), _saved(names, state=state))
    assert new == {"model": new_model, "n": 3, "best": Record(1), 7: [1.0]}


def test_what_a_loop_carries_and_cannot_be_made_again_is_left_out() -> None:
    names = LoopVariables(
        frozenset(("files", "few", "models")), frozenset(), frozenset(), carried=frozenset(("files", "models"))
    )
    values = {"files": [Opened()], "few": [Opened()], "models": [torch.nn.Linear(1, 1)]}
    assert take_down(_frame(**values), names, Identities()).left_out == ["files"]


def test_methods_partials_and_lists_of_its_own_are_followed() -> None:
    def change(method: Any, partial: Any, history: Any) -> None:
        method.__self__.total += 1
        partial.args[0].append(1)
        history.append(2.0)

    import functools

    names = _names(read=("method", "partial", "history"))

    def made() -> dict[str, Any]:
        return {
            "method": Smoothed().__init__,  # type: ignore[misc]
            "partial": functools.partial(print, []),
            "history": History(),
        }

    values, new = made(), made()
    change(**values)
    put_back(_frame(**new), names, Identities(), _saved(names, **values))
    assert new["method"].__self__.total == 2 and new["partial"].args[0] == [1] and new["history"] == [2.0]


class Average:
    def __init__(self) -> None:
        self.flat = torch.arange(6.0)
        self.parts = [self.flat[:2], self.flat[2:].view(2, 2), self.flat[1::2]]


def _through_bytes(saved: Saved) -> Saved:
    return Saved.of(codec.loads(codec.dumps(saved.plain())))


def _one_memory(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_tensors_that_share_elements_share_them_afterwards() -> None:
    average = Average()
    names = _names(read=("average",))
    saved = _through_bytes(take_down(_frame(average=average), names, Identities()))
    before = average.flat.tolist()
    other = Average()
    other.flat = torch.zeros(1)
    for there in (average, other):
        there.flat.add_(1)
        put_back(_frame(average=there), names, Identities(), saved)
        assert there.flat.tolist() == before and _one_memory([there.flat, *there.parts])
        assert there.parts[1].tolist() == [[2, 3], [4, 5]] and there.parts[2].tolist() == [1, 3, 5]


def test_rows_in_a_list_stay_rows_of_their_table() -> None:
    """No statement sets the table: it is written in place, and the rows, which the loop changes, are in its memory."""
    names = _names("rows", read=("table",))

    def made() -> dict[str, Any]:
        table = torch.zeros(3, 2)
        return {"table": table, "rows": list(table)}

    variables, replaced = made(), made()
    variables["rows"][1].add_(5)
    saved = _through_bytes(take_down(_frame(**variables), names, Identities()))
    for there in (variables, replaced):
        table = there["table"].add_(1)
        found = put_back(_frame(**there), names, Identities(), saved)
        assert found["table"] is table and table.tolist() == [[0, 0], [5, 5], [0, 0]]
        assert _one_memory([table, *found["rows"]])


def test_arrays_that_share_elements_share_them_afterwards() -> None:
    names = _names("rows", "last", "counts", read=("table",))

    def made() -> dict[str, Any]:
        table = np.zeros((3, 2))
        return {"table": table, "rows": list(table), "last": table[::-1, 1], "counts": torch.from_numpy(table)}

    variables, replaced = made(), made()
    variables["rows"][1] += 5
    saved = _through_bytes(take_down(_frame(**variables), names, Identities()))
    for there in (variables, replaced):
        there["table"] += 1
        found = put_back(_frame(**there), names, Identities(), saved)
        assert found["table"] is there["table"] and found["table"].tolist() == [[0, 0], [5, 5], [0, 0]]
        found["rows"][2][1] = 7
        assert found["table"][2, 1] == found["last"][0] == found["counts"][2, 1] == 7


@pytest.mark.parametrize("kind", [torch.arange, np.arange])
def test_parts_of_a_data_set_in_a_list_are_no_reason_to_write_into_it(kind: Any) -> None:
    data = kind(8.0)
    names = _names("recent")
    saved = _through_bytes(take_down(_frame(recent=[data[:2], data[4:]]), names, Identities()))
    found = put_back(_frame(recent=[data[2:4], data[:4]]), names, Identities(), saved)
    assert [part.tolist() for part in found["recent"]] == [[0, 1], [4, 5, 6, 7]]
    assert data.tolist() == [*range(8)]


def test_what_has_no_room_in_the_memory_that_is_there_gets_its_own() -> None:
    table = torch.zeros(4)
    names = _names("rows", read=("table",))
    saved = take_down(_frame(table=table[:3], rows=[table[2:]]), names, Identities())
    found = put_back(_frame(table=torch.ones(3), rows=[]), names, Identities(), saved)
    assert found["table"].tolist() == [0, 0, 0] and found["rows"][0].tolist() == [0, 0]
