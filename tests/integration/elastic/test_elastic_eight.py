"""Elastic jobs of eight ranks: two are lost, six go on, and both come back (8 -> 6 -> 8), as by command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic import AHEAD, changes, grow
from tests.support.elastic_sharded import (
    DDP,
    FSDP2,
    Kind,
    Resized,
    check_as_commanded,
    megatron,
    needing,
    resized_once,
    zero,
)
from tests.support.jobs import check_fired

pytestmark = [pytest.mark.timeout(900), pytest.mark.grid]
AT, BACK = 8, 30
FLAGS = ("--step-time", "100", "--global-batch", "48")  # 24 micro-batches, which both sizes divide
DISTRIBUTED = megatron("megatron-distributed", "--bf16", "--use-distributed-optimizer")
EVEN = (zero(2), zero(3), DISTRIBUTED)
"""Whose replicas have equally many micro-batches each."""
KINDS = [pytest.param(kind, id=kind.name, marks=needing(kind)) for kind in (DDP, FSDP2, *EVEN)]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory, *FLAGS, launched=8)


@pytest.mark.parametrize("victims", [(0, 3), (4, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_six_eight(kind: Kind, victims: tuple[int, int], tmp_path: Path, resized: Resized) -> None:
    # Where 24 micro-batches are divided evenly they do not go into 7, so one loss makes eight six. With two, the first
    # could make it six before the second has come to its backward pass, with nothing that the ranks wait for together
    # in ZeRO's: then the second one makes it four.
    struck = victims[:1] if kind in EVEN else victims
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in struck]
    config = {"elastic": {"min": 2, "max": 8, "replace": "never"}}
    running = kind.start(tmp_path / "run", *FLAGS, config=config, inject=faults, nproc=8)
    running.hold(BACK - AHEAD)
    running.wait_for("recovery_finished", 240)
    grow(running, 8, BACK, wait_s=240)
    job = running.wait(400)
    check_fired(job, len(struck))
    assert [len(change.ranks) for change in changes(job)][-1] == 8, job.explain()
    assert {len(change.ranks) for change in changes(job)} == {6, 8}, job.explain()
    check_as_commanded(kind, job, resized)
