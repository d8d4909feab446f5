"""Elastic jobs with megatron-core grow again, with and without the distributed optimizer: as a job that was resized by
command at the same steps, bit for bit, which goes on as a job that was started in that size from that step's state. And
a rank that dies on the way in takes nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic import AHEAD, changes, command, grow, inject, never, shrink
from tests.support.elastic_sharded import Kind, Resized, check_as_commanded, killed_and_back, megatron, resized_once
from tests.support.installed import skip_module_without
from tests.support.jobs import RunningJob, check_fired

skip_module_without("megatron.core")

pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(900)]
AT, BACK = 8, 32
SLOWLY = ("--step-time", "100")
PLAIN = megatron("plain", "--bf16")
SHARDS = megatron("shards", "--bf16", "--use-distributed-optimizer")
KINDS = [pytest.param(PLAIN, id="plain"), pytest.param(SHARDS, id="shards")]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory, *SLOWLY)


@pytest.mark.parametrize("victims", [(0,), (1,), (3,), (0, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_back(kind: Kind, victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """4 -> 3 -> 4, and 4 -> 2 -> 4."""
    killed_and_back(kind, tmp_path / "run", victims, AT, BACK, resized, *SLOWLY)


@pytest.mark.parametrize("kind", KINDS)
def test_from_one_alone(kind: Kind, tmp_path: Path, resized: Resized) -> None:
    """4 -> 3 -> 2 -> 1 by kills, and back to 4: a group of all ranks is of one rank meanwhile, as others always are."""
    faults = [f"rank={rank},fault=sigkill,at=forward,step={AT + 6 * number}" for number, rank in enumerate((0, 2, 1))]
    running = kind.start(tmp_path / "run", *SLOWLY, config=never(1), inject=faults)
    running.hold(BACK - AHEAD)
    running.wait_for("recovery_finished", 120, count=3)
    grow(running, 4, BACK)
    job = running.wait(240)
    assert [len(change.ranks) for change in changes(job)] == [3, 2, 1, 4], job.explain()
    check_as_commanded(kind, job, resized)


def shrunk_by_command(running: RunningJob) -> None:
    """Rank 3 has left; the others are held, so that it can come back before step :data:`BACK`."""
    running.hold(AT - 3)
    running.wait_for("job_started", 120)
    shrink(running, 3, AT, BACK - AHEAD)


def let_in(running: RunningJob) -> None:
    """It comes back."""
    assert command(running, 4, BACK) == ""
    running.wait_for_joining_processes()
    running.hold(None)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_joining_process_dies_on_its_way_in(kind: Kind, state: str, tmp_path: Path, resized: Resized) -> None:
    """It leaves again, and the others go on in the size that they had."""
    faults = [f"rank=3,fault=sigkill,at=recovery:{state}"]  # one that leaves by command does not come to this state
    running = kind.start(tmp_path / "run", *SLOWLY, inject=faults)
    shrunk_by_command(running)
    let_in(running)
    job = running.wait(240)
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2), job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("state", ["restoring", "reshaping", "verifying"])
def test_one_that_dies_on_the_way_in_is_replaced(state: str, tmp_path: Path, resized: Resized) -> None:
    """A member: its replacement takes on the old sharding among three, in groups of four, before all of them go over to
    the new one."""
    running = SHARDS.start(tmp_path / "run", *SLOWLY, config={"elastic": {"min": 2, "max": 4}})
    shrunk_by_command(running)
    inject(running, rank=1, at=f"recovery:{state}")
    let_in(running)
    job = running.wait(240)
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2, 3), job.explain()
    check_as_commanded(SHARDS, job, resized)
