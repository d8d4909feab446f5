"""Many kills in a row in one job, at random phases and ranks.

No hang, at the end the same bits as without any failure, and nothing that grows with the number of recoveries: not in
the processes that survive, the launcher and the TCPStore included, not in /dev/shm, and not the keys in the store.
``FLASHRECOVERY_SOAK_KILLS`` and ``FLASHRECOVERY_SOAK_SEED`` change the number and the choice.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from click.testing import CliRunner
from torch.distributed import TCPStore

from flashrecovery.cli.inject import inject
from tests.support.jobs import Layout, RunningJob, check_same, run_job
from tests.support.leaks import LEAST, OTHERS_SETTLING, Growth, Usage, files_of

SEED = int(os.environ.get("FLASHRECOVERY_SOAK_SEED", "1"))
STEPS_A_KILL = 14
WHOLE_S = 90.0
"""How long a job may take to recover from several deaths."""
FAULTS = ("sigkill", "sigkill", "sigkill", "raise", "sigstop", "exit", "segv")
CONFIG = {"timeouts": {"stopped_s": 0.3}, "max_failures_per_step": 10}


FORGOTTEN_S = 75.0
"""The store looks every 30 s for generations that are over, and forgets those that were over the time before."""
_GENERATION = re.compile(r"fr/gen(\d+)/")


class Overdue:
    """Counts the keys in the store that no one will ask for any more and that should be forgotten by now, and those of
    no generation."""

    def __init__(self) -> None:
        self._newest: list[tuple[float, int]] = []  # when which generation was the newest

    def count(self, keys: Sequence[str], now: float) -> int:
        found = [_GENERATION.match(key) for key in keys]
        generations = [int(m[1]) for m in found if m is not None]
        self._newest.append((now, max(generations, default=0)))
        over = max((newest for at, newest in self._newest if now - at >= FORGOTTEN_S), default=0)
        return found.count(None) + sum(generation < over for generation in generations)


class Watch:
    """Looks at all that belongs to a job after each of its recoveries."""

    def __init__(self, job: RunningJob) -> None:
        self.growth = Growth()
        self._job = job
        self._pids: set[int] = set()
        servers = [p for p in psutil.Process(job.popen.pid).children() if "store_server" in " ".join(p.cmdline())]
        (self._server,) = servers
        port = int(self._server.cmdline()[-2])
        self._overdue = Overdue()
        self._store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def look(self, recovery: int) -> None:
        """After the recovery of this number, when no rank is being replaced."""
        ranks = self._job.ranks()
        self._pids.update(ranks.values())
        pids = {f"rank {rank}, pid {pid}": pid for rank, pid in ranks.items()}
        for subject, pid in {**pids, "launcher": self._job.popen.pid, "store": self._server.pid}.items():
            self.growth.look(subject, recovery, Usage.at_rest(pid))
        keys = self._overdue.count(self._store.list_keys(), time.monotonic())
        job = {"files": float(files_of(self._pids)), "keys": float(keys)}
        self.growth.look("job", recovery, job)


def watched_kill(job: RunningJob, number: int, rank: int, fault: str, phase: str) -> float:
    """Arm one fault a few steps ahead and wait until the job has recovered; returns total_s."""
    args = ["--run-dir", str(job.run_dir), "--rank", str(rank), "--fault", fault, "--at", phase]
    armed = CliRunner().invoke(inject, args, catch_exceptions=False)
    assert armed.exit_code == 0, armed.output
    job.wait_for("recovery_finished", 90, number + 1)
    fired = [e for e in job.events() if e["event"] == "notice" and e["kind"] == "fault_fired"]
    assert len(fired) == number + 1, (phase, fired[-1:])
    finished = [e for e in job.events() if e["event"] == "recovery_finished"]
    return float(finished[number]["total_s"])


def whole_again(job: RunningJob, killed: float) -> float:
    """Seconds from ``killed``, the last kill of several, until every rank has committed a step and nothing is under
    way any more."""
    deadline = time.monotonic() + WHOLE_S
    while time.monotonic() < deadline and job.popen.poll() is None:
        events = job.events()
        begun = [e["monotonic"] for e in events if e["event"] == "recovery_started" and e["monotonic"] > killed]
        ended = [e["monotonic"] for e in events if e["event"] == "recovery_finished"]
        if begun and ended and ended[-1] > begun[-1] and time.monotonic() > ended[-1] + 0.3:
            return float(ended[-1]) - killed
        time.sleep(0.02)
    raise AssertionError(f"not whole {WHOLE_S:g} s after the last kill\n{job.wait(1).explain()}")


def kill_now(job: RunningJob, rank: int) -> float:
    """Kill the process that fills the rank now, as soon as the rank table has it. Returns when."""
    deadline = time.monotonic() + WHOLE_S
    while True:
        killed = time.monotonic()
        try:
            job.kill(rank)
        except ProcessLookupError:  # dead already, and its replacement not in the table yet
            assert time.monotonic() < deadline, job.wait(1).explain()
            time.sleep(0.01)
        else:
            return killed


def kills(default: int) -> int:
    """How many a job is to survive, with the environment's number in place of 100."""
    return max(default * int(os.environ.get("FLASHRECOVERY_SOAK_KILLS", "100")) // 100, 1)


def soak(layout: Layout, kills: int, phases: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run the job twice in ``folder``, without a fault and with ``kills`` of them, in ``phases``, and compare."""
    rng = random.Random(SEED)
    steps = kills * STEPS_A_KILL + 20
    flags = ["--step-time", "40"]
    limit_s = 300 + steps  # a step may take a second: machines without a GPU are slow, and often busy
    reference = run_job(folder / "reference", layout, steps=steps, standby=0, flags=flags, timeout_s=limit_s, env=env)
    assert reference.code == 0, reference.explain()
    job = RunningJob(folder / "run", layout, steps=steps, standby=1, config=CONFIG, flags=flags, env=env)
    job.wait_for("standby_ready", 300)  # a framework is imported five times before
    watch = Watch(job)
    times = []
    for number in range(kills):
        # rank 3's second process lives long, so that a leak of a survivor shows
        rank = 3 if number == 0 else rng.choice((0, 1, 2))
        fault, phase = rng.choice(FAULTS), rng.choice(phases)
        times.append(watched_kill(job, number, rank, fault, phase))
        print(
            f"kill {number + 1}/{kills}: {fault} rank {rank} at {phase}: {times[-1]:.2f} s, step {job.newest_step()}",
            flush=True,
        )
        time.sleep(0.1)
        watch.look(number)
    left = steps - 5 - job.newest_step()
    job.wait_for_step(steps - 5, 60 + 2 * left)  # not in the middle of a fault
    ended = job.wait(600)
    print(f"median {statistics.median(times):.2f} s, worst {max(times):.2f} s\n{watch.growth.table()}")
    check_same(ended, reference)
    leaks = watch.growth.leaks()
    assert not leaks, "\n".join(leaks)
    if kills <= LEAST + OTHERS_SETTLING:
        print(f"too few kills to judge what grows: {LEAST + OTHERS_SETTLING + 1} is the least")
    else:
        assert {"launcher", "store", "job"} < set(watch.growth.judged()), "no rank was judged"
