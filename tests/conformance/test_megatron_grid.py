"""The conformance grid with megatron-core: whatever fails, wherever, the job ends exactly as if nothing had happened.

Two micro-batches a step, dropout, shuffled data, clipping. A job has one fault in each phase, every second step; three
jobs, between which the victims rotate, are the whole product of phases and victims of one layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.config import PHASES
from tests.faults import in_every_phase
from tests.jobs import Job, Layout, References, check_fired, check_recovered, check_same, run_job

pytest.importorskip("megatron.core")

STEPS = 20
TIMEOUT_S = 400
SCRIPT = "pretrain_gpt.py"
CONFIG = {"timeouts": {"stopped_s": 0.3}}
ENVIRONMENT = {"FR_MEGATRON_CPU": "1", "PYTHONWARNINGS": "ignore"}


def gpt(name: str, *flags: str, nproc: int = 4) -> Layout:
    """One layout of the example."""
    return Layout(name, SCRIPT, flags, nproc=nproc)


TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
VPP = (*PP, "--num-virtual-stages-per-pipeline-rank", "2", "--layers", "4")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPS = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "5000")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2")

DP2 = gpt("dp2", nproc=2)
DP2_FP16 = gpt("dp2-fp16", "--fp16", nproc=2)
TP2_DP2 = gpt("tp2-dp2", *TP)
TP2_DP2_SP = gpt("tp2-dp2-sp", *TP, "--sequence-parallel")
PP2_DP2 = gpt("pp2-dp2", *PP)
PP2_DP2_VPP2 = gpt("pp2-dp2-vpp2", *VPP)
TP2_PP2_DP2 = gpt("tp2-pp2-dp2", *TP, *PP, nproc=8)
DP2_DISTRIBUTED = gpt("dp2-distributed", *DISTRIBUTED, "--bf16", nproc=2)
DP4_DISTRIBUTED = gpt("dp4-distributed", *DISTRIBUTED, "--bf16")
DP4_INSTANCES = gpt("dp4-instances2", *DISTRIBUTED, "--num-distributed-optimizer-instances", "2", "--bf16")
EP2_DP2 = gpt("ep2-dp2", *EXPERTS)
EP2_DP2_ALLTOALL = gpt("ep2-dp2-alltoall", *EXPERTS, "--moe-token-dispatcher-type", "alltoall", *DISTRIBUTED)
CP2_DP2 = gpt("cp2-dp2", "--context-parallel-size", "2", *DISTRIBUTED)
DP2_OVERLAPS = gpt("dp2-overlaps", *OVERLAPS, nproc=2)
TP2_DP2_OVERLAPS = gpt("tp2-dp2-overlaps", *TP, *OVERLAPS, "--bf16")
LAYOUTS = (
    DP2,
    DP2_FP16,
    TP2_DP2,
    TP2_DP2_SP,
    PP2_DP2,
    PP2_DP2_VPP2,
    TP2_PP2_DP2,
    DP2_DISTRIBUTED,
    DP4_DISTRIBUTED,
    DP4_INSTANCES,
    EP2_DP2,
    EP2_DP2_ALLTOALL,
    CP2_DP2,
    DP2_OVERLAPS,
    TP2_DP2_OVERLAPS,
)
QUICK = {(TP2_DP2_OVERLAPS, 0)}
"""Layouts and rotations that the fast suite contains."""

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(3 * TIMEOUT_S)]
Reference = Callable[[Layout], Job]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: _run(path, layout, standby=0))


def _run(run_dir: Path, layout: Layout, **kwargs: Any) -> Job:
    return run_job(run_dir, layout, steps=STEPS, timeout_s=TIMEOUT_S, env=ENVIRONMENT, **kwargs)


def _phases(layout: Layout) -> list[str]:
    return [p for p in PHASES if p != "param-gather" or "--use-distributed-optimizer" in layout.flags]


def _victims(layout: Layout) -> tuple[int, int, int]:
    """The first, a middle and the last rank."""
    return 0, layout.nproc // 2, layout.nproc - 1


def _grid() -> Iterator[object]:
    for layout in LAYOUTS:
        for rotation in range(3):
            marks = () if (layout, rotation) in QUICK else (pytest.mark.grid,)
            yield pytest.param(layout, "sigkill", rotation, id=f"{layout.name}-sigkill-{rotation}", marks=marks)
    for layout in (TP2_DP2, PP2_DP2, DP4_DISTRIBUTED):
        for fault in ("sigstop", "raise"):
            yield pytest.param(layout, fault, 0, id=f"{layout.name}-{fault}", marks=pytest.mark.grid)


@pytest.mark.parametrize(("layout", "fault", "rotation"), _grid())
def test_every_phase(layout: Layout, fault: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    inject = in_every_phase(_phases(layout), _victims(layout), rotation, fault)
    job = _run(tmp_path / "run", layout, standby=1, inject=inject, config=CONFIG)
    check_same(job, reference(layout))
    check_fired(job, len(inject))
    check_recovered(job, _victims(layout))
