"""Elastic jobs whose state is sharded among the ranks (FSDP2, ZeRO-1 to 3) grow again: as a job that was resized by
command at the same steps, bit for bit, which goes on as a job that was started in that size from that step's state. And
a rank that dies on the way in, or meanwhile, takes nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic import changes, command, inject, never, often
from tests.support.elastic_sharded import (
    FSDP2,
    Kind,
    Resized,
    check_as_commanded,
    killed_and_back,
    needing,
    resized_once,
    zero,
)
from tests.support.jobs import Job, RunningJob, check_fired

pytestmark = pytest.mark.timeout(400)
AT, BACK = 8, 32
SLOWLY = ("--step-time", "100")


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


KINDS = [
    pytest.param(FSDP2, id="fsdp2", marks=pytest.mark.grid),
    pytest.param(zero(3), id="zero3", marks=needing(zero(3))),
    *(pytest.param(kind, id=kind.name, marks=[*needing(kind), pytest.mark.grid]) for kind in (zero(1), zero(2))),
]
ALSO_ZERO = [
    pytest.param(FSDP2, id="fsdp2"),
    *(pytest.param(kind, id=kind.name, marks=[*needing(kind), pytest.mark.grid]) for kind in (zero(2), zero(3))),
]


def shrunk_by_command(running: RunningJob) -> None:
    """Rank 3 has left."""
    running.wait_for("job_started", 120)
    assert command(running, 3, AT) == ""
    running.wait_for("recovery_finished")


def check_moved(job: Job) -> None:
    """At the growth state has been sharded otherwise, and each byte that a rank lacked has gone once."""
    (event,) = [e for e in job.of("recovery_finished") if e["cause"] == "resize" and not e["left"]]
    assert event["victims"] == [], event
    assert 0 < event["lacking_bytes"] <= event["reshaped_bytes"] <= 1.05 * event["lacking_bytes"], event


@pytest.mark.parametrize("victims", often([(0,), (1,), (3,), (0, 2)], [(0,)]))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_back(kind: Kind, victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """4 -> 3 -> 4, and 4 -> 2 -> 4."""
    check_moved(killed_and_back(kind, tmp_path / "run", victims, AT, BACK, resized, *SLOWLY))


@pytest.mark.grid
@pytest.mark.parametrize("kind", ALSO_ZERO)
def test_by_command_alone_and_again(kind: Kind, tmp_path: Path, resized: Resized) -> None:
    """4 -> 2 -> 4 -> 3 by command: not the last ones leave first, because their neighbours keep their copies."""
    running = kind.start(tmp_path / "run", *SLOWLY, config={"elastic": {"min": 1, "max": 4}})
    running.wait_for("job_started", 120)
    for number, (size, step) in enumerate(((2, AT), (4, BACK), (3, BACK + 3)), 1):
        assert command(running, size, step) == ""
        running.wait_for("recovery_finished", count=number)
    job = running.wait()
    assert [(c.step, len(c.ranks)) for c in changes(job)] == [(AT, 2), (BACK, 4), (BACK + 3, 3)], job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.grid
def test_to_a_size_below_that_of_the_launch(tmp_path: Path, resized: Resized) -> None:
    """4 -> 2 -> 3: a rank that comes has its shards in neither size, and the next one finds three."""
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    running = FSDP2.start(tmp_path / "run", "--step-time", "250", inject=faults)
    running.wait_for("recovery_finished", 120)
    assert command(running, 3, BACK - 12) == ""
    running.wait_for("recovery_finished", count=2)
    assert command(running, 4, BACK) == ""
    job = running.wait()
    assert [change.ranks for change in changes(job)] == [(1, 3), (0, 1, 3), (0, 1, 2, 3)], job.explain()
    check_as_commanded(FSDP2, job, resized)


@pytest.mark.grid
def test_from_one_alone(tmp_path: Path, resized: Resized) -> None:
    """4 -> 3 -> 2 -> 1 by kills, and back to 4."""
    faults = [f"rank={rank},fault=sigkill,at=forward,step={AT + 6 * number}" for number, rank in enumerate((0, 2, 1))]
    running = FSDP2.start(tmp_path / "run", "--step-time", "250", config=never(1), inject=faults)
    running.wait_for("recovery_finished", 120, count=3)
    assert command(running, 4, BACK) == ""
    job = running.wait()
    assert [len(change.ranks) for change in changes(job)] == [3, 2, 1, 4], job.explain()
    check_as_commanded(FSDP2, job, resized)


STATES = ("regrouping", "restoring", "reshaping", "verifying", "resuming")


@pytest.mark.parametrize("state", often(STATES, ()))
@pytest.mark.parametrize("kind", ALSO_ZERO)
def test_the_joining_process_dies_while_it_comes_in(kind: Kind, state: str, tmp_path: Path, resized: Resized) -> None:
    """It has left again before it has taken a step; what it had got others have."""
    faults = [f"rank=3,fault=sigkill,at=recovery:{state}"]  # one that leaves by command does not come to this state
    running = kind.start(tmp_path / "run", *SLOWLY, inject=faults)
    shrunk_by_command(running)
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2), job.explain()
    assert changes(job)[-1].step == BACK, job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("state", often(("quiescing", *STATES), ()))
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.grid), 2])
@pytest.mark.parametrize("kind", ALSO_ZERO)
def test_a_member_dies_while_one_comes_in(
    kind: Kind, victim: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    running = kind.start(tmp_path / "run", *SLOWLY)
    shrunk_by_command(running)
    inject(running, rank=victim, at=f"recovery:{state}")
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert {*changes(job)[-1].ranks} == {0, 1, 2, 3} - {victim}, job.explain()
    assert changes(job)[-1].step == BACK, job.explain()  # no step is lost: the copies were there
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("state", often(STATES, ()))
@pytest.mark.parametrize("victim", [1, 3])
@pytest.mark.parametrize("kind", ALSO_ZERO)
def test_one_that_dies_on_the_way_in_is_replaced(
    kind: Kind, victim: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """A member, or one that comes: where there is room it is filled again, in the old size or in the new one. A
    member's replacement takes on the old sharding among three, in groups of four."""
    faults = [f"rank=3,fault=sigkill,at=recovery:{state}"] if victim == 3 else []
    running = kind.start(tmp_path / "run", *SLOWLY, config={"elastic": {"min": 2, "max": 4}}, inject=faults)
    shrunk_by_command(running)
    if victim != 3:
        inject(running, rank=victim, at=f"recovery:{state}")
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2, 3), job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.grid
def test_one_that_has_come_dies_and_is_replaced(tmp_path: Path, resized: Resized) -> None:
    """Later, as any other: a member, and the one that had come."""
    faults = [f"rank=1,fault=sigkill,at=backward,step={BACK + 2}"]
    running = FSDP2.start(tmp_path / "run", *SLOWLY, config={"elastic": {"min": 2, "max": 4}}, inject=faults)
    shrunk_by_command(running)
    assert command(running, 4, BACK) == ""
    running.wait_for("job_resized", count=2)
    inject(running, rank=3, at="forward", step=BACK + 4)
    job = running.wait()
    check_fired(job, 2)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], [], [1], [3]], job.explain()
    check_as_commanded(FSDP2, job, resized)


