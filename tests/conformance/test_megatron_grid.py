"""The conformance grid with megatron-core: whatever fails, wherever, the job ends exactly as if nothing had happened.

Two micro-batches a step, dropout, shuffled data, clipping. A job has one fault in each phase, every second step; three
jobs, between which the victims rotate, are the whole product of phases and victims of one layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import megatron as mg
from tests.support.faults import in_every_phase
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, Layout, check_fired, check_recovered, check_same

skip_module_without("megatron.core")

LAYOUTS = (
    mg.DP2,
    mg.DP2_FP16,
    mg.TP2_DP2,
    mg.TP2_DP2_SP,
    mg.PP2_DP2,
    mg.PP2_DP2_VPP2,
    mg.TP2_PP2_DP2,
    mg.DP2_DISTRIBUTED,
    mg.DP4_DISTRIBUTED,
    mg.DP4_INSTANCES,
    mg.EP2_DP2,
    mg.EP2_DP2_ALLTOALL,
    mg.EP2_DP2_BIAS,
    mg.EP2_DP2_BIAS_BF16,
    mg.DP2_LATENT,
    mg.TP2_DP2_LATENT,
    mg.TP2_DP2_SP_LATENT,
    mg.PP2_DP2_LATENT,
    mg.CP2_DP2_LATENT,
    mg.CP2_DP2,
    mg.DP2_OVERLAPS,
    mg.TP2_DP2_OVERLAPS,
    mg.FSDP2,
    mg.FSDP2_DP4,
    mg.MEGATRON_FSDP,
    mg.MEGATRON_FSDP_DP4,
    mg.MEGATRON_FSDP_GRADS,
    mg.MEGATRON_FSDP_OPTIM,
)
QUICK = {(mg.TP2_DP2_OVERLAPS, 0)}
"""Layouts and rotations that the fast suite contains."""

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(3 * mg.TIMEOUT_S)]
Reference = Callable[[Layout], Job]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return mg.references(tmp_path_factory)


def _victims(layout: Layout) -> tuple[int, int, int]:
    """The first, a middle and the last rank."""
    return 0, layout.nproc // 2, layout.nproc - 1


def _grid() -> Iterator[object]:
    for layout in LAYOUTS:
        for rotation in range(3):
            marks = () if (layout, rotation) in QUICK else (pytest.mark.grid,)
            yield pytest.param(layout, "sigkill", rotation, id=f"{layout.name}-sigkill-{rotation}", marks=marks)
    for layout in (mg.TP2_DP2, mg.PP2_DP2, mg.DP4_DISTRIBUTED):
        for fault in ("sigstop", "raise"):
            yield pytest.param(layout, fault, 0, id=f"{layout.name}-{fault}", marks=pytest.mark.grid)


@pytest.mark.parametrize(("layout", "fault", "rotation"), _grid())
def test_every_phase(layout: Layout, fault: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    inject = in_every_phase(mg.phases(layout), _victims(layout), rotation, fault)
    job = mg.run(tmp_path / "run", layout, standby=1, inject=inject, config=mg.CONFIG)
    check_same(job, reference(layout))
    check_fired(job, len(inject))
    check_recovered(job, _victims(layout))
