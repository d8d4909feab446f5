"""Jobs of the unmodified loop of a checkout of Megatron-LM (``tests/scripts/replan_megatron_lm.py``) that change their
parallel layout, and perhaps their number of replicas, and what they are compared with. What versions count is in
:mod:`tests.support.megatron_lm_loop`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_fired
from tests.support.megatron_lm_loop import (
    TIMEOUT_S,
    LoopTraining,
    check_experts_logged,
    evaluated,
    finished,
    in_force,
    logs_of,
    loop_environment,
    mean_loss,
)
from tests.support.replan import Course, Saved, Sizes, command, replanned
from tests.support.replan_elastic import Compared, Stage, check_stages

SCRIPT = ROOT / "tests" / "scripts" / "replan_megatron_lm.py"
SLOWLY = "--step-time=300"
AUTO: dict[str, Any] = {"parallelism": {"min": 1}}
"""Lost ranks are replaced; the layout changes by command."""
_LOGGED = re.compile(
    r" iteration +(\d+)/ +\d+ \| consumed samples: +(\d+) \|.*? learning rate: (\S+) .*?lm loss: (\S+)"
)
_LINE = re.compile(r" iteration +(\d+)/ +\d+ \| (.*)")
_NORM = re.compile(r"\b((?:grad|params) norm: \S+)")


@dataclass(frozen=True)
class Training(LoopTraining):
    """A layout at the launch, and what is trained how.

    Attributes:
        padding: the vocabulary (of 128) is padded to a multiple of that many rows for each tensor-parallel rank.
    """

    sizes: Sizes
    flags: tuple[str, ...] = ()
    padding: int = 64
    iterations: int = field(default=8, kw_only=True)

    def start(
        self,
        folder: Path,
        *flags: str,
        sizes: Sizes | None = None,
        config: Mapping[str, Any] | None = None,
        inject: Sequence[str] = (),
    ) -> RunningJob:
        sizes = sizes or self.sizes
        return RunningJob(
            folder,
            Layout("replan", "", nproc=sizes.ranks),
            standby=0,
            inject=inject,
            config={"parallelism": {"min": 1, "replace": "never"}} if config is None else config,
            script=SCRIPT,
            flags=[f"--steps={self.iterations}", *self.arguments(sizes), *flags],
            env=loop_environment(),
        )

    def arguments(self, sizes: Sizes) -> list[str]:
        """Megatron's."""
        padding = f"--make-vocab-size-divisible-by={self.padding}"
        more = ["--sequence-parallel"] if self.experts and sizes.tp > 1 else []  # which Megatron needs
        return [*self.common_flags(), *sizes.flags, padding, *self.flags, *more]


@dataclass(frozen=True)
class Virtual(Training):
    """With two virtual stages on a rank, in layouts of which it is known here that they can have them."""

    def arguments(self, sizes: Sizes) -> list[str]:
        fits = sizes.pp == 2 and self.batch // 2 // sizes.dp % sizes.pp == 0
        virtual = ["--num-virtual-stages-per-pipeline-rank=2"] if fits else []
        return [*super().arguments(sizes), "--num-layers=4", *virtual]


def check_goes_on(job: Job, training: Training, saved: Saved, changes: Sequence[tuple[int, Sizes]]) -> None:
    """The job has changed its layout so, from which calls on; see :func:`check_loop`."""
    assert replanned(job) == list(changes), job.explain()
    # Of several before one call only the last one has taken it.
    check_loop(job, training, saved, [Stage(call, sizes, restarted=True) for call, sizes in dict(changes).items()])


def started(training: Training, folder: Path) -> RunningJob:
    """A slow job whose first step has begun."""
    running = training.start(folder, SLOWLY, config=AUTO)
    running.wait_for("job_started", TIMEOUT_S)
    return running


def check_on_command(training: Training, sizes: Sizes, kind: str, folder: Path, saved: Saved) -> None:
    """Before the call of this kind in iteration 3."""
    running = started(training, folder)
    at = training.call(kind, 3)
    assert command(running, sizes, at) == ""
    job = running.wait(TIMEOUT_S)
    check_goes_on(job, training, saved, [(at, sizes)])
    assert not job.of("failure_detected"), job.explain()


