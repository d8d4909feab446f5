"""A walk through the model is made again whenever it would find something else than the last one: each kind of change
that a script can make to it is seen by the next look, with the compiled backend and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flashrecovery.adapter import ParamRecord, ParamShard, constant, fsdp2_state
from flashrecovery.adapter.buffers import BufferTracker
from flashrecovery.adapter.modes import AttributeTracker, ModeTracker
from flashrecovery.adapter.shards import FixedShard, attribute_of
from flashrecovery.groups.native_build import native
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state.shard import Structure
from flashrecovery.torch_native.fsdp2 import FSDP2Adapter
from flashrecovery.worker.local_state import version_counters
from flashrecovery.worker.local_state.version_counters import (
    ParameterTable,
    TensorTable,
    counter_watch,
    structure_watch,
)


@pytest.fixture(params=["compiled", "python"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    module = native() if request.param == "compiled" else None
    monkeypatch.setattr(version_counters, "loaded", lambda: module)
    return str(request.param)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Job:
    """A model that has taken a step, and the pre-step copy of its shards."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.entries: list[Any] = []
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
            state: Any = self.model._get_fsdp_state()  # type: ignore[operator]
            state._lazy_init()
            group = state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
            self.entries = list(group.fsdp_params)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()
        parameters = list(self.model.parameters())
        gets = [attribute_of(e, "sharded_param") for e in self.entries] or [*map(constant, parameters)]
        shards = [
            ParamShard(ParamRecord(f"{n}", f"param/{n}", (0,), get), {0: self.optimizer}) for n, get in enumerate(gets)
        ]
        self.buffer = torch.zeros(3)
        self.undo = PreStepCopy(
            [*shards, FixedShard("fixed", [0], self.buffer)], look=counter_watch, same=structure_watch
        )
        self.version = 0
        self.copy()
        self.copy()

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameter(self) -> Any:
        return self.entries[0].sharded_param if self.entries else self.model[0].weight

    def copy(self) -> None:
        self.version += 1
        self.undo.hold(self.version)

    def is_whole(self) -> bool:
        """Whether the newest copy is what a walk finds, bit by bit."""
        for shard in self.undo.shards:
            source = self.undo.source(shard.name, self.version)
            live = shard.tensors()
            if list(source.spec.tensors) != list(live) or dict(source.spec.values) != shard.values():
                return False
            if not all(torch.equal(a, b) for a, b in zip(source.tensors, live.values(), strict=True)):
                return False
        live = self.parameter().detach()
        local = live._local_tensor if isinstance(live, DTensor) else live
        return torch.equal(self.undo.source(self.undo.shards[0].name, self.version).tensors[0], local)

    def walks(self) -> int:
        """How often the shards are asked by the next copy."""
        asked = []
        for shard in self.undo.shards:
            look = shard.tensors_and_values
            shard.tensors_and_values = lambda look=look: (asked.append(1), look())[1]  # type: ignore[method-assign]
        self.copy()
        for shard in self.undo.shards:
            del shard.tensors_and_values  # type: ignore[method-assign]
        return len(asked)


def write_in_place(job: Job) -> None:
    with torch.no_grad():
        job.parameter().add_(1)


def swap_data(job: Job) -> None:
    parameter = job.parameter()
    parameter.data = parameter.data.clone() + 1


def transpose_data(job: Job) -> None:
    """The same memory, shape and type; only the strides differ."""
    parameter = job.parameter()
    parameter.data = parameter.data.t()


def exchange_local(job: Job) -> None:
    parameter = job.parameter()
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.detach().clone() + 1
    else:
        swap_data(job)


def exchange_dictionary(job: Job) -> None:
    """Of an object through which a parameter is found."""
    if not job.entries:
        return swap_data(job)
    entry, old = job.entries[0], job.parameter()
    entry.__dict__ = {**vars(entry), "sharded_param": nn.Parameter(old.detach().clone() + 1)}
    job.optimizer.state[entry.sharded_param] = job.optimizer.state.pop(old)


