"""Variables of a script's own loops, what they run over, and what is printed: taken down, and put back."""

from __future__ import annotations

import enum
import io
import logging
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from flashrecovery.errors import DataSourceError
from flashrecovery.state import codec
from flashrecovery.worker.data.source import Source
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.own_loops import variables
from flashrecovery.worker.own_loops.loop_data import LoopData, OwnIterator
from flashrecovery.worker.own_loops.loops import ScriptLoops
from flashrecovery.worker.own_loops.output import Output
from flashrecovery.worker.own_loops.variables import (
    NAMES,
    Identities,
    LoopVariables,
    Saved,
    protected,
    put_back,
    take_down,
)
from flashrecovery.worker.script_text.plain_values import storage_of


@pytest.fixture(autouse=True)
def _no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own would be those of the tests, which have nothing to do with these variables."""
    monkeypatch.setattr(variables, "MODULES", types.SimpleNamespace(besides=lambda variables: iter(())))


class Holding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.draws, self.seen = torch.nn.Linear(2, 2), random.Random(3), [0]
        self.cache: torch.Tensor | None = None
        self.width, self.meter = 3, Meter()
        self.own = self.layer.weight

    def forward(self) -> None:
        self.cache = torch.ones(2)


class Meter:
    def __init__(self) -> None:
        self.sum, self.values, self.inner = 1.5, [1, 2], None


def names(*own: str, remade: tuple[str, ...] = (), read_after: tuple[str, ...] = ()) -> LoopVariables:
    return LoopVariables(frozenset(own), frozenset(remade), frozenset(read_after))


def frame_with(**variables: Any) -> types.FrameType:
    return types.SimpleNamespace(f_locals=variables, f_globals=variables)  # type: ignore[return-value]


def test_what_a_network_holds_comes_back() -> None:
    """Its parameters are kept with it, and so are the numbers that its methods leave alone."""
    net, other = Holding(), Holding()
    model, replaced = torch.nn.Sequential(net), torch.nn.Sequential(other)
    known = protected([model], [])
    frame = frame_with(model=model)
    of = LoopVariables(frozenset(), frozenset(), frozenset(), read=frozenset({"model"}))
    saved = Saved.of(codec.loads(codec.dumps(take_down(frame, of, known).plain())))
    kept = {path for path in saved.attributes if "meter" not in path}
    assert kept == {"model.0.seen", "model.0.cache", "model.0.draws"}
    drawn = net.draws.random()
    net.seen.append(1)
    net()
    net.meter.sum = 9.0
    put_back(frame, of, known, saved)
    assert (net.draws.random(), net.seen, net.cache, net.meter.sum) == (drawn, [0], None, 1.5)
    other()
    other.draws.random()
    put_back(frame_with(model=replaced), of, known, saved)
    assert (other.draws.random(), other.cache) == (drawn, None)


def test_numbers_containers_tensors_and_attributes_come_back() -> None:
    history, recent, meter = [1.0], deque([1], maxlen=3), Meter()
    frame = frame_with(n=3, history=history, recent=recent, mean=torch.ones(2), meter=meter, other=open)
    wanted = names("n", "history", "recent", "mean", "meter", "other")
    saved = Saved.of(codec.loads(codec.dumps(take_down(frame, wanted, Identities()).plain())))
    assert saved.variables.keys() == {"n", "history", "recent", "mean", "meter", "other"}
    history.append(2.0)
    recent.append(2)
    meter.sum, meter.values = 9.0, [7]
    frame.f_locals["n"] = 4
    values = put_back(frame, wanted, Identities(), saved)
    assert values["n"] == 3 and torch.equal(values["mean"], torch.ones(2))
    assert values["history"] is history and history == [1.0], "others may hold the same list"
    assert values["recent"] is recent and [*recent] == [1]
    assert (meter.sum, meter.values) == (1.5, [1, 2])


class Phase(enum.Enum):
    WARM = 1
    TRAIN = 2


class Slots:
    __slots__ = ("n", "values")

    def __init__(self) -> None:
        self.n, self.values = 1, [1]


class Tally:
    steps = 1
    seen: ClassVar[list[int]] = [1]


def noted(value: int, seen: list[int] = [], *, more: dict[str, int] = {}) -> None:  # noqa: B006 - scripts do so
    seen.append(value)
    more["n"] = value
    noted.calls += 1  # type: ignore[attr-defined]


class Env:
    def __init__(self) -> None:
        self.n, self.rng, self.state = 1, np.random.default_rng(0), np.ones(2)


def test_what_else_a_script_counts_in_comes_back() -> None:
    """Arrays, enumerations, slots, classes, functions' attributes and default arguments, generators in objects."""
    noted.calls = 0  # type: ignore[attr-defined]
    array, total, slots, env = np.zeros(3), torch.zeros(3), Slots(), Env()
    variables = {"array": array, "total": total, "phase": Phase.WARM, "phases": [Phase.TRAIN], "mean": np.float64(2)}
    frame = frame_with(**variables, slots=slots, Tally=Tally, noted=noted, env=env)
    own = frozenset(variables)
    wanted = LoopVariables(own, frozenset(), frozenset(), read=frozenset(("slots", "Tally", "noted", "env")))
    saved = Saved.of(codec.loads(codec.dumps(take_down(frame, wanted, Identities()).plain())))
    first = env.rng.random()

    array[1], total[1], slots.n, Tally.steps, env.n = 7, 7, 7, 7, 7
    slots.values.append(7)
    Tally.seen.append(7)
    env.state[0] = 7
    noted(7)
    frame.f_locals["phase"] = Phase.TRAIN
    values = put_back(frame, wanted, Identities(), saved)
    assert values["array"] is array and not array.any(), "others may hold the same array"
    assert values["total"] is total and not total.any(), "no statement sets it"
    assert values["phase"] is Phase.WARM and values["phases"] == [Phase.TRAIN] and values["mean"] == 2
    assert (slots.n, slots.values, Tally.steps, Tally.seen) == (1, [1], 1, [1])
    assert noted.__defaults__ == ([],) and noted.__kwdefaults__ == {"more": {}}
    assert noted.calls == 0  # type: ignore[attr-defined]
    assert env.n == 1 and env.rng.random() == first and env.state.tolist() == [1, 1]
    assert [Phase.WARM.value, Phase.TRAIN.name] == [1, "TRAIN"], "a member is no object with its own attributes"


