"""``make gpu-check``: kill ranks in every phase of a step on NVIDIA GPUs, and compare the end bit for bit.

First what one GPU can show of recovery's parts (:mod:`tests.gpu_parts`). Then for each layout one undisturbed job and
one with a SIGKILL in every phase of a step, with deterministic kernels; for two of them also all ranks at once, and the
launcher with them. Then jobs that change (:mod:`tests.gpu_elastic`). The report (``report.md``, ``report.json``) is
meant to be attached to an issue. With fewer GPUs than ranks, all ranks share
the first one; without any, ``--cpu`` runs the same over gloo, which tests this program and nothing of CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flashrecovery.config import PHASES
from tests import gpu_elastic
from tests.gpu_costs import HELD_BACK, MemoryWatch, Overhead, lost_per_recovery, overhead, used_bytes
from tests.gpu_parts import PARTS, PartResult, run_part
from tests.support import megatron as mg
from tests.support.faults import in_every_phase
from tests.support.jobs import DDP, FSDP, GPT, HSDP, ROOT, SMALL, Job, Layout, RunningJob, check_clean
from tests.support.sameness import Printed, differences
from tests.support.wrappers import on_gpus

STEPS = 2 * len(PHASES) + 4
JOB_S = 400.0
ZERO2, ZERO3 = (Layout(f"zero{stage}", "train_deepspeed.py", ("--zero", str(stage))) for stage in (2, 3))
LAYOUTS = {
    layout.name: layout
    for layout in (DDP, FSDP, HSDP, ZERO2, ZERO3, mg.PP2_DP2, mg.DP4_DISTRIBUTED, mg.TP2_DP2_OVERLAPS, mg.TP2_PP2_DP2)
}
AT_ONCE = (FSDP, ZERO2)
"""Layouts in which all ranks are killed at once, too."""
NEEDS = {"train_deepspeed.py": "deepspeed", "pretrain_gpt.py": "megatron.core"}
REAL = ["--layers=12", "--heads=12", "--width=768", "--context=512", "--batch-size=8"]
"""A model whose step keeps a GPU busy."""
PHASE_NAMES = ("detect", "quiesce", "replace", "regroup", "restore", "verify", "redo")


@dataclass
class Result:
    """Of one layout.

    Attributes:
        phases: seconds of each part of each recovery. lost_bytes: of the GPUs' memory in each recovery, if that could
            be seen. found: what is not as it should be.
    """

    layout: str
    ranks: int
    kills: int = 0
    recoveries: int = 0
    seconds: float = 0.0
    phases: dict[str, list[float]] = field(default_factory=dict)
    totals: list[float] = field(default_factory=list)
    lost_bytes: float | None = None
    found: list[str] = field(default_factory=list)


def phases_of(layout: Layout) -> list[str]:
    """Those that a step of the layout has."""
    return list(PHASES) if layout in (FSDP, HSDP, ZERO3) else mg.phases(layout)


def start(directory: Path, layout: Layout, gpus: int, inject: Sequence[str] = (), *options: str) -> RunningJob:
    """With one warm standby if faults are injected."""
    wrapper = on_gpus(gpus, layout.nproc)
    env = wrapper.environment(GPT / layout.script, mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else None)
    flags = [*SMALL, "--steps", str(STEPS), *layout.flags]
    standby = 1 if inject else 0
    return RunningJob(
        directory, layout, standby=standby, inject=inject, options=options, script=wrapper.script, flags=flags, env=env
    )


def check(layout: Layout, directory: Path, gpus: int, job_s: float = JOB_S) -> list[Result]:
    """One layout. A job that takes more than ``job_s`` seconds counts as hung: all its stacks are written."""
    result = Result(layout.name, layout.nproc)
    directory.mkdir(parents=True)
    victims = (0, layout.nproc // 2, layout.nproc - 1)
    inject = in_every_phase(phases_of(layout), victims, 0, "sigkill")
    result.kills = len(inject)
    began = time.monotonic()
    reference = start(directory / "reference", layout, gpus).wait(job_s)
    if reference.code != 0:
        result.seconds = time.monotonic() - began
        result.found.append(f"the undisturbed job has ended with code {reference.code}: {directory}/reference.out")
        return [result]
    with MemoryWatch(used_bytes if gpus else lambda: 0) as memory:
        job = start(directory / "killed", layout, gpus, inject).wait(job_s)
    result.lost_bytes = lost_per_recovery(memory.samples, job.events) if gpus else None
    fired = len(job.notices("fault_fired"))
    if fired < len(inject):
        result.found.append(f"{fired} of {len(inject)} kills were carried out")
    compare(result, job, reference)
    result.seconds = time.monotonic() - began
    if layout not in AT_ONCE:
        return [result]
    at_once = (all_at_once(layout, directory, reference, gpus, job_s, launcher=launcher) for launcher in (False, True))
    return [result, *at_once]


def all_at_once(layout: Layout, directory: Path, reference: Job, gpus: int, job_s: float, *, launcher: bool) -> Result:
    """All ranks are killed at once, with or without the launcher: what the snapshot process holds is all there is."""
    began = time.monotonic()
    name = "everything" if launcher else "all ranks"
    result = Result(f"{layout.name}, {name} at once", layout.nproc, kills=layout.nproc + launcher)
    run_dir = directory / name.replace(" ", "-")
    running = start(run_dir, layout, gpus)
    try:
        running.wait_for_step(STEPS // 3, job_s)
    except AssertionError as e:
        result.found.append(str(e).splitlines()[0])
        return result
    for pid in [*([running.popen.pid] if launcher else []), *running.ranks().values()]:
        os.kill(pid, signal.SIGKILL)
    job = running.wait(job_s)
    if launcher:
        job = start(run_dir, layout, gpus, (), "--resume").wait(job_s)
        if not job.gone_on_from_snapshots():
            result.found.append("the second launch has not gone on from the snapshots")
    compare(result, job, reference, launches=1 + launcher)
    result.seconds = time.monotonic() - began
    return result


def check_changed(name: str, directory: Path, gpus: int, job_s: float) -> Result:
    """A job that becomes smaller by a kill, and grows again, or goes on in another layout."""
    began = time.monotonic()
    directory.mkdir(parents=True)
    result = Result(name, gpu_elastic.RANKS, kills=1)
    try:
        job, result.found = gpu_elastic.changed(name, directory, gpus, job_s)
    except AssertionError as e:
        result.found.append(str(e).splitlines()[0])
    else:
        take_times(result, job)
    result.seconds = time.monotonic() - began
    return result


def compare(result: Result, job: Job, reference: Job, launches: int = 1) -> None:
    """What is not as in the undisturbed job, and how long the recoveries took."""
    result.found += differences(job, reference, Printed.STEPS, 0, launches)
    try:
        check_clean(job)
    except AssertionError as e:
        result.found.append(str(e).splitlines()[0])
    take_times(result, job)


def take_times(result: Result, job: Job) -> None:
    """Of its recoveries."""
    for event in job.of("recovery_finished"):
        result.recoveries += 1
        result.totals.append(event["total_s"])
        for name, seconds in event["phases"].items():
            result.phases.setdefault(name, []).append(seconds)


def machine() -> dict[str, Any]:
    """What this has been run on."""
    found: dict[str, Any] = {
        "host": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    found["flashrecovery"] = commit.stdout.strip() or "unknown"
    return found


def markdown(
    results: list[Result], where: dict[str, Any], parts: list[PartResult], costs: dict[str, Overhead | str]
) -> str:
    """The report. ``costs``: of a step, by what the job was."""
    lines = ["# GPU check", "", *(f"* {name}: {value}" for name, value in where.items()), ""]
    if parts:
        lines += ["| part, on one GPU | measured | as it should be |", "|---|---|---|"]
        for part in parts:
            measured = ", ".join(f"{name} {value:.4g}" for name, value in part.found.items())
            lines.append(f"| {part.name} | {measured or '-'} | {'no: ' + part.problem if part.problem else 'yes'} |")
        lines.append("")
    for name, cost in costs.items():
        if isinstance(cost, Overhead):
            rates = f"{cost.off:.0f} tokens a second under torchrun, {cost.on:.0f} under `flashrecovery run`"
            lines += [
                f"{name}, {cost.ranks} ranks, without a kill: {rates}: steps are {cost.percent:+.2f} % longer.",
                "",
            ]
        else:
            lines += [f"{name}: what a step costs could not be measured: {cost}", ""]
    lines += ["Medians of the recoveries, in seconds.", ""]
    head = ["layout", "ranks", "kills", "recoveries", "total", "worst", *PHASE_NAMES, "MB lost a recovery", "same bits"]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in results:
        times = [f"{statistics.median(r.phases[n]):.3f}" if r.phases.get(n) else "-" for n in PHASE_NAMES]
        total = [f"{statistics.median(r.totals):.2f}", f"{max(r.totals):.2f}"] if r.totals else ["-", "-"]
        lost = "-" if r.lost_bytes is None else f"{r.lost_bytes / 1e6:.1f}"
        row = [r.layout, r.ranks, r.kills, r.recoveries, *total, *times, lost, "no" if r.found else "yes"]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    for r in results:
        lines += [""] + [f"* {r.layout}: {text}" for text in r.found] if r.found else []
    return "\n".join(lines) + "\n"


COSTS: dict[str, Callable[[Path, int, Sequence[str]], Overhead]] = {
    "DDP": overhead,
    "DDP, fused optimizer": partial(overhead, path=HELD_BACK),
    "DDP, fused optimizer, `barrier: auto`": partial(overhead, path=HELD_BACK, barrier="auto"),
}


def main() -> int:
    flags = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__.splitlines()[0])
    flags.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="all by default")
    changing = [*gpu_elastic.KINDS, *gpu_elastic.REPLANNED]
    flags.add_argument("--elastic", nargs="*", choices=changing, default=changing, help="all by default")
    flags.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="all by default; not with --cpu")
    flags.add_argument("--no-overhead", action="store_true", help="steps with and without recovery are not compared")
    flags.add_argument("--out", type=Path, default=Path("runs") / f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}")
    flags.add_argument("--minutes", type=float, default=28.0, help="no layout is begun after so long")
    flags.add_argument("--job-seconds", type=float, default=JOB_S, help="a job that takes longer counts as hung")
    flags.add_argument("--cpu", action="store_true", help="over gloo, to try this program")
    args = flags.parse_args()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    if not gpus and not args.cpu:
        flags.error("there is no GPU here; --cpu tries this program over gloo")
    args.out.mkdir(parents=True, exist_ok=False)
    where = machine()
    results: list[Result] = []
    until = time.monotonic() + 60 * args.minutes
    parts: list[PartResult] = []
    costs: dict[str, Overhead | str] = {}

    def write() -> None:
        (args.out / "report.md").write_text(markdown(results, where, parts, costs))
        measured = {name: asdict(cost) if isinstance(cost, Overhead) else cost for name, cost in costs.items()}
        found = {"machine": where, "parts": [asdict(p) for p in parts], "overhead": measured}
        found["results"] = [asdict(r) for r in results]
        (args.out / "report.json").write_text(json.dumps(found))

    for name in args.parts if gpus else []:
        parts.append(run_part(name))
        print(f"{name}: {parts[-1].problem or parts[-1].found}", flush=True)
        write()
    if not args.no_overhead:
        ranks = min(gpus, 4) or 2  # ranks that share a GPU take turns, which says nothing of a step
        for name, measure in COSTS.items():
            try:
                costs[name] = measure(args.out, ranks, REAL if gpus else SMALL[:5])
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                costs[name] = str(error)
            print(f"overhead, {name}: {costs[name]}", flush=True)
            write()
    for name in args.layouts:
        layout = LAYOUTS[name]
        package = NEEDS.get(layout.script)
        if package is not None and not installed(package):
            print(f"{name}: left out, {package} is not installed", flush=True)
            continue
        if time.monotonic() > until:
            print(f"{name}: left out, the time is up", flush=True)
            continue
        for result in check(layout, args.out / name, gpus, args.job_seconds):
            results.append(result)
            print(verdict(result), flush=True)
        write()
    for name in args.elastic:
        needed = gpu_elastic.NEEDS.get(name)
        if needed is not None and not installed(needed):
            print(f"{name}: left out, {needed} is not installed", flush=True)
        elif time.monotonic() > until:
            print(f"{name}: left out, the time is up", flush=True)
        else:
            results.append(check_changed(name, args.out / name, gpus, args.job_seconds))
            print(verdict(results[-1]), flush=True)
            write()
    print(f"{args.out}/report.md")
    if any(isinstance(cost, str) for cost in costs.values()):
        return 1
    return 1 if not (results or parts) or any(r.found for r in results) or any(p.problem for p in parts) else 0


def verdict(result: Result) -> str:
    """A line."""
    found = "; ".join(result.found) or f"{result.recoveries} recoveries, the same bits"
    return f"{result.layout}: {found} ({result.seconds:.0f} s)"


def installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
