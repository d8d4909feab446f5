"""Jobs that change their parallel layout: what is left of the old one, and scripts that cannot begin in the new one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import RunningJob, check_clean, check_fired
from tests.support.replan import (
    AT,
    STEPS,
    TIMEOUT_S,
    Course,
    Saved,
    Sizes,
    Training,
    check_goes_on,
    check_same_steps,
    command,
    left_in_memory,
    replanned,
    start,
)

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), ("--use-distributed-optimizer", "--bf16"))
SLOWLY = ("--step-time", "150")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned-hostile"))


def workers_of(job: RunningJob) -> dict[int, str]:
    """The living processes that print into the logs of the job's ranks."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            log = os.readlink(process / "fd" / "1")
        except OSError:
            continue
        if Path(log).parent == job.run_dir / "logs" and Path(log).name.startswith("rank"):
            found[int(process.name)] = Path(log).name
    return found


@pytest.mark.parametrize("victim", [0, 3])
def test_no_process_of_the_old_layout_lives_on(victim: int, tmp_path: Path, saved: Saved) -> None:
    faults = [f"rank={victim},fault=sigkill,at=backward,step=3"]
    running = start(tmp_path / "run", PARTS, "--step-time", "400", inject=faults)
    running.wait_for("recovery_finished", TIMEOUT_S)
    table = json.loads((running.run_dir / "ranktable.json").read_text())
    mine = {entry["pid"] for entry in table["ranks"]}
    found = workers_of(running)
    assert len(mine) == 3 and set(found) == mine, found
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    check_goes_on(job, PARTS, saved, replanned(job))


def test_a_script_that_cannot_begin_in_the_layout_that_is_commanded(tmp_path: Path, saved: Saved) -> None:
    """It goes on in the layout before, as if nothing had been commanded."""
    running = start(tmp_path / "run", PARTS, *SLOWLY, "--mode", "needs-tp", config={"parallelism": {"min": 1}})
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, Sizes(1, 2, 2), AT) == ""
    job = running.wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    assert replanned(job) == [(AT, Sizes(1, 2, 2)), (AT, PARTS.sizes)], job.explain()
    assert "sequence parallelism without tensor" in job.explain() and job.of("recovery_finished"), job.explain()
    _, undisturbed = saved.written(PARTS)
    mine, theirs = Course.of(job), Course.of(undisturbed)
    check_same_steps(mine, theirs, 0, STEPS, PARTS.sizes, job.explain())
    assert mine.ends == theirs.ends, job.explain()
    check_clean(job)
    assert not left_in_memory()


GATED = ("--gated", "--heads", "4")


@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        (
            Training("gated-distributed", Sizes(2, 1, 2), ("--use-distributed-optimizer", "--bf16", *GATED)),
            Sizes(1, 2, 2),
        ),
        (Training("gated", Sizes(2, 2, 1), ("--bf16", *GATED)), Sizes(1, 1, 3)),
        (
            Training("gated-fp16-distributed", Sizes(2, 1, 2), ("--use-distributed-optimizer", "--fp16", *GATED)),
            Sizes(1, 2, 2),
        ),
        (Training("gated-fp16", Sizes(1, 2, 2), ("--fp16", *GATED)), Sizes(2, 1, 1)),
    ],
    ids=str,
)
def test_gated_layers_and_fp16(training: Training, sizes: Sizes, tmp_path: Path, saved: Saved) -> None:
    running = start(tmp_path / "run", training, *SLOWLY, config={"parallelism": {"min": 1}})
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, sizes, AT) == ""
    check_goes_on(running.wait(TIMEOUT_S), training, saved, [(AT, sizes)])
