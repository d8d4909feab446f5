"""``make gpu-check``: kill ranks in every phase of a step on NVIDIA GPUs, and compare the end bit for bit.

What tells most comes first, and what does not fit into ``--minutes`` is left out, by name: the parts of recovery that
one GPU can show (:mod:`tests.gpu_parts`); two layouts, each with an undisturbed job and one with a SIGKILL in every
phase of a step, with deterministic kernels; what each of :mod:`tests.gpu_scenarios` shows; the cost of a step; one job
that changes (:mod:`tests.gpu_elastic`); then the other layouts and jobs. For two layouts also all ranks are killed at
once, and the launcher with them. The report (``report.md``, ``report.json``), written after each of them, is meant to
be attached to an issue. With fewer GPUs than ranks, all ranks share the first one; without any, ``--cpu`` runs the same
over gloo, and ``--fake`` over the fake of NCCL, which tests this program and nothing of CUDA.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flashrecovery.config import PHASES
from tests import gpu_elastic, gpu_scenarios
from tests.gpu_costs import MemoryWatch, Overhead, lost_per_recovery, overhead, used_bytes
from tests.gpu_parts import PARTS, PartResult, run_part
from tests.gpu_scenarios import SCENARIOS
from tests.support import fake_nccl
from tests.support import megatron as mg
from tests.support.faults import in_every_phase
from tests.support.jobs import DDP, FSDP, GPT, HSDP, ROOT, SMALL, Job, Layout, RunningJob, check_clean
from tests.support.sameness import Printed, differences
from tests.support.wrappers import FAKE_NCCL, on_gpus

STEPS = 2 * len(PHASES) + 4
JOB_S = 400.0
ZERO2, ZERO3 = (Layout(f"zero{stage}", "train_deepspeed.py", ("--zero", str(stage))) for stage in (2, 3))
LAYOUTS = {
    layout.name: layout
    for layout in (DDP, FSDP, HSDP, ZERO2, ZERO3, mg.PP2_DP2, mg.DP4_DISTRIBUTED, mg.TP2_DP2_OVERLAPS, mg.TP2_PP2_DP2)
}
FIRST = (DDP.name, FSDP.name)
ELASTIC_FIRST = ("elastic-ddp", "replan-megatron")
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


def start(
    directory: Path, layout: Layout, gpus: int, inject: Sequence[str] = (), *options: str, fake: bool = False
) -> RunningJob:
    """With one warm standby if faults are injected."""
    wrapper = FAKE_NCCL if fake else on_gpus(gpus, layout.nproc)
    env = wrapper.environment(GPT / layout.script, mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else None)
    flags = [*SMALL, "--steps", str(STEPS), *layout.flags]
    standby = 1 if inject else 0
    return RunningJob(
        directory, layout, standby=standby, inject=inject, options=options, script=wrapper.script, flags=flags, env=env
    )


def check(layout: Layout, directory: Path, gpus: int, job_s: float = JOB_S, *, fake: bool = False) -> list[Result]:
    """One layout. A job that takes more than ``job_s`` seconds counts as hung: all its stacks are written."""
    result = Result(layout.name, layout.nproc)
    directory.mkdir(parents=True)
    victims = (0, layout.nproc // 2, layout.nproc - 1)
    inject = in_every_phase(phases_of(layout), victims, 0, "sigkill")
    result.kills = len(inject)
    began = time.monotonic()
    reference = start(directory / "reference", layout, gpus, fake=fake).wait(job_s)
    if reference.code != 0:
        result.seconds = time.monotonic() - began
        result.found.append(f"the undisturbed job has ended with code {reference.code}: {directory}/reference.out")
        return [result]
    with MemoryWatch(used_bytes if gpus else lambda: 0) as memory:
        job = start(directory / "killed", layout, gpus, inject, fake=fake).wait(job_s)
    result.lost_bytes = lost_per_recovery(memory.samples, job.events) if gpus else None
    fired = len(job.notices("fault_fired"))
    if fired < len(inject):
        result.found.append(f"{fired} of {len(inject)} kills were carried out")
    compare(result, job, reference)
    result.seconds = time.monotonic() - began
    if layout not in AT_ONCE:
        return [result]
    at_once = (
        all_at_once(layout, directory, reference, gpus, job_s, launcher=launcher, fake=fake)
        for launcher in (False, True)
    )
    return [result, *at_once]


def all_at_once(
    layout: Layout, directory: Path, reference: Job, gpus: int, job_s: float, *, launcher: bool, fake: bool
) -> Result:
    """All ranks are killed at once, with or without the launcher: what the snapshot process holds is all there is."""
    began = time.monotonic()
    name = "everything" if launcher else "all ranks"
    result = Result(f"{layout.name}, {name} at once", layout.nproc, kills=layout.nproc + launcher)
    run_dir = directory / name.replace(" ", "-")
    running = start(run_dir, layout, gpus, fake=fake)
    try:
        running.wait_for_step(STEPS // 3, job_s)
    except AssertionError as e:
        result.found.append(str(e).splitlines()[0])
        return result
    for pid in [*([running.popen.pid] if launcher else []), *running.ranks().values()]:
        os.kill(pid, signal.SIGKILL)
    job = running.wait(job_s)
    if launcher:
        job = start(run_dir, layout, gpus, (), "--resume", fake=fake).wait(job_s)
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
    results: list[Result],
    where: dict[str, Any],
    parts: list[PartResult],
    costs: Sequence[Overhead | str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """The report."""
    lines = ["# GPU check", "", *(f"* {name}: {value}" for name, value in where.items()), ""]
    if parts:
        lines += ["| part, on one GPU | measured | as it should be |", "|---|---|---|"]
        for part in parts:
            measured = ", ".join(f"{name} {value:.4g}" for name, value in part.found.items())
            lines.append(f"| {part.name} | {measured or '-'} | {'no: ' + part.problem if part.problem else 'yes'} |")
        lines.append("")
    for cost in costs:
        if isinstance(cost, Overhead):
            rates = f"{cost.off:.0f} tokens a second under torchrun, {cost.on:.0f} under `flashrecovery run`"
            lines += [f"DDP, {cost.ranks} ranks, without a kill: {rates}: steps are {cost.percent:+.2f} % longer.", ""]
        else:
            lines += [f"What a step costs could not be measured: {cost}", ""]
    if left_out:
        lines += [f"Left out, for the time was up: {', '.join(left_out)}.", ""]
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


def main() -> int:
    flags = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__.splitlines()[0])
    flags.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="all by default")
    flags.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=list(SCENARIOS), help="all by default")
    changing = [*gpu_elastic.KINDS, *gpu_elastic.REPLANNED]
    flags.add_argument("--elastic", nargs="*", choices=changing, default=changing, help="all by default")
    flags.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="all by default; only with a GPU")
    flags.add_argument("--no-overhead", action="store_true", help="steps with and without recovery are not compared")
    flags.add_argument("--out", type=Path, default=Path("runs") / f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}")
    flags.add_argument("--minutes", type=float, default=12.0, help="nothing is begun after so long")
    flags.add_argument("--job-seconds", type=float, default=JOB_S, help="a job that takes longer counts as hung")
    instead = flags.add_mutually_exclusive_group()
    instead.add_argument("--cpu", action="store_true", help="over gloo, to try this program")
    instead.add_argument("--fake", action="store_true", help="over the fake of NCCL, to try this program")
    args = flags.parse_args()
    gpus = 0 if args.cpu or args.fake else torch.cuda.device_count()
    if not gpus and not (args.cpu or args.fake):
        flags.error("there is no GPU here; --cpu and --fake try this program")
    args.out.mkdir(parents=True, exist_ok=False)
    check_of = Check(args.out, gpus, args.job_seconds, fake=args.fake)
    for name, run in in_order(check_of, args):
        if time.monotonic() > check_of.began + 60 * args.minutes:
            print(f"{name}: left out, the time is up", flush=True)
            check_of.left_out.append(name)
        else:
            print(f"{name}: {run()}", flush=True)
        check_of.write()
    print(f"{args.out}/report.md")
    return 0 if check_of.good else 1


def in_order(check_of: Check, args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """What there is to do, by name, what tells most first."""
    first = [name for name in FIRST if name in args.layouts]
    elastic_first = [name for name in ELASTIC_FIRST if name in args.elastic]
    for name in args.parts if check_of.gpus else ():
        yield name, partial(check_of.part, name)
    for name in first:
        yield name, partial(check_of.layout, name)
    for name in args.scenarios:
        yield name, partial(check_of.scenario, name)
    for ranks in () if args.no_overhead else overhead_ranks(check_of.gpus):
        yield f"overhead, {ranks} ranks", partial(check_of.cost, ranks)
    for name in elastic_first:
        yield name, partial(check_of.changing, name)
    for name in [name for name in args.layouts if name not in first]:
        yield name, partial(check_of.layout, name)
    for name in [name for name in args.elastic if name not in elastic_first]:
        yield name, partial(check_of.changing, name)


def overhead_ranks(gpus: int) -> tuple[int, ...]:
    """Ranks that share a GPU take turns, which says nothing of a step."""
    return tuple(ranks for ranks in (1, 2, 8) if ranks <= gpus) or (2,)


class Check:
    """What has been found so far, on ``gpus`` GPUs (0: over gloo, or with ``fake`` over the fake of NCCL)."""

    def __init__(self, out: Path, gpus: int, job_s: float, *, fake: bool = False) -> None:
        self.began = time.monotonic()
        self.gpus = gpus
        self.left_out: list[str] = []
        self._out, self._job_s, self._fake = out, job_s, fake
        self._where = machine()
        self._results: list[Result] = []
        self._parts: list[PartResult] = []
        self._costs: list[Overhead | str] = []
        if fake:
            fake_nccl.build()

    @property
    def good(self) -> bool:
        """Something was looked at, and all of it is as it should be."""
        bad = [r for r in self._results if r.found] or [p for p in self._parts if p.problem]
        return bool(self._results or self._parts) and not bad and not any(isinstance(c, str) for c in self._costs)

    def write(self) -> None:
        """The report, of what there is now."""
        text = markdown(self._results, self._where, self._parts, self._costs, self.left_out)
        (self._out / "report.md").write_text(text)
        found = {"machine": self._where, "parts": [asdict(p) for p in self._parts], "left_out": self.left_out}
        found["overhead"] = [asdict(c) if isinstance(c, Overhead) else c for c in self._costs]
        found["results"] = [asdict(r) for r in self._results]
        (self._out / "report.json").write_text(json.dumps(found))

    def part(self, name: str) -> str:
        self._parts.append(run_part(name))
        return self._parts[-1].problem or str(self._parts[-1].found)

    def layout(self, name: str) -> str:
        layout = LAYOUTS[name]
        package = NEEDS.get(layout.script)
        if package is not None and not installed(package):
            return f"left out, {package} is not installed"
        return self._take(check(layout, self._out / name, self.gpus, self._job_s, fake=self._fake))

    def scenario(self, name: str) -> str:
        scenario = SCENARIOS[name]
        if not scenario.possible:
            return f"left out, {scenario.needs} is not installed"
        began = time.monotonic()
        layout = scenario.layout
        result = Result(f"{name}: {scenario.what}", layout.nproc, kills=len(scenario.inject))
        wrapper = FAKE_NCCL if self._fake else on_gpus(self.gpus, layout.nproc)
        job, result.found = gpu_scenarios.run(scenario, self._out / name, wrapper, self._job_s)
        take_times(result, job)
        result.seconds = time.monotonic() - began
        return self._take([result])

    def cost(self, ranks: int) -> str:
        try:
            self._costs.append(overhead(self._out / f"overhead{ranks}", ranks, REAL if self.gpus else SMALL[:5]))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self._costs.append(f"{ranks} ranks: {error}")
        return str(self._costs[-1])

    def changing(self, name: str) -> str:
        needed = gpu_elastic.NEEDS.get(name)
        if needed is not None and not installed(needed):
            return f"left out, {needed} is not installed"
        return self._take([check_changed(name, self._out / name, self.gpus, self._job_s)])

    def _take(self, results: list[Result]) -> str:
        self._results += results
        return "; ".join(map(verdict, results))


def verdict(result: Result) -> str:
    """In a line."""
    found = "; ".join(result.found) or f"{result.recoveries} recoveries, the same bits"
    return f"{found} ({result.seconds:.0f} s)"


def installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
