"""Run real jobs with real faults, and compare their end state bit for bit.

A job is ``flashrecovery run`` in a separate process, with one of the example scripts. :func:`check_clean` proves
that it left nothing behind; :func:`check_same` proves that a job with faults went exactly the way of the same launch
without (:mod:`tests.support.sameness`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrecovery.cli.status import look_at
from flashrecovery.events import RunFiles
from flashrecovery.observe.timeline import TimelineFile
from flashrecovery.terminal import unwrapped
from tests.support import shared_imports
from tests.support.sameness import Printed, ProcessLog, Run, differences

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "examples" / "gpt"
MARKER = "FLASHRECOVERY_TEST_JOB"
PACE = "FLASHRECOVERY_TEST_PACE"
PROGRAM = (sys.executable, "-m", "flashrecovery.cli.main")
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "GLOO_SOCKET_IFNAME": "lo"}
SMALL = ["--layers=2", "--heads=2", "--width=32", "--context=32", "--batch-size=2", "--log-all", "--digest"]

_DIGEST = re.compile(r"digest rank=(\d+) ([0-9a-f]{64})")
_LOG = re.compile(r"rank(\d+)\.gen(\d+)\.log")
_LOSS = re.compile(r"step=(\d+) .*loss_hex=(\S+)|iteration +(\d+)/.* lm loss: (\S+)")
"""Of the examples, and of Megatron-LM."""


@dataclass(frozen=True)
class Layout:
    """One parallel layout of the example: script, its extra flags, world size."""

    name: str
    script: str
    flags: tuple[str, ...] = ()
    nproc: int = 4


DDP = Layout("ddp", "train_ddp.py")
FSDP = Layout("fsdp", "train_fsdp.py")
HSDP = Layout("hsdp", "train_fsdp.py", ("--replicate", "2"))
LAYOUTS = (DDP, FSDP, HSDP)


@dataclass(kw_only=True)
class Job(Run):
    """How a job ended. ``output``: with each text in one line, however long (:mod:`flashrecovery.terminal`)."""

    output: str
    run_dir: Path
    seconds: float
    marker: str

    def explain(self) -> str:
        """All there is to know when a test fails."""
        logs = "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted((self.run_dir / "logs").glob("*")))
        events = "\n".join(json.dumps(e)[:3000] for e in self.events)
        return f"code {self.code} after {self.seconds:.1f} s\n{self.output[-3000:]}\n{events}\n{logs}"


class RunningJob:
    """A job under way."""

    _own_imports = False

    def __init__(
        self,
        run_dir: Path,
        layout: Layout,
        *,
        steps: int = 8,
        standby: int = 1,
        inject: Sequence[str] = (),
        options: Sequence[str] = (),
        flags: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        script: Path | None = None,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] | None = None,
        within: Sequence[str] = (),
        own_imports: bool = False,
    ) -> None:
        """``launcher``: a command that starts one task for each rank; None: `flashrecovery run` does. ``within``: a
        command that becomes the one behind it. ``own_imports``: the job's zygote is a new interpreter, which imports
        torch for this job alone (:mod:`tests.support.shared_imports`)."""
        self._own_imports = own_imports
        self.run_dir = run_dir
        self.marker = uuid.uuid4().hex
        adopts = [*(launcher or ()), *PROGRAM, "adopt"]
        command = [*PROGRAM, "run", "--nproc-per-node", str(layout.nproc)] if launcher is None else adopts
        command += ["--standby", str(standby), "--run-dir", str(run_dir)]
        if config is not None:
            path = run_dir.parent / f"{run_dir.name}.yaml"
            path.write_text(json.dumps(config))
            command += ["--config", str(path)]
        for spec in inject:
            command += ["--inject", spec]
        command += [*options, str(script or GPT / layout.script)]
        if script is None:
            command += [*SMALL, "--steps", str(steps), *layout.flags]
        command += flags
        self._start([*within, *command], env or {})

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        self._out = open(self.run_dir.parent / f"{self.run_dir.name}.out", "w+")  # noqa: SIM115 - closed in wait()
        env = {**os.environ, **ENVIRONMENT, MARKER: self.marker, PACE: str(self._pace), **env}
        runs = [*command[: len(PROGRAM) + 1]] == [*PROGRAM, "run"]
        if runs and not self._own_imports and shared_imports.possible(env):
            forked = shared_imports.images.start(command[len(PROGRAM) :], env, self._out.fileno())
            if forked is not None:
                self.popen: subprocess.Popen[Any] = forked
                return
        self.popen = subprocess.Popen(
            command,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )

    @property
    def _pace(self) -> Path:
        return self.run_dir.parent / f"{self.run_dir.name}.pace"

    def hold(self, step: int | None) -> None:
        """Neither this step nor a later one ends (of scripts with ``tests/scripts/pacing.py``); None: all do. To be
        called before the job comes to it."""
        if step is None:
            self._pace.unlink(missing_ok=True)
        else:
            new = self._pace.with_suffix(".new")
            new.write_text(str(step))
            new.replace(self._pace)

    def wait_for_joining_processes(self, timeout_s: float = 120) -> None:
        """Until all that are to come in are there, which the ranks are told at once."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.popen.poll() is None:
            course = look_at(RunFiles(self.run_dir)).course
            if course is not None and course.coming and all(one.here for one in course.coming):
                time.sleep(0.5)  # a word to the ranks may be on its way
                return
            time.sleep(0.05)
        raise AssertionError(f"no one has come\n{self.wait(1).explain()}")

    def wait_until_committed(self, version: int, timeout_s: float = 60) -> None:
        """Until the controller knows that all ranks have committed it; also of a script that prints nothing."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.popen.poll() is None:
            ranks = look_at(RunFiles(self.run_dir)).ranks
            if ranks and all(rank.committed is not None and rank.committed >= version for rank in ranks):
                return
            time.sleep(0.05)
        raise AssertionError(f"version {version} has not come\n{self.wait(1).explain()}")

    def logs(self) -> list[Path]:
        """Those of all processes that have filled ranks."""
        return [*(self.run_dir / "logs").glob("rank*.log")]

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)

    def wait_for(self, event: str, timeout_s: float = 60, count: int = 1, **having: Any) -> dict[str, Any]:
        """The ``count``-th event of this name, and with these fields, as soon as it is there."""
        wanted, deadline = {"event": event, **having}.items(), time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [e for e in self.events() if e.items() >= wanted]
            if len(found) >= count:
                return found[count - 1]
            if self.popen.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no event {event!r} {having or ''}\n{self.wait(1).explain()}")

    def ranks(self) -> dict[int, int]:
        """Rank -> pid, from the rank table."""
        table = json.loads((self.run_dir / "ranktable.json").read_text())
        return {r["rank"]: r["pid"] for r in table["ranks"]}

    def newest_step(self) -> int:
        """The newest step that rank 0's logs show; -1 before the first."""
        newest = -1
        for log in (log for log in self.logs() if log.name.startswith("rank0.")):
            for line in log.read_text().splitlines()[-3:]:
                if "step=" in line:
                    newest = max(newest, int(line.split("step=")[1].split()[0]))
        return newest

    def wait_for_step(self, step: int, timeout_s: float = 60) -> None:
        """Until rank 0 has finished ``step``."""
        deadline = time.monotonic() + timeout_s
        while self.newest_step() < step:
            if time.monotonic() > deadline or self.popen.poll() is not None:
                raise AssertionError(f"step {step} has not come\n{self.wait(1).explain()}")
            time.sleep(0.02)

    def kill(self, *ranks: int) -> None:
        """SIGKILL to all of them at once."""
        table = self.ranks()
        for rank in ranks:
            os.kill(table[rank], signal.SIGKILL)

    def wait(self, timeout_s: float = 120) -> Job:
        """The end of the job; past the deadline every process dumps its stacks and dies, and the job counts as hung."""
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in marked_processes(self.marker):
                _signal(pid, signal.SIGABRT)
            time.sleep(1.0)
            for pid in marked_processes(self.marker):
                _signal(pid, signal.SIGKILL)
            self.popen.kill()
            self.popen.wait()
            code = -1000
        self._out.seek(0)
        job = Job(
            code=code,
            output=unwrapped(self._out.read()),
            run_dir=self.run_dir,
            seconds=time.monotonic() - self._began,
            marker=self.marker,
            events=self.events(),
        )
        self._out.close()
        read_digests(job, self.logs())
        return job


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events so far."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def read_digests(job: Job, logs: Iterable[Path]) -> None:
    """Losses and digests out of the ranks' logs."""
    for log in sorted(logs, key=lambda p: (int(_LOG.search(p.name)[2]), p.stat().st_mtime)):  # type: ignore[index]
        name, text = _LOG.search(log.name), log.read_text()
        assert name is not None
        lines = tuple((int(m[1] or m[3]), m[2] or m[4]) for m in _LOSS.finditer(text))
        job.logs.append(ProcessLog(int(name[1]), int(name[2]), lines))
        job.digests.update({int(m[1]): m[2] for m in _DIGEST.finditer(text)})


