"""Elastic jobs on Megatron-LM's unmodified loop: a rank dies and is not replaced, and the others go on as a job that
was resized by command at the same call, bit for bit, which goes on as one that was started in the new size from that
iteration's state: the loop's losses, and the whole weights and optimizer state, of every later iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import changes, check_steps_alike, command
from tests.support.elastic_megatron_lm import (
    DISTRIBUTED,
    Resized,
    Training,
    check_ends_as_resized,
    evaluations,
    logged,
    resized_once,
)
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, check_clean, check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S, content

skip_module_without("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]
PHASES = (
    *("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "param-gather"),
    "commit",
)
VICTIMS = (0, 1, 3)
PLAIN = Training("plain")
AT = PLAIN.call("train", 4)
SHARDS = Training("distributed-bf16", (*DISTRIBUTED, "--bf16"))
MAIN = (PLAIN, SHARDS)
OTHERS = (
    Training("bf16", ("--bf16",)),
    Training("fp16", ("--fp16", "--initial-loss-scale=65536")),
    Training("workers", ("--num-workers=2",)),
    Training("overlap", ("--overlap-grad-reduce", "--ddp-bucket-size=700", "--bf16")),
    Training("distributed", DISTRIBUTED),
    Training("distributed-fp16", (*DISTRIBUTED, "--fp16", "--initial-loss-scale=65536")),
    Training("distributed-overlap", (*DISTRIBUTED, "--overlap-grad-reduce", "--ddp-bucket-size=700", "--bf16")),
    Training("per-token", ("--calculate-per-token-loss",)),
    Training("recompute", ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")),
    Training("unvalidated", ("--rerun-mode=disabled",)),
)


TP2, PP2 = ("--tensor-model-parallel-size=2",), ("--pipeline-model-parallel-size=2",)
REPLICAS = (
    Training("tp2", TP2, each=2),
    Training("tp2-sp-bf16", (*TP2, "--sequence-parallel", "--bf16"), each=2),
    Training("pp2", PP2, each=2),
    Training("pp2-fp16", (*PP2, "--fp16", "--initial-loss-scale=65536"), each=2),
    Training("tp2-distributed", (*TP2, *DISTRIBUTED, "--bf16"), each=2),
    Training("pp2-distributed", (*PP2, *DISTRIBUTED, "--bf16"), each=2),
)
"""Replicas of several ranks, which leave as a whole. Two of them: a job that is started with one is no elastic one."""
THREE = (
    Training("tp2-three", TP2, launched=6, each=2),
    Training("pp2-three", PP2, launched=6, each=2),
    Training("tp2-three-distributed", (*TP2, *DISTRIBUTED, "--bf16"), launched=6, each=2),
    Training("pp2-three-distributed", (*PP2, *DISTRIBUTED, "--bf16"), launched=6, each=2),
)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def kills() -> list[Any]:
    return [
        pytest.param(training, phase, victim, id=f"{training}-{phase}-{victim}")
        for training in MAIN
        for phase in PHASES
        if training.sharded or phase != "param-gather"
        for victim in VICTIMS
    ]


def test_the_same_from_the_start_in_new_interpreters(tmp_path: Path) -> None:
    """They are started where a zygote does not answer in time: the weights, which ranks draw for themselves."""
    training = Training("plain-short", iterations=2)
    jobs = []
    for method in ("zygote", "spawn"):
        config = {"elastic": {"min": 1, "max": 4}, "start_method": method}
        job = training.start(tmp_path / method, config=config).wait(TIMEOUT_S)
        assert job.code == 0, job.explain()
        assert (job.run_dir / "logs" / "zygote.log").exists() == (method == "zygote")
        check_clean(job)
        jobs.append(job)
    check_steps_alike(*jobs, 0, training.iterations, 4)


@pytest.mark.parametrize(("training", "phase", "victim"), kills())
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    job = training.start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, AT, [victim], training, resized)


@pytest.mark.parametrize("phase", ["between", "commit"])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("training", MAIN, ids=str)
def test_killed_in_the_log(training: Training, victim: int, phase: str, tmp_path: Path, resized: Resized) -> None:
    """Between two iterations."""
    faults = [f"rank={victim},fault=sigkill,at={phase},step={AT + 1}"]
    job = training.start(tmp_path / "run", inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, AT + 1, [victim], training, resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    job = training.start(tmp_path / "run", inject=[f"rank=0,fault=sigkill,at=optimizer,step={AT}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, AT, [0], training, resized)


SCALE = ("--fp16", "--initial-loss-scale=65536", "--loss-scale-window=1", "--hysteresis=1")
OVERFLOWS = 5
"""An iteration that overflows with four ranks, and not with two: each divides its loss by twice as many micro-batches
there."""


@pytest.mark.parametrize("phase", ["backward", "commit"])
@pytest.mark.parametrize(
    "training", [Training("distributed-scale", (*DISTRIBUTED, *SCALE)), Training("scale", SCALE)], ids=str
)
def test_an_iteration_that_overflows_in_the_old_size_alone(
    training: Training, phase: str, tmp_path: Path, resized: Resized
) -> None:
    """The loss scale moves in each iteration. That one was skipped by four ranks is of no meaning for two, which make
    it again; what is logged of it, and of those after it, is theirs."""
    at = training.call("train", OVERFLOWS)
    faults = [f"rank={rank},fault=sigkill,at={phase},step={at}" for rank in (0, 2)]
    job = training.start(tmp_path / "run", inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, at, [0, 2], training, resized)
    call = job.of("job_resized")[-1]["step"]
    mine, theirs = logged(job), logged(resized(training, call, 2))
    for number in range(training.iteration(call), training.iterations):
        assert len(theirs[number]) == 1 and theirs[number] <= mine[number], (number, mine[number], theirs[number])
    if call <= at:
        (line,) = theirs[OVERFLOWS]
        assert "loss scale: 1048576.0 |" in line and "number of skipped iterations:   0 |" in line, line


def _others(victim: int, training: Training) -> list[int]:
    """The ranks of a replica of two, as Megatron numbers them."""
    if "tp2" in training.name:
        return sorted([victim, victim ^ 1])
    replicas = training.launched // 2
    return [victim % replicas, victim % replicas + replicas]


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "commit"])
@pytest.mark.parametrize("training", REPLICAS, ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    job = training.start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, AT, _others(victim, training), training, resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three_replicas(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    """The others go on as a job that was started with two, from that iteration's state."""
    job = training.start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at=backward,step={AT}"]).wait(
        TIMEOUT_S
    )
    check_fired(job)
    check_ends_as_resized(job, AT, _others(victim, training), training, resized)


