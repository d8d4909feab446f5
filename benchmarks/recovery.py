"""From SIGKILL in backward to the first newly committed step: FlashRecovery and its peers, in the same run.

Every trial is one launch with one kill. The systems take turns, so that whatever else the machine does
meets all of them alike. *First step*: the moment at which that many ranks as go on (all, or all survivors
where a system goes on with fewer) have committed a step that no rank had committed before the kill. *Whole
again*: the moment at which as many ranks as before have done so.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import harness
from peers import (
    Peer,
    deepspeed_zero2,
    lm_resiliency_torchrun,
    megatron_gpt,
    nvrx_inprocess,
    ours,
    ours_elastic,
    torchft_manager,
    torchrun_elastic,
    torchrun_restart,
)
from workload import Job

PEERS: dict[str, Peer] = {
    "ours": ours.STANDBY,
    "ours-cold": ours.COLD,
    "torchrun": torchrun_restart.PEER,
    "torchft": torchft_manager.PEER,
    "torchft-pair": torchft_manager.PAIR,
    "nvrx-reserve": nvrx_inprocess.RESERVE,
    "nvrx-between": nvrx_inprocess.BETWEEN,
    "nvrx-shrink": nvrx_inprocess.SHRINK,
    "lm-resiliency": lm_resiliency_torchrun.PEER,
    "elastic": ours_elastic.DDP,
    "elastic-fsdp2": ours_elastic.FSDP2,
    "elastic-torchft": torchft_manager.DROPS,
    "elastic-torchft-quick": torchft_manager.DROPS_QUICKLY,
    "elastic-torchrun": torchrun_elastic.PEER,
    "elastic-torchrun-quick": torchrun_elastic.QUICK,
    "deepspeed": deepspeed_zero2.STANDBY,
    "deepspeed-torchrun": deepspeed_zero2.RESTARTED,
    "megatron": megatron_gpt.TENSOR_STANDBY,
    "megatron-torchrun": megatron_gpt.TENSOR_RESTARTED,
    "megatron-distributed": megatron_gpt.DISTRIBUTED_STANDBY,
    "megatron-distributed-torchrun": megatron_gpt.DISTRIBUTED_RESTARTED,
}
OURS = ("ours", "ours-cold", "deepspeed", "megatron", "megatron-distributed", "elastic", "elastic-fsdp2")
SHRINKING = ("elastic", "elastic-fsdp2", "nvrx-shrink", *(n for n in PEERS if n.startswith("elastic-torch")))
REFERENCE = {f"{name}-torchrun": name for name in ("deepspeed", "megatron", "megatron-distributed")}
"""What a peer is compared with, if not with "ours"."""
APART = ("deepspeed", "megatron", "elastic")
"""Beginnings of those that only run where they are named."""
WARM_STEPS = 8
COLD_S = 1.0
"""With ``--cold``: how long after the job's first step the kill comes."""
GOALS = {
    "torchrun": 10.0,
    "torchft": 5.0,
    "torchft-pair": 5.0,
    "nvrx-reserve": 2.0,
    "nvrx-between": 2.0,
    "nvrx-shrink": 2.0,
    **dict.fromkeys(REFERENCE, 10.0),
}
LIMITS = {
    "ours": (0.8, 2.0),
    "deepspeed": (2.0, 4.0),
    "megatron": (2.5, 5.0),
    "megatron-distributed": (2.5, 5.0),
    "elastic": (1.0, 2.0),
    "elastic-fsdp2": (2.5, 5.0),
}
"""Goals for the median and the worst, seconds."""


@dataclass(frozen=True)
class Trial:
    """One kill. Times are seconds since the kill; None means that it did not happen within the limit. ``age``: seconds
    since the first step, before the kill."""

    first: float | None
    whole: float | None
    step: float
    warm: bool = False
    age: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    trouble: str = ""


