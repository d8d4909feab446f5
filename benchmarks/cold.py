"""Failures that no standby is ready for: in the job's first second, right after a recovery, several at once.

Each launch of an example (4 ranks, no standby) loses one rank 1 s after its first step, another one 0.2 s after that
recovery, and then three ranks within a second. Measured from outside: SIGKILL to the event that every rank has
committed a step again. Also how long a launch takes to its first step. The peers, in the same run, turn by turn: the
same launcher with a new interpreter for each process (``--start-method spawn``), and ``torchrun`` (launch only).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

SMALL = ("--layers=2", "--heads=2", "--width=32", "--context=32", "--batch-size=2", "--steps=100000")
LIMIT_S = 180.0
STORM_S = (0.0, 0.3, 0.6)
"""When the three ranks die."""


@dataclass(frozen=True)
class Layout:
    """One example. ``goal_s``: the goal for the median of each kind of failure. ``ours``: options of our launcher."""

    name: str
    script: str
    flags: tuple[str, ...]
    goal_s: float
    ours: tuple[str, ...] = ()


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ddp", "train_ddp.py", (), 1.0),
        Layout("zero2", "train_deepspeed.py", ("--zero=2",), 1.5),
        # Three of four ranks are more than its replicas survive: snapshots hold what they held.
        Layout("tp2dp2", "pretrain_gpt.py", ("--tensor-model-parallel-size=2",), 1.5, ("--snapshots", "always")),
    )
}
Times = dict[tuple[str, str, str], list[float]]
"""Seconds, by layout, kind of failure and way to start."""


class Job:
    """One launch under ``flashrecovery run``."""

    def __init__(self, layout: Layout, method: str, folder: Path) -> None:
        self.began = time.monotonic()
        self._run_dir = folder / "run"
        self.launch = harness.Launch(folder / "output.log")
        self.launch.start(
            [
                *(sys.executable, "-m", "flashrecovery.cli.main", "run", "--start-method", method),
                *("--nproc-per-node", "4", "--run-dir", str(self._run_dir), "--log", "none", *layout.ours),
                *(str(harness.EXAMPLE / layout.script), *SMALL, *layout.flags),
            ],
            FR_MEGATRON_CPU="1",
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        """All of this name so far."""
        path = self._run_dir / "events.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th event of this name. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.launch.processes[0].poll() is None:
            found = self.events(name)
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        raise TimeoutError(f"{name} {count} has not come\n{self.launch.tail()}")

    def kill(self, rank: int) -> float:
        """When it was."""
        table = json.loads((self._run_dir / "ranktable.json").read_text())
        pid = next(entry["pid"] for entry in table["ranks"] if entry["rank"] == rank)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed

    def recovered(self, before: int, killed: float) -> float:
        """Seconds from the kill until nothing has been under way for a second, but the first ``before`` recoveries."""
        seen = before
        while True:
            last = self.wait_for("recovery_finished", seen + 1)
            seen = len(self.events("recovery_finished"))
            time.sleep(1.0)
            begun = [e for e in self.events("recovery_started") if e["monotonic"] > killed]
            if len(self.events("recovery_finished")) == seen and begun:
                last = self.events("recovery_finished")[-1]
                if last["monotonic"] > begun[-1]["monotonic"]:
                    return float(last["monotonic"]) - killed


def losses(layout: Layout, method: str, times: Times) -> None:
    """One launch, and what it loses."""
    with harness.job_directory() as folder:
        job = Job(layout, method, folder)
        try:
            started = job.wait_for("job_started")
            times[layout.name, "launch to first step", method].append(float(started["monotonic"]) - job.began)
            time.sleep(max(0.0, float(started["monotonic"]) + 1.0 - time.monotonic()))
            killed = job.kill(1)
            first = job.wait_for("recovery_finished")
            times[layout.name, "1 s after the first step", method].append(float(first["monotonic"]) - killed)
            time.sleep(max(0.0, float(first["monotonic"]) + 0.2 - time.monotonic()))
            killed = job.kill(2)
            second = job.wait_for("recovery_finished", 2)
            times[layout.name, "0.2 s after a recovery", method].append(float(second["monotonic"]) - killed)
            time.sleep(2.0)
            before, began = len(job.events("recovery_finished")), time.monotonic()
            for rank, at in zip((1, 2, 3), STORM_S, strict=True):
                time.sleep(max(0.0, began + at - time.monotonic()))
                killed = job.kill(rank)
            times[layout.name, "three ranks within a second", method].append(job.recovered(before, killed))
        finally:
            job.launch.stop()


def torchrun(layout: Layout, times: Times) -> None:
    """One launch, until rank 0 has printed its first step."""
    with harness.job_directory() as folder:
        launch = harness.Launch(folder / "output.log")
        began = time.monotonic()
        launch.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
                *(str(harness.EXAMPLE / layout.script), *SMALL, *layout.flags),
            ],
            FR_MEGATRON_CPU="1",
        )
        try:
            while "step=0 " not in (launch.log.read_text() if launch.log.exists() else ""):
                if time.monotonic() > began + LIMIT_S or launch.processes[0].poll() is not None:
                    raise TimeoutError(launch.tail())
                time.sleep(0.01)
            times[layout.name, "launch to first step", "torchrun"].append(time.monotonic() - began)
        finally:
            launch.stop()


def main() -> None:
    """Measure, print, judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="2 launches each instead of 20 (peers: a quarter)")
    flags.add_argument("--launches", type=int, help="launches of ours")
    flags.add_argument("--layouts", default=",".join(LAYOUTS))
    args = flags.parse_args()
    launches = args.launches or (2 if args.quick else 20)
    harness.begin()
    times: Times = defaultdict(list)
    missed = []
    for name in args.layouts.split(","):
        layout = LAYOUTS[name]
        for number in range(launches):
            losses(layout, "zygote", times)
            if number % 4 == 0:
                losses(layout, "spawn", times)
                torchrun(layout, times)
            latest = {kind: f"{values[-1]:.2f}" for (n, kind, m), values in times.items() if (n, m) == (name, "zygote")}
            print(f"  {name} {number + 1}/{launches}: {latest}", flush=True)
        rows = []
        for kind in dict.fromkeys(kind for (n, kind, _) in times if n == name):
            ours, spawned = times[name, kind, "zygote"], times[name, kind, "spawn"]
            median = sorted(ours)[len(ours) // 2]
            goal = "" if kind.startswith("launch") else f"<= {layout.goal_s:g}, worst <= {2 * layout.goal_s:g}"
            met = not goal or (median <= layout.goal_s and max(ours) <= 2 * layout.goal_s)
            missed += [] if met else [f"{name}: {kind}"]
            bare = times.get((name, kind, "torchrun"), [])
            judged = "" if not goal else "met" if met else "NOT MET"
            rows.append([kind, *map(harness.spread, (ours, spawned, bare)), goal, judged])
        head = ["", "zygote, s", "spawn, s", "torchrun, s", "goal", ""]
        harness.table(f"{name}, 4 ranks, no standby", head, rows)
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
