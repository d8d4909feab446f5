"""A copy that a checkpoint is written from stays as it is while training goes on, and costs memory only meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec


class Weights(Shard):
    name, holders = "w", (0,)

    def __init__(self) -> None:
        self.tensor = torch.zeros(1000)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"x": self.tensor}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


def shard() -> tuple[Weights, torch.Tensor]:
    made = Weights()
    return made, made.tensor


@pytest.fixture
def copies() -> tuple[PreStepCopy, torch.Tensor]:
    made, tensor = shard()
    return PreStepCopy([made]), tensor


def hold(copies: PreStepCopy, tensor: torch.Tensor, version: int) -> None:
    tensor.fill_(version)
    copies.hold(version)


def content(copies: PreStepCopy, version: int) -> float:
    return float(copies.source("w", version).tensors[0][7])


def test_it_outlasts_many_steps_and_then_gives_its_memory_back(copies: tuple[PreStepCopy, torch.Tensor]) -> None:
    undo, tensor = copies
    hold(undo, tensor, 1)
    hold(undo, tensor, 2)
    two = undo.nbytes()
    undo.reserve(3)
    for version in range(3, 10):
        hold(undo, tensor, version)
        kept = undo.reserved()
        assert kept is not None and float(kept("w").tensors[0][7]) == 3
        assert undo.versions()[-2:] == sorted({3, version, max(version - 1, 2)})[-2:]
        assert content(undo, version) == version
    assert undo.nbytes() == two * 3 // 2
    undo.release()
    hold(undo, tensor, 10)
    assert undo.nbytes() == two and undo.versions() == [9, 10] and content(undo, 9) == 9
    undo.reserve(11)
    hold(undo, tensor, 11)
    again = undo.reserved()
    assert again is not None and float(again("w").tensors[0][7]) == 11


def test_a_recovery_before_the_copy_is_made_leaves_nobody_waiting(copies: tuple[PreStepCopy, torch.Tensor]) -> None:
    undo, tensor = copies
    hold(undo, tensor, 4)
    undo.reserve(5)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(undo.reserved()))
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    undo.reset(4)
    reader.join(10)
    assert found == [None]
    hold(undo, tensor, 5)
    assert undo.reserved() is None, "it was for a generation that is over"


def test_a_version_that_is_held_already_is_reserved_as_it_is(copies: tuple[PreStepCopy, torch.Tensor]) -> None:
    undo, tensor = copies
    hold(undo, tensor, 5)
    undo.reserve(5)
    undo.hold(5)
    for version in (6, 7, 8):
        hold(undo, tensor, version)
    kept = undo.reserved()
    assert kept is not None and float(kept("w").tensors[0][7]) == 5
    undo.drop_after(4)
    assert float(kept("w").tensors[0][7]) == 5, "what is being written stays what it is"
    hold(undo, tensor, 5)
    hold(undo, tensor, 6)
    assert float(kept("w").tensors[0][7]) == 5


def test_a_copy_that_the_script_has_changed_meanwhile_is_none() -> None:
    made, tensor = shard()
    looks = iter(range(100))
    undo = PreStepCopy([made], look=lambda _: lambda: next(looks))
    undo.reserve(1)
    hold(undo, tensor, 1)
    assert undo.reserved() is None and undo.versions() == []
