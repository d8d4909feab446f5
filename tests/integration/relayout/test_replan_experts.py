"""A megatron-core job with MoE layers, expert or context parallelism that goes on in another parallel layout: from its
step on it is, bit for bit, a job that megatron-core alone has started in that layout from that step's state.

Experts are known by their number in the whole layer, no matter which rank has them. Without expert parallelism they are
stepped on by the optimizer of all parameters, with it by one of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.config import PHASES
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.replan import (
    AT,
    STEPS,
    TIMEOUT_S,
    Course,
    Saved,
    Sizes,
    Training,
    check_same_steps,
    command,
    never,
    replanned,
    start,
)
from tests.support.replan_scenarios import (
    check_back_to_a_checkpoint,
    check_losses,
    check_on_command,
    check_replaced_in_the_new_layout,
    check_second_death_before_the_change,
    check_second_death_in_the_new_layout,
    check_there_and_back,
    killed,
    started,
)

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

SHARDED = ("--use-distributed-optimizer", "--bf16")
EXPERTS = ("--num-experts", "4", "--takes", "cp,ep")
CONTEXT = ("--takes", "cp")
CP = Training("cp2", Sizes(dp=2, cp=2), (*CONTEXT, "--bf16"))
CP_PARTS = Training("cp2-distributed", Sizes(dp=2, cp=2), (*CONTEXT, *SHARDED))
EP = Training("ep2", Sizes(dp=4, ep=2), (*EXPERTS, "--bf16"))
EP_PARTS = Training("ep2-distributed", Sizes(dp=4, ep=2), (*EXPERTS, *SHARDED))
EP_ALONE = Training("ep2-alone", Sizes(dp=2, ep=2), (*EXPERTS, "--bf16"))
EP_ALONE_PARTS = Training("ep2-alone-distributed", Sizes(dp=2, ep=2), (*EXPERTS, *SHARDED))
EP_ONE = Training("ep1-distributed", Sizes(dp=4), (*EXPERTS, *SHARDED))
EP_ONE_WHOLE = Training("ep1-fp32", Sizes(dp=4), EXPERTS)
EP_FP16 = Training("ep2-fp16-distributed", Sizes(dp=4, ep=2), (*EXPERTS, "--use-distributed-optimizer", "--fp16"))
EP_TP = Training("ep2-tp2-distributed", Sizes(tp=2, dp=2, ep=2), (*EXPERTS, *SHARDED))
EP_CP = Training("ep2-cp2-distributed", Sizes(dp=2, cp=2, ep=2), (*EXPERTS, *SHARDED))
EP_PP = Training("ep2-pp2", Sizes(pp=2, dp=2, ep=2), (*EXPERTS, "--bf16"))
STAGES = ("--layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
VICTIMS = (0, 1, 3)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned"))


@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{str(sizes).replace(',', '-')}")
        for training, sizes in (
            (CP, Sizes(cp=2)),
            (CP, Sizes(dp=2)),
            (CP, Sizes(cp=4)),
            (CP, Sizes(tp=2, cp=2)),
            (CP_PARTS, Sizes(cp=2)),
            (CP_PARTS, Sizes(dp=2)),
            (CP_PARTS, Sizes(dp=4)),
            (CP_PARTS, Sizes(pp=2, cp=2)),
            (EP, Sizes(dp=2)),
            (EP, Sizes(dp=2, ep=2)),
            (EP, Sizes(dp=4, ep=4)),
            (EP, Sizes()),
            (EP_PARTS, Sizes(dp=2)),
            (EP_PARTS, Sizes(dp=2, ep=2)),
            (EP_PARTS, Sizes(dp=4, ep=4)),
            (EP_PARTS, Sizes(pp=2, dp=2, ep=2)),
            (EP_PARTS, Sizes(dp=2, cp=2, ep=2)),
            (EP_ALONE, Sizes()),
            (EP_ALONE_PARTS, Sizes(cp=2, ep=2)),
            (EP_ONE, Sizes(dp=4, ep=2)),
            (EP_ONE, Sizes(dp=3)),
            (EP_ONE_WHOLE, Sizes(dp=4, ep=4)),
            (EP_FP16, Sizes(dp=2)),
            (EP_TP, Sizes(dp=4, ep=4)),
            (EP_TP, Sizes(tp=2)),
            (EP_CP, Sizes(dp=4, ep=2)),
            (EP_PP, Sizes(dp=4, ep=4)),
            (EP_PP, Sizes(pp=2)),
        )
    ],
)
def test_on_command(training: Training, sizes: Sizes, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, tmp_path / "run", saved)


def test_there_and_back(tmp_path: Path, saved: Saved) -> None:
    """EP 2 -> 1 -> 2: the experts' optimizer goes into that of all parameters, and comes out of it."""
    check_there_and_back(EP_PARTS, Sizes(dp=4), tmp_path / "run", saved)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", [CP_PARTS, EP, EP_PARTS], ids=str)
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, saved: Saved) -> None:
    if phase == "param-gather" and "--use-distributed-optimizer" not in training.flags:
        pytest.skip("parameters are not gathered")
    check_losses(training, [killed(victim, phase)], 3, tmp_path / "run", saved)


@pytest.mark.parametrize("training", [CP, EP_ONE, EP_FP16, EP_TP, EP_CP, EP_PP], ids=str)
def test_other_trainings(training: Training, tmp_path: Path, saved: Saved) -> None:
    check_losses(training, [killed(1, "optimizer")], 3, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "optimizer", "commit"])
