"""A launcher of one task for each rank, like mpirun on one node, for what one cannot ask of mpirun; and mpirun itself::

    python -m tests.support.tasks -n 4 [--keep-going] [--start R]... [--cpus R=C,C] [--before R=COMMAND] PROGRAM ...

Each task gets the variables of Open MPI. If one ends badly the others get SIGTERM, and SIGKILL half a second later, as
mpirun does it; with ``--keep-going`` they go on, as srun does it by default. SIGTERM and SIGUSR1 are passed on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid

MPIRUN_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_GRACE_S = 0.5


def is_open_mpi() -> bool:
    """Whether Open MPI's mpirun is installed here."""
    if shutil.which("mpirun") is None:
        return False
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in done.stdout


def mpirun(number: int) -> list[str]:
    """The real one, with :data:`MPIRUN_ENV`."""
    return ["mpirun", "--oversubscribe", "-n", str(number)]


def stand_in(number: int, *options: str) -> list[str]:
    """This module's."""
    return [sys.executable, "-m", "tests.support.tasks", "-n", str(number), *options]


def main() -> int:
    """Start the tasks, and wait for all of them. Returns the first bad code."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("-n", type=int, required=True)
    p.add_argument("--keep-going", action="store_true")
    p.add_argument("--start", type=int, action="append", help="only these ranks; the others never come")
    p.add_argument("--cpus", action="append", default=[], metavar="R=C,C")
    p.add_argument("--before", action="append", default=[], metavar="R=COMMAND", help="that runs this rank's program")
    p.add_argument("--set", action="append", default=[], metavar="R=NAME=VALUE")
    p.add_argument("program", nargs=argparse.REMAINDER)
    args = p.parse_args()
    cpus = {int(rank): {int(c) for c in text.split(",")} for rank, text in (o.split("=", 1) for o in args.cpus)}
    before = {int(rank): shlex.split(text) for rank, text in (o.split("=", 1) for o in args.before)}
    job, all_cpus = uuid.uuid4().hex, os.sched_getaffinity(0)
    tasks: dict[int, subprocess.Popen[bytes]] = {}

    def pass_on(number: int, _: object) -> None:
        for task in tasks.values():
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    for rank in range(args.n) if args.start is None else args.start:
        own = dict(text.split("=", 2)[1:] for text in args.set if text.startswith(f"{rank}="))
        env = {
            **os.environ,
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(args.n),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(args.n),
            "PMIX_NAMESPACE": job,
            **own,
        }
        os.sched_setaffinity(0, cpus.get(rank, all_cpus))
        tasks[rank] = subprocess.Popen([*before.get(rank, []), *args.program], env=env)
        os.sched_setaffinity(0, all_cpus)
        print(f"task {rank} has pid {tasks[rank].pid}", flush=True)
    return _wait(tasks, keep_going=args.keep_going)


def _wait(tasks: dict[int, subprocess.Popen[bytes]], *, keep_going: bool) -> int:
    deadline = None
    while None in [task.poll() for task in tasks.values()]:
        time.sleep(0.02)
        if deadline is None and not keep_going and any(task.returncode for task in tasks.values()):
            deadline = time.monotonic() + _GRACE_S
            for task in tasks.values():
                task.terminate()
        if deadline is not None and time.monotonic() > deadline:
            for task in tasks.values():
                task.kill()
    for rank, task in tasks.items():
        print(f"\ntask {rank} has ended with {task.returncode}", flush=True)  # after what ends without a newline
    return abs(next((task.returncode for task in tasks.values() if task.returncode), 0))


if __name__ == "__main__":
    sys.exit(main())
