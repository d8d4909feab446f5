"""Elastic jobs with a DeepSpeed engine: a rank dies and is not replaced, and the others go on as a job that was
resized by command at the same step, bit for bit, which goes on as one that was started in the new size from that step's
state: losses, and the whole fp32 weights and optimizer state, of every later step."""

from __future__ import annotations

import json
import re
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

skip_module_without("deepspeed")

SCRIPT = ROOT / "tests" / "scripts" / "elastic_deepspeed.py"
TIMEOUT_S = 240
AT = 9
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
VICTIMS = (0, 1, 3)

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(3 * TIMEOUT_S)]


@dataclass(frozen=True)
class Engine:
    """One configuration of the script's engine."""

    name: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def sharded(self) -> bool:
        """Whether ranks have what others do not. Then a death in a step may come before the copies of its version are
        complete, and the step before is done again, too."""
        return "--zero" in self.flags

    def with_batch(self, samples: int) -> Engine:
        return Engine(f"{self.name}-{samples}", (*self.flags, "--global-batch", str(samples)))


ZERO0 = Engine("zero0", ())
ZERO0_FP32 = Engine("zero0-fp32", ("--precision", "fp32"))
ZERO0_FP16 = Engine("zero0-fp16", ("--precision", "fp16"))
FUSED_ADAM = ("--set", "optimizer.params.torch_adam=false")
"""DeepSpeed's own. It keeps the powers of its betas in C++, which the script cannot start from."""
ZERO0_FUSED = Engine("zero0-fp32-fused-adam", ("--precision", "fp32", *FUSED_ADAM))
ZERO1 = Engine("zero1", ("--zero", "1"))
ZERO2 = Engine("zero2", ("--zero", "2"))
ZERO3 = Engine("zero3", ("--zero", "3"))
MAIN = (ZERO0, ZERO1, ZERO2, ZERO3)
"""Those that are killed in each phase."""
OTHERS = (
    *(ZERO0_FP32, ZERO0_FP16, ZERO0_FUSED),
    Engine("zero1-fp32", ("--zero", "1", "--precision", "fp32")),
    Engine("zero2-fp16", ("--zero", "2", "--precision", "fp16")),
    Engine(
        "zero2-fp32-overlap", ("--zero", "2", "--precision", "fp32", "--set", "zero_optimization.overlap_comm=true")
    ),
    Engine("zero1-no-buckets", ("--zero", "1", "--set", "zero_optimization.contiguous_gradients=false")),
    Engine("zero2-fused-adam", ("--zero", "2", *FUSED_ADAM)),
    *(
        Engine(f"zero3-{name}", ("--zero", "3", *flags))
        for name, flags in {
            "fp32": ("--precision", "fp32"),
            "fp16": ("--precision", "fp16"),
            "fused-adam": FUSED_ADAM,
            "overlap": ("--set", "zero_optimization.overlap_comm=true"),
            "no-buckets": ("--set", "zero_optimization.contiguous_gradients=false"),
            "all-persist": ("--set", "zero_optimization.stage3_param_persistence_threshold=100000"),
            "none-persists": ("--set", "zero_optimization.stage3_param_persistence_threshold=0"),
            "fetched-by-sum": ("--set", "zero_optimization.stage3_use_all_reduce_for_fetch_params=true"),
            "one-by-one": ("--set", "zero_optimization.stage3_allgather_sequential=true"),
        }.items()
    ),
)

Resized = Callable[[Engine, int, int], Job]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """The job that is resized by command, undisturbed: from this step on to this size. Each is made once, and is itself
    compared with a job that was started in the new size from that step's state."""

    @cache
    def job(engine: Engine, step: int, size: int) -> Job:
        folder = tmp_path_factory.mktemp(f"{engine.name}-resized-{step}-{size}")
        return commanded(
            *(folder, step, size, *engine.flags),
            script=SCRIPT,
            timeout_s=TIMEOUT_S,
            sharded=engine.sharded,
            started=not {*FUSED_ADAM} <= {*engine.flags},
        )

    return job


def launch(folder: Path, engine: Engine, *flags: str, inject: Sequence[str] = (), config: Any = None) -> RunningJob:
    return start(folder, config, *engine.flags, *flags, inject=inject, script=SCRIPT)


def check_ends_as_resized(job: Job, engine: Engine, resized: Resized, left: Sequence[int]) -> None:
    elastic.check_ends_as_resized(job, AT, left, partial(resized, engine), sharded=engine.sharded)


