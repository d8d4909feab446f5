"""Options of Hugging Face's Trainer, in a script without a line of ours, by ``--auto``: killed, it ends with the state
that it has without protection, and has logged the same; or it is refused by name before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, check_fired, check_recovered, check_same, run_job
from tests.support.sameness import Printed

skip_module_without("transformers", "accelerate")

SCRIPT = ROOT / "tests" / "scripts" / "trainer_unmodified.py"
TIMEOUT_S = 300
STEPS = (0, "forward", 0), (1, "backward", 3), (0, "optimizer", 7), (1, "commit", 11)
BEGUN = (0, "forward", 0), (0, "forward", 1), (1, "backward", 4), (0, "optimizer", 8)
"""An evaluation comes first."""
EVALUATED = (0, "forward", 0), (1, "backward", 4), (0, "commit", 5), (1, "forward", 11)
"""In an evaluation, too, and in the third epoch."""
COMPILED = (0, "commit", 0), (1, "commit", 3), (0, "optimizer", 7), (1, "commit", 11)
"""A drill can miss the forward and the backward pass of what Dynamo has compiled."""
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[tuple[int, str, int], ...]]] = {
    "order": ((), {"train_sampling_strategy": "group_by_length", "eval_on_start": True}, BEGUN),
    "loss": (
        (),
        {"average_tokens_across_devices": True, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0},
        STEPS,
    ),
    "best": (("--best",), {"save_strategy": "best", "metric_for_best_model": "loss"}, STEPS),
    "compiled": ((), {"torch_compile": True, "torch_compile_backend": "aot_eager"}, COMPILED),
    "split": ((), {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}, STEPS),
    "workers": ((), {"dataloader_num_workers": 2}, STEPS),
    "persistent": ((), {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}, EVALUATED),
    "memory": (
        (),
        {
            "torch_empty_cache_steps": 2,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
        STEPS,
    ),
}
"""Flags of the script, more of TrainingArguments, and which rank is killed in which call."""


def each(first: int, last: int) -> tuple[tuple[int, str, int], ...]:
    """In each of these calls one rank is killed, and the other one in the next: a replacement has the state alone."""
    return tuple((call % 2, "commit", call) for call in range(first, last + 1))


STOPPED: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[tuple[int, str, int], ...]]] = {
    "early": (
        ("--patience", "1", "--best"),
        {"metric_for_best_model": "counted", "batch_eval_metrics": True},
        each(6, 12),
    ),
    "step": (("--after", "on_step_end"), {}, each(8, 12)),
    "step-best": (("--after", "on_step_end", "--best"), {}, each(8, 13)),
    "optimizer": (("--after", "on_pre_optimizer_step"), {}, each(8, 12)),
    "log": (("--after", "on_log"), {}, each(7, 11)),
    "evaluation": (("--after", "on_evaluate", "--best"), {}, each(7, 12)),
    "save": (("--after", "on_save"), {}, each(7, 11)),
    "epoch": (("--after", "on_epoch_end", "--lines", "2", "--best"), {}, each(4, 9)),
    "last-epoch": (
        ("--after", "on_step_end", "--lines", "4", "--decides", "should_epoch_stop", "--best", "--steps", "12"),
        {},
        each(11, 16),
    ),
    "fsdp": (("--by", "fsdp", "--after", "on_evaluate", "--best"), {}, each(7, 12)),
    "zero2": (("--by", "deepspeed", "--after", "on_evaluate"), {}, each(7, 11)),
}
"""As above. A callback decides when three lines have been logged (``early``: by a metric): in the log of step 6, which
is call 8, or a step later. The count of operations follows, the best model's load, ``save_model()``, ``evaluate()``."""

pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S)]


def run(path: Path, flags: tuple[str, ...], more: dict[str, Any], **kwargs: Any) -> Job:
    flags = ("--by", "ddp", *flags, "--set", json.dumps(more), "--output", str(path.parent / f"{path.name}-output"))
    return run_job(path, Layout("ddp", "", nproc=2), script=SCRIPT, flags=flags, timeout_s=TIMEOUT_S, **kwargs)


def check(path: Path, flags: tuple[str, ...], more: dict[str, Any], kills: tuple[tuple[int, str, int], ...]) -> None:
    reference = run(path / "reference", (*flags, "--off"), more, standby=0)
    job = run(path / "run", flags, more, inject=faults(*kills), options=[] if "deepspeed" in flags else ["--auto"])
    check_fired(job, len(kills))
    check_same(job, reference, printed=Printed.LOGS)
    check_recovered(job, (0, 1))


@pytest.mark.grid
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, tmp_path: Path) -> None:
    check(tmp_path, *OPTIONS[name])


@pytest.mark.parametrize(
    "name", [name if name == "early" else pytest.param(name, marks=pytest.mark.grid) for name in STOPPED]
)
def test_stopped_before_the_last_step(name: str, tmp_path: Path) -> None:
    """A replacement stops where the dead process did, whatever has decided that."""
    flags, more, kills = STOPPED[name]
    check(tmp_path, ("--save", "2", "--steps", "20", *flags), more, kills)


@pytest.mark.grid
def test_what_a_replacement_cannot_know_ends_the_job_by_name(tmp_path: Path) -> None:
    """Evaluations are decided by what a callback keeps, between the calls."""
    flags = ("--save", "2", "--steps", "20", "--after", "on_step_end", "--decides", "should_evaluate")
    job = run(tmp_path / "run", flags, {}, inject=faults((1, "commit", 14)), options=["--auto"])
    assert job.code != 0 and "what has decided when to evaluate, to save or to stop" in job.output, job.explain()
    assert "digest rank=" not in job.output, job.explain()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "more", "said"),
    [
        pytest.param((), {"auto_find_batch_size": True}, "find the size in a job without recovery", id="batch-size"),
        pytest.param(("--stream",), {}, "a train_dataset without a length", id="stream"),
        pytest.param(
            ("--after", "on_step_begin", "--lines", "0"), {}, "amid the micro-batches of a step", id="amid-a-step"
        ),
        pytest.param(
            (), {"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches = False", id="dispatched"
        ),
    ],
)
def test_others_are_refused_before_the_first_step(
    flags: tuple[str, ...], more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    job = run(tmp_path / "run", flags, more, standby=0, options=["--auto"])
    assert job.code != 0 and said in job.output and "loss_hex" not in job.output, job.explain()
