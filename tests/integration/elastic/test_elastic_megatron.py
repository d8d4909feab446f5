"""Elastic jobs with megatron-core: a rank dies and is not replaced, and the others go on as a job that was resized
by command at the same step, bit for bit, which goes on as one that was started in the new size from that step's state:
losses, and the whole weights and optimizer state, of every later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.elastic import check_goes_on_alike, command, commanded, often, start
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, RunningJob, check_clean, check_fired
from tests.support.megatron import ENVIRONMENT

skip_module_without("megatron.core")

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron.py"
TIMEOUT_S = 240
AT = 9
PHASES = (
    *("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "param-gather"),
    *("commit", "below"),
)
VICTIMS = (0, 1, 3)

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]


@dataclass(frozen=True)
class Training:
    """One configuration of the script."""

    name: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def sharded(self) -> bool:
        """Whether ranks have what others do not. Then a death in a step may come before the copies of its version are
        complete, and the step before is done again, too."""
        return "--use-distributed-optimizer" in self.flags

    def with_batch(self, samples: int) -> Training:
        return Training(f"{self.name}-{samples}", (*self.flags, "--global-batch", str(samples)))


FP32 = Training("fp32")
BF16 = Training("bf16", ("--bf16",))
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "700")
DISTRIBUTED = ("--use-distributed-optimizer",)
SHARDS = Training("distributed-bf16", (*DISTRIBUTED, "--bf16"))
MAIN = (FP32, SHARDS)
"""Those that are killed in each phase."""
OTHERS = (
    BF16,
    Training("fp16", ("--fp16",)),
    Training("bf16-buckets", ("--bf16", *BUCKETS)),
    Training("fp32-buckets-tied", (*BUCKETS, "--tie-head")),
    Training("calculator", ("--mode", "calculator")),
    Training("distributed-fp32", DISTRIBUTED),
    Training("distributed-fp16", (*DISTRIBUTED, "--fp16")),
    Training("distributed-buckets", (*DISTRIBUTED, "--bf16", *BUCKETS)),
    Training("distributed-fp32-buckets-tied", (*DISTRIBUTED, *BUCKETS, "--tie-head")),
)

Resized = Callable[[Training, int, int], Job]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """The job that is resized by command, undisturbed: from this step on to this size. Each is made once, and is itself
    compared with a job that was started in the new size from that step's state."""

    @cache
    def job(training: Training, step: int, size: int) -> Job:
        folder = tmp_path_factory.mktemp(f"{training.name}-resized-{step}-{size}")
        return commanded(
            *(folder, step, size, *training.flags),
            script=SCRIPT,
            timeout_s=TIMEOUT_S,
            sharded=training.sharded,
            env=ENVIRONMENT,
        )

    return job


def launch(
    folder: Path, training: Training, *flags: str, inject: Sequence[str] = (), config: Any = None, **more: Any
) -> RunningJob:
    return start(folder, config, *training.flags, *flags, inject=inject, script=SCRIPT, env=ENVIRONMENT, **more)


def check_ends_as_resized(job: Job, training: Training, resized: Resized, left: Sequence[int]) -> None:
    elastic.check_ends_as_resized(job, AT, left, partial(resized, training), sharded=training.sharded)


def kills() -> list[Any]:
    """Each victim in each phase."""
    return [
        pytest.param(
            *(training, phase, victim),
            id=f"{training}-{phase}-{victim}",
        )
        for training in MAIN
        for phase in PHASES
        if training.sharded or phase != "param-gather"
        for victim in VICTIMS
    ]


@pytest.mark.grid
@pytest.mark.parametrize(("training", "phase", "victim"), kills())
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank={victim},fault=sigkill,at={phase},step={AT}"]
    job = launch(tmp_path / "run", training, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, training, resized, [victim])


@pytest.mark.parametrize("training", [pytest.param(t, id=t.name, marks=pytest.mark.grid) for t in OTHERS])
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=0,fault=sigkill,at=optimizer,step={AT}"]
    job = launch(tmp_path / "run", training, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, training, resized, [0])


