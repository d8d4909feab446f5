"""Processor time of the training thread in a step, with recovery on (``flashrecovery run``) and off (``torchrun``).

What the hooks take must not grow with the number of parameters, so the models are many small ones: residual layers of
width 32 (``megatron``: its own small transformer). Two ranks; both launches of a pair run the same script, turn by
turn. Processor time of one thread hardly depends on what else the machine does. A launch counts with the median of its
steps after the warm-up. The ranks compare more in each 64th step: that shows in the mean of the time in the hooks.

Two launches differ by some percent of a step, also with recovery off. So the processor time within the hooks is
measured, too. It leaves out what PyTorch takes to call them, and what the process groups add.

``--profile`` has rank 0 run its steps under cProfile, which makes them slower, and names what costs: the hooks, by the
time until they return to what is not ours, and our functions, by their own time.

``--allocations`` asks how much of it training would pay anyway: glibc sorts the small blocks that a backward pass has
freed when the next large one is wanted, in a hook or later. Without our packages, every second step encodes ``None``
where the hooks encode the rank's own state: what that takes by itself, and what it adds to a step.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import itertools
import json
import os
import pickle
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import harness
from flashrecovery.worker.control.overhead import Overhead
from peers import megatron_gpt, ours
from workload import Job

LAYOUTS = ("ddp", "fsdp2", "zero2", "zero3", "megatron")
WORLD = 2
WIDTH = 32
UNIT = 10
"""Layers that FSDP2 gathers at once."""
OF_MEGATRON_LAYER = 12
"""Parameters of one layer of megatron-core's transformer."""
WARM_UP = 20
GOAL = 1.02
GOAL_MS, GOAL_PARAMETERS = 0.5, 1200
SHOWN = 12
PROFILE = "FLASHRECOVERY_BENCH_PROFILE"
"""The file for the profile of rank 0."""
ALLOCATIONS = "FLASHRECOVERY_BENCH_ALLOCATIONS"
"""Set where every second step encodes ``None``."""


@dataclass(frozen=True)
class Result:
    """Of one launch: the median of rank 0's steps, processor time of the thread that trains, seconds. ``in_hooks_s``:
    of it within the hooks; 0 with recovery off. ``mean_in_hooks_s``: the mean of these steps, not the median."""

    step_s: float
    in_hooks_s: float
    mean_in_hooks_s: float


# -- the script that is measured -------------------------------------------------------------------


