"""Step time with recovery on (``flashrecovery run``) against off (``torchrun``), the same script, turn by turn.

A step of about 100 ms, most of it a sleep in the place of an accelerator's work, because four ranks share
this machine's cores: what recovery adds on the host shows in full, what it could take from the device does
not. DDP has all state replicated and copies nothing, unless snapshots are asked for (``--layouts ddp+snapshots``; with
``--sleep-ms 370`` a step of 400 ms). With FSDP, DeepSpeed's ZeRO-2 (``--layouts zero2``) and Megatron's distributed
optimizer (``--layouts megatron``, both overlaps on) the neighbour holds copies of each rank's shards of every step;
with ``fsdp+parity`` parity takes their place.

The table tells the CPU's share apart: what a step takes more of it in the thread that trains, and what the process's
other threads take more. The latter holds training up only where ranks have no cores to spare, as here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
from peers import deepspeed_zero2, megatron_gpt, ours
from workload import Job

WARM_UP = 10
GOALS = {"ddp": 0.005, "ddp+snapshots": 0.01, "fsdp": 0.03, "fsdp+parity": 0.03, "zero2": 0.03, "megatron": 0.03}
OPTIONS = {"snapshots": ("--snapshots", "always"), "parity": ("--redundancy", "parity")}
UNIQUE = {"zero2": deepspeed_zero2.unique_bytes, "megatron": megatron_gpt.unique_bytes}
"""Bytes that a rank's neighbour gets each step."""


@dataclass(frozen=True)
class StepCost:
    """Means of one launch's steps after the warm-up on rank 0, seconds. CPU: of the thread that trains, of others."""

    wall: float
    own_cpu: float
    other_cpu: float

    @staticmethod
    def of(records: Sequence[harness.Record]) -> StepCost:
        """Of consecutive steps."""
        first, last, n = records[0], records[-1], len(records) - 1
        own, everything = last.own_s - first.own_s, last.all_s - first.all_s
        return StepCost((last.t - first.t) / n, own / n, (everything - own) / n)


def step_cost(job: Job, recovery: bool, limit_s: float, options: Sequence[str] = ()) -> StepCost:
    """What a step costs. Raises TimeoutError."""
    directory = Path(job.directory)
    launch = harness.Launch(directory / "output.log")
    _start(job, launch, recovery, options)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            records = [r for r in harness.read_records(directory) if r.rank == 0]
            # The last step's commit is not logged by the script: the loop hands out no step after it.
            if len(records) >= job.steps - 1:
                return StepCost.of(records[WARM_UP:])
            if launch.processes[0].poll() not in (None, 0):
                break
            time.sleep(0.1)
        raise TimeoutError(f"{job.layout}, recovery {'on' if recovery else 'off'}\n{launch.tail()}")
    finally:
        launch.stop()


def _start(job: Job, launch: harness.Launch, recovery: bool, options: Sequence[str]) -> None:
    if job.layout == "zero2":
        deepspeed_zero2.start_protected(job, launch, standby=0) if recovery else deepspeed_zero2.start_bare(job, launch)
    elif job.layout == "megatron":
        layout = megatron_gpt.OVERLAPS
        if recovery:
            megatron_gpt.start_protected(job, launch, layout, standby=0)
        else:
            megatron_gpt.start_bare(job, launch, layout)
    elif recovery:
        ours.start(job, launch, standby=0, options=options)
    else:
        launch.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={job.world}", str(Path(ours.__file__))),
            ],
            **job.to_env(),
        )


def _more(couples: Sequence[tuple[StepCost, StepCost]], of: Callable[[StepCost], float]) -> str:
    """With recovery than without, milliseconds a step: the median of the pairs."""
    return f"{statistics.median(of(on) - of(off) for on, off in couples) * 1e3:+.2f}"


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="3 pairs of 40 steps instead of 10 of 100")
    flags.add_argument("--pairs", type=int, help="pairs of launches")
    flags.add_argument("--layouts", default="ddp,fsdp")
    flags.add_argument("--sleep-ms", type=float, default=70.0, help="the part of a step that is no work")
    args = flags.parse_args()
    pairs, steps = (3, 40) if args.quick else (10, 100)
    pairs = args.pairs or pairs
    harness.begin()
    rows = []
    met = True
    for layout in args.layouts.split(","):
        costs: dict[bool, list[StepCost]] = {True: [], False: []}
        for i in range(pairs):
            # Turn by turn, and every other pair the other way round: the machine drifts.
            for recovery in (True, False) if i % 2 else (False, True):
                with harness.job_directory() as directory:
                    job = Job(
                        directory=str(directory),
                        steps=steps,
                        batch_size=1,
                        context=64,
                        step_time_ms=args.sleep_ms,
                        layout=layout.partition("+")[0],
                    )
                    options = OPTIONS.get(layout.partition("+")[2], ())
                    costs[recovery].append(step_cost(job, recovery, 240, options))
            on, off = costs[True][-1], costs[False][-1]
            print(f"  {layout} {i + 1}/{pairs}: on {on.wall * 1e3:.2f}, off {off.wall * 1e3:.2f} ms", flush=True)
        # Of the pairs' own ratios: the machine drifts by more between pairs than within one.
        couples = list(zip(costs[True], costs[False], strict=True))
        extra = statistics.median(on.wall / off.wall for on, off in couples) - 1
        if layout in UNIQUE:
            sent = UNIQUE[layout](job)
            # The copies have until the end of the next forward pass, about a third of the step.
            print(
                f"  {sent / 1e6:.2f} MB a step and rank for a neighbour on another host (none here): free on links of "
                f"{sent / (statistics.median(c.wall for c in costs[False]) / 3) / 1e6:.1f} MB/s and more"
            )
        goal = GOALS[layout]
        met = met and extra <= goal
        rows.append(
            (
                layout,
                harness.spread([c.wall for c in costs[True]], 1e3),
                harness.spread([c.wall for c in costs[False]], 1e3),
                f"{extra:+.2%}",
                _more(couples, lambda c: c.own_cpu),
                _more(couples, lambda c: c.other_cpu),
                f"<= +{goal:.1%}",
                "met" if extra <= goal else "NOT MET",
            )
        )
    cpu = ("CPU of the training thread, ms", "CPU of others, ms")
    head = ("layout", "on, ms", "off, ms", "difference, median of pairs", *cpu, "goal", "")
    harness.table(f"Step time, 4 ranks, {steps - WARM_UP} steps a launch", head, rows)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
