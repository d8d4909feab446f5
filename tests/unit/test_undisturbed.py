"""Errors that a data loader's handler of SIGCHLD raises hit the script, and nothing of ours."""

from __future__ import annotations

import os
import signal

import pytest

from flashrecovery.worker.exit.undisturbed import Outside, undisturbed
from flashrecovery.worker.step.step import Step


@pytest.fixture
def _handler() -> object:
    def raises(*_: object) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGCHLD, Outside(raises, lambda: False))
    yield
    signal.signal(signal.SIGCHLD, before)


class Loop:
    """``with`` it something is dealt with that takes time."""

    begun = ended = False

    @undisturbed
    def end(self) -> None:
        self.begun = True
        self._wait()
        self.ended = True

    def _wait(self) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        for _ in range(100):  # until the handler has been called
            pass


@pytest.mark.usefixtures("_handler")
def test_what_deals_with_the_first_error_is_not_hit_by_the_second() -> None:
    loop = Loop()
    loop.end()
    assert loop.begun and loop.ended
    with pytest.raises(RuntimeError, match="a worker was killed"):
        loop._wait()


def test_the_end_of_a_step_is_undisturbed() -> None:
    from flashrecovery.worker.exit import undisturbed as module

    assert Step.__exit__.__code__ in module._undisturbed