@pytest.mark.parametrize("training", [EP_ALONE, EP_ALONE_PARTS], ids=str)
def test_experts_that_nobody_else_has(
    training: Training, phase: str, victim: int, tmp_path: Path, saved: Saved
) -> None:
    """Half of the experts was on the dead rank alone: they come from the copies that its neighbour keeps."""
    check_losses(training, [killed(victim, phase)], 1, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["quiescing", "stashing"])
@pytest.mark.parametrize("training", [CP_PARTS, EP, EP_PARTS], ids=str)
def test_a_second_death_before_the_change(training: Training, state: str, tmp_path: Path, saved: Saved) -> None:
    """With experts: of two that have others (without the distributed optimizer no copies are needed), or the same ones,
    of which no rank is left then."""
    if training is not EP_PARTS:
        second = 1 if training is EP else 2
        check_second_death_before_the_change(training, state, tmp_path / "run", saved, second)
        return
    faults = [killed(0, "backward"), killed(2, f"recovery:{state}", None)]
    job = start(tmp_path / "run", training, inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    assert job.code != 0, job.explain()
    (failed,) = job.of("job_failed")
    assert "held by no living process" in failed["reason"] and "expert" in failed["reason"], job.explain()


@pytest.mark.parametrize("state", ["restoring", "verifying", "resuming"])
def test_a_second_death_in_the_new_layout(state: str, tmp_path: Path, saved: Saved) -> None:
    check_second_death_in_the_new_layout(EP_PARTS, state, tmp_path / "run", saved)


@pytest.mark.parametrize("training", [EP_PARTS, CP_PARTS], ids=str)
def test_a_rank_is_replaced_in_the_new_layout(training: Training, tmp_path: Path, saved: Saved) -> None:
    sizes = Sizes(dp=4, ep=4) if training is EP_PARTS else Sizes(cp=2)
    check_replaced_in_the_new_layout(training, sizes, tmp_path / "run", saved)


def test_two_at_once_go_back_to_a_checkpoint_in_another_layout(tmp_path: Path, saved: Saved) -> None:
    """Experts, too, and their optimizer."""
    check_back_to_a_checkpoint(EP_PARTS, tmp_path, saved)


def test_experts_with_tensor_parallelism_but_whole_sequences(tmp_path: Path, saved: Saved) -> None:
    """By command: the script is told before its first step what it lacks, and the job goes on in the layout before. By
    itself the planner does not choose that."""
    running = started(tmp_path / "run", EP, "--mode", "whole-sequences")
    sizes = Sizes(tp=2, dp=2)
    assert command(running, sizes, AT) == ""
    job = running.wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    assert replanned(job) == [(AT, sizes), (AT, EP.sizes)], job.explain()
    assert "without sequence_parallel, which megatron-core does not" in job.explain(), job.explain()
    mine, theirs = Course.of(job), Course.of(saved.written(EP)[1])
    check_same_steps(mine, theirs, 0, STEPS, EP.sizes, job.explain())


def test_what_is_refused(tmp_path: Path) -> None:
    running = started(tmp_path / "run", EP)
    assert "ep = 3 does not divide 4 experts" in command(running, Sizes(dp=3, ep=3))
    assert "ep = 4 does not divide the 2 ranks" in command(running, Sizes(dp=2, ep=4))
    assert "2 x cp = 6 does not divide 8 tokens" in command(running, Sizes(cp=3))
    job = running.wait(TIMEOUT_S)
    assert job.code == 0 and not job.of("job_replanned"), job.explain()


def test_what_the_script_has_not_asked_for_stays(tmp_path: Path) -> None:
    training = Training("ep1-stays", Sizes(dp=4), ("--num-experts", "4", "--bf16"))
    running = started(tmp_path / "run", training)
    assert "has not asked flashrecovery.layout() for ep, so it stays 1" in command(running, Sizes(dp=4, ep=2))
    assert "has not asked flashrecovery.layout() for cp, so it stays 1" in command(running, Sizes(dp=2, cp=2))
    job = running.wait(TIMEOUT_S)
    assert job.code == 0 and not job.of("job_replanned"), job.explain()


@pytest.mark.parametrize(
    ("training", "config", "reason"),
    [
        (
            Training("bias", Sizes(dp=2, ep=2), (*EXPERTS, "--moe-router-enable-expert-bias")),
            never(),
            "moe_router_enable_expert_bias",
        ),
        (EP, {**never(), "elastic": {"min": 1, "max": 4}}, "elastic.max = 2 is allowed"),
        (
            Training("virtual", Sizes(pp=2, dp=2, ep=2), (*EXPERTS, *STAGES)),
            {**never(), "elastic": {"min": 1, "max": 2}},
            "MoE layers in several model chunks",
        ),
        (
            Training("virtual-cp", Sizes(pp=2, cp=2), (*CONTEXT, *STAGES)),
            {**never(), "elastic": {"min": 1, "max": 2}},
            "context_parallel_size = 2 with several model chunks",
        ),
    ],
    ids=["bias", "elastic-beyond", "elastic-virtual-experts", "elastic-virtual-context"],
)
def test_jobs_that_are_refused(training: Training, config: dict[str, object], reason: str, tmp_path: Path) -> None:
    job = start(tmp_path / "run", training, config=config).wait(TIMEOUT_S)
    assert job.code != 0 and reason in job.explain(), job.explain()
