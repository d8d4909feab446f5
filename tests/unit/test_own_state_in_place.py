"""A rank's own state goes from where it lies into the page: every change is seen, and a kill leaves a whole version."""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashrecovery.errors import ProtocolError
from flashrecovery.runtime.page import Page
from flashrecovery.state import codec, witness
from flashrecovery.state.object_shard import ObjectShard
from flashrecovery.torch_native import ModuleAdapter, adapter_for
from flashrecovery.worker.local_state.step_profile import StepProfile
from flashrecovery.worker.loop import _LocalStates
from flashrecovery.worker.registry import Registry, _own_states
from flashrecovery.worker.step.sealing import Sealing

SIZE = 40_000
"""Elements: more than one chunk of the page, as float64."""


KILLS = 20


class Own:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def tensor() -> torch.Tensor:
    return torch.arange(SIZE * 4, dtype=torch.float64)


def by_numpy(value: Any) -> None:
    value[0].numpy()[-1] = -1.0


def by_data(value: Any) -> None:
    value[0].data[7] = -1.0


def swapped(value: Any) -> None:
    value[0].set_(tensor() + 1)


def resized(value: Any) -> None:
    value[0].resize_(SIZE + 5)


def put(what: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        value[0] = what(value[0])

    return change


def through_a_view(value: Any) -> None:
    value[0].view(2, -1)[1, 5] = -1.0


def not_contiguous(value: Any) -> None:
    value[0] = value[0].view(2, -1).t()


CHANGES: dict[str, Callable[[Any], None]] = {
    "in place": lambda value: value[0].add_(1),
    "one element": lambda value: value[0].__setitem__(SIZE // 2, -1.0),
    "a slice": lambda value: value[0][3:9].zero_(),
    "numpy's view": by_numpy,
    ".data": by_data,
    "a view": through_a_view,
    "storage swapped": swapped,
    "resized": resized,
    "-0.0 for 0.0": lambda value: value[0].__setitem__(0, -0.0),
    "another dtype, equal bytes": put(lambda t: t.view(torch.int64)),
    "another shape": put(lambda t: t.view(2, -1)),
    "not contiguous": not_contiguous,
    "requires_grad": lambda value: value[0].requires_grad_(),
    "replaced": put(lambda t: t + 1),
    "by numpy's array": put(lambda t: t.numpy().copy()),
    "grown": lambda value: value.append(1),
    "grown by a tensor": lambda value: value.append(tensor()),
    "shrunk": lambda value: value.pop(),
    "turned around": lambda value: value.reverse(),
}


def registry(value: Any, model: nn.Module | None = None) -> Registry:
    made = Registry(0, 2, adapter_for, ModuleAdapter)
    made.register(model or nn.Linear(2, 2), [], {"own": Own(value)}, ("own",))
    return made


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_of_an_own_object_is_seen_and_comes_back(change: Callable[[Any], None]) -> None:
    value = [tensor(), tensor()[:50] + 0.5, 3]
    made = registry(value)
    before = made.drawn()
    assert made.drawn() == before
    old = made.capture_local_state(before, 0)
    change(value)
    assert made.drawn() != before
    now = made.capture_local_state(made.drawn(), 1)
    heir = registry([0])
    heir.restore_local_state(now, 1, fresh=True)
    assert codec.dumps(heir.objects["own"].state_dict()) == codec.dumps({"value": value})
    heir.restore_local_state(old, 0, fresh=True)
    assert codec.dumps(heir.objects["own"].state_dict()) == codec.dumps({"value": [tensor(), tensor()[:50] + 0.5, 3]})


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.arange(SIZE, dtype=np.float32), id="array"),
        pytest.param(np.arange(SIZE)[::3], id="every-third"),
        pytest.param(np.asfortranarray(np.arange(SIZE).reshape(200, 200)), id="fortran"),
        pytest.param(np.full(SIZE, "text"), id="texts"),
        pytest.param(np.arange(SIZE).astype("datetime64[s]"), id="dates"),
        pytest.param(torch.arange(SIZE, dtype=torch.float32).to(torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.arange(SIZE).view(200, 200).t(), id="transposed"),
        pytest.param(torch.ones(1).expand(SIZE), id="expanded"),
        pytest.param(torch.full((SIZE,), 3, dtype=torch.uint8).view(torch.bool), id="bool-view"),
        pytest.param(collections.deque([torch.rand(SIZE)], maxlen=3), id="deque"),
        pytest.param(torch.empty(0, 5), id="empty-tensor"),
        pytest.param(np.empty((0, 5)), id="empty-array"),
        pytest.param([torch.rand(5), np.arange(3.0), torch.rand(SIZE)], id="mixed"),
    ],
)
def test_both_forms_of_an_encoded_state_have_the_same_content(value: Any) -> None:
    encoded = codec.encode({"a": value})
    data = encoded.tobytes()
    assert encoded.nbytes == len(data) and encoded.mark() == codec.encode({"a": value}).mark()
    back = codec.loads(data + witness.UNKNOWN)
    assert codec.dumps(back) == codec.dumps({"a": value})
    assert codec.encode(back).tobytes() == data