def check_killed(training: Training, victim: int, phase: str, at: int, folder: Path, saved: Saved) -> None:
    """This rank is killed in this phase of this call, and is not replaced."""
    job = training.start(folder, inject=[f"rank={victim},fault=sigkill,at={phase},step={at}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_changed_around(job, training, saved, at)


def check_changed_around(job: Job, training: Training, saved: Saved, at: int) -> None:
    """It has changed once, before or after the call of the fault, to a layout of fewer ranks."""
    assert job.code == 0, job.explain()
    (event,) = job.of("job_replanned")
    assert event["step"] in (at - 1, at, at + 1) and 1 <= event["ranks"] < training.sizes.ranks, job.explain()
    assert event["bytes"] > 0 and not job.of("fallback_started"), job.explain()
    check_goes_on(job, training, saved, replanned(job))


def check_loop(job: Job, training: Training, saved: Saved, expected: Sequence[Stage]) -> None:
    """The job has gone through these stages (from which calls on), and each of them is, bit for bit, a job that was
    started so from that iteration's state: losses of each rank and iteration, the whole state, and evaluations. What
    Megatron logs is that of an undisturbed job, but for the means of the losses that its iterations have had."""
    finished(job)
    compared = check_stages(job, training, saved, expected, alike=training.padding == 64)
    why = job.explain()
    layouts = [(0, training.sizes), *((training.iteration(stage.step), stage.sizes) for stage in expected)]
    check_logged(job, compared[0].job, training, layouts, why)
    check_experts_logged(job, training, [(number, str(sizes)) for number, sizes in layouts])
    check_norms_logged(job, training, compared, why)
    calls = [0, *(stage.step for stage in expected), len(training.calls)]
    sizes = [training.sizes, *(stage.sizes for stage in expected)]
    for first, until, there in zip(calls, calls[1:], sizes, strict=False):
        for number in {n for kind, n in training.calls[first:until] if kind == "evaluate"}:
            _check_evaluated(job, number, there, compared, why)


def _check_evaluated(job: Job, number: int, sizes: Sizes, compared: Sequence[Compared], why: str) -> None:
    """What the evaluation after iteration ``number`` has found in these sizes."""
    found = {at: losses for at, losses in evaluated(job).items() if at[0] == number and at[2] == str(sizes)}
    part = next(part for part in compared if part.first <= number < part.until)
    known = {at: losses for at, losses in evaluated(part.job).items() if at[0] == number}
    if part.sizes == sizes:
        assert found == known and len(found) == sizes.ranks, f"evaluation {number}: {found}, and {known}\n{why}"
        return
    # The same samples as in the layout in which the iteration was computed: sums have another order.
    ours, theirs = (
        [float.fromhex(text.split("'")[3]) for text in results[number, s.ranks - 1, str(s)]]
        for results, s in ((found, sizes), (known, part.sizes))
    )
    assert ours == pytest.approx(theirs, rel=1e-5), f"evaluation {number}: {ours}, and {theirs}\n{why}"


def logged(job: Job) -> dict[int, set[tuple[str, ...]]]:
    """What Megatron has logged of each iteration: consumed samples, learning rate, loss."""
    found: dict[int, set[tuple[str, ...]]] = defaultdict(set)
    for log in job.run_dir.rglob("rank*.log"):
        for number, *rest in _LOGGED.findall(log.read_text()):
            found[int(number) - 1].add(tuple(rest))
    return found


def check_logged(job: Job, other: Job, training: Training, layouts: Sequence[tuple[int, Sizes]], why: str) -> None:
    """Megatron has logged consumed samples and learning rate as of the undisturbed job ``other``, and the means of the
    losses that the iterations since the log before have had, in whatever layout. ``layouts``: from which iteration on
    the job has had which."""
    mine, theirs, losses = logged(job), logged(other), Course.of(job).losses

    def loss(number: int) -> str:
        sizes = in_force(layouts, number)
        (found,) = losses[number, sizes.ranks - 1, str(sizes)]
        return found

    for number, shown in logs_of(training, loss):
        ((samples, rate, _),) = theirs[number]
        line = samples, rate, mean_loss(shown)
        assert line in mine[number], f"iteration {number}: {mine[number]}, and not {line}\n{why}"


def norms(job: Job) -> dict[int, set[tuple[str, ...]]]:
    """What Megatron has logged of the norms of gradients and parameters in each iteration."""
    found: dict[int, set[tuple[str, ...]]] = defaultdict(set)
    for log in job.run_dir.rglob("rank*.log"):
        for number, line in _LINE.findall(log.read_text()):
            found[int(number) - 1].add(tuple(_NORM.findall(line)))
    return found


def check_norms_logged(job: Job, training: Training, compared: Sequence[Compared], why: str) -> None:
    """Those of each iteration are of the sizes in which it was computed."""
    mine, of_parts = norms(job), [(part.first, norms(part.job)) for part in compared]
    for number, _ in logs_of(training, int):
        known = in_force(of_parts, number)[number]
        assert len(known) == 1 and all(known), f"iteration {number}: {known}\n{why}"
        assert known <= mine[number], f"iteration {number}: {mine[number]}, and not {known}\n{why}"


def named(training: Training, name: str, **changes: Any) -> Training:
    """Another training like this one."""
    return replace(training, name=f"{training}-{name}", **changes)