def test_a_tensor_of_another_shape_that_no_statement_sets_comes_back() -> None:
    kept = torch.ones(2)
    frame = frame_with(kept=kept)
    saved = take_down(frame, names("kept"), Identities())
    kept.resize_(5).zero_()
    put_back(frame, names("kept"), Identities(), saved)
    assert kept.tolist() == [1, 1]


def test_a_tensor_that_each_round_makes_is_taken_down_only_if_it_is_read_below() -> None:
    frame = frame_with(loss=torch.ones(1))
    assert not take_down(frame, names("loss", remade=("loss",)), Identities()).variables
    assert take_down(frame, names("loss", remade=("loss",), read_after=("loss",)), Identities()).variables


def take(data: LoopData, count: int) -> list[Any]:
    return [data.fetch() for _ in range(count)]


def test_a_run_that_begins_after_an_end_begins_again_for_a_survivor() -> None:
    """The end of the run before is known still; the iterator of this one has been read from."""
    data = LoopData(one := [1, 2])
    data.enter(one)
    take(data, 2)
    data.commit(1)
    with pytest.raises(StopIteration):
        data.fetch()
    data.enter([3, 4])
    data.commit(2)
    assert take(data, 1) == [3]
    data.rollback(2)
    assert take(data, 2) == [3, 4]


