"""The conformance grid with DeepSpeed: whatever fails, wherever, the job ends exactly as if nothing had happened.

Gradient accumulation over two micro-batches, dropout, shuffled data, gradient clipping, a warming-up learning rate.
A job of :func:`test_every_phase` has one fault in each phase, every second step; three jobs, between which the victims
rotate, are the whole product of phases and victims of one layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashrecovery.config import PHASES
from tests.support.faults import faults, in_every_phase
from tests.support.installed import skip_module_without
from tests.support.jobs import (
    ROOT,
    SMALL,
    Job,
    Layout,
    References,
    RunningJob,
    check_clean,
    check_fired,
    check_recovered,
    check_same,
    run_job,
)

skip_module_without("deepspeed")

STEPS = 22
SCRIPT = "train_deepspeed.py"
FP16_SCRIPT = ROOT / "tests" / "scripts" / "deepspeed_fp16.py"
NO_RESET_SCRIPT = ROOT / "tests" / "scripts" / "deepspeed_no_reset.py"
VICTIMS = (0, 2, 3)  # the first, a middle and the last rank
CONFIG = {"timeouts": {"stopped_s": 0.3}}
TIMEOUT_S = 400  # four processes that import deepspeed on two busy cores, three times
PLAIN_STATE_BYTES = 4096
"""Counters, hyper-parameters and the scheduler, which travel with what is lost."""
OVERFLOWS = (0, 1, 2, 7, 12)
"""Steps that the fp16 example skips: its first scale is too high, and it grows again and again."""


def zero(stage: int, name: str = "", *flags: str) -> Layout:
    """One layout of the example."""
    return Layout(f"zero{stage}{name}", SCRIPT, ("--zero", str(stage), *flags))


def setting(key: str, value: str) -> tuple[str, str]:
    """A flag that sets a key of ``zero_optimization``."""
    return "--set", f"zero_optimization.{key}={value}"


FUSED = ("--set", 'optimizer.type="Adam"', "--set", "optimizer.params.torch_adam=false")
"""DeepSpeed's own Adam, which it takes by default. On a CPU it keeps the powers of its betas in C++."""
OFFLOAD = setting("offload_optimizer", '{"device": "cpu"}')
FP32 = ("--precision", "fp32")
PIPELINE = ("--pipeline", "2")  # two stages by two data-parallel ranks
ZERO0, ZERO1, ZERO2, ZERO3 = (zero(stage) for stage in range(4))
ZERO0_FP32 = zero(0, "-fp32", *FP32)
PIPELINE1 = zero(1, "-pipeline", *PIPELINE)
EXPERTS = ("--moe", "4")  # of each layer, shared by two ranks, with two replicas
MOE0, MOE1, MOE2 = (zero(stage, "-moe", *EXPERTS) for stage in range(3))
OFFLOAD2 = zero(2, "-offload-overlap", *OFFLOAD, *setting("overlap_comm", "true"))
LAYOUTS = (ZERO0_FP32, ZERO0, ZERO1, ZERO2, ZERO3, PIPELINE1, MOE0, MOE1, MOE2)
VARIANTS = (
    zero(
        2,
        "-overlap-round-robin",
        *setting("overlap_comm", "true"),
        *setting("round_robin_gradients", "true"),
        *("--tie-head", "--num-workers", "1"),
    ),
    zero(
        2,
        "-fp32-no-norm",
        *FP32,
        *setting("contiguous_gradients", "false"),
        *setting("reduce_scatter", "false"),
        *setting("compute_grad_norm", "false"),
        *("--set", "gradient_clipping=0"),
    ),
    zero(1, "-fp32-overlap", *FP32, *setting("overlap_comm", "true")),
    zero(
        3,
        "-overlap-sub-groups",
        *setting("overlap_comm", "true"),
        *setting("sub_group_size", "5000"),
        *setting("stage3_param_persistence_threshold", "0"),
        "--tie-head",
    ),
    zero(3, "-fp32-all-reduce", *FP32, *setting("reduce_scatter", "false")),
    zero(1, "-offload", *OFFLOAD),
    OFFLOAD2,
    zero(3, "-offload", *OFFLOAD, *setting("sub_group_size", "5000")),
    zero(0, "-moe-fp32", *EXPERTS, *FP32),
    zero(2, "-moe-one-replica", "--moe", "4", "--expert-parallel", "4"),
    zero(3, "-hpz", *setting("zero_hpz_partition_size", "2"), *setting("stage3_param_persistence_threshold", "0")),
    zero(0, "-pipeline-fp32", *PIPELINE, *FP32),
    zero(0, "-fp32-fused-adam", *FP32, *FUSED),
    zero(0, "-pipeline-fp32-fused-adam", *PIPELINE, *FP32, *FUSED),
    zero(2, "-fused-adam", *FUSED),
    zero(3, "-fused-adam", *FUSED, *setting("sub_group_size", "5000")),
)
FP16 = tuple(zero(stage, "-fp16", "--precision", "fp16") for stage in range(4))

