"""The controller hears of a process that has failed, or has ended well.

The only judgement here is what the end was: an exception by what the process has said last, else its exit status.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from flashrecovery.agent.monitoring.heartbeat import counted_pairs
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import LAST_WORDS_S
from flashrecovery.agent.processes.procfs import Exit, exit_of
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.kinds import FailureKind
from flashrecovery.plan.words import raised_text
from flashrecovery.proto import flashrecovery_pb2 as pb


class FailureReports:
    """The failure reports of one node, sent with ``send``. ``fence_s``: seconds that a process has to end normally."""

    def __init__(self, send: Callable[[pb.AgentMessage], None], tasks: Tasks, fence_s: float) -> None:
        self._send = send
        self._tasks = tasks
        self._fence_s = fence_s

    def ended(self, process: WorkerProcess, late: float) -> None:
        """First sign, ``late`` seconds after it, that a worker is dead or dying."""
        found = exit_of(process.pid)
        if found is not None and found.code == 0:
            self._tasks.start(self._report_exit(process))
        else:
            self._tasks.start(self._report_death(process, found, late))

    def report(
        self, process: WorkerProcess, kind: FailureKind, evidence: str, late: float, signal_number: int = 0
    ) -> None:
        """The process has failed, ``late`` seconds ago."""
        now = time.monotonic()
        process.has_failed()
        message = pb.Failure(
            rank=process.place,
            pid=process.pid,
            kind=kind,
            evidence=evidence,
            detect_s=late,
            failed_at=now - late,
            last_words=process.last_words,
            signal=signal_number,
            step=max(process.page.committed, 0),
            counted=counted_pairs(process.page.iterations()),
        )
        self._send(pb.AgentMessage(failure=message))

    async def _report_exit(self, process: WorkerProcess) -> None:
        await process.end(self._fence_s)
        message = pb.Exited(rank=process.place, pid=process.pid)
        self._send(pb.AgentMessage(exited=message))

    async def _report_death(self, process: WorkerProcess, found: Exit | None, late: float) -> None:
        if found is None:
            code = await process.end(1.0)
            found = Exit.from_returncode(code if code is not None else -signal.SIGKILL)
        if found.signal is None:
            await process.hear_out(LAST_WORDS_S, until_last_words=True)
        if process.dead:
            return  # its rank is being filled again, and its page is freed
        if process.last_words is not None:
            kind, evidence = FailureKind.EXCEPTION, exception_text(process.last_words, process.log)
        else:
            kind = FailureKind.KILLED if found.signal is not None else FailureKind.EXIT
            evidence = str(found)
        self.report(process, kind, evidence, late, found.signal or 0)


def exception_text(words: pb.LastWords, log: str) -> str:
    """What a process has raised; in the first line also where, and where all of it stands."""
    first, end, rest = raised_text(words.exception, words.message).partition("\n")
    where = ", ".join(text for text in (words.place and f"at {words.place}", log and f"log: {log}") if text)
    return f"{first} ({where}){end}{rest}" if where else f"{first}{end}{rest}"
