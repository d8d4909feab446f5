"""Megatron-LM's unmodified loop with context parallelism, and with MoE layers and expert parallelism, that goes on in
another parallel layout: from its iteration on it is, bit for bit, a job that was started in that layout from that
iteration's state, which megatron-core alone has written and read.

The losses of experts that Megatron logs are those that the iterations have had, in whatever layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S
from tests.support.replan import Saved, Sizes, command, replanned
from tests.support.replan_megatron_lm import (
    AUTO,
    Training,
    check_goes_on,
    check_killed,
    check_on_command,
    named,
    started,
)

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]

SHARDED = ("--use-distributed-optimizer", "--bf16")
CP = Training("cp2-dp2-bf16", Sizes(cp=2, dp=2), ("--bf16",))
CP_PARTS = Training("cp2-dp2-distributed", Sizes(cp=2, dp=2), SHARDED)
CP_ROWS = Training("tp2-cp2-sp", Sizes(tp=2, cp=2), ("--sequence-parallel",))
CP_STAGES = Training("pp2-cp2-per-token", Sizes(pp=2, cp=2), (*SHARDED, "--calculate-per-token-loss"))
CP_EVALUATED = Training("cp2-dp2-evaluated", Sizes(cp=2, dp=2), ("--use-distributed-optimizer",), evaluates=3)
EXPERTS = (
    *("--num-experts=4", "--moe-router-topk=2", "--moe-aux-loss-coeff=0.01", "--moe-z-loss-coeff=0.001"),
    *("--moe-router-load-balancing-type=aux_loss", "--moe-token-dispatcher-type=alltoall"),
)


def experts(name: str, sizes: Sizes, *flags: str, **more: Any) -> Training:
    return Training(name, sizes, (*EXPERTS, *flags), experts=True, **more)


EP = experts("ep2-dp4-bf16", Sizes(dp=4, ep=2), "--bf16")
EP_PARTS = experts("ep2-dp4-distributed", Sizes(dp=4, ep=2), *SHARDED)
EP_ONE = experts("ep1-dp4-distributed", Sizes(dp=4), *SHARDED)
EP_ALONE = experts("ep2-dp2-distributed", Sizes(dp=2, ep=2), *SHARDED)
EP_ROWS = experts("ep2-tp2-dp2-distributed", Sizes(tp=2, dp=2, ep=2), *SHARDED)
EP_STAGES = experts("ep2-pp2-dp2", Sizes(pp=2, dp=2, ep=2), "--log-params-norm")
EP_CP = experts("ep2-cp2-dp2-distributed", Sizes(cp=2, dp=2, ep=2), *SHARDED)
EP_MIXED = experts("ep2-dp4-mixed", Sizes(dp=4, ep=2), "--moe-layer-freq=([0]+[1])")
EP_SUMS = experts("ep2-dp4-logs", Sizes(dp=4, ep=2), *SHARDED, "--log-params-norm", logs=3)
EP_EVALUATED = experts("ep2-dp4-evaluated", Sizes(dp=4, ep=2), "--use-distributed-optimizer", evaluates=3)
PHASES = ("data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "param-gather", "commit")
VICTIMS = (0, 1, 3)
AT = CP.call("train", 4)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned-lm-experts"))


@pytest.mark.parametrize("kind", ["train", "log"])
@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{str(sizes).replace(',', '-')}")
        for training, sizes in (
            (CP, Sizes(dp=2)),
            (CP, Sizes(cp=4)),
            (CP, Sizes(tp=2, cp=2)),
            (CP_PARTS, Sizes(cp=2)),
            (CP_PARTS, Sizes(dp=4)),
            (CP_PARTS, Sizes(pp=2, cp=2)),
            (CP_ROWS, Sizes(cp=2, dp=2)),
            (CP_ROWS, Sizes(tp=2)),
            (CP_STAGES, Sizes(dp=3)),
            (CP_STAGES, Sizes(cp=4)),
            (EP, Sizes(dp=3)),
            (EP, Sizes(dp=4, ep=4)),
            (EP, Sizes(tp=2, dp=2, ep=2)),
            (EP_PARTS, Sizes(dp=2, ep=2)),
            (EP_PARTS, Sizes(dp=4)),
            (EP_PARTS, Sizes(pp=2, dp=2, ep=2)),
            (EP_PARTS, Sizes(tp=2, dp=2)),
            (EP_ONE, Sizes(dp=4, ep=4)),
            (EP_ALONE, Sizes()),
            (EP_ROWS, Sizes(dp=4, ep=4)),
            (EP_ROWS, Sizes(tp=2)),
            (EP_STAGES, Sizes(dp=3)),
            (EP_STAGES, Sizes(dp=4, ep=2)),
            (EP_CP, Sizes(cp=2, ep=2)),
            (EP_CP, Sizes(dp=4, ep=4)),
            (EP_MIXED, Sizes(pp=2, dp=2)),
        )
    ],
)
def test_on_command(training: Training, sizes: Sizes, kind: str, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, kind, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", [CP_PARTS, EP, EP_PARTS], ids=str)
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, saved: Saved) -> None:
    if phase == "param-gather" and training is EP:
        pytest.skip("parameters are not gathered")
    check_killed(training, victim, phase, AT, tmp_path / "run", saved)


@pytest.mark.parametrize(
    "training", [CP, CP_ROWS, CP_STAGES, EP_ONE, EP_ALONE, EP_ROWS, EP_STAGES, EP_CP, EP_MIXED], ids=str
)
def test_other_trainings(training: Training, tmp_path: Path, saved: Saved) -> None:
    check_killed(training, 1, "optimizer", AT, tmp_path / "run", saved)


@pytest.mark.parametrize("phase", ["between", "commit"])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("training", [CP_STAGES, EP_PARTS, EP_STAGES], ids=str)
def test_killed_in_the_log(training: Training, victim: int, phase: str, tmp_path: Path, saved: Saved) -> None:
    """What is to be logged died with the rank; the others have it."""
    at = training.call("log", 4)
    check_killed(training, victim, phase, at, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("training", [CP_PARTS, EP_SUMS], ids=str)
def test_losses_that_are_summed_up(training: Training, victim: int, tmp_path: Path, saved: Saved) -> None:
    """The log is of three iterations, of which some were computed in the layout before."""
    if training is CP_PARTS:
        training = named(training, "logs", logs=3, flags=(*training.flags, "--log-params-norm"))
    at = training.call("train", 4)
    check_killed(training, victim, "backward", at, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("training", [CP_EVALUATED, EP_EVALUATED], ids=str)
def test_killed_in_an_evaluation(training: Training, victim: int, tmp_path: Path, saved: Saved) -> None:
    """It is done again, and the ones after it have the samples that they would have had."""
    at = training.call("evaluate", 5)
    check_killed(training, victim, "data", at, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["restoring", "verifying", "resuming"])
@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_a_second_death_in_the_new_layout(training: Training, state: str, tmp_path: Path, saved: Saved) -> None:
    running = training.start(tmp_path / "run", inject=[f"rank=0,fault=sigkill,at=backward,step={AT}"])
    running.wait_for("job_replanned", TIMEOUT_S)
    elastic.inject(running, rank=1, at=f"recovery:{state}")
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    changes = replanned(job)
    assert len(changes) == 2 and changes[1][1].ranks <= 2 and changes[0][0] == changes[1][0], job.explain()
    check_goes_on(job, training, saved, changes)


@pytest.mark.parametrize(("training", "there"), [(CP_PARTS, Sizes(dp=4)), (EP_PARTS, Sizes(tp=2, dp=2))], ids=str)
def test_there_and_back(training: Training, there: Sizes, tmp_path: Path, saved: Saved) -> None:
    running = started(training, tmp_path / "run")
    changes = [(training.call("train", 2), there), (training.call("train", 5), training.sizes)]
    assert command(running, changes[0][1], changes[0][0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, changes[1][1], changes[1][0]) == ""
    check_goes_on(running.wait(TIMEOUT_S), training, saved, changes)


def test_a_rank_is_replaced_in_the_new_layout(tmp_path: Path, saved: Saved) -> None:
    running = started(CP_PARTS, tmp_path / "run")
    at = CP_PARTS.call("train", 2)
    assert command(running, Sizes(cp=4), at) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="backward", step=CP_PARTS.call("train", 6))
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    assert job.of("recovery_finished")[1]["victims"] == [1], job.explain()
    check_goes_on(job, CP_PARTS, saved, [(at, Sizes(cp=4))])


def test_what_is_refused_on_command(tmp_path: Path) -> None:
    """A loop that was launched without context parallelism gets none."""
    training = Training("dp2", Sizes(dp=2))
    running = started(training, tmp_path / "run")
    assert "where it was launched with more than 1" in command(running, Sizes(cp=2))
    job = running.wait(TIMEOUT_S)
    assert job.code == 0 and not job.of("job_replanned"), job.explain()


def test_a_job_that_is_refused(tmp_path: Path) -> None:
    flags = ("--moe-router-enable-expert-bias", "--moe-router-score-function=sigmoid")
    job = experts("bias", Sizes(dp=2), *flags).start(tmp_path / "run", config=AUTO).wait(TIMEOUT_S)
    assert job.code != 0 and "moe_router_enable_expert_bias" in job.explain(), job.explain()
    assert "step=0" not in job.explain()