@pytest.mark.parametrize("training", MAIN, ids=str)
def test_two_at_once(training: Training, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    job = training.start(tmp_path / "run", inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, AT, [0, 2], training, resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", MAIN, ids=str)
def test_a_second_death_during_the_change(training: Training, state: str, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}", f"rank=3,fault=sigkill,at=recovery:{state}"]
    job = training.start(tmp_path / "run", inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, AT, [1, 3], training, resized)


@pytest.mark.parametrize("training", MAIN, ids=str)
def test_a_size_that_does_not_divide_is_left_out(training: Training, tmp_path: Path, resized: Resized) -> None:
    """Eight micro-batches: without one of four replicas, two go on."""
    training = Training(f"{training}-16", training.flags, batch=16)
    running = training.start(tmp_path / "run", inject=[f"rank=3,fault=sigkill,at=optimizer,step={AT}"])
    running.wait_for("job_started", TIMEOUT_S)
    assert "2 is allowed" in command(running, 3, AT - 2)
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, AT, [1, 3] if training.sharded else [2, 3], training, resized)


@pytest.mark.parametrize("training", MAIN, ids=str)
def test_one_after_another(training: Training, tmp_path: Path) -> None:
    """4 -> 3 -> 2 -> 1: as by command."""
    training = Training(f"{training}-three", training.flags, iterations=12)
    faults = [f"rank={rank},fault=sigkill,at=forward,step={AT + 4 * i}" for i, rank in enumerate((1, 0, 3))]
    config = {"elastic": {"min": 1, "max": 4, "replace": "never"}}
    job = training.start(tmp_path / "run", inject=faults, config=config).wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    check_fired(job, 3)
    check_clean(job)
    found = [(change.step, len(change.ranks)) for change in changes(job)]
    assert [size for _, size in found] == [3, 2, 1], job.explain()
    running = training.start(tmp_path / "other", "--step-time=400", config={"elastic": {"min": 1, "max": 4}})
    running.wait_for("job_started", TIMEOUT_S)
    for number, (call, size) in enumerate(found, 1):
        assert command(running, size, call) == ""
        running.wait_for("recovery_finished", TIMEOUT_S, count=number)
    other = running.wait(TIMEOUT_S)
    assert [(change.step, len(change.ranks)) for change in changes(other)] == found, other.explain()
    ends = [*(call for call, _ in found[1:]), 2 * training.iterations]
    for (call, size), end in zip(found, ends, strict=True):
        check_steps_alike(job, other, training.iteration(call), end // 2, size)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("training", MAIN, ids=str)
def test_killed_in_an_evaluation(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    """It is done again with as many samples, the same ones."""
    training = Training(f"{training}-evaluated", training.flags, evaluates=4)
    at = training.call("evaluate", 3)
    job = training.start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at=data,step={at}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, at, [victim], training, resized)
    (event,) = job.of("job_resized")
    found, commanded = evaluations(job), evaluations(resized(training, event["step"], 3))
    numbers = {at: len(losses) for at, losses in found.items()}
    assert numbers == {(3, 3): 1, (7, 3): 1, (8, 3): 2}, found  # at the end those of two sets
    assert found == commanded


LOADED = (PLAIN, Training("bf16", ("--bf16",)))
"""Without Transformer Engine and Apex, as here, Megatron cannot load what it has saved of the distributed optimizer
(``DistributedOptimizer.state_dict`` wants the steps of torch's Adam, which has made none)."""


@pytest.mark.parametrize("training", LOADED, ids=str)
def test_a_checkpoint_of_megatrons(training: Training, tmp_path: Path) -> None:
    """Written by three of four replicas, and loaded by a job of three, of two, and of four: that of three goes on as
    the one that wrote it, evaluations included."""
    training = Training(f"{training}-saved", training.flags, evaluates=4, saves=6)
    job = _saving(training, tmp_path, "run", f"rank=1,fault=sigkill,at=backward,step={training.call('train', 4)}")
    for size in (3, 2, 4):
        other = _loading(training, tmp_path, size)
        if size == 3:
            check_steps_alike(job, other, 6, training.iterations, 3)
            assert evaluations(job)[7, 3] == evaluations(other)[7, 3] and len(evaluations(job)[7, 3]) == 1


@pytest.mark.parametrize("phase", ["between", "commit"])
@pytest.mark.parametrize("training", LOADED, ids=str)
def test_killed_in_a_checkpoint(training: Training, phase: str, tmp_path: Path) -> None:
    """Those that stay write it again, and a job of as many goes on from it as they do."""
    training = Training(f"{training}-saved", training.flags, saves=6)
    job = _saving(training, tmp_path, "run", f"rank=1,fault=sigkill,at={phase},step={training.call('exit', 5)}")
    check_steps_alike(job, _loading(training, tmp_path, 3), 6, training.iterations, 3)


@pytest.mark.parametrize("kind", ["train", "exit"])
def test_a_checkpoint_of_the_distributed_optimizer(kind: str, tmp_path: Path) -> None:
    """It holds what that of a job holds that was resized by command. The rank dies before it is written, or in it.
    (Written parameter by parameter: Megatron's default writes whole buckets, with padding that is not set.)"""
    training = Training("saved", (*SHARDS.flags, "--dist-ckpt-optim-fully-reshardable"), saves=6)
    phase, at = ("backward", training.call("train", 4)) if kind == "train" else ("between", training.call("exit", 5))
    job = _saving(training, tmp_path, "run", f"rank=1,fault=sigkill,at={phase},step={at}")
    (change,) = changes(job)
    other = _saving(training, tmp_path, "other", "", change.step)
    check_steps_alike(job, other, 6, training.iterations, 3)
    for iteration in (6, 9):
        mine, theirs = (
            content(tmp_path / f"{name}-saved" / f"iter_{iteration:07}", tmp_path / "all.pt")
            for name in ("run", "other")
        )
        assert mine == theirs, sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
        assert any("exp_avg_sq" in name for name in mine), sorted(mine)


def _saving(training: Training, folder: Path, name: str, fault: str, resized_at: int = -1) -> Job:
    """Four replicas become three, by a fault or on command, and save after six iterations."""
    flags = (f"--save={folder}/{name}-saved", "--save-interval=6")
    if fault:
        job = training.start(folder / name, *flags, inject=[fault]).wait(TIMEOUT_S)
        check_fired(job)
    else:
        running = training.start(folder / name, *flags, "--step-time=400", config={"elastic": {"min": 1, "max": 4}})
        running.wait_for("job_started", TIMEOUT_S)
        assert command(running, 3, resized_at) == ""
        job = running.wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    check_clean(job)
    assert [len(change.ranks) for change in changes(job)] == [3], job.explain()
    return job


def _loading(training: Training, folder: Path, size: int) -> Job:
    """A job of that many replicas that loads it."""
    load = (f"--load={folder}/run-saved", "--ckpt-step=6")
    config = {"elastic": {"min": 1, "max": size}}
    job = training.start(folder / f"loaded-{size}", *load, config=config, nproc=size).wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    check_clean(job)
    return job
