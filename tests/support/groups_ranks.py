"""Runs a function on a few ranks, each a forked process, with a hard deadline and all stacks on its expiry."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch._C._distributed_c10d import Store, TCPStore

from flashrecovery.groups.state import STATE

RankFunction = Callable[[int, int, Store], None]


def run_ranks(
    size: int, body: RankFunction, deadline_s: float = 60.0, allowed: dict[int, int] | None = None
) -> list[str]:
    """Call ``body(rank, size, store)`` on ``size`` ranks and return what each has printed.

    ``allowed`` maps ranks to an exit status that is expected of them (negative: the signal). A process of its own
    hosts the store, so that any rank may die.
    """
    assert STATE.abandonments == 0, "a test has abandoned the communication of this process: forked ranks have it, too"
    with tempfile.TemporaryDirectory() as folder:
        port = _Host.start()
        pids = {
            _fork(functools.partial(_rank_main, rank, size, port.number, body, Path(folder))): rank
            for rank in range(size)
        }
        try:
            statuses = _wait(dict(pids), deadline_s)
        finally:
            port.stop()
        texts = [Path(folder, f"{rank}.txt").read_text() for rank in range(size)]
        ended = {rank: statuses.get(pid, "deadline") for pid, rank in pids.items()}
        wrong = [rank for rank, status in ended.items() if status != (allowed or {}).get(rank, 0)]
        assert not wrong, "\n".join(f"rank {r} ended with {ended[r]}:\n{texts[r][-6000:]}" for r in wrong)
        return texts


def connections() -> int:
    """Of this process, TCP."""
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process().net_connections("tcp"))


class _Host:
    """The TCPStore's server in its own process."""

    def __init__(self, pid: int, number: int) -> None:
        self.pid, self.number = pid, number

    @classmethod
    def start(cls) -> _Host:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write_end, f"{store.port}\n".encode())
            signal.pause()
            os._exit(0)
        os.close(write_end)
        ready, _, _ = select.select([read_end], [], [], 30)
        number = int(os.read(read_end, 16)) if ready else 0
        os.close(read_end)
        assert number, "the store host did not start"
        return cls(pid, number)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def connect(port: int) -> Store:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))


def _fork(main: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            main()
            code = 0
        finally:
            os._exit(code)
    return pid


def _rank_main(rank: int, size: int, port: int, body: RankFunction, folder: Path) -> None:
    with open(folder / f"{rank}.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = log
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            body(rank, size, connect(port))
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - reported, and the status says it
            traceback.print_exc(file=log)
            log.flush()
            os._exit(1)


def _wait(waiting: dict[int, int], deadline_s: float) -> dict[int, int]:
    end = time.monotonic() + deadline_s
    statuses: dict[int, int] = {}
    while waiting:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                del waiting[pid]
        if waiting and time.monotonic() > end:
            for pid in waiting:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    return statuses
