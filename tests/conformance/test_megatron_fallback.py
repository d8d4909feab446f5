"""The fallback checkpoint in Megatron's own format: gone back to, begun with, in the same layout and in others, and
read by megatron-core alone.

``tests/scripts/megatron_values.py`` writes what a job holds with Megatron's own ``dist_checkpointing.save``: every
whole tensor in it has to be the one in the fallback checkpoint, bit for bit, whatever the layouts are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashrecovery.redundancy.checkpoint.dcp import read_whole
from flashrecovery.redundancy.checkpoint.published import newest
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, SMALL, Job, Layout, RunningJob, check_clean, check_same, run_job
from tests.support.megatron import (
    DISTRIBUTED,
    DP2_DISTRIBUTED,
    DP4_DISTRIBUTED,
    DP4_INSTANCES,
    ENVIRONMENT,
    EP2_DP2,
    EP2_DP2_ALLTOALL,
    PP,
    PP2_DP2_VPP2,
    TIMEOUT_S,
    TP,
    TP2_DP2,
    TP2_DP2_OVERLAPS,
    gpt,
)

skip_module_without("megatron.core")

STEPS = 30
SLOW = ["--step-time", "60"]
VALUES = ROOT / "tests" / "scripts" / "megatron_values.py"

TP2_DP2_DISTRIBUTED = gpt("tp2-dp2-distributed", *TP, *DISTRIBUTED, "--bf16")
PP2_DP2_DISTRIBUTED = gpt("pp2-dp2-distributed", *PP, *DISTRIBUTED, "--bf16")
TP2_PP2_DISTRIBUTED = gpt("tp2-pp2-distributed", *TP, *PP, *DISTRIBUTED, "--bf16")
TP2_DP2_FP16 = gpt("tp2-dp2-fp16", *TP, "--fp16")
PP2_DP2_FP16 = gpt("pp2-dp2-fp16", *PP, "--fp16")
TP2_DP2_LAYERS = gpt("tp2-dp2-layers4", *TP, "--layers", "4")
EP2_DP1_ALLTOALL = gpt("ep2-alltoall", *EP2_DP2_ALLTOALL.flags, nproc=2)
TP2_DP2_TIED = gpt("tp2-dp2-bf16-distributed-tied", *TP, *DISTRIBUTED, "--bf16", "--tie-head")
PP2_DP2_TIED = gpt("pp2-dp2-bf16-distributed-tied", *PP, *DISTRIBUTED, "--bf16", "--tie-head")

NEIGHBOURS = (1, 2)  # rank 2 has the copies of rank 1's part
COLUMN = (1, 3)  # all that have rank 1's parameters

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(3 * TIMEOUT_S)]
Saved = Callable[[Layout], tuple[Path, Job]]


def _options(directory: Path, *more: str, interval_s: float = 0.7) -> list[str]:
    return ["--checkpoint-dir", str(directory), "--checkpoint-interval", str(interval_s), *more]


def _run(run_dir: Path, layout: Layout, *options: str) -> Job:
    return run_job(
        run_dir, layout, steps=STEPS, standby=0, flags=SLOW, options=options, env=ENVIRONMENT, timeout_s=TIMEOUT_S
    )


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Where a job of a layout has left its checkpoints, and the job; the newest one is of a step before the last."""
    known: dict[Layout, tuple[Path, Job]] = {}

    def of(layout: Layout) -> tuple[Path, Job]:
        if layout not in known:
            folder = tmp_path_factory.mktemp("saved")
            job = _run(folder / layout.name, layout, *_options(folder / "checkpoints"))
            assert job.code == 0, job.explain()
            check_clean(job)
            found = newest(folder / "checkpoints")
            if found is not None and found[0] == STEPS:
                shutil.rmtree(found[1])
            known[layout] = folder / "checkpoints", job
        return known[layout]

    return of


def _newest(directory: Path) -> tuple[int, Path]:
    found = newest(directory)
    assert found is not None and 0 < found[0] < STEPS
    return found


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        pytest.param(TP2_DP2_DISTRIBUTED, NEIGHBOURS, id="tp2-dp2-distributed", marks=pytest.mark.grid),
        *(
            pytest.param(layout, victims, id=layout.name, marks=pytest.mark.grid)
            for layout, victims in (
                (DP4_DISTRIBUTED, NEIGHBOURS),
                (PP2_DP2_DISTRIBUTED, NEIGHBOURS),
                (TP2_DP2_OVERLAPS, NEIGHBOURS),
                (EP2_DP2_ALLTOALL, NEIGHBOURS),
                (DP4_INSTANCES, (1, 3)),
                (TP2_DP2, COLUMN),
                (TP2_DP2_FP16, COLUMN),
            )
        ),
    ],
)
def test_both_that_hold_a_shard_at_once_go_back_to_the_checkpoint(
    layout: Layout, victims: tuple[int, ...], tmp_path: Path
) -> None:
    reference = _run(tmp_path / "reference", layout)
    options = [*_options(tmp_path / "checkpoints"), "--snapshots", "never"]
    running = RunningJob(tmp_path / "run", layout, steps=STEPS, standby=2, flags=SLOW, options=options, env=ENVIRONMENT)
    first = running.wait_for("checkpoint_saved", TIMEOUT_S)
    running.kill(*victims)
    job = running.wait(TIMEOUT_S)
    check_same(job, reference)
    assert {e["rank"] for e in job.of("failure_detected")} >= set(victims)
    (fallback,) = job.of("fallback_started")
    assert first["version"] <= fallback["version"] < STEPS
    assert not job.notices("checkpoint_failed"), job.explain()


