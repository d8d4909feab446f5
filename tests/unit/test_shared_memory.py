"""Memory that another process can map and that outlives its maker."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from flashrecovery.redundancy.memory.flat_buffer import Layout, Slot
from flashrecovery.snapshot.memory import MemoryAddress, SharedMemory

MAKER = """
import sys, time, dataclasses
from flashrecovery.snapshot.memory import SharedMemory
memory = SharedMemory.create(1000)
memory.map[64:] = bytes([7]) * 1000
memory.version = 3
print(*dataclasses.astuple(memory.address), flush=True)
sys.stdin.read()
"""


def test_content_and_version_outlive_the_process_that_made_them() -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    address = MemoryAddress(*map(int, maker.stdout.readline().split()))
    memory = SharedMemory.open(address)
    maker.kill()
    maker.communicate()
    assert memory is not None and memory.version == 3
    assert memory.nbytes == 1000 and memory.map[64:] == bytes([7]) * 1000
    assert SharedMemory.open(address) is None, "its maker is gone"


def test_what_is_not_the_memory_that_was_meant_is_not_opened() -> None:
    memory = SharedMemory.create(100)
    assert SharedMemory.open(memory.address) is not None
    for change in ({"inode": memory.address.inode + 1}, {"size": 7}, {"host": 1}, {"fd": 999_999}):
        assert SharedMemory.open(dataclasses.replace(memory.address, **change)) is None


def test_an_adopted_slot_follows_its_owner() -> None:
    owner, reader = Slot(), Slot()
    layout = Layout.of({"w": {"x": torch.arange(8.0)}})
    owner.shape(layout, pin=False, share=True)
    owner.views[0].copy_(torch.arange(8.0))
    owner.version = 5
    assert owner.shared is not None
    memory = SharedMemory.open(owner.shared.address)
    assert memory is not None
    reader.adopt(memory, layout)
    reader.version = 5
    assert reader.version == 5 and reader.nbytes == 0
    assert torch.equal(reader.content("w")[1][0], torch.arange(8.0))
    reader.version = -1
    assert owner.version == 5, "a reader never writes"
    reader.version = 5
    owner.version = -1
    assert reader.version == -1
    reader.drop_after(4)
    owner.version = 5
    assert reader.version == -1, "the owner's second version 5 has not been exchanged yet"
    owner.version = 7
    assert reader.version == -1, "it holds 7 only when its owner has said so"
    reader.shape(layout, pin=False)
    assert reader.shared is None and reader.nbytes == layout.nbytes


class Cudart:
    """What is used of CUDA's runtime library, which says ``code``."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_memory_that_a_gpu_copies_into_is_shared_as_well_and_of_exactly_that_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slot = Slot()
    slot.shape(Layout.of({"w": {"x": torch.zeros(1000)}}), pin=True, share=True)
    assert slot.shared is not None and SharedMemory.open(slot.shared.address) is not None
    assert cudart.registered == {slot.buffer.data_ptr(): slot.buffer.numel()} and slot.buffer.numel() < 4096
    slot.shape(Layout.of({"w": {"x": torch.zeros(1000)}}), pin=True, share=True)
    assert len(cudart.registered) == 1, "used again"
    slot.shape(Layout.of({"w": {"x": torch.zeros(5000)}}), pin=True, share=True)
    assert cudart.registered == {slot.buffer.data_ptr(): slot.buffer.numel()}, "the old one is given back"
    slot.shape(Layout(), pin=True, share=True)
    assert not cudart.registered


def test_memory_that_cuda_does_not_take_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(code=2))
    slot = Slot()
    with pytest.warns(RuntimeWarning, match="cudaHostRegister of 4032 bytes failed with error 2"):
        slot.shape(Layout.of({"w": {"x": torch.zeros(1000)}}), pin=True)
    slot.views[0].fill_(3)
