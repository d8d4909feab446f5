"""``make gpu-check``: kill ranks in every phase of a step on NVIDIA GPUs, and compare the end bit for bit.

What tells most comes first, and what does not fit into ``--minutes`` is left out, by name: the parts of recovery that
one GPU can show (:mod:`tests.gpu_parts`); two layouts, each with an undisturbed job and one with a SIGKILL in every
phase of a step, with deterministic kernels; what each of :mod:`tests.gpu_scenarios` shows; the cost of a step; one job
that changes (:mod:`tests.gpu_elastic`); then the other layouts and jobs. For two layouts also all ranks are killed at
once, and the launcher with them. The report (``report.md``, ``report.json``), written after each of them, is meant to
be attached to an issue. With fewer GPUs than ranks, all ranks share the first one; without any, ``--cpu`` runs the same
over gloo, and ``--fake`` over the fake of NCCL, which tests this program and nothing of CUDA. ``--plan`` says what
there is to do and for how long, and does nothing. ``--begin`` only begins each job, which tells whether it can be.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from flashrecovery.config import PHASES
from tests import gpu_costs, gpu_elastic, gpu_scenarios
from tests.gpu_costs import MemoryWatch, Overhead, lost_per_recovery, used_bytes
from tests.gpu_parts import PARTS, PartResult, run_part
from tests.gpu_scenarios import SCENARIOS
from tests.support import fake_nccl
from tests.support import megatron as mg
from tests.support.faults import in_every_phase
from tests.support.jobs import DDP, FSDP, GPT, HSDP, ROOT, SMALL, Job, Layout, RunningJob, check_clean
from tests.support.sameness import Printed, differences
from tests.support.wrappers import FAKE_NCCL, Wrapper, on_gpus

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


def start(directory: Path, layout: Layout, wrapper: Wrapper, inject: Sequence[str] = (), *options: str) -> RunningJob:
    """With one warm standby if faults are injected."""
    env = wrapper.environment(GPT / layout.script, mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else None)
    flags = [*SMALL, "--steps", str(STEPS), *layout.flags]
    standby = 1 if inject else 0
    return RunningJob(
        directory, layout, standby=standby, inject=inject, options=options, script=wrapper.script, flags=flags, env=env
    )


def kills_of(layout: Layout) -> list[str]:
    """One in each phase of a step."""
    return in_every_phase(phases_of(layout), (0, layout.nproc // 2, layout.nproc - 1), 0, "sigkill")


def check(layout: Layout, directory: Path, wrapper: Wrapper, job_s: float) -> list[Result]:
    """One layout. A job that takes more than ``job_s`` seconds counts as hung: all its stacks are written."""
    result = Result(layout.name, layout.nproc)
    directory.mkdir(parents=True)
    inject = kills_of(layout)
    result.kills = len(inject)
    began = time.monotonic()
    reference = start(directory / "reference", layout, wrapper).wait(job_s)
    if reference.code != 0:
        result.seconds = time.monotonic() - began
        result.found.append(f"the undisturbed job has ended with code {reference.code}: {directory}/reference.out")
        return [result]
    with MemoryWatch(lambda: 0 if wrapper.on_cpus else used_bytes()) as memory:
        job = start(directory / "killed", layout, wrapper, inject).wait(job_s)
    result.lost_bytes = None if wrapper.on_cpus else lost_per_recovery(memory.samples, job.events)
    fired = len(job.notices("fault_fired"))
    if fired < len(inject):
        result.found.append(f"{fired} of {len(inject)} kills were carried out")
    compare(result, job, reference)
    result.seconds = time.monotonic() - began
    if layout not in AT_ONCE:
        return [result]
    at_once = (
        all_at_once(layout, directory, reference, wrapper, job_s, launcher=launcher) for launcher in (False, True)
    )
    return [result, *at_once]


def all_at_once(
    layout: Layout, directory: Path, reference: Job, wrapper: Wrapper, job_s: float, *, launcher: bool
) -> Result:
    """All ranks are killed at once, with or without the launcher: what the snapshot process holds is all there is."""
    began = time.monotonic()
    name = "everything" if launcher else "all ranks"
    result = Result(f"{layout.name}, {name} at once", layout.nproc, kills=layout.nproc + launcher)
    run_dir = directory / name.replace(" ", "-")
    running = start(run_dir, layout, wrapper)
    try:
        running.wait_for_step(STEPS // 3, job_s)
    except AssertionError as e:
        result.found.append(str(e).splitlines()[0])
        return result
    for pid in [*([running.popen.pid] if launcher else []), *running.ranks().values()]:
        os.kill(pid, signal.SIGKILL)
    job = running.wait(job_s)
    if launcher:
        job = start(run_dir, layout, wrapper, (), "--resume").wait(job_s)
        if not job.gone_on_from_snapshots():
            result.found.append("the second launch has not gone on from the snapshots")
    compare(result, job, reference, launches=1 + launcher)
    result.seconds = time.monotonic() - began
    return result


def check_changed(name: str, directory: Path, wrapper: Wrapper, job_s: float) -> Result:
    """A job that becomes smaller by a kill, and grows again, or goes on in another layout."""
    began = time.monotonic()
    directory.mkdir(parents=True)
    result = Result(name, gpu_elastic.RANKS, kills=1)
    try:
        job, result.found = gpu_elastic.changed(name, directory, wrapper, job_s)
    except AssertionError as e:
        result.found.append(str(e).splitlines()[0])
    else:
        take_times(result, job)
    result.seconds = time.monotonic() - began
    return result


def check_scenario(name: str, directory: Path, wrapper: Wrapper, job_s: float) -> Result:
    """What one of :mod:`tests.gpu_scenarios` shows."""
    scenario = SCENARIOS[name]
    began = time.monotonic()
    result = Result(f"{name}: {scenario.what}", scenario.layout.nproc, kills=len(scenario.inject))
    job, result.found = gpu_scenarios.run(scenario, directory, wrapper, job_s)
    take_times(result, job)
    result.seconds = time.monotonic() - began
    return result


def begin(job: RunningJob, job_s: float) -> str:
    """It is told to end when all of its ranks have committed a step. Returns what is not as it should be, "" if
    nothing."""
    try:
        job.wait_for("job_started", job_s)
        job.wait_until_committed(1, job_s)
    except AssertionError as e:
        return f"it does not come to its second step: {str(e).splitlines()[0]}"
    job.popen.send_signal(signal.SIGTERM)
    try:
        check_clean(job.wait(job_s))
    except AssertionError as e:
        return str(e).splitlines()[0]
    return ""


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
    flags.add_argument("--minutes", type=float, default=12.0, help="what would not end by then is left out")
    flags.add_argument("--job-seconds", type=float, default=JOB_S, help="a job that takes longer counts as hung")
    flags.add_argument("--plan", action="store_true", help="say what would be done, and for how long")
    flags.add_argument("--begin", action="store_true", help="only begin each job, up to its second step")
    instead = flags.add_mutually_exclusive_group()
    instead.add_argument("--cpu", action="store_true", help="over gloo, to try this program")
    instead.add_argument("--fake", action="store_true", help="over the fake of NCCL, to try this program")
    args = flags.parse_args()
    gpus = 0 if args.cpu or args.fake else torch.cuda.device_count()
    if not gpus and not (args.cpu or args.fake or args.plan):
        flags.error("there is no GPU here; --cpu and --fake try this program")
    if args.plan:
        print(plan(in_order(args, gpus or 1), 60 * args.minutes))
        return 0
    args.out.mkdir(parents=True, exist_ok=False)
    check_of = Check(args.out, gpus, args.job_seconds, 60 * args.minutes, fake=args.fake)
    for case in in_order(args, gpus):
        print(f"{case.name}: {check_of.begin(case) if args.begin else check_of.run(case)}", flush=True)
        check_of.write()
    print(f"{args.out}/report.md")
    return 0 if check_of.good else 1


@dataclass(frozen=True)
class Case:
    """One thing to do. ``expected_s``: seconds that it takes with one GPU, as estimated from its launches and
    recoveries."""

    kind: Literal["part", "layout", "scenario", "cost", "changing"]
    name: str
    expected_s: float
    ranks: int = 1
    needs: str = ""

    @property
    def possible(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.needs or installed(self.needs)


LAUNCH_S, RECOVERY_S, PART_S, STEP_S = 15.0, 3.5, 6.0, 0.3
"""Estimates for ranks that share one GPU: a launch up to its first step, a recovery (docs/gpu.md: medians of 1.6 to
4.6 s), a part, and a step of a small model."""


def in_order(args: argparse.Namespace, gpus: int) -> list[Case]:
    """What there is to do, what tells most first."""
    first = [name for name in FIRST if name in args.layouts]
    elastic_first = [name for name in ELASTIC_FIRST if name in args.elastic]
    cases = [Case("part", name, PART_S) for name in args.parts if gpus]
    cases += [_layout(name) for name in first]
    cases += [_scenario(name) for name in args.scenarios]
    cases += [_cost(ranks) for ranks in (() if args.no_overhead else overhead_ranks(gpus))]
    cases += [_changing(name) for name in elastic_first]
    cases += [_layout(name) for name in args.layouts if name not in first]
    return cases + [_changing(name) for name in args.elastic if name not in elastic_first]


def _layout(name: str) -> Case:
    layout = LAYOUTS[name]
    launches = 2 + (3 if layout in AT_ONCE else 0)
    seconds = launches * (LAUNCH_S + STEPS * STEP_S) + len(kills_of(layout)) * RECOVERY_S
    return Case("layout", name, seconds, layout.nproc, NEEDS.get(layout.script, ""))


def _scenario(name: str) -> Case:
    scenario = SCENARIOS[name]
    seconds = 2 * (LAUNCH_S + gpu_scenarios.STEPS * STEP_S) + len(scenario.victims) * RECOVERY_S
    return Case("scenario", name, seconds, scenario.layout.nproc, scenario.needs)


def _cost(ranks: int) -> Case:
    return Case("cost", f"overhead, {ranks} ranks", 4 * (LAUNCH_S + 60 * STEP_S), ranks)


def _changing(name: str) -> Case:
    return Case("changing", name, 2 * LAUNCH_S + 60 * STEP_S + 4 * RECOVERY_S, 4, gpu_elastic.NEEDS.get(name, ""))


def overhead_ranks(gpus: int) -> tuple[int, ...]:
    """Ranks that share a GPU take turns, which says nothing of a step."""
    return tuple(ranks for ranks in (1, 2, 8) if ranks <= gpus) or (2,)


def plan(cases: Sequence[Case], budget_s: float) -> str:
    """What fits into ``budget_s`` seconds, as far as estimates tell, and what does not."""
    lines, spent = [], 0.0
    for case in cases:
        what = f"needs {case.needs}" if not case.possible else ""
        if not what and spent + case.expected_s > budget_s:
            what = "left out, the time would be up"
        if not what:
            spent += case.expected_s
            what = f"{case.expected_s:3.0f} s"
        lines.append(f"{case.name:28} {what}")
    return "\n".join([*lines, f"{spent / 60:.1f} of {budget_s / 60:.1f} minutes"])


class Check:
    """What has been found so far, on ``gpus`` GPUs (0: over gloo, or with ``fake`` over the fake of NCCL).

    ``budget_s``: seconds for all of it. A case is left out that would take longer than what is left of them, as far as
    its estimate tells, and how those before it have kept to theirs."""

    def __init__(self, out: Path, gpus: int, job_s: float, budget_s: float, *, fake: bool = False) -> None:
        self.gpus = gpus
        self.left_out: list[str] = []
        self._until = time.monotonic() + budget_s
        self._expected_s = self._taken_s = 0.0
        self._out, self._job_s, self._fake = out, job_s, fake
        self._where = machine()
        self._results: list[Result] = []
        self._parts: list[PartResult] = []
        self._costs: list[Overhead | str] = []
        self._begun: dict[str, str] = {}
        if fake:
            fake_nccl.build()

    @property
    def good(self) -> bool:
        """Something was looked at, and all of it is as it should be."""
        bad = [r for r in self._results if r.found] or [p for p in self._parts if p.problem]
        bad_otherwise = any(isinstance(c, str) for c in self._costs) or any(self._begun.values())
        return bool(self._results or self._parts or self._begun) and not bad and not bad_otherwise

    def write(self) -> None:
        """The report, of what there is now."""
        text = markdown(self._results, self._where, self._parts, self._costs, self.left_out)
        (self._out / "report.md").write_text(text)
        found = {"machine": self._where, "parts": [asdict(p) for p in self._parts], "left_out": self.left_out}
        found["overhead"] = [asdict(c) if isinstance(c, Overhead) else c for c in self._costs]
        found["results"] = [asdict(r) for r in self._results]
        found["begun"] = self._begun
        (self._out / "report.json").write_text(json.dumps(found))

    def run(self, case: Case) -> str:
        """Do it, and say in a line what came of it."""
        if not case.possible:
            return f"left out, {case.needs} is not installed"
        expected_s = case.expected_s * max(self._taken_s, 1.0) / max(self._expected_s, 1.0)
        if time.monotonic() + expected_s > self._until:
            self.left_out.append(case.name)
            return f"left out, it would take {expected_s:.0f} s, and the time would be up"
        began = time.monotonic()
        said = self._run(case)
        self._taken_s += time.monotonic() - began
        self._expected_s += case.expected_s
        return said

    def begin(self, case: Case) -> str:
        """Only begin it. A part needs a GPU, and is a separate program, which says so."""
        if not case.possible:
            return f"left out, {case.needs} is not installed"
        if case.kind == "part":
            return "begins with a GPU only"
        began = time.monotonic()
        directory = self._out / case.name.replace(", ", "-").replace(" ", "-")
        directory.mkdir()
        problem = begin(self._start(case, directory / "killed"), self._job_s)
        self._begun[case.name] = problem
        return problem or f"begins ({time.monotonic() - began:.0f} s)"

    def _start(self, case: Case, run_dir: Path) -> RunningJob:
        wrapper = self._wrapper(case)
        if case.kind == "scenario":
            return gpu_scenarios.start(SCENARIOS[case.name], run_dir, wrapper)
        if case.kind == "changing":
            return gpu_elastic.start(case.name, run_dir, wrapper)
        if case.kind == "cost":
            return gpu_costs.start(run_dir, case.ranks, self._model)
        layout = LAYOUTS[case.name]
        return start(run_dir, layout, wrapper, kills_of(layout))

    def _run(self, case: Case) -> str:
        directory = self._out / case.name
        wrapper, job_s = self._wrapper(case), min(self._job_s, max(self._until - time.monotonic(), _LEAST_S))
        if case.kind == "part":
            self._parts.append(run_part(case.name))
            return self._parts[-1].problem or str(self._parts[-1].found)
        if case.kind == "cost":
            return self._cost(case.ranks)
        if case.kind == "layout":
            results = check(LAYOUTS[case.name], directory, wrapper, job_s)
        elif case.kind == "scenario":
            results = [check_scenario(case.name, directory, wrapper, job_s)]
        else:
            results = [check_changed(case.name, directory, wrapper, job_s)]
        self._results += results
        return "; ".join(map(verdict, results))

    def _wrapper(self, case: Case) -> Wrapper:
        return FAKE_NCCL if self._fake else on_gpus(self.gpus, case.ranks)

    @property
    def _model(self) -> list[str]:
        return REAL if self.gpus else SMALL[:5]

    def _cost(self, ranks: int) -> str:
        try:
            self._costs.append(gpu_costs.overhead(self._out / f"overhead{ranks}", ranks, self._model))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self._costs.append(f"{ranks} ranks: {error}")
        return str(self._costs[-1])


_LEAST_S = 60.0
"""A job that was begun has at least so long."""


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