def run_trial(peer: Peer, job: Job, limit_s: float, *, cold: bool = False) -> Trial:
    """Launch, wait for the kill and for what follows, stop. ``cold``: the kill comes :data:`COLD_S` after the first
    step, whether or not the system is ready for it."""
    directory = Path(job.directory)
    launch = harness.Launch(directory / "output.log")
    peer.start(job, launch)
    deadline = time.monotonic() + limit_s
    try:
        while True:
            trial = measure(peer, job)
            done = trial.first is not None and (peer.whole is None or trial.whole is not None)
            if done and (all(peer is not PEERS[n] for n in OURS) or ours.events(job, "recovery_finished")):
                return _with_phases(trial, job)
            if time.monotonic() > deadline:
                state = "after the kill" if job.kill_file.exists() else "before the kill"
                return Trial(trial.first, trial.whole, trial.step, trouble=f"time-out {state}\n{launch.tail()}")
            ready = trial.age >= COLD_S if cold else trial.warm and (peer.ready is None or peer.ready(job))
            if not job.arm_file.exists() and ready:
                job.arm_file.touch()
            ended = [p.poll() is not None for p in launch.processes]
            if all(ended) or (ended[0] and not job.kill_file.exists()):
                state = "after the kill" if job.kill_file.exists() else "before the kill"
                return Trial(None, None, 0.0, trouble=f"ended {state}\n{launch.tail(40)}")
            if peer.tend is not None:
                peer.tend(job, launch)
            time.sleep(0.02)
    finally:
        launch.stop()


def measure(peer: Peer, job: Job) -> Trial:
    """What the logs say so far."""
    records = harness.read_records(Path(job.directory))
    killed = harness.read_json(job.kill_file) if job.kill_file.exists() else None
    end = killed["t"] if killed is not None else math.inf
    before = [r for r in records if r.rank == 0 and r.step >= 2 and r.t < end]
    gaps = [b.t - a.t for a, b in pairwise(before)]
    step = statistics.median(gaps) if gaps else 0.0
    if killed is None:
        age = time.monotonic() - min((r.t for r in records), default=math.inf)
        return Trial(None, None, step, warm=len(before) >= WARM_STEPS, age=age)
    newly: dict[int, float] = {}
    for r in records:
        if r.t > killed["t"] and r.step >= killed["step"]:
            newly.setdefault(r.pid, r.t - killed["t"])
    times = sorted(newly.values())
    return Trial(
        first=times[peer.first - 1] if len(times) >= peer.first else None,
        whole=times[peer.whole - 1] if peer.whole is not None and len(times) >= peer.whole else None,
        step=step,
    )


def _with_phases(trial: Trial, job: Job) -> Trial:
    finished = ours.events(job, "recovery_finished")
    phases: dict[str, float] = finished[0]["phases"] if finished else {}
    return Trial(trial.first, trial.whole, trial.step, phases=phases)


def import_seconds() -> float:
    """How long a fresh interpreter takes, now, for what the training script imports."""
    command = harness.python("-c", "import peers.ours, flashrecovery; flashrecovery.init")
    start = time.monotonic()
    subprocess.run(command, env=harness.environment(), check=True, capture_output=True)
    return time.monotonic() - start


def report(results: dict[str, list[Trial]], imports: float, *, cold: bool = False) -> bool:
    """Print the tables; True if every goal that could be judged is met."""
    firsts = {n: [t.first for t in trials if t.first is not None] for n, trials in results.items()}
    wholes = {n: [t.whole for t in trials if t.whole is not None] for n, trials in results.items()}
    rows = []
    for name, trials in results.items():
        peer = PEERS[name]
        ratio = "-"
        shrinks = name in SHRINKING and "elastic" in results
        reference = firsts.get("elastic" if shrinks else REFERENCE.get(name, "ours"))
        if reference and firsts[name] and name not in OURS:
            ratio = f"1/{statistics.median(firsts[name]) / statistics.median(reference):.1f}"
            if name in GOALS and not cold:
                ratio += f" (goal 1/{GOALS[name]:.0f})"
        failed = sum(t.first is None for t in trials)
        steps = [t.step for t in trials if t.step]
        rows.append(
            (
                peer.name,
                harness.spread(firsts[name]),
                harness.spread(wholes[name]) if peer.whole is not None else "never",
                ratio,
                f"{failed} of {len(trials)}" if failed else "0",
                f"{statistics.median(steps) * 1e3:.0f} ms" if steps else "-",
                peer.settings,
            )
        )
    head = ("system", "first step, s", "whole again, s", "ours / it", "not recovered", "step", "settings")
    when = f", {COLD_S:g} s after the job's first step" if cold else ""
    harness.table(f"SIGKILL in backward{when} to the first newly committed step", head, rows)

    met = True
    goals = []
    for name, (median, worst) in ({} if cold else LIMITS).items():
        if firsts.get(name):
            goals.append((f"{PEERS[name].name}, median", statistics.median(firsts[name]), median))
            goals.append((f"{PEERS[name].name}, worst", max(firsts[name]), worst))
    if firsts.get("ours-cold") and not cold:
        goals.append(("cold replacement, median", statistics.median(firsts["ours-cold"]), imports + 0.8))
    if goals:
        judged = [(what, f"{value:.2f}", f"<= {goal:.2f}", _verdict(value <= goal)) for what, value, goal in goals]
        harness.table(f"Goals (the script's imports take {imports:.2f} s)", ("measure", "s", "goal", ""), judged)
        met = all(value <= goal for _, value, goal in goals)
    for name in OURS:
        print_phases([t for t in results.get(name, []) if t.phases], PEERS[name].name)
    for name, trials in results.items():
        for trial in trials:
            if trial.trouble:
                print(f"--- {PEERS[name].name}: {trial.trouble}\n")
                break
    return met and not any(t.first is None for n in OURS for t in results.get(n, []))