def set_memory(job: Job) -> None:
    parameter = job.parameter()
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    with torch.no_grad():
        local.set_(local.detach().clone() + 1)


def swap_tensors(job: Job) -> None:
    parameter = job.parameter()
    torch.utils.swap_tensors(job.optimizer.state[parameter]["exp_avg"], torch.full_like(parameter.detach(), 7))


def replace_state(job: Job) -> None:
    state = job.optimizer.state[job.parameter()]
    state["exp_avg"] = state["exp_avg"].clone() + 1


def replace_entry(job: Job) -> None:
    job.optimizer.state[job.parameter()] = {k: v.clone() + 1 for k, v in job.optimizer.state[job.parameter()].items()}


def replace_all_state(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    write_in_place(job)


def add_state(job: Job) -> None:
    job.optimizer.state[job.parameter()]["more"] = torch.ones(2)


def drop_state(job: Job) -> None:
    add_state(job)
    job.copy()
    del job.optimizer.state[job.parameter()]["more"]


def drop_entry(job: Job) -> None:
    job.optimizer.state.pop(job.parameter())


def plain_state(job: Job) -> None:
    job.optimizer.state[job.parameter()]["count"] = 3


def move_state(job: Job) -> None:
    state = job.optimizer.state[job.parameter()]
    state["step"].resize_(100_000).resize_(())
    state["step"].fill_(9)


def rename_shard(job: Job) -> None:
    job.undo.shards[0].name = "param/other"


CHANGES: list[Callable[[Job], None]] = [
    write_in_place,
    swap_data,
    transpose_data,
    exchange_local,
    exchange_dictionary,
    set_memory,
    swap_tensors,
    replace_state,
    replace_entry,
    replace_all_state,
    add_state,
    drop_state,
    drop_entry,
    plain_state,
    move_state,
    rename_shard,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
def test_a_copy_is_what_a_walk_finds(
    change: Callable[[Job], None], layout: str, request: pytest.FixtureRequest
) -> None:
    job = Job(request.getfixturevalue("mesh") if layout == "fsdp2" else None)
    before = [job.undo.source(s.name, job.version).tensors[0].clone() for s in job.undo.shards]
    change(job)
    job.copy()
    assert job.is_whole()
    job.step()
    job.copy()
    assert job.is_whole()
    assert not all(
        torch.equal(a, job.undo.source(s.name, job.version).tensors[0])
        for a, s in zip(before, job.undo.shards, strict=True)
    )
    job.undo.close()


def test_another_parameter_in_its_place_is_found(mesh: DeviceMesh) -> None:
    """FSDP2 does so when a state dictionary is loaded with ``assign=True``."""
    job = Job(mesh)
    entry = job.entries[0]
    old = entry.sharded_param
    entry.sharded_param = nn.Parameter(old.detach().clone() + 1)
    job.optimizer.state[entry.sharded_param] = job.optimizer.state.pop(old)
    job.copy()
    assert job.is_whole()
    job.undo.close()


def test_the_fixed_tensor_is_found_where_it_is(backend: str) -> None:
    job = Job()
    job.buffer.data = torch.full((3,), 5.0)
    job.copy()
    assert job.is_whole() and job.undo.source("fixed", job.version).tensors[0].eq(5).all()
    job.undo.close()


def test_the_shards_are_asked_only_when_something_has_changed(backend: str) -> None:
    job = Job()
    many = len(job.undo.shards)
    assert job.walks() == (0 if backend == "compiled" else many)
    job.step()  # in place, as every step
    assert job.walks() == (0 if backend == "compiled" else many)
    replace_state(job)
    assert job.walks() == many
    assert job.walks() == (0 if backend == "compiled" else many)
    plain_state(job)
    job.copy()
    assert job.walks() == (1 if backend == "compiled" else many), "the one with a plain value, which may change unseen"
    job.optimizer.state[job.parameter()]["count"] += 1
    job.copy()
    assert job.is_whole()
    job.undo.close()


def test_structure_that_changes_in_each_step_is_found_in_each(backend: str) -> None:
    job = Job()
    for _ in range(150):
        replace_state(job)
        job.copy()
        assert job.is_whole()
    assert job.walks() == len(job.undo.shards)
    for _ in range(70):
        job.copy()
        assert job.is_whole()
    assert job.walks() == (0 if backend == "compiled" else len(job.undo.shards))
    job.undo.close()


def test_a_write_beside_the_copy_is_seen_after_a_change_of_structure() -> None:
    job = Job()
    replace_state(job)
    job.copy()
    capture = job.undo.capture()
    with torch.no_grad():
        job.optimizer.state[job.parameter()]["exp_avg"].mul_(2)
    assert capture.found.look is not None and capture.found.look() != capture.seen
    job.undo.close()


# -- version counters -------------------------------------------------------------------------------


def test_a_table_of_tensors_shows_what_is_written_and_exchanged() -> None:
    tensors = [torch.zeros(3), nn.Parameter(torch.zeros(2)), torch.zeros(0)]
    table = TensorTable(tensors)
    seen = table.digest()
    assert table.digest() == seen
    tensors[0].add_(1)
    assert table.digest() != seen
    seen = table.digest()
    torch.utils.swap_tensors(tensors[0], torch.zeros(3))
    assert table.digest() != seen
    seen = table.digest()
    tensors[0][0] = 1  # through a view
    assert table.digest() != seen
    with torch.inference_mode():
        assert TensorTable([torch.zeros(1)]).digest()


def test_tensors_that_exchange_their_insides_are_seen_though_neither_was_written_to() -> None:
    tensors = [torch.zeros(3), torch.ones(3)]
    table = TensorTable(tensors)
    seen = table.digest()
    torch.utils.swap_tensors(*tensors)
    assert table.digest() != seen


def test_a_tensor_that_becomes_a_part_of_itself_is_seen(backend: str) -> None:
    tensor = torch.zeros(4, 4)
    same = structure_watch([Structure(tensors=[(tensor, None)])])
    assert same() is (backend == "compiled")
    tensor.data = tensor.data[:2]
    assert not same()


def test_a_table_of_parameters() -> None:
    class Entry:
        def __init__(self) -> None:
            self.sharded_param = nn.Parameter(torch.zeros(2))

    entry, fixed, other = Entry(), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for gets in ([attribute_of(entry, "sharded_param"), constant(fixed)], [lambda: entry.sharded_param, lambda: fixed]):
        table = ParameterTable(gets)
        assert table.trained() == b"\1\1" and table.gradients() == 0
        fixed.requires_grad_(False)
        entry.sharded_param.grad = torch.zeros(2)
        assert table.trained() == b"\1\0" and table.gradients() == 1
        entry.sharded_param = other
        assert table.gradients() == 0 and table.parameters() == [other, fixed]
        entry.__dict__ = {"sharded_param": nn.Parameter(torch.zeros(2), requires_grad=False)}
        assert table.trained() == b"\0\0"
        fixed.requires_grad_()
        entry.sharded_param = nn.Parameter(torch.zeros(2))


def test_a_later_look_at_parameters_is_at_those_that_were_found_last(backend: str) -> None:
    class Entry:
        def __init__(self) -> None:
            self.sharded_param = nn.Parameter(torch.zeros(2))

    entry, fixed = Entry(), nn.Parameter(torch.zeros(2))
    table = ParameterTable([attribute_of(entry, "sharded_param"), constant(fixed)])
    marks = [table.trained_mark(again=True)]
    assert table.trained_mark() == marks[0] and table.trained() == b"\1\1", "the first look finds them"
    for parameter in (entry.sharded_param, fixed):
        parameter.requires_grad_(False)
        marks.append(table.trained_mark(again=True))
        assert table.trained_mark() == marks[-1]
    entry.sharded_param = nn.Parameter(torch.zeros(2))
    later, now = table.trained_mark(again=True), table.trained_mark()
    assert later == (marks[-1] if backend == "compiled" else now)
    assert table.trained() == b"\1\0" and table.trained_mark(again=True) == now
    assert len({*marks, now}) == 4
    entry.sharded_param.requires_grad_(False)
    fixed.requires_grad_()
    assert table.trained_mark() == marks[1], "the same ones are trained as then"


@pytest.mark.parametrize("count", [0, 1, 62, 63, 64, 126, 127, 200])
def test_whichever_of_many_parameters_is_frozen_is_seen(backend: str, count: int) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
    table = ParameterTable([*map(constant, parameters)])
    whole = table.trained_mark()
    marks = {whole}
    for parameter in parameters:
        parameter.requires_grad_(False)
        marks.add(table.trained_mark())
        parameter.requires_grad_()
    assert len(marks) == count + 1 and table.trained_mark() == whole


@pytest.mark.parametrize("attributes", [2, 12, 29, 31, 90])
def test_attributes_of_small_and_large_objects(attributes: int) -> None:
    class Entry:
        def __init__(self, backwards: bool) -> None:
            for number in sorted(range(attributes), reverse=backwards):
                setattr(self, f"other{number}", number)
            self.sharded_param = nn.Parameter(torch.zeros(2))

    entries = [Entry(bool(number % 2)) for number in range(40)]
    table = ParameterTable([attribute_of(entry, "sharded_param") for entry in entries])
    assert table.trained() == b"\1" * 40
    for number, entry in enumerate(entries):
        entry.__dict__[f"more{number}"] = number
        if number % 3 == 0:
            del entry.__dict__["other0"]
            entry.sharded_param = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert table.trained() == bytes(number % 3 != 0 for number in range(40))
    entries[7].__dict__.clear()
    with pytest.raises(AttributeError):
        table.trained()


# -- modes, attributes, buffers ---------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.cache: Any = None


def small() -> nn.Sequential:
    return nn.Sequential(Counting(), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)), nn.Linear(2, 2))


