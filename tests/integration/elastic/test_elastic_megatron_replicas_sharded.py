"""Elastic jobs with megatron-core whose replicas have several ranks, and whose optimizer's state is sharded among the
replicas: tensor and pipeline parallelism with the distributed optimizer. Those that stand at the same place in their
replicas divide what they have alike, again in each size. As jobs that are resized by command at the same step, bit for
bit, which go on as jobs that are started in that size from that step's state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import changes, check_steps_alike, command, inject, sizes_of, start
from tests.support.elastic_checkpoints import dead_job, fell_back, launched, saving
from tests.support.elastic_checkpoints import started as began_otherwise
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, RunningJob, check_clean, check_fired
from tests.support.megatron import ENVIRONMENT

skip_module_without("megatron.core")

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron.py"
TIMEOUT_S, AT, STEPS = 240, 6, 12
EACH = 2
PHASES = (
    *("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "param-gather"),
    *("commit", "below"),
)
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]
TP = ("--tensor-model-parallel-size", "2", "--use-distributed-optimizer")
PP = ("--pipeline-model-parallel-size", "2", "--layers", "2", "--use-distributed-optimizer")
TRAININGS = {
    "tp": (*TP, "--bf16"),
    "pp": (*PP, "--bf16"),
    "tp-fp32": TP,
    "tp-fp16-sp": (*TP, "--fp16", "--sequence-parallel"),
    "tp-buckets": (*TP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"),
    "pp-fp32": PP,
    "pp-fp16-tied": (*PP, "--fp16", "--tie-head"),
    "pp-buckets": (*PP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"),
    "tp-frozen": (*TP, "--bf16", "--mode", "frozen"),
    "pp-frozen": (*PP, "--bf16", "--mode", "frozen"),
}
PLAIN = {"tp-plain": ("--tensor-model-parallel-size", "2"), "pp-plain": PP[:-1]}
"""Whose state is not sharded."""
TRAININGS |= PLAIN
MAIN = ("tp", "pp")
Resized = Callable[..., Job]


def launch(
    folder: Path, training: str, *flags: str, replicas: int, config: Any = None, faults: tuple[str, ...] = ()
) -> RunningJob:
    never = {"elastic": {"min": 1, "max": replicas, "replace": "never"}}
    return start(
        *(folder, never if config is None else config, *TRAININGS[training], "--steps", str(STEPS), *flags),
        nproc=EACH * replicas,
        inject=faults,
        script=SCRIPT,
        env=ENVIRONMENT,
    )


def replica_of(training: str, rank: int, replicas: int) -> list[int]:
    """All of its ranks, as launched."""
    if training.startswith("tp"):
        return sorted([rank, rank ^ 1])
    return [rank % replicas, rank % replicas + replicas]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """Gives the job that is resized by command at these steps to these sizes, undisturbed. After its last change it
    goes on as one that is *started* in that size from that step's state (an elastic one, which has two replicas)."""

    @cache
    def job(training: str, launched: int, *sizes: tuple[int, int], end: int = STEPS, step_ms: int = 300) -> Job:
        folder = tmp_path_factory.mktemp(f"{training}-resized")
        flags = ("--steps", str(end), "--step-time", str(step_ms), "--save-to", str(folder))
        config = {"elastic": {"min": 1, "max": launched}}
        running = launch(folder / "run", training, *flags, replicas=launched, config=config)
        running.wait_for("job_started", TIMEOUT_S)
        for number, (step, replicas) in enumerate(sizes, 1):
            refused = command(running, replicas, step)
            assert not refused, refused
            event = running.wait_for("job_resized", TIMEOUT_S, count=number)
            assert (event["step"], event["replicas"]) == (step, replicas), running.wait(TIMEOUT_S).explain()
            running.wait_for("recovery_finished", TIMEOUT_S, count=number)
        made = running.wait(TIMEOUT_S)
        assert made.code == 0 and not made.of("failure_detected"), made.explain()
        check_clean(made)
        step, replicas = sizes[-1]
        if replicas > 1:
            begin = ("--steps", str(end), "--start-from", str(folder / f"{step}.pt"))
            new = launch(folder / "new", training, *begin, replicas=replicas).wait(TIMEOUT_S)
            assert new.code == 0, new.explain()
            check_steps_alike(made, new, step, end, EACH * replicas)
            check_clean(new)
        return made

    return job


def check_bytes(job: Job) -> None:
    """What went over the wire for a change is what was needed and not held."""
    for event in job.of("recovery_finished"):
        assert event["reshaped_bytes"] == event["lacking_bytes"], job.explain()


