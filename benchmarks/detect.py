"""How soon the death of a big worker is seen: FlashRecovery's ``failure_detected`` event against a bare pidfd.

The victim holds 2 GiB of touched memory, which the kernel frees before it tells anyone that the process is
gone. Both witnesses watch the same kill; both times count from the victim's last instruction, by the
monotonic clock.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import sys
import threading
import time
from pathlib import Path

import harness
from peers import ours
from workload import Job

GOAL_MS = 20.0


class PidfdWitness(threading.Thread):
    """Waits for a process with poll(2) on its pidfd, as a launcher would. ``seen`` is the monotonic time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._fd = os.pidfd_open(pid)
        self.seen: float | None = None

    def run(self) -> None:
        """Wait."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll()
        self.seen = time.monotonic()
        os.close(self._fd)


def trial(job: Job, limit_s: float) -> tuple[float, float]:
    """Seconds from the kill to our event, and to the pidfd. Raises TimeoutError, RuntimeError."""
    directory = Path(job.directory)
    launch = harness.Launch(directory / "output.log")
    ours.COLD.start(job, launch)
    deadline = time.monotonic() + limit_s
    witness: PidfdWitness | None = None
    try:
        while time.monotonic() < deadline:
            if witness is None:
                pids = [r.pid for r in harness.read_records(directory) if r.rank == job.victim]
                if pids:
                    witness = PidfdWitness(pids[0])
                    witness.start()
                    job.arm_file.touch()
            detected = ours.events(job, "failure_detected")
            event = detected[0] if detected else None
            # Read in this order: a kill that was detected has been written down before.
            killed = harness.read_json(job.kill_file) if job.kill_file.exists() else None
            if event is not None and (killed is None or event["monotonic"] < killed["t"]):
                raise RuntimeError(f"a failure before the kill: {event}")
            if killed is not None and event is not None and witness is not None and witness.seen is not None:
                return event["monotonic"] - killed["t"], witness.seen - killed["t"]
            time.sleep(0.02)
        raise TimeoutError(f"nothing detected within {limit_s} s\n{launch.tail()}")
    finally:
        launch.stop()


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="3 kills instead of 10")
    flags.add_argument("--gib", type=float, default=2.0, help="resident memory of the victim")
    args = flags.parse_args()
    trials = 3 if args.quick else 10
    harness.begin()
    event_s, pidfd_s = [], []
    for i in range(trials):
        with harness.job_directory() as directory:
            job = Job(directory=str(directory), world=2, ballast_bytes=int(args.gib * 2**30))
            event, pidfd = trial(job, limit_s=90)
        event_s.append(event)
        pidfd_s.append(pidfd)
        print(f"  {i + 1}/{trials}: event {event * 1e3:.1f} ms, pidfd {pidfd * 1e3:.1f} ms", flush=True)
    median = statistics.median(event_s) * 1e3
    rows = [
        ("FlashRecovery: failure_detected", harness.spread(event_s, 1e3, 1), "1"),
        ("pidfd", harness.spread(pidfd_s, 1e3, 1), f"{statistics.median(pidfd_s) * 1e3 / median:.1f}"),
    ]
    harness.table(f"SIGKILL of a worker with {args.gib:g} GiB to its detection", ("witness", "ms", "ratio"), rows)
    met = median <= GOAL_MS
    print(f"goal: median <= {GOAL_MS:.0f} ms: {median:.1f} ms, {'met' if met else 'NOT MET'}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
