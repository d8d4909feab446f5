"""Equal tensors are equal bytes, whatever has been in the memory before: parity is of bytes."""

from __future__ import annotations

import pytest
import torch

from flashrecovery.redundancy.memory.flat_buffer import FirstShards, Layout, Slot


@pytest.mark.parametrize("share", [False, True])
def test_what_lies_between_tensors_is_zero(share: bool) -> None:
    full = Layout.of({"a": {"x": torch.zeros(32)}, "b": {"y": torch.zeros(16)}})
    gaps = Layout.of({"a": {"x": torch.zeros(3)}, "b": {"y": torch.zeros(17)}})
    assert full.nbytes == gaps.nbytes == 192
    slot = Slot()
    slot.shape(full, pin=False, share=share)
    slot.buffer.fill_(255)
    slot.shape(gaps, pin=False, share=share)
    for view in slot.views:
        view.fill_(1.0)
    fresh = Slot()
    fresh.shape(gaps, pin=False, share=share)
    for view in fresh.views:
        view.fill_(1.0)
    assert torch.equal(slot.buffer, fresh.buffer)


def test_the_first_shards_are_one_range() -> None:
    layout = Layout.of({"mine": {"x": torch.zeros(5)}, "empty": {}, "shared": {"y": torch.zeros(9)}})
    first = FirstShards(["mine", "empty"])
    assert first.of(layout) is first.of(layout)
    part = first.of(layout)
    assert part.shards == ("mine", "empty") and part.nbytes == 64 and [e[0] for e in part.entries] == ["mine"]
    assert FirstShards([]).of(layout).nbytes == 0
    assert FirstShards(["mine", "empty", "shared"]).of(layout).nbytes == layout.nbytes
