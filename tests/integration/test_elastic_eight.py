"""Elastic jobs of eight ranks: two are lost, six go on, and both come back (8 -> 6 -> 8), as by command."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import elastic
from tests.support.elastic import changes, command
from tests.support.elastic_divided import FSDP2, Kind, Resized, check_as_commanded, megatron, resized_once, zero
from tests.support.jobs import check_fired

pytestmark = [pytest.mark.timeout(900), pytest.mark.grid]
AT, BACK = 8, 30
FLAGS = ("--step-time", "500", "--global-batch", "48")  # 24 micro-batches, which both sizes divide
DDP = Kind("ddp", elastic.SCRIPT, (), elastic.check_steps_alike, elastic.check_goes_on_alike)


def needing(package: str, mark: pytest.MarkDecorator) -> list[pytest.MarkDecorator]:
    return [mark, pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")]


KINDS = [
    pytest.param(DDP, id="ddp"),
    pytest.param(FSDP2, id="fsdp2"),
    pytest.param(zero(2), id="zero2", marks=needing("deepspeed", pytest.mark.deepspeed)),
    pytest.param(zero(3), id="zero3", marks=needing("deepspeed", pytest.mark.deepspeed)),
    pytest.param(
        megatron("distributed", "--bf16", "--use-distributed-optimizer"),
        id="megatron-distributed",
        marks=needing("megatron", pytest.mark.megatron),
    ),
]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory, *FLAGS, launched=8)


@pytest.mark.parametrize("victims", [(0, 3), (4, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_six_eight(kind: Kind, victims: tuple[int, int], tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in victims]
    config = {"elastic": {"min": 2, "max": 8, "replace": "never"}}
    running = kind.start(tmp_path / "run", *FLAGS, config=config, inject=faults, nproc=8)
    running.wait_for("recovery_finished", 240)
    assert command(running, 8, BACK) == ""
    job = running.wait(400)
    check_fired(job, 2)
    assert [len(change.ranks) for change in changes(job)][-1] == 8, job.explain()
    assert {len(change.ranks) for change in changes(job)} == {6, 8}, job.explain()
    check_as_commanded(kind, job, resized)
