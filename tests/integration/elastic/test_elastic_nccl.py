"""Elastic jobs whose process groups behave as NCCL's do (tests/support/fake_nccl) shrink and grow: as a job over that
fake that was resized by command at the same steps, bit for bit, which goes on as one that was started in that size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fake_nccl
from tests.support.elastic import changes, command, often
from tests.support.elastic_sharded import (
    DDP,
    FSDP2,
    Kind,
    Resized,
    check_as_commanded,
    killed_and_back,
    megatron,
    needing,
    resized_once,
    zero,
)
from tests.support.jobs import Job, check_fired
from tests.support.wrappers import FAKE_NCCL

pytestmark = pytest.mark.timeout(400)
AT, BACK = 8, 32
SLOWLY = ("--step-time", "100")
DISTRIBUTED = megatron("megatron-distributed", "--bf16", "--use-distributed-optimizer")


def over_nccl(kind: Kind) -> Kind:
    """The same jobs over the fake."""
    env = FAKE_NCCL.environment(kind.script, kind.env)
    return replace(kind, name=f"{kind.name}-nccl", script=FAKE_NCCL.script, env=env)


KINDS = [
    pytest.param(over_nccl(DDP), id="ddp"),
    *(
        pytest.param(over_nccl(kind), id=kind.name, marks=[pytest.mark.grid, *needing(kind)])
        for kind in (FSDP2, zero(1), zero(2), zero(3), DISTRIBUTED)
    ),
]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    fake_nccl.build()
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victims", often([(0,), (1,), (3,), (0, 2)], []))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_back(kind: Kind, victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """4 -> 3 -> 4, and 4 -> 2 -> 4."""
    fake_nccl.build()
    job = killed_and_back(kind, tmp_path / "run", victims, AT, BACK, resized, *SLOWLY)
    if kind.name == "ddp-nccl":
        check_from_device_to_device(job)


def check_from_device_to_device(job: Job) -> None:
    """A rank that has come was restored so: what it lacked is equal on all ranks."""
    (grown,) = [e for e in job.of("recovery_finished") if e["cause"] == "resize" and not e["left"]]
    assert grown["device_bytes"] > 0, grown


@pytest.mark.grid
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_replaced_in_the_new_size(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    """After one has left by command, another one dies that has room: of three ranks, too, some group reaches from
    device to device."""
    fake_nccl.build()
    fault = [f"rank={victim},fault=sigkill,at=backward,step={BACK}"]
    config = {"elastic": {"min": 2, "max": 4}}
    running = kind.start(tmp_path / "run", *SLOWLY, config=config, inject=fault, standby=1)
    running.wait_for("job_started", 120)
    assert command(running, 3, AT) == ""
    job = running.wait()
    check_fired(job)
    assert [len(change.ranks) for change in changes(job)] == [3], job.explain()
    (_, replaced) = job.of("recovery_finished")
    assert (replaced["victims"], replaced["left"]) == ([victim], []), job.explain()
    assert (replaced["device_bytes"] > 0) == (kind.name == "ddp-nccl"), replaced  # copies of rows are in host memory
    check_as_commanded(kind, job, resized)
