"""Launching jobs, reading what their workers wrote, and printing tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
EXAMPLE = REPOSITORY / "examples" / "gpt"
JOB_ENV = "FLASHRECOVERY_BENCH_JOB"
"""Every process of a launch has this variable, and the job's directory in it."""


def environment(**extra: str) -> dict[str, str]:
    """What every process of every system gets: one thread, loopback, our modules on the path."""
    env = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    paths = [str(BENCHMARKS), str(EXAMPLE), env.get("PYTHONPATH", "")]
    env.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(filter(None, paths)))
    env.update(extra)
    return env


def free_ports(count: int = 1) -> list[int]:
    """Of loopback, free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(s.getsockname()[1]) for s in sockets]


@dataclass
class Launch:
    """The processes of one job, each in a separate session so that its children go with it."""

    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start one more process; its output goes to the launch's log."""
        with self.log.open("ab") as out:
            process = subprocess.Popen(
                list(command),
                env=environment(**env),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def stop(self, grace_s: float = 2.0) -> None:
        """SIGTERM to each process, then SIGKILL to it and to all its descendants, whatever session they are in."""
        family: list[psutil.Process] = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                head = psutil.Process(process.pid)
                family += [head, *head.children(recursive=True)]
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        psutil.wait_procs(family, timeout=grace_s)
        for member in [*family, *self._orphans()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=grace_s)
        for process in self.processes:
            process.wait(grace_s)

    def _orphans(self) -> list[psutil.Process]:
        """Processes of this job whose parent has died, such as the writers of a rank that was killed."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if str(self.log.parent) in process.environ().get(JOB_ENV, ""):
                    found.append(process)
        return found

    def tail(self, lines: int = 12) -> str:
        """The end of the log, for a report of what went wrong."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def job_directory() -> Iterator[Path]:
    """A directory for one launch, removed at the end unless ``KEEP`` is set in the environment."""
    path = Path(tempfile.mkdtemp(prefix="fr-bench-"))
    try:
        yield path
    finally:
        if os.environ.get("KEEP"):
            print(f"  kept: {path}")
        else:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Record:
    """One line that a worker wrote, at time ``t``, with the CPU time so far in seconds: ``own_s`` of the thread that
    trains, ``all_s`` of the process."""

    pid: int
    rank: int
    step: int
    t: float
    own_s: float = 0.0
    all_s: float = 0.0


def read_records(directory: Path) -> list[Record]:
    """All steps that all workers finished, by time. A line still being written is left out."""
    records = []
    for path in directory.glob("steps.*.jsonl"):
        pid = int(path.name.split(".")[1])
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(Record(pid=pid, **json.loads(line)))
    return sorted(records, key=lambda r: r.t)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small file that another process has just made; None while it is still empty."""
    text = path.read_text()
    if not text.endswith("}"):
        return None
    value: dict[str, Any] = json.loads(text)
    return value


def python(script: Path | str, *arguments: str) -> list[str]:
    """A command that runs ``script`` with this interpreter."""
    return [sys.executable, str(script), *arguments]


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """``median (min .. max, n)``."""
    if not values:
        return "-"
    scaled = [v * scale for v in values]
    return (
        f"{statistics.median(scaled):.{digits}f} "
        f"({min(scaled):.{digits}f} .. {max(scaled):.{digits}f}, n={len(scaled)})"
    )


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    cells = [[str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n## {title}\n")
    for number, row in enumerate(cells):
        print("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    print(flush=True)


def begin() -> None:
    """Print the machine and how busy it is: numbers without it say little. From here on SIGTERM cleans up, too."""
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}, Python {sys.version.split()[0]}")


def numbers(doc: str | None, what: str, usual: str, *, quick: str) -> list[int]:
    """The command line of a benchmark over several sizes, ``usual`` by default: ``SIZE,SIZE,...``, or ``--quick``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(what, nargs="?", default=usual, help="with commas between")
    parser.add_argument("--quick", action="store_true", help=f"only {quick}")
    args = parser.parse_args()
    return [int(size) for size in (quick if args.quick else getattr(args, what)).split(",")]
