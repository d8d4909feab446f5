"""A rank whose collective has failed waits for the stop, and its clock stands while no one could say it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.worker.control.interruption import InterruptionClassifier

WAIT_S = 0.3


class Waiting:
    """Gate and control of a worker that waits."""

    def __init__(self, *, heard: bool) -> None:
        self.gate: Any = SimpleNamespace(stopped=False, held=False)
        self.control: Any = SimpleNamespace(controller_heard=heard)
        self.told = False
        self.stops = InterruptionClassifier(self.gate, self.control, WAIT_S, lambda: self.told)


def test_with_a_controller_it_waits_for_so_long_and_no_longer() -> None:
    worker, began = Waiting(heard=True), time.monotonic()
    assert not worker.stops.wait()
    assert time.monotonic() - began >= WAIT_S


def test_an_error_of_the_script_waits_for_a_stop_only_where_a_scheduler_has_told_it_to_end() -> None:
    worker, began = Waiting(heard=True), time.monotonic()
    assert not worker.stops.explain(ValueError("a bad sample"))
    assert time.monotonic() - began < WAIT_S
    worker.told, found = True, []
    thread = threading.Thread(target=lambda: found.append(worker.stops.explain(RuntimeError("a worker was killed"))))
    thread.start()
    worker.gate.stopped = True
    thread.join(20 * WAIT_S)
    assert found == [True]


def test_once_the_controller_has_said_hold_it_waits_for_the_stop() -> None:
    worker, found = Waiting(heard=True), []
    worker.gate.held = True
    thread = threading.Thread(target=lambda: found.append(worker.stops.wait()))
    thread.start()
    thread.join(4 * WAIT_S)
    assert thread.is_alive()
    worker.gate.stopped = True
    thread.join(20 * WAIT_S)
    assert found == [True]


@pytest.mark.parametrize("stop_comes", [True, False])
def test_without_a_controller_it_waits_until_there_is_one_again(stop_comes: bool) -> None:
    worker, found = Waiting(heard=False), []
    thread = threading.Thread(target=lambda: found.append(worker.stops.wait()))
    thread.start()
    thread.join(4 * WAIT_S)
    assert thread.is_alive(), "it has given up although no one could have stopped it"
    worker.control.controller_heard = True
    worker.gate.stopped = stop_comes
    thread.join(20 * WAIT_S)
    assert found == [stop_comes]


def test_the_time_for_which_the_node_was_halted_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, slept = Waiting(heard=True), []
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += 100.0 if len(slept) == 2 else seconds  # SIGSTOP, and SIGCONT 100 s later

    monkeypatch.setattr(
        "flashrecovery.worker.control.interruption.time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now)
    )
    assert not worker.stops.wait()
    assert len(slept) > 100, "a halted node's ranks gave up as soon as it went on"