Run = Callable[..., Job]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    """The same launch without a fault, once a layout."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: _run(path, layout, standby=0))


def _run(run_dir: Path, layout: Layout, **kwargs: Any) -> Job:
    """Run the example; fp16 through the script that lifts DeepSpeed's refusal of it on CPUs."""
    if "fp16" in layout.flags:
        kwargs |= {"script": FP16_SCRIPT, "flags": [*SMALL, "--steps", str(STEPS), *layout.flags]}
    return run_job(run_dir, layout, steps=STEPS, timeout_s=TIMEOUT_S, **kwargs)


def _replicated(layout: Layout) -> bool:
    return layout.flags[:2] == ("--zero", "0")


def _phases(layout: Layout) -> list[str]:
    return [p for p in PHASES if p != "param-gather" or not _replicated(layout)]


QUICK = {(ZERO2, 0)}
"""Layouts and rotations that the fast suite contains."""


def _grid() -> Iterator[object]:
    for layout in LAYOUTS:
        for rotation in range(len(VICTIMS)):
            marks = () if (layout, rotation) in QUICK else (pytest.mark.grid,)
            yield pytest.param(layout, "sigkill", rotation, id=f"{layout.name}-sigkill-{rotation}", marks=marks)
    for layout in (ZERO1, ZERO2, ZERO3, PIPELINE1):
        for fault in ("sigstop", "raise"):
            yield pytest.param(layout, fault, 0, id=f"{layout.name}-{fault}", marks=pytest.mark.grid)


pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(3 * TIMEOUT_S)]


