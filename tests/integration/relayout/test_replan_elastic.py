"""A megatron-core job that is elastic, and whose parallel layout may change: replicas leave and come in the living
processes, and where that is not possible the job goes on in another layout, in which it is elastic again. In each stage
it is, bit for bit, a job that megatron-core alone has started so from that step's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.config import PHASES
from tests.support import elastic
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, check_fired
from tests.support.replan import TIMEOUT_S, Sizes, Training, command, start
from tests.support.replan_elastic import History, Stage, both, check_history, never, stages

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

SHARDED = ("--use-distributed-optimizer", "--bf16")
TP = Training("tp2-dp2", Sizes(2, 1, 2), ("--bf16",))
TP_PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)
TP_PARTS_32 = Training("tp2-dp2-distributed-fp32", Sizes(2, 1, 2), ("--use-distributed-optimizer",))
PP = Training("pp2-dp2-fp32", Sizes(1, 2, 2))
PP_PARTS = Training("pp2-dp2-distributed", Sizes(1, 2, 2), SHARDED)
TIED = Training("pp2-dp2-tied-distributed", Sizes(1, 2, 2), (*SHARDED, "--tie-head"))
STAGES = ("--layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
VIRTUAL = Training("vpp2-dp2-distributed", Sizes(1, 2, 2), (*STAGES, *SHARDED))
TO_VIRTUAL = Training("tp2-dp2-to-virtual", Sizes(2, 1, 2), (*STAGES, *SHARDED))
CONTEXT, EXPERTS = ("--takes", "cp"), ("--num-experts", "4", "--takes", "cp,ep")
CP = Training("cp2-dp2", Sizes(cp=2, dp=2), (*CONTEXT, "--bf16"))
CP_PARTS = Training("cp2-dp2-distributed", Sizes(cp=2, dp=2), (*CONTEXT, *SHARDED))
EP = Training("ep2-dp4", Sizes(ep=2, dp=4), (*EXPERTS, "--bf16"))
EP_PARTS = Training("ep2-dp4-distributed", Sizes(ep=2, dp=4), (*EXPERTS, *SHARDED))
DP_CONTEXT = Training("dp4-distributed", Sizes(dp=4), (*CONTEXT, *SHARDED))
EP_ONE = Training("ep1-dp4-distributed", Sizes(dp=4), (*EXPERTS, *SHARDED))
TRAININGS = (TP, TP_PARTS, TP_PARTS_32, PP, PP_PARTS, TIED, VIRTUAL, CP, CP_PARTS, EP, EP_PARTS)
FIRST, SECOND = 3, 6
ONE = Sizes(1, 1, 1)


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(tmp_path_factory.mktemp("stages"))


def mate(training: Training, rank: int) -> int:
    """The other rank of its replica."""
    return (rank + 2) % 4 if training.sizes.pp > 1 else rank ^ 1


def check_two_losses(job: Job, training: Training, history: History) -> None:
    """First a replica has left, and then the layout has changed; each before or after its step."""
    check_fired(job, 2)
    found = stages(job, training)
    assert [stage.restarted for stage in found] == [False, True], job.explain()
    assert found[0].sizes == training.sizes.of(1) and found[1].sizes.ranks == 1, job.explain()
    assert abs(found[0].step - FIRST) <= 1 and abs(found[1].step - SECOND) <= 1, job.explain()
    assert not job.of("fallback_started"), job.explain()
    check_history(job, training, history, found)


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_a_replica_and_then_a_part_of_the_last_one(
    training: Training, second: int, tmp_path: Path, history: History
) -> None:
    """No other rank has what the second one had, but for the copies that the last replica's ranks keep of each
    other."""
    last = second if second == 0 else mate(training, 0)
    faults = [f"rank=3,fault=sigkill,at=backward,step={FIRST}", f"rank={last},fault=sigkill,at=optimizer,step={SECOND}"]
    job = start(tmp_path / "run", training, config=never(training), inject=faults).wait(TIMEOUT_S)
    check_two_losses(job, training, history)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "param-gather"])
@pytest.mark.parametrize("training", [TP, PP_PARTS, CP_PARTS, EP_PARTS], ids=str)
def test_the_second_loss_in_each_phase(training: Training, phase: str, tmp_path: Path, history: History) -> None:
    faults = [f"rank=1,fault=sigkill,at=forward,step={FIRST}"]
    victim = 0 if training.sizes.pp > 1 else 2
    faults.append(f"rank={victim},fault=sigkill,at={phase},step={SECOND}")
    job = start(tmp_path / "run", training, config=never(training), inject=faults).wait(TIMEOUT_S)
    check_two_losses(job, training, history)


@pytest.mark.parametrize("training", [TP_PARTS, PP, CP_PARTS, EP, EP_PARTS], ids=str)
def test_the_second_loss_in_the_first_step_of_the_smaller_job(
    training: Training, tmp_path: Path, history: History
) -> None:
    """The copies of the last replica are there before it goes on."""
    faults = [f"rank=3,fault=sigkill,at=backward,step={FIRST}", "rank=0,fault=sigkill,at=recovery:resuming"]
    job = start(tmp_path / "run", training, config=never(training), inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    found = stages(job, training)
    assert found[-1].restarted and found[-1].sizes.ranks == 1, job.explain()
    check_history(job, training, history, found)


@pytest.mark.parametrize("training", [TP_PARTS, TP, PP_PARTS, CP, CP_PARTS, EP, EP_PARTS], ids=str)
def test_a_second_death_as_a_replica_is_about_to_leave(training: Training, tmp_path: Path, history: History) -> None:
    """Of the replica that was to stay: what is left of both lays the job out again."""
    faults = [f"rank=3,fault=sigkill,at=backward,step={FIRST}", "rank=0,fault=sigkill,at=recovery:quiescing"]
    job = start(tmp_path / "run", training, config=never(training), inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    found = stages(job, training)
    assert found and found[-1].restarted and found[-1].sizes.ranks <= 2, job.explain()
    check_history(job, training, history, found)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", [TP_PARTS, PP, CP_PARTS, EP, EP_PARTS], ids=str)
def test_a_second_death_when_a_replica_has_just_left(training: Training, state: str, tmp_path: Path) -> None:
    """The healthy rank of the other replica is gone, and the copies of the last one are not decided for yet: the job
    ends, and says so."""
    faults = [f"rank=3,fault=sigkill,at=backward,step={FIRST}", f"rank=0,fault=sigkill,at=recovery:{state}"]
    job = start(tmp_path / "run", training, config=never(training), inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    assert job.code != 0, job.explain()
    (failed,) = job.of("job_failed")
    assert "cannot be recovered" in failed["reason"] or "no rank" in failed["reason"], job.explain()


@pytest.mark.parametrize("training", [TP_PARTS, PP, CP_PARTS, EP, EP_PARTS], ids=str)
def test_below_the_least_replicas(training: Training, tmp_path: Path, history: History) -> None:
    """With ``elastic.min`` 2 no replica leaves: the three ranks that are left get another layout at once."""
    faults = [f"rank=1,fault=sigkill,at=backward,step={FIRST}"]
    job = start(tmp_path / "run", training, config=never(training, least=2), inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    (found,) = stages(job, training)
    assert found.restarted and found.sizes.ranks in (2, 3), job.explain()
    check_history(job, training, history, [found])


STEPS_LONG = 22
LONG = ("--steps", str(STEPS_LONG), "--step-time", "250")


@pytest.mark.parametrize(
    ("training", "other"),
    [
        pytest.param(training, other, id=str(training))
        for training, other in (
            (TP, Sizes(1, 2, 2)),
            (TP_PARTS, Sizes(1, 2, 2)),
            (PP_PARTS, Sizes(2, 1, 2)),
            (VIRTUAL, Sizes(2, 1, 2)),
            (TO_VIRTUAL, Sizes(1, 2, 2)),
            (CP_PARTS, Sizes(2, 1, 2)),
            (DP_CONTEXT, Sizes(cp=2, dp=2)),
            (EP_ONE, Sizes(ep=2, dp=4)),
            (EP_PARTS, Sizes(cp=2, ep=2, dp=2)),
            (EP, Sizes(pp=2, dp=2)),
        )
    ],
)
def test_elastic_again_in_the_new_layout(training: Training, other: Sizes, tmp_path: Path, history: History) -> None:
    """By command to another layout of two replicas; there one is killed, and its replica leaves and comes back."""
    running = start(tmp_path / "run", training, *LONG, config=never(training))
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, other, 2) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="backward", step=5)
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert elastic.command(running, 2) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    found = stages(job, training)
    assert [(stage.sizes, stage.restarted) for stage in found] == [
        (other, True),
        (other.of(1), False),
        (other, False),
    ], job.explain()
    assert found[1].step in (4, 5, 6), job.explain()
    check_history(job, training, history, found, STEPS_LONG)


@pytest.mark.parametrize("training", [TP_PARTS, CP_PARTS, EP_PARTS], ids=str)
def test_a_smaller_job_changes_its_layout_by_command(training: Training, tmp_path: Path, history: History) -> None:
    """After a resize by command; to more ranks than there are, whose number of replicas is another one's."""
    running = start(tmp_path / "run", training, *LONG, config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    assert elastic.command(running, 1, 3) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert "has the layout" in command(running, training.sizes.of(1))
    assert command(running, Sizes(1, 1, 4), 7) == ""
    assert "about to change its parallel layout" in elastic.command(running, 2)
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert "4 at most is allowed" in elastic.command(running, 6)
    assert elastic.command(running, 2, 16) == ""
    assert "about to change its number of replicas" in command(running, training.sizes)
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    job = running.wait(TIMEOUT_S)
    expected = [
        Stage(3, training.sizes.of(1)),
        Stage(7, Sizes(1, 1, 4), restarted=True),
        Stage(16, Sizes(1, 1, 2)),
    ]
    check_history(job, training, history, expected, STEPS_LONG)


@pytest.mark.parametrize(
    ("training", "other"),
    [
        pytest.param(training, other, id=str(training))
        for training, other in (
            (TP_PARTS, Sizes(1, 2, 1)),
            (CP_PARTS, Sizes(dp=2)),
            (EP, Sizes(dp=2)),
            (EP_PARTS, Sizes(cp=2, ep=2)),
        )
    ],
)
def test_a_rank_is_replaced_in_each_size_and_layout(
    training: Training, other: Sizes, tmp_path: Path, history: History
) -> None:
    """As launched, among fewer replicas, and in the layout that these change to."""
    running = start(tmp_path / "run", training, *LONG, config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    elastic.inject(running, rank=2, at="backward", step=3)
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert elastic.command(running, 1, 7) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    elastic.inject(running, rank=1, at="optimizer", step=10)
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    assert command(running, other, 14) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=4)
    elastic.inject(running, rank=0, at="commit", step=18)
    job = running.wait(TIMEOUT_S)
    check_fired(job, 3)
    assert [event["victims"] for event in job.of("recovery_finished")] == [[2], [], [1], [], [0]], job.explain()
    check_history(
        job, training, history, [Stage(7, training.sizes.of(1)), Stage(14, other, restarted=True)], STEPS_LONG
    )
