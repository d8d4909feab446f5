"""``flashrecovery run --preflight``: does every device of this node compute and communicate what it should?

Before the job starts, one process for each local rank multiplies matrices of known result on its GPU (without GPUs: on
the CPU), then all of them reduce numbers of known sums. All numbers are small integers, which every floating-point unit
adds up exactly, so one wrong bit is an error. In a minute at most; with several nodes each looks at itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flashrecovery.errors import PreflightError

LIMIT_S = 60.0
STAGES = ("start", "gemm", "all-reduce")
"""In this order; each rank says when it has come through one."""
RANK_PROGRAM = (sys.executable, "-m", "flashrecovery.cli.preflight_rank")


@dataclass
class RankReport:
    """What one rank's process has said. ``device``: how it names its device; ``wrong``: what it has found."""

    rank: int
    device: str = ""
    passed: list[str] = field(default_factory=list)
    wrong: str = ""
    ended: str = ""

    def has_ended(self, how: str) -> None:
        """Its process has ended before it was through, or cannot be ended."""
        self.ended = how

    def take(self, line: str) -> None:
        """One line of its output; what is not its own is left out."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        if isinstance(said, dict):
            self.device = str(said.get("device", self.device))
            self.wrong = self.wrong or str(said.get("wrong", ""))
            if said.get("passed") in STAGES:
                self.passed.append(said["passed"])

    @property
    def name(self) -> str:
        return self.device or f"the device of local rank {self.rank}"

    @property
    def at(self) -> str:
        """The stage in which it is; "": through with all."""
        return next((stage for stage in STAGES if stage not in self.passed), "")


def verdict(reports: Sequence[RankReport], seconds: float) -> str:
    """What is wrong, device by device; "": nothing. Who has found a wrong result is named; then who ended, or stands
    still, in the earliest stage: others mostly wait for it."""
    wrong = [f"{one.name}: {one.wrong}" for one in reports if one.wrong]
    if wrong:
        return "; ".join(wrong)
    late = [one for one in reports if one.at]
    if not late:
        return ""
    first = min(STAGES.index(one.at) for one in late)
    said = [
        f"{one.name}: {one.ended or f'has not ended within {seconds:.0f} s'}, in stage {one.at}"
        for one in late
        if STAGES.index(one.at) == first
    ]
    return "; ".join(said)


def check(ranks: int, environment: Mapping[str, str], program: Sequence[str] = RANK_PROGRAM) -> str:
    """Look at this node. Returns one line about it. Raises PreflightError, which names what is bad.

    Args:
        ranks: of this node.
        environment: of the processes.
        program: how one of them is started; a test's own.
    """
    began = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**environment, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    reports = [RankReport(rank) for rank in range(ranks)]
    try:
        _wait(processes, began + LIMIT_S)
    finally:
        for process in processes:
            _end(process)
    for process, report in zip(processes, reports, strict=True):
        _read(process, report)
    bad = verdict(reports, LIMIT_S)
    if bad:
        raise PreflightError(f"preflight: {bad}")
    seconds = time.monotonic() - began
    return f"preflight: {', '.join(one.name for one in reports)}: GEMM and all-reduce are right ({seconds:.1f} s)"


def _wait(processes: Sequence[subprocess.Popen[str]], until: float) -> None:
    """Until all have ended; a little longer than the first that fails, for the others to say what they have found."""
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if any(process.poll() for process in processes):
            until = min(until, time.monotonic() + 2.0)
        time.sleep(0.02)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read(process: subprocess.Popen[str], report: RankReport) -> None:
    killed = process.poll() is None
    try:
        out, err = process.communicate(timeout=5.0)
    except subprocess.TimeoutExpired:  # in uninterruptible sleep: nothing is waited for
        report.has_ended("cannot be killed")
        return
    for line in out.splitlines():
        report.take(line)
    if not killed and process.returncode not in (0, -signal.SIGKILL):
        last = err.strip().splitlines()[-1:] or [""]
        report.has_ended(f"ended with code {process.returncode}" + (f" ({last[0]})" if last[0] else ""))