@pytest.mark.parametrize("training", often(MAIN, ()))
def test_two_at_once(training: Training, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    job = launch(tmp_path / "run", training, inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, training, resized, [0, 2])


@pytest.mark.parametrize("state", often(("quiescing", "regrouping", "restoring", "verifying"), ()))
@pytest.mark.parametrize("training", often(MAIN, ()))
def test_a_second_death_during_the_change(training: Training, state: str, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}", f"rank=3,fault=sigkill,at=recovery:{state}"]
    job = launch(tmp_path / "run", training, inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, training, resized, [1, 3])


@pytest.mark.parametrize("training", often(MAIN, ()))
def test_a_size_that_does_not_divide_is_left_out(training: Training, tmp_path: Path, resized: Resized) -> None:
    """Eight micro-batches: without one of four replicas, two go on. If it is divided, not rank 2 leaves with rank 3,
    which kept rank 2's copies."""
    training = training.with_batch(16)
    running = launch(tmp_path / "run", training, inject=[f"rank=3,fault=sigkill,at=optimizer,step={AT}"])
    running.wait_for("job_started", TIMEOUT_S)
    assert "2 is allowed" in command(running, 3, AT - 2)
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, training, resized, [1, 3] if training.sharded else [2, 3])


@pytest.mark.parametrize("victim", often((0, 2), ()))
@pytest.mark.parametrize("training", often(MAIN, ()))
def test_replaced_in_the_new_size(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    """After a command has taken one away, a rank dies that has room: its replacement, which has built all of it for
    four ranks, comes into the job of three."""
    running = launch(
        *(tmp_path / "run", training, "--step-time", "250"),
        config={"elastic": {"min": 2, "max": 4}},
        standby=1,
        inject=[f"rank={victim},fault=sigkill,at=backward,step={AT + 5}"],  # long after the command, on a busy machine
    )
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, 3, AT) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    (event,) = job.of("job_resized")
    assert job.code == 0 and (event["step"], event["left"]) == (AT, [3]), job.explain()
    (_, finished) = job.of("recovery_finished")
    assert (finished["victims"], finished["left"]) == ([victim], []), job.explain()
    check_goes_on_alike(job, resized(training, AT, 3), AT, 3)
    check_clean(job)


@pytest.mark.parametrize("victim", often((0, 2), ()))
@pytest.mark.parametrize("training", often(MAIN, ()))
def test_in_the_very_first_step(training: Training, victim: int, tmp_path: Path) -> None:
    """Then all of it is as in a job that was launched with three ranks. What is sharded must have been copied by then;
    with replicas the others would complete the step."""
    phase = "optimizer-start" if training.sharded else "backward"
    faults = [f"rank={victim},fault=sigkill,at={phase},step=0"]
    job = launch(tmp_path / "run", training, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    (event,) = job.of("job_resized")
    assert job.code == 0 and event["step"] == 0 and event["left"] == [victim], job.explain()
    sizes = {"elastic": {"min": 2, "max": 3}}
    launched = launch(tmp_path / "launched", training, config=sizes, nproc=3).wait(TIMEOUT_S)
    check_goes_on_alike(job, launched, 0, 3)
    check_clean(job)
    check_clean(launched)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "tensor": (("--tensor-model-parallel-size", "2"), "elastic.max = 2 is allowed"),
    "virtual": (
        (
            *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2", "--layers", "4"),
            *("--num-experts", "4"),
        ),
        "MoE layers in several model chunks (virtual pipelines; allowed: dense layers)",
    ),
    "context": (("--context-parallel-size", "2"), "elastic.max = 4: 2 is allowed here, the replicas of the launch"),
    "experts": (
        ("--num-experts", "4", "--expert-model-parallel-size", "2"),
        "elastic.max = 4: 2 is allowed here, the replicas of the launch",
    ),
    "expert-bias": (("--num-experts", "4", "--moe-router-enable-expert-bias"), "moe_router_enable_expert_bias"),
    "overlapped": (
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        "overlap_param_gather (allowed: without it)",
    ),
    "instances": (
        ("--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"),
        "num_distributed_optimizer_instances > 1",
    ),
    "megatron-fsdp": (("--use-megatron-fsdp", "--bf16"), "FullyShardedDataParallel"),
    "torch-fsdp2": (("--use-torch-fsdp2",), "TorchFullyShardedDataParallel"),
    "ramp-up": (("--mode", "ramp-up"), "rampup_batch_size"),
    "decreased": (("--mode", "decreased"), "decrease_batch_size_if_needed"),
    "some": (("--mode", "some"), "a process group of 2 of its 4 ranks"),
    "first": (("--mode", "first"), "process groups of ranks at the same place in their replicas"),
    "loader": (("--mode", "loader"), "recovery.data() in an elastic job"),
    "left-over": (("--mode", "left-over"), "step 0 has not gone through its micro-batches"),
}


@pytest.mark.parametrize("mode", often(REFUSED, ()))
def test_what_is_refused(mode: str, tmp_path: Path) -> None:
    flags, words = REFUSED[mode]
    job = launch(tmp_path / "run", Training(mode, flags), config={"elastic": {"min": 2, "max": 4}}).wait(TIMEOUT_S)
    assert job.code != 0 and words in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)
