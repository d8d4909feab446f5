"""Pages that exist before they are needed, and move into tensors."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashrecovery.adapter.placement import backed_by_pages, zeros_backed_by_pages
from flashrecovery.runtime import page_reserve, process_memory
from flashrecovery.runtime.page import Page
from flashrecovery.runtime.page_reserve import LEAST, WORTH_IT, PageReserve

MIB = 1 << 20


@pytest.fixture
def reserve() -> Iterator[PageReserve]:
    """Of this process, and full."""
    page_reserve.begin(WORTH_IT)
    made = page_reserve._reserve
    assert made is not None and made.filled() == WORTH_IT
    yield made
    page_reserve.end()
    assert not page_reserve.back(0, WORTH_IT)


def present(tensor: torch.Tensor) -> int:
    """Bytes of its whole pages that have memory (``mincore``)."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * mmap.PAGESIZE), found) == 0
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


def resident() -> int:
    """Bytes of memory of this process. Its addresses would not do: threads of earlier tests come and go with theirs."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_new_tensor_gets_pages_and_nothing_else_is_touched(reserve: PageReserve) -> None:
    around = [torch.full((3 * MIB,), number, dtype=torch.uint8) for number in range(3)]
    tensor = torch.empty(3 * MIB + 12345, dtype=torch.uint8)
    tensor[:10], tensor[-10:] = 7, 9
    assert backed_by_pages(tensor) is tensor
    assert present(tensor) > 3 * MIB - mmap.PAGESIZE
    tensor.fill_(5)
    assert int(tensor.sum(dtype=torch.int64)) == 5 * tensor.numel()
    assert [int(t.unique()) for t in around] == [0, 1, 2]


def test_tensors_outlive_the_reserve_and_are_freed_like_others() -> None:
    page_reserve.begin(WORTH_IT)
    assert page_reserve._reserve is not None
    page_reserve._reserve.filled()
    tensors = [backed_by_pages(torch.empty(size * MIB, dtype=torch.uint8)).fill_(size) for size in (1, 2, 3)]
    page_reserve.end()
    assert [int(t.unique()) for t in tensors] == [1, 2, 3]
    before = resident()
    large = torch.empty(64 * MIB, dtype=torch.uint8)
    del tensors
    large.fill_(1)
    del large
    assert resident() <= before


def test_it_backs_what_it_can(reserve: PageReserve) -> None:
    """Also of a tensor that is larger than what is left; small ones do not count."""
    small = torch.empty(LEAST // 4, dtype=torch.uint8)
    assert not page_reserve.back(small.data_ptr(), small.nbytes)
    large = torch.empty(2 * WORTH_IT, dtype=torch.uint8)
    assert len(page_reserve.back(large.data_ptr(), large.nbytes)) == WORTH_IT
    assert present(large) >= WORTH_IT
    assert not page_reserve.back(large.data_ptr(), large.nbytes)
    large.fill_(3)
    assert int(large.sum(dtype=torch.int64)) == 3 * large.numel()


@pytest.mark.parametrize("nbytes", [LEAST // 4, 3 * MIB + 12345, 2 * WORTH_IT], ids=["small", "covered", "too-large"])
def test_zeros_are_zero_wherever_pages_begin_and_end(reserve: PageReserve, nbytes: int) -> None:
    """And what has pages is not written for it."""
    tensor = torch.full((nbytes,), 7, dtype=torch.uint8)
    view, written = tensor[100:-100], []

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.zero_.default:
                written.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    with Writes():
        assert zeros_backed_by_pages(view) is view
    assert not tensor.any()
    backed = 0 if nbytes < LEAST else min(nbytes // mmap.PAGESIZE * mmap.PAGESIZE, WORTH_IT)
    assert nbytes - backed <= sum(written) <= nbytes - backed + mmap.PAGESIZE


def test_zeros_without_a_reserve_are_written() -> None:
    tensor = torch.full((2 * MIB,), 7, dtype=torch.uint8)
    assert not zeros_backed_by_pages(tensor).any()


def test_several_threads_never_get_the_same_pages(reserve: PageReserve) -> None:
    tensors = [torch.empty(LEAST, dtype=torch.uint8) for _ in range(WORTH_IT // LEAST)]

    def work(number: int) -> None:
        for place in range(number, len(tensors), 4):
            backed_by_pages(tensors[place]).fill_(place)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(t.unique()) for t in tensors] == list(range(len(tensors)))


def test_where_memory_is_short_pages_are_made_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_reserve, "available_memory", lambda: 2 * WORTH_IT - 1)
    reserve = PageReserve(WORTH_IT)
    reserve.start()
    assert reserve.filled() == 0
    tensor = torch.empty(2 * LEAST, dtype=torch.uint8)
    assert not reserve.back(tensor.data_ptr(), tensor.nbytes)
    tensor.fill_(1)
    reserve.close()


def test_pages_that_cannot_be_moved_leave_a_tensor_that_can_be_used(
    reserve: PageReserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have taken away what was there before it failed."""
    real, tensor = page_reserve._libc(), torch.empty(4 * MIB, dtype=torch.uint8)

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def mremap(self, source: int, nbytes: int, _: int, flags: int, target: int) -> int | None:
            real.munmap(target, nbytes)
            return page_reserve._FAILED

    refusing = Refusing()
    monkeypatch.setattr(page_reserve, "_libc", lambda: refusing)
    assert not page_reserve.back(tensor.data_ptr(), tensor.nbytes)
    tensor.fill_(6)
    assert int(tensor.sum(dtype=torch.int64)) == 6 * tensor.numel()
    assert not page_reserve.back(tensor.data_ptr(), tensor.nbytes), "tried once"


def test_memory_that_is_there_is_not_made_present_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost as much as a copy."""
    real, made = process_memory._libc(), []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def madvise(self, *arguments: int) -> int:
            made.append(arguments)
            return int(real.madvise(*arguments))

    counting = Counting()
    monkeypatch.setattr(process_memory, "_libc", lambda: counting)
    with mmap.mmap(-1, 4 * MIB) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        process_memory.make_present(tensor.data_ptr(), tensor.nbytes)
        assert len(made) == 1 and present(tensor) == tensor.nbytes
        process_memory.make_present(tensor.data_ptr(), tensor.nbytes)
        assert len(made) == 1
        del tensor


def test_little_is_not_worth_it() -> None:
    page_reserve.begin(WORTH_IT - 1)
    assert page_reserve._reserve is None
    page_reserve.end()


def test_what_is_left_is_given_back() -> None:
    before = resident()
    for _ in range(20):
        page_reserve.begin(WORTH_IT)
        backed_by_pages(torch.empty(LEAST, dtype=torch.uint8))
        page_reserve.end()
    assert resident() < before + 4 * WORTH_IT


def test_a_replacement_knows_how_much_it_will_need() -> None:
    old, new = Page.create("old"), Page.create("new")
    assert old.grown_bytes == 0
    old.set_grown_bytes(5 << 30)
    new.inherit(old)
    assert new.grown_bytes == 5 << 30
    old.close()
    new.close()