def test_a_larger_tensor_comes_back_if_the_loop_carries_it() -> None:
    frame = frame_with(hidden=torch.ones(5000), table=torch.ones(5000))
    wanted = LoopVariables(frozenset(("hidden", "table")), frozenset(), frozenset(), carried=frozenset(("hidden",)))
    assert take_down(frame, wanted, Identities()).variables.keys() == {"hidden"}


def loader() -> DataLoader[Any]:
    return DataLoader(range(12), batch_size=2, shuffle=True)  # type: ignore[arg-type]


def test_rounds_are_given_again_to_a_survivor_and_read_again_by_a_replacement() -> None:
    torch.manual_seed(3)
    data = LoopData(one := loader())
    data.enter(one)
    first = take(data, 3)
    data.commit(1)
    at, rng = data.capture(), RngState.now().plain()
    rest = take(data, 3)
    after = RngState.now()
    with pytest.raises(StopIteration):
        data.fetch()
    data.rollback(1)
    data.enter(loader())  # the loop around has begun its round again
    restore_rng(rng)
    assert [t.tolist() for t in take(data, 3)] == [t.tolist() for t in rest]
    torch.manual_seed(77)
    other = LoopData(two := loader())
    other.restore(codec.loads(codec.dumps(at)))
    other.enter(two)
    restore_rng(rng)
    assert [t.tolist() for t in take(other, 3)] == [t.tolist() for t in rest]
    assert RngState.now() == after
    assert len(first) == 3


def test_within_a_run_a_survivor_gets_the_same_objects_again() -> None:
    data = LoopData(values := [[1], [2], [3]])
    data.enter(values)
    take(data, 1)
    data.commit(1)
    second = take(data, 1)
    data.rollback(1)
    assert take(data, 2) == [*second, [3]]


class Interrupted:
    """A rank is stopped while it reads."""

    stops = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.stops:
            raise KeyboardInterrupt
        return index


def test_an_element_whose_read_was_cut_short_comes_again() -> None:
    dataset = Interrupted()
    data = LoopData(one := DataLoader(dataset, batch_size=2))  # type: ignore[arg-type]
    data.enter(one)
    take(data, 1)
    data.commit(1)
    dataset.stops = True
    with pytest.raises(KeyboardInterrupt):
        data.fetch()
    dataset.stops = False
    data.rollback(1)
    assert [t.tolist() for t in take(data, 2)] == [[2, 3], [4, 5]]


def test_other_elements_than_before_are_refused() -> None:
    data = LoopData([1, 2, 3])
    data.enter([1, 2, 3])
    take(data, 2)
    state = data.capture()
    other = LoopData([1, 7, 3])
    other.restore(state)
    other.enter([1, 7, 3])
    with pytest.raises(DataSourceError, match="other elements"):
        other.fetch()


