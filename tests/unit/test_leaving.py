"""Has a notice of preemption come to this process?"""

from __future__ import annotations

import os
import signal
import time

import flashrecovery
from flashrecovery.runtime.page import TERMINATIONS_WORD, Page
from flashrecovery.worker.exit.termination import LeavingNotice
from flashrecovery.worker.exit.undisturbed import Outside
from flashrecovery.worker.recovery import Recovery


def test_without_recovery_there_is_none() -> None:
    recovery = Recovery(None)
    assert (recovery.leaving, recovery.is_replacement, recovery.first_launch) == (False, False, True)
    assert flashrecovery.Recovery is Recovery


def test_who_has_told_it() -> None:
    for tell in (Page.set_leaving, lambda page: page._words.__setitem__(TERMINATIONS_WORD, 1)):
        page = Page.create("leaving")
        assert not page.leaving and not page.asks_leaving
        tell(page)
        assert page.leaving and not page.asks_leaving
        page.close()


def test_a_signal_is_noted_once_the_script_has_asked() -> None:
    page = Page.create("leaving")
    own: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: own.append(number))
    try:
        notice = LeavingNotice(page)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not page.asks_leaving
        assert not notice.has_come and page.asks_leaving
        signal.raise_signal(signal.SIGUSR2)
        assert own and not notice.has_come, "the script has its own handler for it"
        pid = os.fork()
        if pid == 0:  # as a worker of a data loader
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0 and notice.has_come
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, before)
        page.close()


def test_a_loaders_error_waits_while_the_script_sees_to_a_notice() -> None:
    raised: list[int] = []
    for quiet in (True, False):
        Outside(lambda number, _: raised.append(number), lambda quiet=quiet: quiet)(signal.SIGCHLD, None)
    assert raised == [signal.SIGCHLD]