@pytest.mark.parametrize(("layout", "fault", "rotation"), _grid())
def test_every_phase(
    layout: Layout, fault: str, rotation: int, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    inject = in_every_phase(_phases(layout), VICTIMS, rotation, fault)
    job = _run(tmp_path / "run", layout, standby=1, inject=inject, config=CONFIG)
    check_same(job, reference(layout))
    check_fired(job, len(inject))
    check_recovered(job, VICTIMS)


@pytest.mark.grid
@pytest.mark.parametrize("layout", VARIANTS, ids=lambda layout: layout.name)
def test_settings(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    last = "commit" if _replicated(layout) else "param-gather"
    inject = faults((0, "backward", 3), (2, "optimizer", 6), (3, last, 9))
    job = _run(tmp_path / "run", layout, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, len(inject))


@pytest.mark.grid
@pytest.mark.parametrize("layout", FP16, ids=lambda layout: layout.name)
def test_dynamic_loss_scale(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """Deaths in steps that overflow (nothing is mutated but the scale) and in others."""
    first, second, third = OVERFLOWS[1], OVERFLOWS[3], OVERFLOWS[4]
    inject = faults((0, "commit", first), (2, "optimizer", 4), (3, "backward", second), (1, "grad-sync", third))
    job = _run(tmp_path / "run", layout, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, len(inject))


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_first_and_last_step(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    inject = faults((1, "backward", 0), (2, "optimizer", STEPS - 1))
    job = _run(tmp_path / "run", layout, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, 2)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("layout", "victims"),
    [(ZERO0, (0, 1)), (ZERO2, (0, 2)), (ZERO3, (1, 3))],
    ids=["zero0-0-1", "zero2-0-2", "zero3-1-3"],
)
def test_victims_at_once(
    layout: Layout, victims: tuple[int, ...], tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """Replicas survive any two; partitions survive two that do not hold each other's copies."""
    inject = faults(*((rank, "backward", 5) for rank in victims))
    job = _run(tmp_path / "run", layout, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, len(victims))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(x, id=x.name, marks=pytest.mark.grid)
        for x in (ZERO1, ZERO2, ZERO3, zero(3, "-fp32", *FP32), PIPELINE1, MOE1, OFFLOAD2)
    ],
)
def test_a_rank_and_its_neighbour_at_once_go_back_to_the_checkpoint(layout: Layout, tmp_path: Path) -> None:
    checkpoint = json.dumps({"dir": str(tmp_path / "ckpt"), "interval_s": 0.7})
    flags = ["--step-time", "60"]
    reference = run_job(tmp_path / "reference", layout, steps=60, standby=0, flags=flags, timeout_s=TIMEOUT_S)
    flags += ["--set", f"flash_recovery.checkpoint={checkpoint}"]
    running = RunningJob(tmp_path / "run", layout, steps=60, standby=2, flags=flags, options=["--snapshots", "never"])
    saved = running.wait_for("checkpoint_saved", TIMEOUT_S)
    running.kill(1, 2)
    job = running.wait(TIMEOUT_S)
    check_same(job, reference)
    (fallback,) = job.of("fallback_started")
    assert saved["version"] <= fallback["version"] < 60
    _check_readable(tmp_path / "ckpt", layout)


def _check_readable(directory: Path, layout: Layout) -> None:
    """DeepSpeed's own tool makes whole fp32 weights of the newest checkpoint."""
    tag = (directory / "latest").read_text()
    assert list((directory / tag).glob("*model_states.pt"))
    if "--pipeline" in layout.flags:
        return
    if "--moe" in layout.flags:  # that tool takes the experts' files for models, no matter who saved them
        experts = list((directory / tag).glob("layer_*_expert_*_model_states.pt"))
        assert len(experts) == 4 and all(torch.load(path, weights_only=True) for path in experts)
        return
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag)
    assert sum(w.numel() for w in weights.values()) > 10_000
    assert all(bool(w.isfinite().all()) for w in weights.values())


@pytest.mark.grid
@pytest.mark.parametrize("layout", [ZERO1, ZERO2], ids=lambda layout: layout.name)
def test_only_what_is_lost_is_moved(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    without = ("--snapshots", "never")
    job = _run(tmp_path / "run", layout, standby=1, inject=faults((1, "backward", 5)), options=without)
    check_same(job, reference(layout))
    (moved,) = [e["bytes"] for e in job.of("recovery_finished")]
    computed = _lost_bytes(layout.nproc)
    print(f"{layout.name}: {moved:,} bytes moved, {computed:,} computed, the rest is plain state")
    assert 0 < moved - computed < PLAIN_STATE_BYTES


@pytest.mark.grid
def test_nothing_is_moved_where_the_dead_rank_has_left_it(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """Its own copies are in the snapshot process's memory."""
    job = _run(tmp_path / "run", ZERO2, standby=1, inject=faults((1, "backward", 5)))
    check_same(job, reference(ZERO2))
    assert [e["bytes"] for e in job.of("recovery_finished")] == [0]


def _lost_bytes(ranks: int) -> int:
    """Of one rank with ZeRO-1 or 2 in bf16: its part of master weights and Adam's two moments, and all 16-bit weights.

    DeepSpeed pads each parameter group to twice the number of ranks; Adam counts its steps in 4 bytes a group.
    """
    width, context, layers, vocabulary = 32, 32, 2, 264  # SMALL
    matrices = 2 * vocabulary * width + context * width + layers * 12 * width * width
    vectors = layers * 13 * width + 2 * width
    padded = sum(-(-numel // (2 * ranks)) * 2 * ranks for numel in (matrices, vectors))
    return padded * 12 // ranks + padded * 2 + 2 * 4


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [ZERO2, ZERO3], ids=lambda layout: layout.name)
def test_ten_failures_in_a_row(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    inject = faults(*((step % 4, "backward" if step % 2 else "optimizer", step) for step in range(3, 13)))
    job = _run(tmp_path / "run", layout, standby=2, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, 10)
    # A kill may come before every rank has shown that the last recovery is over; it then counts as a part of that.
    assert len(job.of("failure_detected")) == 10 and not job.of("fallback_started"), job.explain()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("flash_recovery.redundancy", '"replica"', "shards of rank"),
        ("flash_recovery.redundency", '"auto"', "did you mean 'redundancy'?"),
        ("zero_optimization.offload_param", '{"device": "cpu"}', "zero_optimization.offload_param to cpu"),
        ("zero_optimization.zero_quantized_gradients", "true", "zero_optimization.zero_quantized_gradients"),
    ],
)
def test_refused_at_start(key: str, value: str, words: str, tmp_path: Path) -> None:
    layout = zero(1, "-refused", "--set", f"{key}={value}")
    job = _run(tmp_path / "run", layout, standby=0, options=["--max-restarts", "0"])
    assert job.code != 0 and not job.losses, job.explain()
    assert words in job.output, job.explain()
    check_clean(job)


@pytest.mark.grid
@pytest.mark.parametrize("layout", [ZERO1, ZERO2, ZERO3], ids=lambda layout: layout.name)
def test_without_the_reset_it_fails(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """The negative control: the same fault without ``EngineAdapter._reset_framework`` has another end."""
    job = run_job(
        tmp_path / "run",
        layout,
        standby=1,
        script=NO_RESET_SCRIPT,
        flags=[*SMALL, "--steps", str(STEPS), *layout.flags],
        inject=faults((2, "backward", 6)),
        options=["--hang-timeout", "15"],
        timeout_s=TIMEOUT_S,
    )
    check_fired(job)
    assert job.code != 0 or job.digests != reference(layout).digests, job.explain()
    check_clean(job)


@pytest.mark.grid
def test_switched_off(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """The key is false: the same script trains to the same end, and no one protects it."""
    layout = zero(2, "-off", "--set", "flash_recovery.enabled=false")
    job = _run(tmp_path / "run", layout, standby=0)
    check_same(job, reference(ZERO2), launches=0)
    assert not job.notices("redundancy")
