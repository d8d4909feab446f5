"""The undo copy: two versions, reused memory, exact restore, structure that grows with the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashrecovery.errors import RestoreError
from flashrecovery.redundancy.memory.flat_buffer import ALIGN, Layout, Slot, slot_for_next
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec


class ParamShard(Shard):
    """A parameter with lazily created state, like an optimizer's."""

    def __init__(self, name: str, shape: tuple[int, ...], holders: tuple[int, ...] = (0,)) -> None:
        self.name = name
        self.holders = holders
        self.param = torch.nn.Parameter(torch.zeros(shape))
        self.state: dict[str, torch.Tensor] = {}
        self.count = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"param": self.param, **self.state}

    def values(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        self.state = {k: torch.empty(t.shape, dtype=t.dtype) for k, t in spec.tensors.items() if k != "param"}
        self.count = spec.values.get("count", 0)
        return self.tensors()

    def step(self, version: int) -> None:
        """The state of ``version``."""
        self.count = version
        if version == 0:
            self.state = {}
        elif not self.state:
            self.state = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(self.param, dtype=torch.bfloat16),
            }
        for t in self.tensors().values():
            t.data.fill_(version)

    def is_at(self, version: int) -> bool:
        expected = {"param"} if version == 0 else {"param", "step", "exp_avg"}
        tensors = self.tensors()
        return (
            set(tensors) == expected and self.count == version and all((t == version).all() for t in tensors.values())
        )


def shards() -> list[ParamShard]:
    return [ParamShard("a", (5, 3)), ParamShard("empty", (0, 3)), ParamShard("scalar", ())]


def step(all_shards: list[ParamShard], version: int) -> None:
    for s in all_shards:
        s.step(version)


@pytest.mark.parametrize("background", [False, True])
def test_the_last_two_versions_can_be_restored(background: bool) -> None:
    mine = shards()
    undo = PreStepCopy(mine)
    for version in range(5):
        step(mine, version)
        if background:
            undo.start(version)
            undo.before_mutation()
        else:
            undo.hold(version)
    undo.wait()
    assert undo.versions() == [3, 4]
    for version in (3, 4, 3):
        step(mine, 9)
        for s in mine:
            undo.restore(version, s)
        assert all(s.is_at(version) for s in mine)
    with pytest.raises(RestoreError, match=r"'a' at version 2; held: \[3, 4\]"):
        undo.restore(2, mine[0])
    undo.close()


def test_version_0_without_optimizer_state_can_be_restored() -> None:
    mine = shards()
    undo = PreStepCopy(mine)
    for version in (0, 1):
        step(mine, version)
        undo.hold(version)
    for s in mine:
        undo.restore(0, s)
    assert all(s.is_at(0) for s in mine)
    for s in mine:
        undo.restore(1, s)
    assert all(s.is_at(1) for s in mine)


def test_memory_is_reused_once_the_structure_is_stable() -> None:
    mine = shards()
    undo = PreStepCopy(mine)
    for version in range(4):
        step(mine, version)
        undo.hold(version)
    memory = {s.buffer.data_ptr() for s in undo._slots.values()}
    for version in range(4, 9):
        step(mine, version)
        undo.hold(version)
    assert {s.buffer.data_ptr() for s in undo._slots.values()} == memory
    assert undo.nbytes() == 2 * sum(-(-t.nbytes // ALIGN) * ALIGN for s in mine for t in s.tensors().values())


def test_holding_a_version_again_keeps_both_versions() -> None:
    """After a recovery to k the same k is committed again; that must not cost the older version."""
    mine = shards()
    undo = PreStepCopy(mine)
    for version in (6, 7, 7, 6):
        step(mine, version)
        undo.hold(version)
        assert undo.versions()[-1] == max(undo.versions())
    assert undo.versions() == [6, 7]


def test_undone_versions_are_forgotten() -> None:
    mine = shards()
    undo = PreStepCopy(mine)
    for version in (6, 7):
        step(mine, version)
        undo.hold(version)
    undo.reset(6)
    assert undo.versions() == [6]
    step(mine, 7)
    undo.hold(7)
    assert undo.versions() == [6, 7]


def test_a_failing_copy_is_raised_before_the_mutation() -> None:
    class Broken(ParamShard):
        def tensors(self) -> dict[str, torch.Tensor]:
            return {"param": torch.empty(3, device="meta")}

    undo = PreStepCopy([Broken("x", (3,))])
    undo.start(0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        undo.before_mutation()
        undo.wait()
    assert undo.versions() == []


def test_a_layout_survives_encoding_and_knows_its_structure() -> None:
    tensors = {
        "a": {"x": torch.ones(3), "y": torch.ones(2, dtype=torch.bfloat16)},
        "none": {},
        "b": {"x": torch.ones(())},
    }
    layout = Layout.of(tensors)
    assert Layout.decode(layout.encoded) == layout and Layout.decode(layout.encoded).ident == layout.ident
    assert layout.payload == {"a": 16, "none": 0, "b": 4}
    assert layout.matches(tensors)
    assert not layout.matches({**tensors, "c": {}})
    assert not layout.matches({**tensors, "b": {"x": torch.ones(1)}})
    assert not layout.matches({"a": tensors["a"], "none": {}})
    assert all(offset % ALIGN == 0 for *_, offset in layout.entries)


def test_the_newest_whole_version_is_never_the_one_to_overwrite() -> None:
    a, b = Slot(), Slot()
    a.version = 4
    assert slot_for_next([a, b]) is b
    b.version = 3
    assert slot_for_next([a, b]) is b
    b.version = 4
    assert slot_for_next([a, b]) in (a, b)
