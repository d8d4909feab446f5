"""Jobs on this host whose controller is a separate process, so that it can be lost alone, and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.elastic import STEPS, Course, command, inject
from tests.support.jobs import ENVIRONMENT, Job, Layout, RunningJob, read_events

TOKEN = {"FLASHRECOVERY_TOKEN": "the-token-of-this-test-job"}


@contextmanager
def controller(run_dir: Path, address: str, nproc: int = 4) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-alone one of a job with that many ranks on its node."""
    command = [sys.executable, "-m", "flashrecovery.cli.main", "controller", "--nproc-per-node", str(nproc)]
    command += ["--run-dir", str(run_dir), "--bind", address, "--config", str(run_dir.parent / "run.yaml")]
    with open(run_dir.parent / "controller.out", "ab") as out:
        env = {**os.environ, **ENVIRONMENT, **TOKEN}
        popen = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


class WithController:
    """A job on this host, and its controller, which is a separate process."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        config: dict[str, Any],
        *flags: str,
        nproc: int = 4,
        env: Mapping[str, str] | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        folder.mkdir(exist_ok=True)
        self._nproc = nproc
        self._known = folder / "controller"
        self.job = RunningJob(
            folder / "run",
            Layout("elastic", "", nproc=nproc),
            standby=0,
            config=config,
            script=script,
            flags=["--steps", str(STEPS), "--step-time", "100", *flags],
            options=["--no-embed-controller", "--controller", self._address],
            env={**TOKEN, **(env or {})},
        )
        self.begin()
        # commands and faults go to the controller, whose run directory is its own
        self._tools = RunningJob.__new__(RunningJob)
        self._tools.run_dir, self._tools.popen = self._known, self.job.popen

    def begin(self) -> None:
        self._running = controller(self._known, self._address, self._nproc)
        self._process = self._running.__enter__()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        self._running.__exit__(None, None, None)

    def wait_for(self, event: str, count: int = 1, **having: Any) -> dict[str, Any]:
        return self._tools.wait_for(event, 120, count, **having)

    def events(self) -> list[dict[str, Any]]:
        return self._tools.events()

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while max((s for s, _, _ in self.course.losses), default=0) < step:
            assert time.monotonic() < deadline, self.job.wait().explain()
            time.sleep(0.02)

    @property
    def course(self) -> Course:
        return Course.of(self.job)  # type: ignore[arg-type]  # it looks at the logs only

    def command(self, replicas: int, step: int | None = None) -> str:
        return command(self._tools, replicas, step)

    def inject(self, rank: int, at: str, step: int | None = None, fault: str = "sigkill") -> None:
        inject(self._tools, rank=rank, at=at, step=step, fault=fault)

    def pid(self, rank: int) -> int:
        table = json.loads((self._known / "ranktable.json").read_text())
        return int(next(r["pid"] for r in table["ranks"] if r["rank"] == rank))

    def result(self) -> Job:
        ended = self.job.wait(120)
        self.end()
        ended.events = read_events(self._known)
        return ended
