"""``flashrecovery run --preflight``: does every device of this node compute and communicate what it should?

Before the job starts, one process for each local rank multiplies matrices of known result on its GPU (without GPUs: on
the CPU), then all of them reduce numbers of known sums. All numbers are small integers, which every floating-point unit
adds up exactly, so one wrong bit is an error. In a minute at most, from when all have started; with several nodes each
looks at itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flashrecovery.errors import PreflightError

LIMIT_S = 60.0
"""From when all have started."""
START_S = 180.0
"""For imports from a cold or distant disk, and for the driver to come up."""
STAGES = ("start", "gemm", "all-reduce")
"""In this order; each rank says when it has come through one."""
FOLDER_ENV, PARENT_ENV = "FLASHRECOVERY_PREFLIGHT_FOLDER", "FLASHRECOVERY_PREFLIGHT_PARENT"
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
        """Its process has ended before it was through."""
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
    """What is wrong, device by device; "": nothing. The rank that has found a wrong result is named; then the one that
    ended in the earliest stage; then, where none did, the one that stands still there: others mostly wait for it.

    Args:
        seconds: how long those had that have not ended.
    """
    wrong = [f"{one.name}: {one.wrong}" for one in reports if one.wrong]
    if wrong:
        return "; ".join(wrong)
    late = [one for one in reports if one.ended] or [one for one in reports if one.at]
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
    with tempfile.TemporaryDirectory(prefix="flashrecovery-preflight-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        own = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        own |= {FOLDER_ENV: temporary, PARENT_ENV: str(os.getpid())}
        processes = []
        for rank in range(ranks):
            env = {**environment, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # Files: a pipe holds 64 KiB, and NCCL_DEBUG=INFO says more.
            out, err = (stack.enter_context((folder / f"{name}.{rank}").open("wb")) for name in ("out", "err"))
            processes.append(subprocess.Popen([*program], stdout=out, stderr=err, start_new_session=True, env=env))
            stack.callback(_end, processes[-1])
        limit_s = _wait(processes, folder)
        over = [process.poll() for process in processes]
        for process in processes:
            _end(process)
        reports = [_report(folder, rank, code) for rank, code in enumerate(over)]
    bad = verdict(reports, limit_s)
    if bad:
        raise PreflightError(f"preflight: {bad}")
    seconds = time.monotonic() - began
    return f"preflight: {', '.join(one.name for one in reports)}: GEMM and all-reduce are right ({seconds:.1f} s)"


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> float:
    """Until all have ended, or for the limit, which is returned; a little longer than the first that fails, for the
    others to say what they have found."""
    limit_s = START_S
    until = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if limit_s == START_S and all(_report(folder, rank, None).at != "start" for rank in range(len(processes))):
            limit_s = LIMIT_S
            until = time.monotonic() + limit_s
        if any(process.poll() for process in processes):
            until = min(until, time.monotonic() + 2.0)
        time.sleep(0.05)
    return limit_s


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5.0)
    except (ProcessLookupError, subprocess.TimeoutExpired):  # in uninterruptible sleep: nothing is waited for
        pass


def _report(folder: Path, rank: int, code: int | None) -> RankReport:
    """What a rank has said so far. ``code``: with which it has ended by itself; None: it has not."""
    report = RankReport(rank)
    for line in (folder / f"out.{rank}").read_text(errors="replace").splitlines():
        report.take(line)
    if code:
        last = (folder / f"err.{rank}").read_text(errors="replace").strip().splitlines()[-1:]
        report.has_ended(f"ended with code {code}" + "".join(f" ({line})" for line in last))
    return report