MODES: dict[str, Callable[[Any], Any]] = {
    "eval": lambda m: m[1].eval(),
    "parameter added": lambda m: m[0].register_parameter("more", nn.Parameter(torch.ones(1))),
    "parameter removed": lambda m: m[2].register_parameter("bias", None) or m[2]._parameters.pop("bias"),
    "buffer added": lambda m: m[0].register_buffer("more", torch.ones(1)),
    "module added": lambda m: m.add_module("more", nn.Linear(1, 1)),
    "frozen": lambda m: m[2].weight.requires_grad_(False),
    "assigned": lambda m: m[1].__dict__.update(training=False),
}


@pytest.mark.parametrize("name", MODES)
def test_the_mark_of_modes_shows_it(name: str) -> None:
    model = small()
    tracker = ModeTracker(model, ParameterTable([*map(constant, model.parameters())]))
    seen, state = tracker.mark(), tracker.capture()
    assert tracker.mark() == seen and tracker.capture() == state
    MODES[name](model)
    assert tracker.mark() != seen
    if name != "buffer added":
        assert tracker.capture() != state


def test_what_happens_to_parameters_within_a_step_is_seen_at_its_end() -> None:
    """Later looks of a step see that one is frozen. The one at the end sees that another parameter is there."""

    class Entry:
        def __init__(self, parameter: nn.Parameter) -> None:
            self.sharded_param = parameter

    model = small()
    entries = [*map(Entry, model.parameters())]
    tracker = ModeTracker(model, ParameterTable([attribute_of(entry, "sharded_param") for entry in entries]))
    first = tracker.mark()
    with tracker.again():
        assert tracker.mark() == first
        entries[1].sharded_param.requires_grad_(False)
        frozen = tracker.mark()
        assert frozen != first
        entries[0].sharded_param = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    assert tracker.mark() not in (first, frozen)
    entries[2].sharded_param = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    with tracker.again():
        assert tracker.capture()["turned"] == [0, 1, 2], "what is written down is what is there"