def tokens_per_step(job: Job) -> int:
    """As the job's course over time has it; 0 if no one has said."""
    seen = TimelineFile.model_validate_json((job.run_dir / "timeline.json").read_bytes()).whole
    return max((tokens // steps for tokens, steps in zip(seen.tokens, seen.steps, strict=True) if steps), default=0)


def run_job(run_dir: Path, layout: Layout, *, timeout_s: float = 120, **kwargs: Any) -> Job:
    """Start a job and wait for its end."""
    return RunningJob(run_dir, layout, **kwargs).wait(timeout_s)


class References:
    """The same launches without a fault, each layout's made once. ``folder``: gives a new directory; ``launch``: runs a
    layout in the given run directory."""

    def __init__(self, folder: Callable[[], Path], launch: Callable[[Path, Layout], Job]) -> None:
        self._folder = folder
        self._launch = launch
        self._jobs: dict[Layout, Job] = {}

    def __call__(self, layout: Layout) -> Job:
        if layout not in self._jobs:
            self._jobs[layout] = self._launch(self._folder() / layout.name, layout)
            check_clean(self._jobs[layout])
        return self._jobs[layout]


def check_clean(job: Job) -> None:
    """Nothing of the job is left."""
    left = marked_processes(job.marker)
    if left:
        time.sleep(0.2)
        left = marked_processes(job.marker)
    assert not left, f"processes left behind: {[_cmdline(p) for p in left]}\n{job.explain()}"


def check_same(
    job: Job, reference: Job, *, printed: Printed = Printed.STEPS, start: int = 0, launches: int = 1
) -> None:
    """The job went the way of the reference: parameters, optimizer state and random streams of every rank, the loss of
    every step of every rank, and where each recovery resumed. See :func:`tests.support.sameness.differences`."""
    found = differences(job, reference, printed, start, launches)
    assert not found, "\n".join([*found, job.explain(), "--- the reference", reference.explain()])
    check_clean(job)


def check_fired(job: Job, count: int = 1) -> None:
    """A fault that did not fire proves nothing."""
    fired = job.notices("fault_fired")
    assert len(fired) >= count, f"{len(fired)} of {count} faults fired\n{job.explain()}"


def check_recovered(job: Job, victims: Collection[int] = ()) -> None:
    """The finished recoveries replaced (at least) these ranks. Failures in quick succession may share a recovery."""
    replaced = {rank for e in job.of("recovery_finished") for rank in e["victims"]}
    assert replaced and replaced >= set(victims), f"replaced: {replaced}, not {set(victims)}\n{job.explain()}"
    touches = [
        notice["text"] for notice in job.notices("pre_step_copy_enabled") if "before its optimizer" in notice["text"]
    ]
    assert not touches, f"the framework is taken for a script that changes its state by hand: {touches}"


def marked_processes(marker: str) -> list[int]:
    """Pids of living processes that carry the job's marker in their environment."""
    found = []
    needle = f"{MARKER}={marker}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if needle in environ:
                found.append(int(entry))
    return found


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "gone"


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
