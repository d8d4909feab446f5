"""What a framework writes to its checkpoint is taken from the copy that is made anyway, where it lies in a shard."""

from __future__ import annotations

from typing import Any

import torch

from flashrecovery.redundancy.checkpoint.host_copies import HostCopies, LaterCopies
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import ShardSpec


class Partition(Shard):
    name = "partition"
    holders = (0,)

    def __init__(self) -> None:
        self.flat = torch.arange(100, dtype=torch.float32)
        self.step = torch.tensor(7.0)
        self.turned = torch.arange(12.0).view(3, 4).t()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"flat": self.flat, "step": self.step, "turned": self.turned, "none": torch.empty(0)}

    def values(self) -> dict[str, Any]:
        return {}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


def test_equal_to_copies_made_at_once_and_training_is_not_held_up_for_them() -> None:
    shard, strange = Partition(), torch.full((5,), 3.0)
    wanted = [
        shard.flat,
        shard.flat[10:30],
        shard.flat[12:36].view(4, 6),
        shard.flat.view(torch.int32)[3:5],
        shard.step,
        shard.flat[::2],  # not one range
        shard.turned,  # as it lies in the shard, but not in the copy
        strange,
        torch.empty(0),
        torch.cat([shard.flat[:2], strange]),
    ]
    at_once = [HostCopies()(t) for t in wanted]
    undo, later = PreStepCopy([shard]), LaterCopies([shard])
    rooms = [later(t) for t in wanted]
    assert later.later == sum(t.nbytes for t in wanted[:5])
    assert rooms[0] is later(shard.flat), "the same tensor only once"
    undo.hold(4)
    shard.flat.zero_(), shard.step.zero_(), shard.turned.zero_(), strange.zero_()  # training goes on
    slot = undo.slot(4)
    assert slot is not None
    later.fill(lambda name: ShardSource(name, *slot.content(name)))
    assert later.later == 0
    for room, expected in zip(rooms, at_once, strict=True):
        assert torch.equal(room, expected) and room.dtype == expected.dtype and room.is_contiguous()
    undo.close()


def test_a_tensor_that_only_begins_in_a_shard_is_copied_at_once() -> None:
    whole = torch.arange(8.0)
    shard = Partition()
    shard.flat = whole[:5]
    later = LaterCopies([shard])
    assert torch.equal(later(whole[3:7]), whole[3:7]) and later.later == 0
    later(whole[1:5])
    assert later.later == 16