@pytest.mark.parametrize("first", ["mark", "capture"])
def test_a_module_in_the_place_of_another_is_captured(first: str) -> None:
    """No matter what looks first: a change is not used up."""
    model = small()
    tracker = ModeTracker(model)
    tracker.mark(), tracker.capture()
    model[1][0] = nn.Dropout(0.1)
    if first == "mark":
        tracker.mark()
    assert tracker.capture()["changed"] == ["module '1.0'"]
    model[1].eval()
    tracker.mark() if first == "mark" else tracker.capture()
    assert 2 in [*tracker.capture()["eval"]] or tracker.capture()["eval"]


def test_a_mode_that_is_no_attribute_is_asked_for() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @property
        def training(self) -> bool:  # type: ignore[override]
            return bool(self.__dict__.get("mode", True))

        @training.setter
        def training(self, mode: bool) -> None:
            self.__dict__["mode"] = mode

    model = Wrapper(nn.Linear(1, 1))
    tracker = ModeTracker(model)
    seen = tracker.mark()
    model.training = False
    assert tracker.mark() != seen and tracker.capture()["eval"] == [0]


def test_the_mode_of_a_script_module_is_seen() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    tracker = ModeTracker(model)
    seen = tracker.mark()
    model[0].eval()
    assert tracker.mark() != seen and tracker.capture()["eval"] == [1]


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m[0], "calls", 5),
    "another type": lambda m: setattr(m[0], "calls", 0.5),
    "new": lambda m: setattr(m[2], "scale", 2.0),
    "none to number": lambda m: setattr(m[0], "cache", 1),
    "none to tensor": lambda m: setattr(m[0], "cache", torch.ones(1)),
    "removed": lambda m: delattr(m[0], "calls"),
    "exchanged": lambda m: (delattr(m[0], "calls"), setattr(m[0], "rounds", 4)),
    "by dict": lambda m: m[1][0].__dict__.update(p=0.25),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_mark_of_attributes_shows_it(name: str) -> None:
    model = small()
    tracker = AttributeTracker(model)
    seen, state = tracker.mark(), tracker.capture()
    assert tracker.mark() == seen and tracker.capture() == state
    ATTRIBUTES[name](model)
    assert tracker.mark() != seen and (tracker.capture() != state or name == "removed")
    seen = tracker.mark()
    model[0].later = 3  # after places have been looked up again
    assert tracker.mark() != seen and tracker.capture()["0.later"] == 3