class Jittered(Dataset[float]):
    """``draws``: each sample, from the stream that the order is drawn from."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + (torch.rand(()).item() if self.draws else 0.0)


class Infinite:
    """Begins its loader again. ``ahead``: elements that it fetches early."""

    def __init__(self, loader: DataLoader[Any], ahead: int = 0) -> None:
        self.loader, self.ahead = loader, ahead
        self.elements, self.waiting = iter(loader), deque[Any]()

    def __iter__(self) -> Infinite:
        return self

    def __next__(self) -> Any:
        while len(self.waiting) <= self.ahead:
            try:
                self.waiting.append(next(self.elements))
            except StopIteration:
                self.elements = iter(self.loader)
        return self.waiting.popleft()


def again_and_again(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def orders(_loader: object) -> Iterator[Any]:
    """Without a loader."""
    while True:
        yield from torch.randperm(6)


def of_two(loader: DataLoader[Any]) -> Iterator[Any]:
    longer = DataLoader(range(100, 130), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    for pair in zip(again_and_again(loader), again_and_again(longer), strict=True):
        yield torch.cat(pair)


@pytest.mark.parametrize("place", [1, 5, 6, 7, 9, 20, 200])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("around", [Infinite, lambda one: Infinite(one, 2), again_and_again, orders, of_two])
def test_what_begins_a_shuffled_loader_again_is_read_in_the_same_order(
    around: Callable[[Any], Iterable[Any]], draws: bool, place: int
) -> None:
    """The training draws between the fetches, so each order begins in a state that it has led to."""

    def begun(data: LoopData, seed: int) -> LoopData:
        torch.manual_seed(3)
        data.enter(around(DataLoader(Jittered(draws), batch_size=2, shuffle=True)))
        torch.manual_seed(seed)
        return data

    def rounds(data: LoopData, count: int) -> list[Any]:
        return [(data.fetch().tolist(), torch.rand(7).tolist()) for _ in range(count)]

    if around is of_two and place == 200:
        pytest.skip("the beginning of the longer one's epoch is forgotten")
    data = begun(LoopData(), 100)
    rounds(data, place)
    state, rng = codec.dumps(data.capture()), RngState.now().plain()
    assert len(state) < 250_000
    wanted = rounds(data, 8)
    other = LoopData()
    other.restore(codec.loads(state))
    begun(other, 77)
    restore_rng(rng)
    assert rounds(other, 8) == wanted


def test_an_iterator_of_a_later_run_is_made_again() -> None:
    torch.manual_seed(5)
    data, source = LoopData(), loader()
    got, asked = [], OwnIterator(source)
    for _ in range(8):
        try:
            got.append(data.next_of(asked).tolist())
        except StopIteration:
            asked = OwnIterator(source)
            got.append(data.next_of(asked).tolist())
        if len(got) == 7:
            state, rng = data.capture(), RngState.now().plain()
    torch.manual_seed(99)
    other, first = LoopData(), OwnIterator(loader())
    other.restore(state)
    restore_rng(rng)
    assert other.next_of(first).tolist() == got[7]


def test_an_iterator_that_is_made_behind_the_place_is_a_new_run() -> None:
    """Of which the one before it was left in its midst."""
    batches = [torch.tensor([n]) for n in range(5)]
    data, first = LoopData(), OwnIterator(batches, 0)
    assert [data.next_of(first).item() for _ in range(2)] == [0, 1]
    data.commit(1)
    state = data.capture()
    assert data.next_of(first).item() == 2
    data.rollback(1)
    assert data.next_of(OwnIterator(batches, 1), 1).item() == 0  # a survivor
    other = LoopData()
    other.restore(codec.loads(codec.dumps(state)))
    assert other.next_of(OwnIterator(batches, 1), 1).item() == 0  # a replacement
    other.restore(codec.loads(codec.dumps(state)))
    assert other.next_of(OwnIterator(batches), 2).item() == 2  # made again on the way
    other.restore(codec.loads(codec.dumps(state)))
    assert other.next_of(OwnIterator(batches, 2), 3).item() == 2  # before


class Mark:
    """What a page keeps of what was shown."""

    def __init__(self) -> None:
        self.shown = (0, 0)

    def set_shown(self, step: int, writes: int) -> None:
        self.shown = step, writes


def taken(monkeypatch: pytest.MonkeyPatch, *, replacement: bool, mark: Mark | None = None) -> Output:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    output = Output()
    output.take(replacement=replacement)
    if mark is not None:
        output.protect(mark)
    return output


def shown(output: Output) -> str:
    return str(output._streams[0].real.getvalue())  # type: ignore[attr-defined]


def test_each_line_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    output = taken(monkeypatch, replacement=False, mark=(mark := Mark()))
    print("set-up")
    output.handed_out(0)
    print("step 0")
    output.handed_out(1)
    print("step 1, in vain")
    output.restore(1, output.newest(1))
    output.handed_out(1)
    print("step 1")
    output.handed_out(2)
    assert shown(output) == "set-up\nstep 0\n"
    assert mark.shown == (1, 0)
    output.show_all()
    print("after")
    assert shown(output) == "set-up\nstep 0\nstep 1\nafter\n"


class Message(str):
    """As loguru writes them."""


def test_loggers_that_packages_made_when_they_were_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a zygote or standby; DeepSpeed's, and loguru's first handler."""
    real = io.StringIO()
    handler, other = logging.StreamHandler(real), logging.StreamHandler(elsewhere := io.StringIO())
    sink = types.SimpleNamespace(_stream=real)
    core = types.SimpleNamespace(handlers={0: types.SimpleNamespace(_sink=sink)})
    monkeypatch.setitem(sys.modules, "loguru", types.SimpleNamespace(logger=types.SimpleNamespace(_core=core)))
    monkeypatch.setattr(sys, "stderr", real)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output = Output()
    output.take(replacement=False)
    output.protect(Mark())
    output.handed_out(0)
    record = logging.LogRecord("", logging.INFO, "", 1, "step 0, in vain", None, None)
    handler.emit(record)
    other.emit(record)
    sink._stream.write(Message("step 0, in vain"))
    assert codec.loads(codec.dumps(output.newest(1))) == {0: [(1, "step 0, in vain\n"), (1, "step 0, in vain")]}
    output.restore(0, {})
    output.show_all()
    assert not real.getvalue() and elsewhere.getvalue() == "step 0, in vain\n"


