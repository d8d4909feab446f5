"""Many kills in a row in one job, at random phases and ranks.

No hang, no leak of file descriptors, threads or memory in those that survive, and at the end the same bits as without
any failure. ``FLASHRECOVERY_SOAK_KILLS`` and ``FLASHRECOVERY_SOAK_SEED`` change the number and the choice.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from click.testing import CliRunner

from flashrecovery.cli.inject import inject
from tests.jobs import Layout, RunningJob, check_same, run_job

SEED = int(os.environ.get("FLASHRECOVERY_SOAK_SEED", "1"))
STEPS_A_KILL = 14
FAULTS = ("sigkill", "sigkill", "sigkill", "raise", "sigstop", "exit", "segv")
CONFIG = {"timeouts": {"stopped_s": 0.3}, "max_failures_per_step": 10}


@dataclass(frozen=True)
class Usage:
    """Of one process at one moment."""

    fds: int
    threads: int
    rss_mib: float

    @staticmethod
    def of(pid: int) -> Usage:
        p = psutil.Process(pid)
        return Usage(p.num_fds(), p.num_threads(), p.memory_info().rss / 2**20)


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
    launcher = Usage.of(job.popen.pid)
    first: dict[int, tuple[int, Usage]] = {}
    survived: list[tuple[int, Usage, Usage]] = []
    times = []
    for number in range(kills):
        for pid in job.ranks().values():
            first.setdefault(pid, (number, Usage.of(pid)))
        # rank 3 lives long, so that a leak of a survivor shows
        rank = 3 if number == kills // 2 else rng.choice((0, 1, 2))
        fault, phase = rng.choice(FAULTS), rng.choice(phases)
        times.append(watched_kill(job, number, rank, fault, phase))
        print(
            f"kill {number + 1}/{kills}: {fault} rank {rank} at {phase}: {times[-1]:.2f} s, step {job.newest_step()}",
            flush=True,
        )
        time.sleep(0.1)
    for pid in job.ranks().values():
        born, usage = first.get(pid, (kills, Usage.of(pid)))
        survived.append((kills - born, usage, Usage.of(pid)))
    left = steps - 5 - job.newest_step()
    job.wait_for_step(steps - 5, 60 + 2 * left)  # at rest: no process is being started any more
    end = Usage.of(job.popen.pid)
    ended = job.wait(600)
    print(f"median {statistics.median(times):.2f} s, worst {max(times):.2f} s; launcher {launcher} -> {end}")
    for count, before, after in survived:
        print(f"survivor of {count} recoveries: {before} -> {after}")
    check_same(ended, reference)
    assert end.fds <= launcher.fds + 2 and end.threads <= launcher.threads + 2
    assert end.rss_mib <= launcher.rss_mib + 40
    for count, before, after in survived:
        if count >= 10:
            assert after.fds <= before.fds + 10, (count, before, after)
            assert after.threads <= before.threads + 6, (count, before, after)
            assert after.rss_mib <= before.rss_mib + 10 + 0.5 * count, (count, before, after)
