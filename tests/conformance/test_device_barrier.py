"""Jobs in which the device holds an optimizer's step back, over the fake of NCCL (its ``held_back.py``).

A rank is killed at every point between the last reduction and the commit, and the end is that of the same launch
without a kill, in which the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_nccl
from tests.support.fake_nccl.held_back import POINTS
from tests.support.jobs import ROOT, SMALL, Job, Layout, RunningJob, check_same
from tests.support.soak import SEED
from tests.support.soak import kills as scaled
from tests.support.wrappers import FAKE_NCCL

SCRIPT = ROOT / "tests" / "scripts" / "held_back.py"
STEPS = 8
STRIKE, CHANCE, VOIDS = "FAKE_NCCL_STRIKE", "FAKE_NCCL_CHANCE", "FAKE_NCCL_VOIDS"
AT, STEP = 5, 6  # which hold that is: two try the stream, and of steps 3 to 6 the ranks compare in the fourth
FEW = ("held", "kernel2")

pytestmark = pytest.mark.timeout(500)


def _start(
    directory: Path,
    flags: Sequence[str] = (),
    *,
    steps: int = STEPS,
    env: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> RunningJob:
    fake_nccl.build()
    return RunningJob(
        directory,
        Layout("held-back", "train_ddp.py"),
        script=FAKE_NCCL.script,
        flags=[*SMALL, "--steps", str(steps), *flags],
        env=FAKE_NCCL.environment(SCRIPT, env or {}),
        config={"barrier": "auto", **(config or {})},
        **more,
    )


def _run(directory: Path, flags: Sequence[str] = (), **more: Any) -> Job:
    return _start(directory, flags, **more).wait(300)


Reference = Callable[..., Job]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a kill, in which the host waits."""
    made: dict[tuple[str, ...], Job] = {}

    def job(*flags: str) -> Job:
        if flags not in made:
            made[flags] = _run(tmp_path_factory.mktemp("reference") / "run", flags, config=HOST, standby=0)
        return made[flags]

    return job


HOST = {"barrier": "host"}


def _is_held_back(job: Job) -> None:
    told = job.notices("barrier")  # of each process that rank 0 has had
    assert told and all("the device keeps its step back" in one["text"] for one in told), told


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in FEW else pytest.mark.grid) for point in POINTS]
)
def test_a_kill_at_each_point(point: str, tmp_path: Path, reference: Reference) -> None:
    """On the host: when the stream is held, between two launches, before and behind the wait. On the stream: between
    the kernels of one step. Of the ranks by turns."""
    job = _run(tmp_path / "run", env={STRIKE: f"{POINTS.index(point) % 4}:{AT}:{point}"}, standby=1)
    (failure,) = job.of("failure_detected")
    assert failure["kind"] == "killed", job.explain()
    check_same(job, reference())
    _is_held_back(job)


def test_an_abort_amid_the_reduction_leaves_a_step_that_has_not_been(tmp_path: Path, reference: Reference) -> None:
    """The survivors have launched their optimizers when the dead rank's part is missing."""
    (tmp_path / "voids").mkdir()
    job = _run(tmp_path / "run", ("--dies", f"1:{STEP}"), standby=1, env={VOIDS: str(tmp_path / "voids")})
    voids = {path.name.partition(".")[0] for path in (tmp_path / "voids").iterdir()}
    assert voids == {"0", "2", "3"}, job.explain()
    (recovery,) = job.of("recovery_finished")
    assert recovery["survivors_given"] == [] and recovery["resume_step"] == STEP, (
        "their state is that of the step's begin"
    )
    check_same(job, reference())
    _is_held_back(job)


@pytest.mark.grid
@pytest.mark.parametrize("point", ["held", "whole"])
def test_a_step_that_overflows_anyway(point: str, tmp_path: Path, reference: Reference) -> None:
    """A GradScaler's own flag is in use; a rank dies in the step that it skips."""
    flags = ("--scaler", "--overflow", str(STEP))
    job = _run(tmp_path / "run", flags, env={STRIKE: f"2:{AT}:{point}"}, standby=1)
    assert len(job.of("failure_detected")) == 1, job.explain()
    check_same(job, reference(*flags))
    _is_held_back(job)


@pytest.mark.grid
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
@pytest.mark.parametrize("point", ["held", "whole", "kernel1"])
def test_other_fused_optimizers(optimizer: str, point: str, tmp_path: Path, reference: Reference) -> None:
    flags = ("--optimizer", optimizer)
    job = _run(tmp_path / "run", flags, env={STRIKE: f"3:{AT}:{point}"}, standby=1)
    assert len(job.of("failure_detected")) == 1, job.explain()
    check_same(job, reference(*flags))
    _is_held_back(job)


@pytest.mark.grid
def test_for_one_that_is_not_fused_the_host_waits_and_says_so(tmp_path: Path, reference: Reference) -> None:
    flags = ("--optimizer", "plain")
    job = _run(tmp_path / "run", flags, standby=1, inject=["rank=1,fault=sigkill,at=optimizer-start,step=4"])
    check_same(job, reference(*flags))
    (told,) = job.notices("barrier")
    assert "the host waits before each step of AdamW: without fused=True" in told["text"]


@pytest.mark.grid
def test_where_torch_compile_has_made_the_step_the_host_waits_and_says_so(tmp_path: Path, reference: Reference) -> None:
    """It may have been made before there was a flag. A rank dies amid the reduction: what follows is not torn."""
    job = _run(tmp_path / "run", ("--compiled", "--dies", f"1:{STEP}"), standby=1)
    assert len(job.of("failure_detected")) == 1, job.explain()
    check_same(job, reference())
    told = job.notices("barrier")
    assert told and all("torch.compile has made its step" in one["text"] for one in told), told


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_kills_at_random_points(tmp_path: Path) -> None:
    """Of random ranks, replacements included, in random steps; now and then several in one step."""
    kills, per_job = scaled(500), 100
    done = 0
    for number in range(-(-kills // per_job)):
        wanted = min(per_job, kills - done)
        (folder := tmp_path / f"kills{number}").mkdir()
        steps = 30 * wanted + 100
        env = {CHANCE: f"{SEED + number}:2:{wanted}:{folder}"}
        config = {"max_failures_per_step": 1000}
        job = _start(tmp_path / f"run{number}", steps=steps, env=env, config=config, standby=2).wait(3600)
        killed = [path.read_text() for path in folder.iterdir()]
        assert len(killed) == wanted, f"{len(killed)} of {wanted} kills\n{job.explain()}"
        check_same(job, _run(tmp_path / f"reference{number}", steps=steps, config=HOST, standby=0))
        _is_held_back(job)
        done += wanted
        print(f"{done} of {kills}: {sorted(killed)}", flush=True)