@pytest.mark.grid
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("engine", MAIN, ids=str)
def test_killed_and_not_replaced(engine: Engine, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """In every run of the tests: test_elastic_growth_sharded.py."""
    job = launch(tmp_path / "run", engine, inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, engine, resized, [victim])


@pytest.mark.parametrize("engine", [pytest.param(e, id=e.name, marks=pytest.mark.grid) for e in OTHERS])
def test_other_engines(engine: Engine, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=0,fault=sigkill,at=optimizer,step={AT}"]
    job = launch(tmp_path / "run", engine, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, engine, resized, [0])


OVERFLOWS_AT = 6
"""With four ranks, from the state that there is then, and not with two: each divides its loss by twice as many
micro-batches there."""
_SKIPPED = re.compile(r"step=(\d+) rank=\d+ size=(\d+) \S+ skipped=(\d+)")


@pytest.mark.grid
@pytest.mark.parametrize("phase", ("backward", "commit", "below"))
@pytest.mark.parametrize("zero", ("2", "3"))
def test_a_step_that_overflows_in_the_old_size_alone(zero: str, phase: str, tmp_path: Path, resized: Resized) -> None:
    """Its loss scale moves in almost each step. That the step was skipped by four ranks is of no meaning for two, which
    make it again."""
    scale = ("--precision", "fp16", "--set", "fp16.loss_scale_window=1")
    engine = Engine(f"zero{zero}-scale", ("--zero", zero, *scale))
    faults = [f"rank={rank},fault=sigkill,at={phase},step={OVERFLOWS_AT}" for rank in (0, 2)]
    job = launch(tmp_path / "run", engine, inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    elastic.check_ends_as_resized(job, OVERFLOWS_AT, [0, 2], partial(resized, engine), sharded=True)
    lines = [line for log in job.run_dir.rglob("rank*.log") for line in _SKIPPED.findall(log.read_text())]
    skipped = {(int(step), int(size)): int(count) for step, size, count in lines}
    assert skipped[OVERFLOWS_AT - 1, 4] == skipped[OVERFLOWS_AT, 2] == 3, skipped
    if phase != "backward":
        assert skipped[OVERFLOWS_AT, 4] == 4, skipped


@pytest.mark.parametrize("engine", often(MAIN, ()))
def test_two_at_once(engine: Engine, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    job = launch(tmp_path / "run", engine, inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, engine, resized, [0, 2])


@pytest.mark.grid
@pytest.mark.parametrize("state", ("quiescing", "regrouping", "restoring", "verifying"))
@pytest.mark.parametrize("engine", MAIN, ids=str)
def test_a_second_death_during_the_change(engine: Engine, state: str, tmp_path: Path, resized: Resized) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}", f"rank=3,fault=sigkill,at=recovery:{state}"]
    job = launch(tmp_path / "run", engine, inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_ends_as_resized(job, engine, resized, [1, 3])


@pytest.mark.parametrize("engine", often(MAIN, ()))
def test_a_size_that_does_not_divide_is_left_out(engine: Engine, tmp_path: Path, resized: Resized) -> None:
    """Eight micro-batches: without one of four replicas, two go on. With ZeRO it is not rank 2 that leaves with rank 3,
    which kept rank 2's copies."""
    engine = engine.with_batch(16)
    running = launch(tmp_path / "run", engine, inject=[f"rank=3,fault=sigkill,at=optimizer,step={AT}"])
    running.wait_for("job_started", TIMEOUT_S)
    assert "2 is allowed" in command(running, 3, AT - 2)
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, engine, resized, [1, 3] if engine.sharded else [2, 3])
    (finished,) = job.of("recovery_finished")
    assert finished["victims"] == [3], job.explain()


@pytest.mark.parametrize("victim", often((0, 2), (0,)))
@pytest.mark.parametrize("engine", often((ZERO0, ZERO2, ZERO3), ()))
def test_replaced_in_the_new_size(engine: Engine, victim: int, tmp_path: Path, resized: Resized) -> None:
    """After a command has taken one away, a rank dies that has room: its replacement, which has built its engine for
    four ranks, comes into the job of three."""
    running = start(
        *(tmp_path / "run", {"elastic": {"min": 2, "max": 4}}, *engine.flags, "--step-time", "250"),
        standby=1,
        inject=[f"rank={victim},fault=sigkill,at=backward,step={AT + 5}"],  # long after the command, on a busy machine
        script=SCRIPT,
    )
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, 3, AT) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    (event,) = job.of("job_resized")
    assert job.code == 0 and (event["step"], event["left"]) == (AT, [3]), job.explain()
    (_, finished) = job.of("recovery_finished")
    assert (finished["victims"], finished["left"]) == ([victim], []), job.explain()
    check_goes_on_alike(job, resized(engine, AT, 3), AT, 3)
    check_clean(job)


@pytest.mark.parametrize("victim", often((0, 2), (0,)))
@pytest.mark.parametrize("engine", often(MAIN, ()))
def test_in_the_very_first_step(engine: Engine, victim: int, tmp_path: Path) -> None:
    """Then all of it is as in a job that was launched with three ranks. What is sharded must have been copied by then;
    with replicas the others would complete the step."""
    faults = [f"rank={victim},fault=sigkill,at={'optimizer-start' if engine.sharded else 'backward'},step=0"]
    job = launch(tmp_path / "run", engine, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    (event,) = job.of("job_resized")
    assert job.code == 0 and event["step"] == 0 and event["left"] == [victim], job.explain()
    sizes = {"elastic": {"min": 2, "max": 3}}
    launched = start(tmp_path / "launched", sizes, *engine.flags, nproc=3, script=SCRIPT).wait(TIMEOUT_S)
    check_goes_on_alike(job, launched, 0, 3)
    check_clean(job)
    check_clean(launched)


@pytest.mark.grid
@pytest.mark.parametrize("engine", [ZERO2, ZERO3], ids=str)
def test_the_first_rank_leaves_what_it_alone_does(engine: Engine, tmp_path: Path) -> None:
    """The next one writes the monitor's files, and the checkpoints are those of three ranks."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    monitor = json.dumps({"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"})
    flags = ("--set", f"csv_monitor={monitor}", "--checkpoint-to", str(tmp_path / "checkpoint"))
    faults = [f"rank=0,fault=sigkill,at=optimizer,step={AT}"]
    job = launch(tmp_path / "run", engine, *flags, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    assert job.code == 0 and job.of("job_resized")[0]["left"] == [0], job.explain()
    rows = (tmp_path / "monitor" / "Train_Samples_lr.csv").read_text().splitlines()
    samples = [int(row.partition(",")[0]) for row in rows if row[0].isdigit()]
    assert {24 * step for step in range(1, 17)} <= {*samples}, rows
    tag = (tmp_path / "checkpoint" / "latest").read_text()
    assert len(list((tmp_path / "checkpoint" / tag).glob("*optim_states.pt"))) == 3
    assert len(list((tmp_path / "checkpoint" / tag).glob("*model_states.pt"))) == (3 if engine is ZERO3 else 1)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "checkpoint"), tag)
    assert weights["0.weight"].shape == (61, 16) and all(bool(w.isfinite().all()) for w in weights.values())
    check_clean(job)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "loader": (("--mode", "loader"), "recovery.data() in an elastic job"),
    "training-data": (("--mode", "training-data"), "training_data of deepspeed.initialize()"),
    "boundary": (("--mode", "boundary"), "set_gradient_accumulation_boundary()"),
    "in-a-list": (("--mode", "in-a-list"), "before it computed the one before"),
    "other-batch": (("--mode", "other-batch"), "global_batch = 24, and the framework's own is 48"),
    "other-sizes": (("--mode", "other-sizes"), "global_batch = 48, and the framework's own is 24"),
    "zero3-sub-groups": (
        ("--zero", "3", "--set", "zero_optimization.sub_group_size=1000"),
        "zero_optimization.sub_group_size = 1000, where a parameter group of 4595 elements",
    ),
    "zero3-hpz": (
        ("--zero", "3", "--set", "zero_optimization.zero_hpz_partition_size=2"),
        "zero_optimization.zero_hpz_partition_size",
    ),
    "zero3-offload": (
        ("--zero", "3", "--set", 'zero_optimization.offload_optimizer={"device": "cpu"}'),
        "zero_optimization.offload_optimizer",
    ),
    "offload": (
        ("--zero", "2", "--set", 'zero_optimization.offload_optimizer={"device": "cpu"}'),
        "zero_optimization.offload_optimizer",
    ),
    "round-robin": (
        ("--zero", "2", "--set", "zero_optimization.round_robin_gradients=true"),
        "zero_optimization.round_robin_gradients",
    ),
    "sum": (("--set", 'gradient_allreduce_op="sum"'), "gradient_allreduce_op"),
}


@pytest.mark.parametrize("mode", often(REFUSED, ("other-batch",)))
def test_what_is_refused(mode: str, tmp_path: Path) -> None:
    flags, words = REFUSED[mode]
    config = {"elastic": {"min": 2, "max": 4}}
    job = start(tmp_path / "run", config, *flags, script=SCRIPT).wait(TIMEOUT_S)
    assert job.code != 0 and words in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)