@pytest.mark.parametrize("replacement", [False, True])
def test_a_forked_process_shows_at_once_what_it_prints(
    replacement: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader's worker that cannot send a batch says so there, and nowhere else."""
    file = tmp_path / "log"
    output = taken(monkeypatch, replacement=replacement, mark=Mark())
    output._streams[0].real = file.open("w")
    output.handed_out(0)
    print("step 0")
    child = os.fork()
    if not child:
        print("of a worker")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    assert file.read_text() == "of a worker\n"
    output.show_all()
    assert file.read_text() == "of a worker\nstep 0\n"


def test_a_replacement_shows_what_its_predecessor_had_not(monkeypatch: pytest.MonkeyPatch) -> None:
    output = taken(monkeypatch, replacement=True)
    print("set-up")
    output.protect(Mark())
    print("on the way")
    output.restore(5, {4: [(0, "step 4\n")]})
    output.drop()
    print("the epoch begins")
    output.restore(5, {4: [(0, "step 4\n")]})
    output.handed_out(5)
    print("step 5")
    output.show_all()
    assert shown(output) == "step 4\nstep 5\n"


@pytest.mark.parametrize("died_in", [4, 5, 6])
def test_lines_of_a_rank_that_dies_behind_its_peers_or_ahead_come_once(
    monkeypatch: pytest.MonkeyPatch, died_in: int
) -> None:
    """The job goes on with step 5."""
    output = taken(monkeypatch, replacement=False, mark=(mark := Mark()))
    for step in range(died_in + 1):
        output.handed_out(step)
        print("step", step)
        if step == 4:
            version = output.newest(5)
    before = shown(output)
    output = taken(monkeypatch, replacement=True, mark=mark)
    output.restore(5, version)
    output.handed_out(5)
    print("step", 5)
    output.show_all()
    assert before + shown(output) == "".join(f"step {step}\n" for step in range(6))


def test_steps_that_are_done_again_from_an_old_checkpoint_print_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    output = taken(monkeypatch, replacement=False, mark=Mark())
    for step in (0, 1, 2, 3, 1, 2, 3, 4):
        if step == 1:
            output.restore(1, {0: [(0, "step 0\n")]})
        output.handed_out(step)
        print("step", step)
    output.show_all()
    assert shown(output) == "".join(f"step {step}\n" for step in range(5))


def test_a_death_between_two_writes_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mark, lines = Mark(), [(0, "one\n"), (0, "two\n"), (1, "error\n"), (0, "three\n")]
    mark.set_shown(4, 1)
    output = taken(monkeypatch, replacement=True, mark=mark)
    output.restore(5, {4: lines})
    output.show_all()
    assert shown(output) == "three\n"
    assert mark.shown == (5, 0)


def test_what_a_replacement_prints_before_it_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    output = taken(monkeypatch, replacement=True)
    print("set-up")
    output.show_all()
    assert shown(output) == "set-up\n"


def test_what_a_script_prints_before_its_error_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    output = taken(monkeypatch, replacement=False, mark=(mark := Mark()))
    output.handed_out(0)
    print("step 0")
    output.handed_out(1)
    print("step 1 until its error")
    output.failed()
    assert shown(output) == "step 0\nstep 1 until its error\n"
    assert mark.shown == (1, 0)


def test_a_new_launch_prints_what_the_one_before_it_had_not_shown_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    output = taken(monkeypatch, replacement=False, mark=Mark())
    print("set-up")
    output.restore(5, {4: [(0, "step 4\n")]})
    output.handed_out(5)
    print("step 5")
    output.show_all()
    assert shown(output) == "set-up\nstep 4\nstep 5\n"


def test_where_steps_are_known_to_be_late_variables_are_not_taken_down_to_be_compared() -> None:
    """The mark says that the step is over, and is the same all through it: a change before the optimizer does not make
    all ranks seal again."""
    loops, gate = ScriptLoops(), types.SimpleNamespace(version=3)
    loops._late, loops._loop = True, types.SimpleNamespace(gate=gate)  # type: ignore[assignment]
    loops.stack.append(None)  # type: ignore[arg-type] # nothing of it is looked at
    first, again = loops.mark(), loops.mark()
    gate.version = 4
    assert first == again != loops.mark()


def test_only_what_may_lead_to_state_is_followed() -> None:
    given = {
        "meter": Meter(),
        "numbers": torch.Generator().manual_seed(3),
        "listed": [Meter(), torch.nn.Linear(1, 1)],
        "data": loader(),
        "module": torch,
        "function": loader,
        "other": object(),
    }
    which = LoopVariables(frozenset(), frozenset(), frozenset(), read=frozenset(given))
    saved = take_down(frame_with(**given), which, Identities())
    attributes = {f"{where}.{name}" for where in ("meter", "listed[0]") for name in ("sum", "values", "inner", NAMES)}
    assert saved.attributes.keys() == {"numbers", *attributes}


def test_an_iterator_that_lags_behind_its_sampler_is_read_again_in_its_own_epoch() -> None:
    """The script has told its sampler the next epoch, and has not asked its iterator for what is left."""

    def new() -> tuple[DistributedSampler[Any], DataLoader[Any]]:
        sampler: DistributedSampler[Any] = DistributedSampler(range(12), num_replicas=1, rank=0)  # type: ignore[arg-type]
        return sampler, DataLoader(range(12), batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    sampler, source = new()
    data = LoopData(source)
    data.enter(source)
    first = [t.tolist() for t in take(data, 5)]
    sampler.set_epoch(1)
    state = data.capture()
    rest = data.fetch().tolist()
    sampler, source = new()
    sampler.set_epoch(1)
    other = LoopData(source)
    other.restore(codec.loads(codec.dumps(state)))
    other.enter(source)
    assert other.fetch().tolist() == rest
    assert sampler.epoch == 1
    other.enter(source)
    assert [t.tolist() for t in take(other, 5)] != first


def test_a_list_that_grows_too_long_is_named_once() -> None:
    told: list[str] = []
    loops = ScriptLoops()
    loops._protection = types.SimpleNamespace(session=types.SimpleNamespace(tell_not_registered=told.append))  # type: ignore[assignment]
    loop: Any = types.SimpleNamespace(key=("train.py", 3), place="train.py:3")
    losses = [0.5] * 4096
    for length in (4096, 4097, 4098):
        assert len(losses) == length
        variables = {"losses": losses, "tokens": [1] * 9000}  # the other one has always been as long
        loops.note_left_out(loop, take_down(frame_with(**variables), names("losses", "tokens"), Identities()))
        losses = [*losses, 0.5]
    assert len(told) == 1 and told[0].startswith("train.py:3: losses has grown too long")


def test_an_epoch_that_a_sampler_counts_itself_stays_when_its_loader_is_read_again() -> None:
    """As accelerate's sampler does, whose loader has read it to its end before the last batch is taken."""

    class Counting(Sampler[int]):
        def __init__(self) -> None:
            self.epoch = 0

        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            self.epoch += 1

    class AheadByOne:
        def __init__(self) -> None:
            self.sampler = Counting()

        def __iter__(self) -> Iterator[int]:
            numbers = iter(self.sampler)
            held = next(numbers)
            for number in numbers:
                yield held
                held = number
            yield held

    source = AheadByOne()
    data = LoopData(source)
    data.enter(source)
    assert take(data, 4) == [0, 1, 2, 3] and source.sampler.epoch == 1
    fresh = AheadByOne()
    other = LoopData(fresh)
    other.restore(data.capture())
    other.enter(fresh)
    with pytest.raises(StopIteration):
        other.fetch()
    assert fresh.sampler.epoch == 1


class Counted:
    """Counts its epochs itself, and each epoch has its own order."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([10 * self.epoch + number for number in range(4)])


class ObjectsOf:
    """As the loops of a script see one of its objects."""

    def __init__(self, source: Counted) -> None:
        self._source = source

    def now(self) -> dict[str, Any]:
        return {"epoch": self._source.epoch, "other": [1]}

    def put(self, values: Mapping[str, Any]) -> None:
        self._source.epoch = values.get("epoch", self._source.epoch)


def test_an_element_that_is_given_again_changes_the_scripts_objects_again() -> None:
    """A rollback brings them back as they were before the element was read."""
    source = Counted()
    data = LoopData(source, ObjectsOf(source))
    data.enter(source)
    data.commit(0)
    assert data.fetch() == 10 and source.epoch == 1
    source.epoch = 0  # with the loop's variables
    data.rollback(0)
    assert data.fetch() == 10 and source.epoch == 1
    assert take(data, 3) == [11, 12, 13]
    data.enter(source)
    assert data.fetch() == 20 and source.epoch == 2


def test_a_source_is_read_again_as_the_scripts_objects_were_when_it_was_begun() -> None:
    source = Counted()
    data = LoopData(source, ObjectsOf(source))
    for first in (10, 20):
        data.enter(source)
        assert data.fetch() == first
        rest = take(data, 2)
    fresh = Counted()
    other = LoopData(fresh, ObjectsOf(fresh))
    other.restore(codec.loads(codec.dumps(data.capture())))
    other.enter(fresh)
    fresh.epoch = source.epoch  # with the loop's variables, of the place at which it is now
    assert rest == [21, 22] and other.fetch() == 23
    assert fresh.epoch == 2


def test_which_sources_may_run_the_scripts_code() -> None:
    loader = DataLoader(range(4))  # type: ignore[arg-type]

    class Collator:
        def __call__(self, samples: list[int]) -> list[int]:
            return samples

    sources: tuple[Any, ...] = (loader, [1], (1,), range(3))
    assert not any(Source(one).runs_script for one in sources)
    own: tuple[Any, ...] = (Counted(), iter([1]), zip([1], [2], strict=True))
    assert all(Source(one).runs_script for one in own)
    assert Source(DataLoader(range(4), collate_fn=Collator())).runs_script  # type: ignore[arg-type]


def test_a_tensor_is_not_taken_for_one_whose_memory_was_released() -> None:
    """ZeRO-3 releases what it has gathered; what the script makes next may lie in the same place."""
    for _ in range(20):
        parameter = torch.nn.Parameter(torch.zeros(4))
        known = protected([], [parameter])
        assert storage_of(parameter) in known
        parameter.data = torch.empty(0)
        losses = [torch.zeros(()) for _ in range(16)]
        assert not any(storage_of(loss) in known for loss in losses)