class Layer(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + 0.01 * torch.relu(self.linear(x))
        return y


def build(parameters: int) -> nn.Sequential:
    """``parameters`` of them, in units."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(parameters // 2)]
    return nn.Sequential(*(nn.Sequential(*layers[i : i + UNIT]) for i in range(0, len(layers), UNIT)))


def wrapped(model: nn.Sequential, layout: str) -> nn.Module:
    """In the layout of plain PyTorch."""
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    return model


def train(job: Job, parameters: int) -> None:
    """The loop of plain PyTorch."""
    import flashrecovery

    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    model = wrapped(build(parameters), job.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recovery.register(model=model, optimizer=optimizer)
    x = torch.ones(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    measure(job, recovery.steps(job.steps), step)


def train_with_allocations(job: Job, parameters: int) -> None:
    """The loop of plain PyTorch without our packages. Rank 0 writes down the processor time of each step, and that of
    what every second one encodes, seconds."""
    dist.init_process_group("gloo")
    model = wrapped(build(parameters), job.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(4, WIDTH)
    encodes, spent_s = False, 0.0

    def encode(*_: object) -> None:
        nonlocal spent_s
        if encodes:
            before = time.thread_time()
            pickle.Pickler(io.BytesIO()).dump(None)
            spent_s += time.thread_time() - before

    model.register_forward_pre_hook(encode)
    optimizer.register_step_pre_hook(encode)
    optimizer.register_step_post_hook(encode)
    times = []
    for index in range(job.steps):
        encodes, spent_s = index % 2 == 1, 0.0
        before = time.thread_time()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        times.append((time.thread_time() - before, spent_s))
    if dist.get_rank() == 0:
        Path(job.directory, "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def train_deepspeed(job: Job, parameters: int) -> None:
    """The loop of DeepSpeed."""
    import deepspeed

    import fr_deepspeed  # noqa: F401 - engine.recovery, also where it is off

    deepspeed.init_distributed("gloo")
    model = build(parameters)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(job.layout[-1])},
        "flash_recovery": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    measure(job, engine.recovery.steps(job.steps), step)


def train_megatron(job: Job) -> None:
    """The loop of megatron-core, with its distributed optimizer."""
    training = megatron_gpt.Training(job)
    import fr_megatron

    recovery = fr_megatron.attach(training.chunks, training.optimizer, training.scheduler)
    batches = recovery.data(training.loader)
    measure(job, recovery.steps(job.steps), lambda: training.step(next(batches)))


def measure(job: Job, steps: Iterable[Any], step: Callable[[], None]) -> None:
    """Train, and write down the thread's processor time at each hand-out, and that within the hooks until then."""
    times = []
    hooks = HookTime()
    profile = cProfile.Profile() if os.environ.get(PROFILE) and dist.get_rank() == 0 else None
    for context in steps:
        times.append((time.thread_time(), hooks.spent_s))
        if profile is not None and context.index == WARM_UP:
            profile.enable()
        with context:
            step()
    if profile is not None:
        profile.disable()
        profile.dump_stats(os.environ[PROFILE])
    if dist.get_rank() == 0:
        Path(job.directory, "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


class HookTime:
    """Measures what the thread that trains spends in the hooks, from now on. Seconds."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0
        self._since = 0.0
        overhead: Any = Overhead
        enter, leave = overhead.__enter__, overhead.__exit__

        def entered(one: Overhead) -> None:
            if not self._depth:
                self._since = time.thread_time()
            self._depth += 1
            enter(one)

        def left(one: Overhead, *error: object) -> None:
            leave(one, *error)
            self._depth -= 1
            if not self._depth:
                self.spent_s += time.thread_time() - self._since

        overhead.__enter__, overhead.__exit__ = entered, left


def worker() -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    job = Job.from_env()
    if ALLOCATIONS in os.environ:
        train_with_allocations(job, 2 * job.layers)
    elif job.layout == megatron_gpt.DISTRIBUTED:
        train_megatron(job)
    elif job.layout.startswith("zero"):
        train_deepspeed(job, 2 * job.layers)
    else:
        train(job, 2 * job.layers)


# -- launches ---------------------------------------------------------------------------------------


def job_of(layout: str, parameters: int, steps: int, directory: Path) -> Job:
    """One launch. Of plain layers each has two parameters."""
    if layout == "megatron":
        layers = max(1, parameters // OF_MEGATRON_LAYER)
        job = Job(str(directory), WORLD, steps, layers=layers, width=WIDTH, context=16, batch_size=1)
        return job.with_layout(megatron_gpt.DISTRIBUTED)
    return Job(str(directory), WORLD, steps, layers=parameters // 2, layout=layout)


def launch(job: Job, on: bool, **variables: str) -> list[tuple[float, float]]:
    """What rank 0 has written down, without the steps of the warm-up. ``variables``: of the environment. Raises
    RuntimeError if the launch fails."""
    run = harness.Launch(Path(job.directory) / "output.log")
    extra = megatron_gpt.ENVIRONMENT if job.layout == megatron_gpt.DISTRIBUTED else {"DS_ACCELERATOR": "cpu"}
    extra = {**extra, **variables}
    if on:
        ours.start(job, run, 0, __file__, **extra)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", __file__]
        run.start(command, **extra, **job.to_env())
    try:
        if run.processes[0].wait(600) != 0:
            raise RuntimeError(f"{job.layout}, recovery {'on' if on else 'off'}\n{run.tail(30)}")
    finally:
        run.stop()
    times: list[tuple[float, float]] = json.loads(Path(job.directory, "times.json").read_text())[WARM_UP:]
    return times


def measured(job: Job, on: bool) -> Result:
    """The medians of one launch."""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(launch(job, on))]
    times = [step for step, _ in steps]
    hooks = [within for _, within in steps]
    return Result(statistics.median(times), statistics.median(hooks), statistics.mean(hooks))


def allocations(layout: str, parameters: int, steps: int) -> list[str]:
    """A row: what the encoding takes by itself, and what it adds to a step. A tenth of the differences at either end
    is left out; after the sign, the standard error."""
    with harness.job_directory() as directory:
        times = launch(job_of(layout, parameters, steps, directory), False, **{ALLOCATIONS: "1"})
    pairs = list(zip(times[::2], times[1::2], strict=False))
    more = sorted(encoding - plain for (plain, _), (encoding, _) in pairs)
    kept = more[len(more) // 10 : len(more) - len(more) // 10]
    error = statistics.stdev(kept) / len(kept) ** 0.5
    alone = statistics.median(spent for _, (_, spent) in pairs)
    added = f"{statistics.mean(kept) * 1e3:+.2f} ± {error * 1e3:.2f}"
    return [layout, str(parameters), f"{alone * 1e3:.2f}", added]


def compare(layout: str, parameters: int, pairs: int, steps: int) -> tuple[list[str], bool]:
    """A row of the table, and whether the goals are met."""
    ons: list[float] = []
    offs: list[float] = []
    hooks: list[float] = []
    means: list[float] = []
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            with harness.job_directory() as directory:
                result = measured(job_of(layout, parameters, steps, directory), on)
            (ons if on else offs).append(result.step_s)
            if on:
                hooks.append(result.in_hooks_s)
                means.append(result.mean_in_hooks_s)
        columns = (("on", ons), ("off", offs), ("in the hooks", hooks), ("their mean", means))
        shown = ", ".join(f"{name} {values[-1] * 1e3:.2f}" for name, values in columns)
        print(f"  {layout} {parameters}: {shown} ms", flush=True)
    ratio = statistics.median(on / off for on, off in zip(ons, offs, strict=True))
    more_ms = statistics.median(on - off for on, off in zip(ons, offs, strict=True)) * 1e3
    met = ratio <= GOAL and (parameters > GOAL_PARAMETERS or more_ms <= GOAL_MS)
    return [
        layout,
        str(parameters),
        harness.spread(ons, 1e3),
        harness.spread(offs, 1e3),
        f"{ratio:.3f}",
        f"{more_ms:+.2f}",
        harness.spread(hooks, 1e3),
        harness.spread(means, 1e3),
        "met" if met else "NOT MET",
    ], met


# -- the profile ------------------------------------------------------------------------------------

Function = tuple[str, int, str]


def is_ours(function: Function) -> bool:
    """Whether it is a function of these packages."""
    return any(f"/{package}/" in function[0] for package in ("flashrecovery", "fr_deepspeed", "fr_megatron"))


def named(function: Function) -> str:
    """For a table."""
    path, line, name = function
    parts = Path(path).parts
    return f"{'/'.join(parts[-2:])}:{line} {name}"


def show_profile(path: Path, steps: int) -> None:
    """Two tables, milliseconds a step."""
    found: Mapping[Function, Any] = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
    of_hook: dict[Function, tuple[float, float]] = {}
    own: dict[Function, tuple[float, float]] = {}
    for function, (_, calls, own_s, _, callers) in found.items():
        if not is_ours(function):
            continue
        own[function] = (own_s, calls)
        outside = [entry for caller, entry in callers.items() if not is_ours(caller)]
        if outside:
            of_hook[function] = (sum(entry[3] for entry in outside), sum(entry[1] for entry in outside))
    for title, times in (("hooks, until they return", of_hook), ("functions, themselves", own)):
        most = sorted(times.items(), key=lambda item: -item[1][0])[:SHOWN]
        rows = [(named(f), f"{s / steps * 1e3:.3f}", f"{calls / steps:.1f}") for f, (s, calls) in most]
        harness.table(f"Profile of rank 0: {title}", (title, "ms a step", "calls a step"), rows)


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="one pair of 60 steps, 1,200 parameters")
    flags.add_argument("--pairs", type=int, default=3, help="pairs of launches")
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--layouts", default=",".join(LAYOUTS))
    flags.add_argument("--parameters", default="50,200,1200,5000")
    flags.add_argument("--profile", action="store_true", help="what costs, instead of how much")
    flags.add_argument("--allocations", action="store_true", help="what training pays with and without the hooks")
    args = flags.parse_args()
    if args.allocations and set(args.layouts.split(",")) - {"ddp", "fsdp2"}:
        flags.error(f"--allocations measures ddp and fsdp2, not {args.layouts}")
    pairs, steps = (1, 60) if args.quick else (args.pairs, args.steps)
    sizes = [int(size) for size in ("1200" if args.quick else args.parameters).split(",")]
    harness.begin()
    rows, all_met = [], True
    for layout in args.layouts.split(","):
        for parameters in sizes:
            if args.profile:
                with harness.job_directory() as directory:
                    print(f"{layout}, {parameters} parameters", flush=True)
                    profile = directory / "profile"
                    launch(job_of(layout, parameters, steps, directory), True, **{PROFILE: str(profile)})
                    show_profile(profile, steps - WARM_UP)
                continue
            if args.allocations:
                rows.append(allocations(layout, parameters, steps))
                continue
            row, met = compare(layout, parameters, pairs, steps)
            rows.append(row)
            all_met = all_met and met
    if args.allocations:
        head = ("layout", "parameters", "by itself, ms", "more in a step, ms")
        harness.table("Encoding None three times a step, processor time of the training thread", head, rows)
    elif rows:
        titles = ("layout", "parameters", "on, ms", "off, ms", "ratio", "more, ms", "in the hooks, ms", "mean", "goal")
        harness.table(f"Processor time of the training thread a step, {WORLD} ranks", titles, rows)
    sys.exit(0 if all_met else 1)


if __name__ == "__main__":
    if harness.JOB_ENV in os.environ:
        worker()
    else:
        main()