@pytest.mark.parametrize("replace", often(("never", "auto"), ()))
def test_a_member_dies_while_one_is_built_up(replace: str, tmp_path: Path, resized: Resized) -> None:
    """An ordinary recovery; a rank that is on the way comes in all the same."""
    config = {"elastic": {"min": 2, "max": 4, "replace": replace}}
    faults = [f"rank=0,fault=sigkill,at=backward,step={AT + 4}"]
    running = FSDP2.start(tmp_path / "run", *SLOWLY, config=config, inject=faults)
    shrunk_by_command(running)
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert changes(job)[-1].ranks == ((1, 2, 3) if replace == "never" else (0, 1, 2, 3)), job.explain()
    check_as_commanded(FSDP2, job, resized)


@pytest.mark.grid
def test_one_with_another_model_is_given_up(tmp_path: Path, resized: Resized) -> None:
    """As many numbers, in another shape."""
    running = FSDP2.start(tmp_path / "run", *SLOWLY, "--joining", "other-model")
    shrunk_by_command(running)
    assert command(running, 4) == ""
    job = running.wait()
    (notice,) = job.notices("joining_process_given_up")
    assert "its model has other parameters" in notice["text"] and notice["rank"] == 3, job.explain()
    assert len(job.of("job_resized")) == 1 and not job.of("failure_detected"), job.explain()
    check_as_commanded(FSDP2, job, resized)


@pytest.mark.grid
def test_a_damaged_message_is_noticed(tmp_path: Path, resized: Resized) -> None:
    """What a member gets of the joining process's share of the work has another bit: noticed, and done again."""
    running = FSDP2.start(tmp_path / "run", *SLOWLY)
    shrunk_by_command(running)
    inject(running, rank=1, at="recovery:restoring", fault="corrupt")
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert any("did not arrive as it was sent" in notice["text"] for notice in job.of("notice")), job.explain()
    assert changes(job)[-1].ranks == (0, 1, 2, 3), job.explain()
    check_as_commanded(FSDP2, job, resized)
