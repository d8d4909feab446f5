"""A copy that is made while an operation writes is not whole, though the operation has not counted its writing yet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashrecovery.adapter.shards import FixedShard
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.redundancy.memory.safe_points import Between
from flashrecovery.state.shard import Shard
from flashrecovery.worker.local_state.version_counters import TensorTable

LARGE = 60_000_000


def look(tensors: Sequence[torch.Tensor]) -> Callable[[], int]:
    return TensorTable(tensors).digest


def shard_of(tensor: torch.Tensor) -> Shard:
    return FixedShard("x", [0], tensor)


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Copies of the background thread begin so much later: in the middle of what the script does next."""
    delay = [0.02]
    copy = torch._foreach_copy_

    def later(*args: Any) -> None:
        time.sleep(delay[0])
        copy(*args)

    monkeypatch.setattr(torch, "_foreach_copy_", later)
    return delay


def test_what_is_copied_in_the_middle_of_an_operation_is_not_kept(late_copies: list[float]) -> None:
    base = torch.ones(LARGE)
    undo = PreStepCopy([shard_of(base[:1000])], look=look)
    undo.start(1)
    base.mul_(2).mul_(2).mul_(2).mul_(2)  # takes some 50 ms each
    undo.wait()
    if undo.versions():
        assert undo.source("x", 1).tensors[0].eq(1).all()
    undo.close()


def test_what_is_copied_before_an_operation_is_kept(late_copies: list[float]) -> None:
    late_copies[0] = 0.0
    tensor = torch.ones(1000)
    undo = PreStepCopy([shard_of(tensor)], look=look)
    undo.start(1)
    while not undo.versions():
        time.sleep(0.001)
    tensor.mul_(2)
    undo.wait()
    assert undo.versions() == [1] and undo.source("x", 1).tensors[0].eq(1).all()
    undo.close()


def test_a_look_waits_for_the_end_of_an_operation() -> None:
    between, order = Between(), []
    asked = threading.Event()

    def other() -> None:
        asked.set()
        order.append(f"seen by {between.ask(threading.get_ident, 5.0) == threading.main_thread().ident}")

    thread = threading.Thread(target=other)
    thread.start()
    asked.wait()
    torch.ones(LARGE).mul_(2), order.append("written")
    thread.join(5)
    assert not thread.is_alive()
    assert order[-1] == "seen by True" or order == ["seen by True", "written"]


def test_who_is_held_up_is_not_waited_for_without_end() -> None:
    """By someone who waits for this very answer."""
    between, (reading, writing) = Between(), os.pipe()

    def other() -> None:
        time.sleep(0.05)
        between.ask(threading.get_ident, 0.1)
        os.write(writing, b"x")

    thread = threading.Thread(target=other)
    thread.start()
    assert os.read(reading, 1) == b"x"  # without the interpreter's lock, and without a bytecode
    thread.join(5)
    os.close(reading), os.close(writing)


def test_one_who_rests_answers() -> None:
    between, found = Between(), []
    thread = threading.Thread(target=lambda: found.append(between.ask(lambda: 7, 5.0)))
    with between.resting():
        thread.start()
        thread.join(5)
    assert found == [7]


def test_what_the_look_raises_is_raised_where_it_was_asked_for() -> None:
    between, found = Between(), []

    def other() -> None:
        try:
            between.ask(lambda: 1 // 0, 5.0)
        except ZeroDivisionError:
            found.append("raised")

    thread = threading.Thread(target=other)
    with between.resting():
        thread.start()
        thread.join(5)
    assert found == ["raised"]


def test_an_own_copy_may_be_made_by_the_training_thread_itself() -> None:
    tensor = torch.ones(4)
    undo = PreStepCopy([shard_of(tensor)], look=look)
    undo.hold(3)
    assert undo.versions() == [3]
    undo.close()
