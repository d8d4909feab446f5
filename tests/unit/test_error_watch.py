"""NCCL reports an error and no one says stop: communication is given up, after the patience and not before."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from flashrecovery import groups
from flashrecovery.worker.control.nccl_error_watch import NcclErrorWatch
from flashrecovery.worker.loop import Loop

PATIENCE_S = 10.0


class Watched:
    """Its process groups, and what becomes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[str] = []
        self.given_up: list[str] = []
        self.gate: Any = SimpleNamespace(stopped=False)
        monkeypatch.setattr(groups, "reported_errors", lambda: self.errors)
        monkeypatch.setattr(groups, "abandon", self.given_up.append)
        self.watch = NcclErrorWatch(self.gate, PATIENCE_S)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_an_unexplained_error(watched: Watched) -> None:
    watched.errors = ["tp"]
    for now in (0.0, 5.0, 9.9):
        watched.watch.look(now)
        assert not watched.given_up
    watched.watch.look(10.0)
    (reason,) = watched.given_up
    assert "'tp'" in reason


def test_a_stop_explains_it(watched: Watched) -> None:
    watched.errors = ["tp"]
    watched.watch.look(0.0)
    watched.gate.stopped = True
    watched.watch.look(10.0)
    watched.gate.stopped = False
    watched.watch.look(11.0)  # after the recovery the patience starts again
    watched.watch.look(20.9)
    assert not watched.given_up


def test_an_error_that_was_over_does_not_count(watched: Watched) -> None:
    watched.errors = ["tp"]
    watched.watch.look(0.0)
    watched.errors = []
    watched.watch.look(5.0)
    watched.errors = ["tp"]
    watched.watch.look(10.0)
    assert not watched.given_up


def test_without_nccl_nobody_asks(watched: Watched) -> None:
    watched.watch.start()
    assert not watched.watch._thread.is_alive()


def test_with_nccl_somebody_asks_until_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    group = SimpleNamespace(request=SimpleNamespace(kind="nccl"), size=2)
    monkeypatch.setattr(groups, "groups", lambda: [group])
    monkeypatch.setattr(groups, "reported_errors", lambda: [] if given_up.is_set() else ["0"])
    monkeypatch.setattr(groups, "abandon", lambda reason: given_up.set())
    gate: Any = SimpleNamespace(stopped=False)
    NcclErrorWatch(gate, patience_s=0.05, period_s=0.01).start()
    assert given_up.wait(10)


def test_a_loop_has_it_asked_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    class Watch:
        def __init__(self, gate: object, patience_s: float) -> None:
            order.append(patience_s)

        def start(self) -> None:
            order.append("asked")

    monkeypatch.setattr("flashrecovery.worker.loop.NcclErrorWatch", Watch)
    loop: Any = Loop.__new__(Loop)
    loop._touches, loop._registry, loop._recoverer = MagicMock(), MagicMock(), MagicMock()
    loop._outside, loop._own_calls = MagicMock(), True
    loop._gate, loop._worker, loop._registry.adapters = MagicMock(), MagicMock(), []
    loop._worker.settings.timeouts.peer_error_wait_s = PATIENCE_S
    loop._recoverer.join.side_effect = lambda num_steps: order.append("joined")
    loop.join(5)
    assert order == ["joined", PATIENCE_S, "asked"]