def check_shrunk(job: Job, training: str, launched: int, left: list[int], resized: Resized) -> None:
    """These ranks have left since something has happened in step AT, and the others go on as by command."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, replicas = events[-1]["step"], launched - len(left) // EACH
    assert step in (AT - 1, AT, AT + 1) and events[-1]["replicas"] == replicas, job.explain()
    check_steps_alike(job, resized(training, launched, (step, replicas)), step, STEPS, EACH * replicas)
    check_bytes(job)
    check_clean(job)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", MAIN)
def test_one_of_two(training: str, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    faults = (f"rank={victim},fault=sigkill,at={phase},step={AT}",)
    job = launch(tmp_path / "run", training, replicas=2, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_shrunk(job, training, 2, replica_of(training, victim, 2), resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", MAIN)
def test_one_of_three(training: str, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """Two are left, among which the state is sharded again."""
    faults = (f"rank={victim},fault=sigkill,at={phase},step={AT}",)
    job = launch(tmp_path / "run", training, replicas=3, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_shrunk(job, training, 3, replica_of(training, victim, 3), resized)


@pytest.mark.parametrize("training", [t for t in TRAININGS if t not in (*MAIN, *PLAIN)])
def test_other_trainings(training: str, tmp_path: Path, resized: Resized) -> None:
    faults = (f"rank=1,fault=sigkill,at=optimizer,step={AT}",)
    job = launch(tmp_path / "run", training, replicas=3, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_shrunk(job, training, 3, replica_of(training, 1, 3), resized)


STATES = ("quiescing", "regrouping", "restoring", "reshaping", "verifying", "resuming")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("training", MAIN)
def test_a_second_death_during_the_change(training: str, state: str, tmp_path: Path, resized: Resized) -> None:
    """Of four replicas the second one leaves, and a rank of the last one dies meanwhile, which does not keep copies of
    the first loser's, nor the other way round: of everything there is a copy with those that stay."""
    faults = (f"rank=2,fault=sigkill,at=backward,step={AT}", f"rank=7,fault=sigkill,at=recovery:{state}")
    lost = (2, 7)
    if training.startswith("pp"):
        faults = (f"rank=1,fault=sigkill,at=backward,step={AT}", f"rank=7,fault=sigkill,at=recovery:{state}")
        lost = (1, 7)
    job = launch(tmp_path / "run", training, replicas=4, faults=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    left = sorted({rank for victim in lost for rank in replica_of(training, victim, 4)})
    check_shrunk(job, training, 4, left, resized)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("training", MAIN)
def test_one_of_two_dies_while_the_other_leaves(training: str, state: str, tmp_path: Path) -> None:
    """No replica is left that is whole: a node is waited for, and then the job ends and says so."""
    config = {"elastic": {"min": 1, "max": 2, "replace": "never"}, "timeouts": {"node_wait_s": 3}}
    faults = (f"rank=0,fault=sigkill,at=backward,step={AT}", f"rank=3,fault=sigkill,at=recovery:{state}")
    job = launch(tmp_path / "run", training, replicas=2, config=config, faults=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    assert job.code != 0 and "0 replicas left" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)


@pytest.mark.parametrize("training", MAIN)
def test_neighbours_at_once(training: str, tmp_path: Path) -> None:
    """Two neighbouring replicas lose a rank each, at different places: what the first one has had is with ranks that
    leave, too. No one makes it up."""
    ranks = (2, 5) if training.startswith("tp") else (1, 6)
    faults = tuple(f"rank={rank},fault=sigkill,at=forward,step={AT}" for rank in ranks)
    job = launch(tmp_path / "run", training, replicas=4, faults=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    reason = job.of("job_failed")[0]["reason"]
    assert job.code != 0 and ("no rank keeps copies" in reason or "cannot be recovered" in reason), job.explain()
    check_clean(job)


LONG, BACK = 38, 30
SLOWLY = ("--steps", str(LONG), "--step-time", "800")


def check_sizes(job: Job, training: str, launched: int, resized: Resized) -> None:
    """In each of its sizes it is as the job that is resized so by command."""
    assert job.code == 0, job.explain()
    sizes = [(step, ranks // EACH) for step, ranks in sizes_of(job)]
    other = resized(training, launched, *sizes, end=LONG, step_ms=800)
    for (step, replicas), until in zip(sizes, [*(step for step, _ in sizes[1:]), LONG], strict=True):
        check_steps_alike(job, other, step, until, EACH * replicas)
    check_bytes(job)
    check_clean(job)


@pytest.mark.parametrize(("launched", "victims"), [(2, (0,)), (2, (3,)), (3, (2,)), (4, (1, 7))], ids=str)
@pytest.mark.parametrize("training", MAIN)
def test_killed_and_back(
    training: str, launched: int, victims: tuple[int, ...], tmp_path: Path, resized: Resized
) -> None:
    """Whole replicas come back."""
    faults = tuple(f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in victims)
    running = launch(tmp_path / "run", training, *SLOWLY, replicas=launched, faults=faults)
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, launched, BACK) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job, len(victims))
    assert (changes(job)[-1].step, len(changes(job)[-1].ranks)) == (BACK, EACH * launched), job.explain()
    check_sizes(job, training, launched, resized)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "reshaping", "verifying"])
