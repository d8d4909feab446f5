"""Copies are of bytes, whatever a dtype's own copies make of them."""

from __future__ import annotations

import pytest
import torch

from flashrecovery.adapter.buffers import BufferTracker
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state import codec
from flashrecovery.state.digest import shard_digest, tensor_digest
from flashrecovery.state.exact import exact_clone, exact_contiguous, exact_copy
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec
from flashrecovery.worker.transfer.chunks import messages, pack, unpack

DTYPES = [torch.bool, torch.uint4, torch.int3, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex64]


class OneTensor(Shard):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.name, self.holders = "a", (0,)
        self._tensor = tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"x": self._tensor}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


def _odd(dtype: torch.dtype, shape: tuple[int, ...] = (5, 8)) -> torch.Tensor:
    """All bytes there are: bools that are neither 0 nor 1, NaNs with every payload, -0.0."""
    count = torch.Size(shape).numel() * dtype.itemsize
    content = (torch.arange(count) * 37 % 256).to(torch.uint8)
    return content.view(dtype).view(shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    strides = [s * tensor.itemsize for s in tensor.stride()]
    at = tensor.storage_offset() * tensor.itemsize
    return dense.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), at).contiguous().numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["contiguous", "transposed", "part"])
def test_every_way_that_state_takes(dtype: torch.dtype, form: str) -> None:
    whole = _odd(dtype)
    source = {"contiguous": whole, "transposed": whole.t(), "part": whole[:, 1:3]}[form]
    wanted = _bytes(source)
    assert _bytes(exact_clone(source)) == wanted
    assert _bytes(exact_contiguous(source)) == wanted
    assert _bytes(codec.loads(codec.dumps(source))) == wanted
    target = torch.zeros_like(whole)
    target = {"contiguous": target, "transposed": target.t(), "part": target[:, 1:3]}[form]
    exact_copy(target, source)
    assert _bytes(target) == wanted
    undo = PreStepCopy([OneTensor(source)])
    undo.hold(1)
    exact_copy(source, torch.zeros_like(source))
    undo.restore(1, undo.shards[0])
    assert _bytes(source) == wanted
    exact_copy(target, torch.zeros_like(target))
    for message in messages([undo.shards[0].spec().tensors["x"]]):
        buffer = torch.empty(message.nbytes, dtype=torch.uint8)
        pack(message, [source], buffer)
        unpack(message, [target], buffer)
    assert _bytes(target) == wanted
    undo.close()


def test_bools_that_are_true_in_other_bytes_are_others() -> None:
    one, other = torch.ones(4, dtype=torch.uint8).view(torch.bool), _odd(torch.bool, (4,)) | True
    other.view(torch.uint8).add_(6)
    assert torch.equal(one, other)
    assert tensor_digest(one) != tensor_digest(other) and shard_digest([one]) != shard_digest([other])


@pytest.mark.parametrize("large", [False, True])
def test_buffers(large: bool) -> None:
    module = torch.nn.Module()
    flags = torch.zeros(100_000 if large else 8, dtype=torch.bool)
    module.register_buffer("flags", flags)
    module.register_buffer("wide", torch.zeros(3, 1, dtype=torch.bool).expand(3, 4))
    tracker = BufferTracker(module)
    before = tracker.mark()
    flags.view(torch.uint8)[1] = 4
    module.wide[:, :1].view(torch.uint8).fill_(2)
    kept = codec.loads(codec.dumps(tracker.capture()))
    assert tracker.mark() != before
    flags.view(torch.uint8)[1] = 1
    module.wide[:, :1].view(torch.uint8).fill_(1)
    assert codec.loads(codec.dumps(tracker.capture()))["changed"]["flags"].view(torch.uint8)[1] == 1
    tracker.restore(kept)
    assert flags.view(torch.uint8)[1] == 4 and module.wide.view(torch.uint8)[2, 3] == 2
