"""Elastic jobs whose replicas have several ranks (HSDP; layers that a script divides itself, in
DistributedDataParallel): a rank dies and is not replaced, its replica leaves, and the others go on bit for bit as in
a job that was resized by command at the same step, which goes on as a job that was started in the new size from that
step's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import Change, changes, command, inject
from tests.support.elastic_replicas import (
    EACH,
    Resized,
    check_ends_as_resized,
    check_goes_on_alike,
    check_same_in_all_replicas,
    check_steps_alike,
    never,
    resized_once,
    start,
)
from tests.support.jobs import check_clean, check_fired

pytestmark = [pytest.mark.timeout(600), pytest.mark.grid]
AT = 9
PHASES = (
    "between",
    "data",
    "forward",
    "param-gather",
    "backward",
    "grad-sync",
    "optimizer-start",
    "optimizer",
    "commit",
)
KINDS = {"hsdp": (), "tensor": ("--kind", "tensor")}


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def kills() -> list[Any]:
    """Two replicas of two ranks, and three; the victim is the first, in the middle, or the last one."""
    found = []
    for replicas, victims in ((2, (0, 1, 3)), (3, (0, 3, 5))):
        found += [(kind, replicas, victim, phase) for kind in KINDS for victim in victims for phase in PHASES]
    return [p for p in found if not (p[0] == "tensor" and (p[3] == "param-gather" or p[1] == 3))]


@pytest.mark.parametrize(("kind", "replicas", "victim", "phase"), kills())
def test_killed_and_not_replaced(
    kind: str, replicas: int, victim: int, phase: str, tmp_path: Path, resized: Resized
) -> None:
    faults = [f"rank={victim},fault=sigkill,at={phase},step={AT}"]
    job = start(tmp_path / "run", *KINDS[kind], replicas=replicas, inject=faults).wait(180)
    check_fired(job)
    (event,) = job.of("job_resized")
    assert event["step"] in (AT, AT + 1), job.explain()
    check_ends_as_resized(job, resized, replicas, [victim], *KINDS[kind])


@pytest.mark.parametrize("fault", ["raise", "exit", "sigstop"])
def test_other_losses(fault: str, tmp_path: Path, resized: Resized) -> None:
    job = start(tmp_path / "run", inject=[f"rank=2,fault={fault},at=backward,step={AT}"]).wait(180)
    check_fired(job)
    check_ends_as_resized(job, resized, 2, [2])


@pytest.mark.parametrize(("first", "second"), [(2, 3), (0, 3), (0, 4), (1, 5)])
def test_two_at_once(first: int, second: int, tmp_path: Path, resized: Resized) -> None:
    """Of one replica, or of two."""
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (first, second)]
    job = start(tmp_path / "run", replicas=3, inject=faults).wait(180)
    check_fired(job, 2)
    check_ends_as_resized(job, resized, 3, [first, second])


RECOVERY = ("quiescing", "regrouping", "restoring", "verifying", "resuming")


@pytest.mark.parametrize("state", RECOVERY)
@pytest.mark.parametrize(("first", "second"), [(1, 3), (4, 0)])
def test_a_second_death_during_the_change(
    first: int, second: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    faults = [f"rank={first},fault=sigkill,at=backward,step={AT}", f"rank={second},fault=sigkill,at=recovery:{state}"]
    job = start(tmp_path / "run", replicas=3, inject=faults).wait(180)
    check_fired(job, 2)
    check_ends_as_resized(job, resized, 3, [first, second])


def test_the_other_rank_of_the_replica_dies_while_it_is_stopped(tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=2,fault=sigkill,at=backward,step={AT}", "rank=3,fault=sigkill,at=recovery:quiescing"]
    job = start(tmp_path / "run", replicas=3, inject=faults).wait(180)
    check_fired(job, 2)
    check_ends_as_resized(job, resized, 3, [2, 3])


@pytest.mark.parametrize("state", RECOVERY)
def test_a_death_during_a_command(state: str, tmp_path: Path, resized: Resized) -> None:
    running = start(
        tmp_path / "run",
        *("--step-time", "150"),
        replicas=3,
        config=never(3),
        inject=[f"rank=1,fault=sigkill,at=recovery:{state}"],
    )
    running.wait_for("job_started", 120)
    assert command(running, 2, AT) == ""
    job = running.wait(180)
    check_fired(job)
    left = sorted(rank for event in job.of("job_resized") for rank in event["left"])
    assert left in ([0, 1], [0, 1, 4, 5]), job.explain()
    size = 3 - len(left) // EACH
    step = job.of("job_resized")[-1]["step"]
    check_goes_on_alike(job, resized(3, step, size), step, size * EACH)
    check_clean(job)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_replaced_in_the_new_size(kind: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """After a command has taken a replica away, a rank dies that has room: its replacement comes into the smaller
    job."""
    running = start(
        tmp_path / "run",
        *("--step-time", "150", *KINDS[kind]),
        replicas=3,
        config={"elastic": {"min": 1, "max": 3}},
        standby=1,
        inject=[f"rank={victim},fault=sigkill,at=backward,step={AT + 3}"],
    )
    running.wait_for("job_started", 120)
    assert command(running, 2, AT) == ""
    job = running.wait(180)
    check_fired(job)
    assert job.code == 0 and len(job.of("job_resized")) == 1, job.explain()
    assert job.of("recovery_finished")[-1]["victims"] == [victim], job.explain()
    assert job.of("recovery_finished")[-1]["left"] == [], job.explain()
    check_goes_on_alike(job, resized(3, AT, 2, *KINDS[kind]), AT, 4)
    check_clean(job)


def test_again_and_again_down_to_one(tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank={rank},fault=sigkill,at=forward,step={step}" for step, rank in ((AT - 2, 3), (AT, 0))]
    job = start(tmp_path / "run", replicas=3, inject=faults).wait(180)
    check_fired(job, 2)
    assert [event["replicas"] for event in job.of("job_resized")] == [2, 1], job.explain()
    assert job.code == 0, job.explain()
    check_clean(job)


FORMS = {
    "kept-unsharded": ("--keep",),
    "mixed-precision": ("--mixed",),
    "tied": ("--tied",),
    "clipped": ("--clip",),
    "uneven-batch": ("--global-batch", "20"),
    "apart": ("--stride",),
    "apart-tensor": ("--stride", "--kind", "tensor"),
    "uneven-tensor": ("--kind", "tensor", "--global-batch", "20"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=1,fault=sigkill,at=optimizer,step={AT}"]
    job = start(tmp_path / "run", *FORMS[form], replicas=3, inject=faults).wait(180)
    check_fired(job)
    check_ends_as_resized(job, resized, 3, [1], *FORMS[form])


LONG = 44


@pytest.mark.parametrize("kind", KINDS)
def test_it_grows_back(kind: str, tmp_path: Path) -> None:
    """A replica leaves by a kill, and another one comes back in its place by command: as in a job in which both was
    commanded, undisturbed, at the same steps."""
    flags = (*KINDS[kind], "--step-time", "150")
    faults = [f"rank=0,fault=sigkill,at=backward,step={AT}"]
    running = start(tmp_path / "run", *flags, config=never(2), inject=faults, steps=LONG)
    running.wait_for("recovery_finished", 120)
    assert command(running, 2) == ""
    job = running.wait(240)
    check_fired(job)
    assert job.code == 0, job.explain()
    found = changes(job)
    assert [change.ranks for change in found] == [(2, 3), (0, 1, 2, 3)], job.explain()
    other = start(tmp_path / "other", *flags, config=never(2), steps=LONG)
    other.wait_for("job_started", 120)
    assert command(other, 1, found[0].step) == ""
    other.wait_for("recovery_finished", 120)
    assert command(other, 2, found[1].step) == ""
    undisturbed = other.wait(240)
    assert changes(undisturbed) == [
        Change(found[0].step, (0, 1)),
        Change(found[1].step, (0, 1, 2, 3)),
    ], undisturbed.explain()
    check_steps_alike(job, undisturbed, found[0].step, found[1].step, EACH)
    check_goes_on_alike(job, undisturbed, found[1].step, 2 * EACH, LONG)
    check_same_in_all_replicas(job, found[1].step, 2 * EACH, LONG)
    check_clean(job)
    check_clean(undisturbed)


def test_a_replica_of_which_one_dies_does_not_come(tmp_path: Path) -> None:
    running = start(tmp_path / "run", "--step-time", "150", "--joining", "die-one", config=never(2), steps=30)
    running.wait_for("job_started", 120)
    assert command(running, 1, 3) == ""
    running.wait_for("recovery_finished", 120)
    assert command(running, 2) == ""
    job = running.wait(240)
    assert job.code == 0 and len(job.of("job_resized")) == 1, job.explain()
    texts = [notice["text"] for notice in job.notices("joining_process_given_up")]
    assert len(texts) == 2 and any("of the same replica does not come" in text for text in texts), job.explain()
    check_clean(job)


@pytest.mark.parametrize("state", RECOVERY[1:4])
@pytest.mark.parametrize("victim", [0, 5])
def test_one_dies_while_a_replica_comes_in(victim: int, state: str, tmp_path: Path) -> None:
    """A member, or one that comes: its replica leaves."""
    faults = [f"rank=5,fault=sigkill,at=recovery:{state}"]  # one that leaves by command does not come to this state
    inject_first = faults if victim == 5 else []
    running = start(
        tmp_path / "run", "--step-time", "150", replicas=3, config=never(3), inject=inject_first, steps=LONG
    )
    running.wait_for("job_started", 120)
    assert command(running, 2, 3) == ""
    running.wait_for("recovery_finished", 120)
    if victim == 0:
        inject(running, rank=0, at=f"recovery:{state}")
    assert command(running, 3) == ""
    job = running.wait(240)
    check_fired(job)
    assert job.code == 0, job.explain()
    assert changes(job)[-1].ranks == ((2, 3, 4, 5) if victim == 0 else (0, 1, 2, 3)), job.explain()
    other = start(tmp_path / "other", "--step-time", "150", replicas=3, config=never(3), steps=LONG)
    other.wait_for("job_started", 120)
    assert command(other, 2, 3) == ""
    check_goes_on_alike(job, other.wait(240), 3, 2 * EACH, LONG)
    check_clean(job)


def test_the_only_replica_cannot_lose_a_rank(tmp_path: Path) -> None:
    """What each of its ranks has is on no other, also where there is room for another process: the job says so."""
    running = start(
        tmp_path / "run",
        *("--step-time", "150"),
        config={"elastic": {"min": 1, "max": 2}},
        inject=[f"rank=0,fault=sigkill,at=backward,step={AT}"],
    )
    running.wait_for("job_started", 120)
    assert command(running, 1, 3) == ""
    job = running.wait(180)
    check_fired(job)
    assert job.code != 0 and "held by no living process" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)


REFUSED = {
    "order": "are data-parallel peers: replicas are known where",
    "pairs": "which of them belong to it in another size is not known",
    "one-sided": "the process groups of ranks at the same place in their replicas differ",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    job = start(tmp_path / "run", "--refused", what).wait(120)
    assert job.code != 0 and REFUSED[what] in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)


def test_as_many_as_ranks_is_refused(tmp_path: Path) -> None:
    job = start(tmp_path / "run", config={"elastic": {"min": 1, "max": 4}}).wait(120)
    assert job.code != 0, job.explain()
    reason = job.of("job_failed")[0]["reason"]
    assert "elastic.max = 2 is allowed" in reason and "2 replicas of 2 ranks each" in reason, reason
    check_clean(job)
