"""The smallest job of each framework that shows whether a version of it is recovered: two ranks, one of them killed.

``make matrix`` runs it with every version (docs/versions.md), beside a part of the grids.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Layout, RunningJob, check_fired, check_recovered, check_same, tokens_per_step

STEPS = 8
BATCH, CONTEXT = 2, 32  # of tests.support.jobs.SMALL
MICRO_BATCHES = 2  # a step, of the other examples
TIMEOUT_S = 400  # two processes that import a framework on a busy machine
ENVIRONMENT = {"PYTHONWARNINGS": "ignore"}
FP32 = ("--zero", "0", "--precision", "fp32")  # older ones wrap bf16 in BF16_Optimizer: refused
MEGATRON = ("--use-distributed-optimizer", "--bf16")
LAYOUTS = (
    pytest.param(Layout("ddp", "train_ddp.py", nproc=2), "torch", id="ddp"),
    pytest.param(Layout("fsdp2", "train_fsdp.py", nproc=2), "torch", id="fsdp2"),
    pytest.param(Layout("zero0", "train_deepspeed.py", FP32, nproc=2), "deepspeed", id="zero0-fp32"),
    *(
        pytest.param(Layout(f"zero{n}", "train_deepspeed.py", ("--zero", str(n)), nproc=2), "deepspeed", id=f"zero{n}")
        for n in (1, 2, 3)
    ),
    pytest.param(Layout("megatron", "pretrain_gpt.py", MEGATRON, nproc=2), "megatron.core", id="megatron"),
)

pytestmark = [pytest.mark.grid, pytest.mark.timeout(3 * TIMEOUT_S)]


@pytest.mark.parametrize(("layout", "package"), LAYOUTS)
def test_one_of_two_ranks_is_killed(layout: Layout, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package.partition(".")[0])
    inject = ["rank=1,fault=sigkill,at=backward,step=4"]
    env = {**ENVIRONMENT, "FR_MEGATRON_CPU": "1"} if package.startswith("megatron") else ENVIRONMENT
    flags = ["--step-time", "300"]  # so that the steps are seen in its course
    reference = RunningJob(tmp_path / "reference", layout, steps=STEPS, standby=0, env=env, flags=flags).wait(TIMEOUT_S)
    job = RunningJob(tmp_path / "run", layout, steps=STEPS, inject=inject, env=env, flags=flags).wait(TIMEOUT_S)
    check_same(job, reference)
    check_fired(job, len(inject))
    check_recovered(job, (1,))
    accumulated = 1 if package == "torch" else MICRO_BATCHES
    samples = BATCH * layout.nproc * accumulated
    assert tokens_per_step(reference) == samples * CONTEXT, "as the adapter, or the script, has reported"