def test_a_damaged_state_builds_nothing() -> None:
    data = codec.encode([torch.rand(SIZE), np.arange(SIZE)]).tobytes()
    for end in (3, 20, 30, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(ProtocolError):
            codec.loads(data[:end])
    with pytest.raises(ProtocolError):
        codec.loads(data[:8] + b"\xff" * 16 + data[24:])


def test_a_tensor_that_was_looked_at_can_be_resized() -> None:
    value = torch.zeros(SIZE)
    made = registry([value, torch.zeros(3)])
    made.capture_local_state(made.drawn(), 0)
    value.resize_(2 * SIZE)
    arrays = [np.zeros(SIZE)]
    made = registry(arrays)
    made.capture_local_state(made.drawn(), 0)
    arrays[0].resize(2 * SIZE, refcheck=True)


def test_a_state_without_large_parts_and_one_of_an_older_version_come_back() -> None:
    small = [np.arange(5.0), torch.rand(7), "text", 3]
    made = registry(small)
    data = made.capture_local_state(made.drawn(), 1)
    heir = registry([0])
    heir.restore_local_state(data, 1, fresh=True)
    assert codec.dumps(heir.objects["own"].state_dict()) == codec.dumps({"value": small})
    older = codec.loads(data)
    del older["states"]
    older["objects"] = {"own": codec.dumps({"value": [1, tensor()]})}
    heir.restore_local_state(codec.dumps(older) + witness.UNKNOWN, 1, fresh=True)
    assert codec.dumps(heir.objects["own"].state_dict()) == codec.dumps({"value": [1, tensor()]})


# -- the page ---------------------------------------------------------------------------------------------


class Steps:
    """Steps of a rank without any training."""

    def __init__(self, page: Page, value: Any, model: nn.Module | None = None) -> None:
        self.registry = registry(value, model)
        self.registry.habits = StepProfile(known=True, own=["own"])
        self.registry.capture_common(0)
        kept = SimpleNamespace(page=page)
        self.sealing = Sealing(self.registry.habits, _LocalStates(self.registry, kept))  # type: ignore[arg-type]
        self.sealing.start()
        self.version = 0

    def step(self, change: Callable[[], object] = lambda: None, late: Callable[[], object] = lambda: None) -> None:
        self.version += 1
        self.sealing.step_begins()
        change()
        self.sealing.forward_ends(self.version)
        self.sealing.mutation_begins(self.version)
        late()
        shown = self.sealing.shown(self.version)
        self.registry.capture_common(self.version)
        self.sealing.complete(self.version, shown)


def in_page(page: Page, version: int) -> Any:
    data = page.read_local_state(version)
    assert data is not None
    return _own_states(codec.loads(data))["own"]["value"]


def _slot_with(page: Page, version: int) -> Any:
    """The page's memory for that version."""
    slot = page._slots._slot_of(version)
    assert slot is not None
    return page._slots._slots[slot]


def test_three_versions_of_a_large_state_stand_in_the_page_alone() -> None:
    page, value = Page.create("own"), [tensor(), 0]
    steps = Steps(page, value)
    wanted = {}
    for _ in range(9):
        steps.step(lambda: (value[0].add_(1), value.__setitem__(1, value[1] + 1)))
        wanted[steps.version] = codec.dumps(value)
    kept: ObjectShard = steps.registry.local_state
    assert page.local_state_versions() == kept.versions() == [7, 8, 9] and page.early_local_states() == []
    for version in (7, 8, 9):
        assert codec.dumps(in_page(page, version)) == wanted[version]
        assert kept.at(version) == page.read_local_state(version)
    assert kept.at(6) is None and kept.nbytes() > tensor().nbytes
    heir = Page.create("heir")
    heir.inherit(page)
    assert heir.local_state_versions() == [7, 8, 9] and codec.dumps(in_page(heir, 8)) == wanted[8]


def test_a_page_is_taken_over_beside_its_ends() -> None:
    """Copying goes on if a page is closed meanwhile. What was damaged before is not taken to be whole."""
    page, heir = Page.create("own"), Page.create("heir")
    for version in range(5):
        page.write_local_state(version, os.urandom((9 << 20) + version), early=version == 4)
    page.finish_local_state(3, witness.of({"a": "b"}))
    small = Page.create("small")
    small.write_local_state(1, b"of a few bytes")
    wanted = {version: page.read_local_state(version) for version in (2, 3, 4)}
    for old in (page, small):
        new = Page.create("new")
        with new.inheritance(old) as local_states:
            local_states.copy()
        new.adopt(old)
        assert new.local_state_versions() == old.local_state_versions()
        assert new.early_local_states() == old.early_local_states()
    with heir.inheritance(page) as local_states:
        assert 27 << 20 < local_states.nbytes < 28 << 20
        page.close()
        local_states.copy()
    assert page.closed and heir.local_state_versions() == []
    new = Page.create("new")
    page = Page.create("own")
    for version, data in wanted.items():
        assert data is not None
        page.write_local_state(version, data)
    _slot_with(page, 3)[7] ^= 1
    new.inherit(page)
    assert new.read_local_state(3) is None and new.read_local_state(4) == wanted[4]


def test_what_a_late_change_makes_is_written_beside_the_early_one() -> None:
    page, value = Page.create("own"), [tensor()]
    steps = Steps(page, value)
    for _ in range(5):
        steps.step(lambda: value[0].add_(1), late=lambda: value[0].mul_(2))
        assert codec.dumps(in_page(page, steps.version)) == codec.dumps(value)
        assert len(page.local_state_versions()) <= 3


def test_what_has_not_changed_is_not_written_again() -> None:
    page = Page.create("own")
    value = [torch.rand(1 << 20), torch.rand(1 << 20)]
    steps = Steps(page, value)
    for _ in range(8):
        steps.step(lambda: value[1][5].add_(1))
    written: list[int] = []

    class Memory:
        def __init__(self, memory: memoryview) -> None:
            self.memory = memory

        def __getitem__(self, where: slice) -> memoryview:
            return self.memory[where]

        def __setitem__(self, where: slice, data: Any) -> None:
            written.append(len(data))
            self.memory[where] = data

        def __len__(self) -> int:
            return len(self.memory)

    slots = page._slots._slots
    page._slots._slots = [Memory(slot) for slot in slots]  # type: ignore[misc]
    steps.step(lambda: value[1][5].add_(1))
    page._slots._slots = slots
    # Of 8 MiB: the chunk that has changed, the skeleton, and the digests.
    assert sum(written) < (1 << 20) + (64 << 10) and codec.dumps(in_page(page, steps.version)) == codec.dumps(value)


def test_a_damaged_chunk_or_digest_of_a_large_state_is_not_read() -> None:
    page = Page.create("own")
    for at in (500, (1 << 20) + 5, (3 << 20) - 1, 3 << 20, (3 << 20) + 9):
        page.write_local_state(4, os.urandom(3 << 20))
        slot = _slot_with(page, 4)
        slot[at] ^= 1
        assert page.read_local_state(4) is None
        assert page.local_state_versions() == ([4] if at < 3 << 20 else [])  # the content is digested when it is read
        page._slots._written.clear()


def test_buffers_that_change_come_back_from_memory_that_is_used_again() -> None:
    page = Page.create("own")
    model = nn.Linear(2, 2)
    model.register_buffer("big", torch.zeros(SIZE))
    steps = Steps(page, [0], model)
    wanted = {}
    for _ in range(6):
        steps.step(lambda: model.big.add_(1))
        wanted[steps.version] = model.big.clone()
    other = nn.Linear(2, 2)
    other.register_buffer("big", torch.zeros(SIZE))
    heir = registry([0], other)
    for version in (6, 4, 5):
        data = page.read_local_state(version)
        assert data is not None
        heir.restore_local_state(data, version, fresh=True)
        assert torch.equal(other.big, wanted[version])


def _write_until_killed(page: Page) -> None:
    """Each version is written early and then as it is in the end; what it contains follows from that."""
    value: list[Any] = [np.zeros(1 << 19, np.float32), np.zeros(1 << 19, np.float32), 0]  # torch would use threads
    steps = Steps(page, value)

    def early() -> None:
        value[2] += 1
        value[0][:] = value[2]
        value[1][100:200] = value[2]

    while True:
        steps.step(early, late=lambda: value[0].fill(value[2] + 0.5))


def test_a_rank_that_is_killed_while_it_writes_leaves_whole_versions() -> None:
    """Of the version that it was writing for the second time it leaves the early content or the last one."""
    for trial in range(KILLS):
        page = Page.create("own")
        pid = os.fork()
        if pid == 0:
            _write_until_killed(Page(page.fd))
        while not page.local_state_versions():
            time.sleep(0.001)
        time.sleep(random.Random(trial).uniform(0.005, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        versions = page.local_state_versions()
        assert len(versions) >= min(3, versions[-1] + 1) and versions == list(range(versions[0], versions[-1] + 1))
        for version in versions:
            first, second, number = in_page(page, version)
            assert number == version and np.all(second[100:200] == version)
            assert np.all(first == (version if version in page.early_local_states() else first[0]))
            assert first[0] in (version, version + 0.5 * (version > 0))
        page.close()