def test_a_number_where_a_tensor_was_freed_is_seen() -> None:
    model = small()
    tracker = AttributeTracker(model)
    for number in range(200):
        model[0].cache = torch.ones(1)
        tracker.mark()
        model[0].cache = None
        model[0].cache = float(number) + 0.25
        assert tracker.mark()[tracker.mark().index(float(number) + 0.25)] == number + 0.25


BUFFERS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m[1][1].running_mean.add_(1),
    "through data": lambda m: m[1][1].running_mean.data.add_(1),
    "exchanged": lambda m: setattr(m[1][1], "running_mean", torch.ones(2)),
    "none": lambda m: setattr(m[1][1], "running_mean", None),
    "removed": lambda m: m[1][1]._buffers.pop("running_mean"),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_the_mark_of_buffers_shows_it(name: str) -> None:
    model = small()
    tracker = BufferTracker(model)
    seen = tracker.mark()
    assert tracker.mark() == seen
    BUFFERS[name](model)
    assert tracker.mark() != seen


def test_fsdp2_parameters_are_told_from_others_in_one_pass(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000, a pass for each would take a minute."""
    passes = []

    def counted(entries: Iterable[Any]) -> frozenset[int]:
        passes.append(list(entries))
        return registered(passes[-1])

    registered = fsdp2_state.registered_on_modules
    monkeypatch.setattr(fsdp2_state, "registered_on_modules", counted)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    ignored = {*model[0].parameters()}
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    adapter = FSDP2Adapter(model, [torch.optim.AdamW(model.parameters())])
    assert [len(entries) for entries in passes] == [14]
    found = {record.fqn: record.get() for record in adapter._find_parameters()}
    assert found.keys() == dict(model.named_parameters()).keys() and ignored <= {*found.values()}