@pytest.mark.parametrize("training", MAIN)
def test_a_joining_process_dies_on_its_way_in(training: str, state: str, tmp_path: Path, resized: Resized) -> None:
    """Its replica leaves again, and the others go on in the size that they had."""
    faults = (f"rank=5,fault=sigkill,at=recovery:{state}",)  # one that leaves by command does not come to this state
    config = {"elastic": {"min": 1, "max": 3, "replace": "never"}}
    running = launch(tmp_path / "run", training, *SLOWLY, replicas=3, config=config, faults=faults)
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, 2, AT) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, 3, BACK) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    assert len(changes(job)[-1].ranks) == 2 * EACH, job.explain()
    check_sizes(job, training, 3, resized)


@pytest.mark.parametrize("state", ["restoring", "reshaping", "verifying"])
@pytest.mark.parametrize("training", MAIN)
def test_one_that_dies_on_the_way_in_is_replaced(training: str, state: str, tmp_path: Path, resized: Resized) -> None:
    """A member: its replacement takes on the old sharding among two, in groups of three replicas, before all of them go
    over to the new one."""
    config = {"elastic": {"min": 1, "max": 3}}
    running = launch(tmp_path / "run", training, *SLOWLY, replicas=3, config=config)
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, 2, AT) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    inject(running, rank=1, at=f"recovery:{state}")
    assert command(running, 3, BACK) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    assert len(changes(job)[-1].ranks) == 3 * EACH, job.explain()
    check_sizes(job, training, 3, resized)


@pytest.mark.parametrize("victim", (0, 3))
@pytest.mark.parametrize("training", MAIN)
def test_replaced_in_the_new_size(training: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """After a command has taken a replica away, a rank dies that has room: its replacement, which has built all of it
    for three replicas, comes into the job of two."""
    config = {"elastic": {"min": 1, "max": 3}}
    late = AT + 8  # long after the command, on a busy machine
    faults = (f"rank={victim},fault=sigkill,at=backward,step={late}",)
    flags = ("--steps", "20", "--step-time", "250")
    running = launch(tmp_path / "run", training, *flags, replicas=3, config=config, faults=faults)
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, 2, AT) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    (event,) = job.of("job_resized")
    assert job.code == 0 and (event["step"], event["replicas"]) == (AT, 2), job.explain()
    (_, finished) = job.of("recovery_finished")
    assert (finished["victims"], finished["left"]) == ([victim], []), job.explain()
    check_steps_alike(job, resized(training, 3, (AT, 2), end=20), AT, 20, 2 * EACH)
    check_clean(job)


# -- fallback checkpoints -------------------------------------------------------------------------------


def begin(training: str, each: int = EACH) -> Callable[..., RunningJob]:
    """As :mod:`tests.support.elastic_checkpoints` starts jobs: by ranks."""

    def started(folder: Path, *flags: str, config: Any, nproc: int, **options: Any) -> RunningJob:
        of_replicas = {**config, "elastic": {**config["elastic"], "max": nproc // each}}
        given = (*TRAININGS[training], "--steps", str(LONG), *flags)
        return start(folder, of_replicas, *given, nproc=nproc, script=SCRIPT, env=ENVIRONMENT, **options)

    return started


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("training", (*MAIN, *PLAIN))
def test_a_job_that_died_whole_goes_on_in_another_size(training: str, before: int, after: int, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, nproc=before * EACH, begin=begin(training))[-1]
    job = launched(tmp_path, "again", after * EACH, begin=begin(training))
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    other = began_otherwise(tmp_path, before * EACH, version, after * EACH, begin=begin(training))
    check_steps_alike(job, other, version, LONG, after * EACH)
    check_clean(job)


@pytest.mark.parametrize("training", MAIN)
def test_too_many_are_lost_at_once(training: str, tmp_path: Path, resized: Resized) -> None:
    """No rank has what two neighbouring replicas had: the others go back to a checkpoint of all."""
    config = {"elastic": {"min": 1, "max": 4, "replace": "never"}, **saving(tmp_path / "checkpoints", 2)}
    running = launch(tmp_path / "run", training, *SLOWLY, replicas=4, config=config)
    running.wait_for("checkpoint_saved", TIMEOUT_S)
    running.kill(*((2, 5) if training.startswith("tp") else (1, 6)))
    job = running.wait(TIMEOUT_S)
    version = fell_back(job, 4 * EACH, 2, LONG)
    check_steps_alike(job, resized(training, 4, (version, 2), end=LONG, step_ms=800), version, LONG, 2 * EACH)
    check_clean(job)


def test_a_checkpoint_of_other_replicas_is_refused(tmp_path: Path) -> None:
    """Three of two ranks are not two of three, and stages are not slices."""
    dead_job(tmp_path, nproc=2 * EACH, begin=begin("tp"))
    job = launched(tmp_path, "again", 2 * EACH, begin=begin("pp"))
    assert job.code != 0 and "another number of the same replicas can read it" in job.explain(), job.explain()
    check_clean(job)
