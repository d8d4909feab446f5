"""NCCL reports an error and nobody says stop: communication is given up, after the patience and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery import groups
from flashrecovery.worker.error_watch import ErrorWatch

PATIENCE_S = 10.0


class Watched:
    """Its process groups, and what becomes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[str] = []
        self.given_up: list[str] = []
        self.gate: Any = SimpleNamespace(stopped=False)
        monkeypatch.setattr(groups, "reported_errors", lambda: self.errors)
        monkeypatch.setattr(groups, "abandon", self.given_up.append)
        self.watch = ErrorWatch(self.gate, PATIENCE_S)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_an_error_that_nobody_explains(watched: Watched) -> None:
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
    watched.watch.look(11.0)  # after the recovery the patience begins anew
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