@pytest.mark.grid
@pytest.mark.parametrize(
    "layout", [TP2_DP2_DISTRIBUTED, TP2_DP2_FP16, PP2_DP2_VPP2, EP2_DP2_ALLTOALL], ids=lambda layout: layout.name
)
def test_a_fresh_launch_resumes(layout: Layout, tmp_path: Path, saved: Saved) -> None:
    directory, before = saved(layout)
    version, _ = _newest(directory)
    job = _run(tmp_path / "run", layout, *_options(directory, "--resume", interval_s=1000))
    check_same(job, before, start=version)
    assert not job.notices("checkpoint_layout_mismatch")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (TP2_DP2_DISTRIBUTED, DP4_DISTRIBUTED),
        (TP2_DP2_DISTRIBUTED, PP2_DP2_DISTRIBUTED),
        (TP2_DP2_DISTRIBUTED, TP2_PP2_DISTRIBUTED),
        (TP2_DP2_DISTRIBUTED, DP2_DISTRIBUTED),
        (TP2_DP2_TIED, PP2_DP2_TIED),
        (TP2_DP2_FP16, PP2_DP2_FP16),
        (PP2_DP2_VPP2, TP2_DP2_LAYERS),
        (EP2_DP2_ALLTOALL, EP2_DP1_ALLTOALL),
    ],
    ids=lambda layout: layout.name,
)
def test_another_layout_resumes(written: Layout, read: Layout, tmp_path: Path, saved: Saved) -> None:
    """Every value is what it was; random numbers and data start again, and that is said."""
    directory, _ = saved(written)
    version, path = _newest(directory)
    values = tmp_path / "values"
    job = run_job(
        tmp_path / "run",
        read,
        standby=0,
        script=VALUES,
        flags=[*SMALL, "--steps", str(STEPS), *read.flags, "--values", str(values)],
        options=_options(directory, "--resume", interval_s=1000),
        env=ENVIRONMENT,
        timeout_s=TIMEOUT_S,
    )
    assert job.code == 0, job.explain()
    check_clean(job)
    assert min(step for _, step in job.losses) == version
    (notice,) = job.notices("checkpoint_layout_mismatch")
    assert path.name in notice["text"]
    check_same_values(path, values)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (TP2_DP2_DISTRIBUTED, TP2_DP2_DISTRIBUTED),
        (TP2_DP2_DISTRIBUTED, PP2_DP2_DISTRIBUTED),
        (TP2_DP2_FP16, PP2_DP2_FP16),
        (EP2_DP2, EP2_DP2),
    ],
    ids=lambda layout: layout.name,
)
def test_megatron_alone_reads_it(written: Layout, read: Layout, tmp_path: Path, saved: Saved) -> None:
    """``dist_checkpointing.load`` under torchrun, with nothing of flash-recovery."""
    version, path = _newest(saved(written)[0])
    values = tmp_path / "values"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={read.nproc}"]
    flags = [*SMALL, "--steps", str(STEPS), *read.flags, "--values", str(values), "--load", str(path)]
    done = subprocess.run(
        [*command, str(VALUES), *flags],
        env={**_environment(), **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = torch.load(path / "common.pt")["opt_param_scheduler"]["num_steps"]
    assert steps == version or ("--fp16" in written.flags and 0 < steps < version)  # less those that overflow
    assert f"loaded num_steps={steps}\n" in done.stdout
    check_same_values(path, values)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def check_same_values(checkpoint: Path, values: Path) -> None:
    """What Megatron has written has the same keys, and in every tensor the same bits."""
    keys = _keys(checkpoint)
    assert keys == _keys(values)
    tensors = sorted(k for k in keys if "/shard_" not in k)  # the others are objects
    ours, theirs = read_whole(tensors, checkpoint), read_whole(tensors, values)
    assert any(k.startswith("optimizer.state.exp_avg.") for k in tensors)
    for key in tensors:
        assert ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]), key


def _keys(directory: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return {k for k in FileSystemReader(directory).read_metadata().state_dict_metadata if not k.startswith("manifest/")}
