"""Elastic jobs on Megatron-LM's unmodified loop grow again: as a job that was resized by command at the same calls, bit
for bit, which goes on as one that was started in that size from that iteration's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import changes, check_steps_alike, command
from tests.support.elastic_back import WAIT_S, Way
from tests.support.elastic_megatron_lm import DISTRIBUTED, Training
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, RunningJob, check_clean, check_fired
from tests.support.megatron_lm import needs_checkout

skip_module_without("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * WAIT_S), needs_checkout]
ITERATIONS = 36
TP2, PP2 = ("--tensor-model-parallel-size=2",), ("--pipeline-model-parallel-size=2",)
PLAIN = Training("plain", iterations=ITERATIONS)
SHARDS = Training("distributed-bf16", (*DISTRIBUTED, "--bf16"), iterations=ITERATIONS)
TRAININGS = (
    PLAIN,
    SHARDS,
    Training("tp2", TP2, each=2, iterations=ITERATIONS),
    Training("pp2", PP2, each=2, iterations=ITERATIONS),
    Training("workers", ("--num-workers=2",), iterations=ITERATIONS),
)
AT, BACK = PLAIN.call("train", 3), PLAIN.call("train", 31)


def way(training: Training) -> Way:
    def alike(job: Job, other: Job, call: int, until: int, ranks: int) -> None:
        end = training.iterations if until < 0 else training.iteration(until)
        check_steps_alike(job, other, training.iteration(call), end, ranks)

    def begin(folder: Path, *flags: str, **options: Any) -> RunningJob:
        return training.start(folder, "--step-time=800", *flags, **options)

    return Way(begin, alike, training.iteration, training.launched // training.each, training.each)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    """4 -> 3 -> 4; and two replicas of two ranks to one and back."""
    left = {"tp2": sorted([victim, victim ^ 1]), "pp2": sorted([victim, (victim + 2) % 4])}.get(training.name, [victim])
    way(training).check_back(tmp_path, [victim], left, AT, BACK)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", TRAININGS[:2], ids=str)
def test_a_joining_process_dies_on_its_way_in(training: Training, state: str, tmp_path: Path) -> None:
    """It leaves again, and the others go on in the size that they had."""
    how = way(training)
    faults = [f"rank=3,fault=sigkill,at=recovery:{state}"]  # one that leaves by command does not come to this state
    running = how.begin(tmp_path / "run", config=how.config(replace="never"), inject=faults)
    running.wait_for("job_started", WAIT_S)
    assert command(running, 3, AT) == ""
    running.wait_for("recovery_finished", WAIT_S)
    assert command(running, 4, BACK) == ""
    job = running.wait(WAIT_S)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_clean(job)
    assert changes(job)[-1].ranks == (0, 1, 2), job.explain()
    how.alike(job, how.commanded(tmp_path, [(AT, 3)]), AT, -1, 3)