def print_phases(trials: list[Trial], name: str) -> None:
    """Print where the time of our recoveries goes."""
    if not trials:
        return
    medians = {p: statistics.median([t.phases.get(p, 0.0) for t in trials]) for p in trials[0].phases}
    total = sum(medians.values())
    rows = [
        (phase, harness.spread([t.phases.get(phase, 0.0) for t in trials], 1e3, 0), f"{value / total:.0%}")
        for phase, value in medians.items()
    ]
    harness.table(f"Phases of {name}", ("phase", "ms", "share"), rows)
    largest = max(medians, key=lambda p: medians[p])
    print(f"The largest phase is {largest}: {EXPLAIN.get(largest, 'no explanation written yet')}\n")


EXPLAIN = {
    "detect": "bounded by the kernel's hand-over of the worker's lifeline and the scheduling of the agent.",
    "quiesce": "bounded by the longest stretch of computation that a survivor cannot leave (one kernel).",
    "replace": "the replacement runs the user's script from the top: model, optimizer and data set are built "
    "again (and imported, without a standby); bounded by the script, not by the recovery.",
    "regroup": "bounded by gloo's full mesh of connections, one group after the other.",
    "restore": "bounded by the bytes that were lost and the bandwidth of one holder.",
    "verify": "bounded by hashing the restored bytes.",
    "redo": "the interrupted step itself runs again; bounded by the step time.",
}


def _verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def main() -> None:
    """Run the comparison."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="2 trials a system instead of 10 (ours: 20)")
    flags.add_argument(
        "--only", help=f"comma-separated systems of: {', '.join(PEERS)} (without: those whose job keeps its size)"
    )
    flags.add_argument("--elastic", action="store_true", help=f"those that go on smaller: {', '.join(SHRINKING)}")
    flags.add_argument("--trials", type=int, help="trials a peer; ours gets twice as many")
    flags.add_argument(
        "--cold", action="store_true", help=f"kill {COLD_S:g} s after the first step, ready or not; no goals"
    )
    flags.add_argument("--limit", type=float, default=150.0, help="seconds after which a trial is given up")
    args = flags.parse_args()
    if args.only and args.elastic:
        flags.error("--elastic and --only: give one of them")
    chosen = SHRINKING if args.elastic else [n for n in PEERS if not n.startswith(APART)]
    names = args.only.split(",") if args.only else list(chosen)
    for name in names:
        if name not in PEERS:
            flags.error(f"--only: {name!r} is none of {', '.join(PEERS)}")
    trials = args.trials or (2 if args.quick else 10)
    rounds = {n: trials if args.quick or n not in OURS else 2 * trials for n in names}

    harness.begin()
    imports: list[float] = []
    results: dict[str, list[Trial]] = {n: [] for n in names}
    for i in range(max(rounds.values())):
        for name in names:
            if i >= rounds[name]:
                continue
            peer = PEERS[name]
            if name == "ours-cold":
                imports.append(import_seconds())
            with harness.job_directory() as directory:
                job = Job(directory=str(directory), world=peer.world, kill_at=peer.kill_at)
                trial = run_trial(peer, job, args.limit, cold=args.cold)
            results[name].append(trial)
            shown = f"{trial.first:.2f} s" if trial.first is not None else trial.trouble.splitlines()[0]
            print(f"  {i + 1}/{rounds[name]} {name}: {shown}", flush=True)
    sys.exit(0 if report(results, statistics.median(imports or [0.0]), cold=args.cold) else 1)


if __name__ == "__main__":
    main()
