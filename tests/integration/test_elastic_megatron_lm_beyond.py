"""Elastic jobs on Megatron-LM's unmodified loop grow beyond their launch: as a job that was resized by command at the
same calls, bit for bit, which goes on as one that was started in that size from that iteration's state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import AHEAD, Change, changes, check_steps_alike, command, grow, inject
from tests.support.elastic_back import WAIT_S, Way
from tests.support.elastic_megatron_lm import DISTRIBUTED, Training
from tests.support.jobs import Job, RunningJob, check_clean, check_fired
from tests.support.megatron_lm import needs_checkout

pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * WAIT_S), needs_checkout]
TP2, PP2 = ("--tensor-model-parallel-size=2",), ("--pipeline-model-parallel-size=2",)
MOST, ITERATIONS = 3, 28


def training(name: str, *flags: str, each: int = 1) -> Training:
    return Training(name, flags, launched=2 * each, each=each, iterations=ITERATIONS)


TRAININGS = (
    training("plain"),
    training("distributed-bf16", *DISTRIBUTED, "--bf16"),
    training("tp2", *TP2, each=2),
    training("tp2-distributed", *TP2, *DISTRIBUTED, "--bf16", each=2),
    training("pp2", *PP2, each=2),
    training("pp2-distributed", *PP2, *DISTRIBUTED, "--bf16", each=2),
)
AT, LOST, BACK = (TRAININGS[0].call("train", number) for number in (8, 12, 23))


@dataclass(frozen=True)
class Beyond(Way):
    """Launched with two replicas, and there may be three."""

    def config(self, **more: Any) -> dict[str, Any]:
        return {"elastic": {"min": 1, "max": MOST, **more}, "slots": MOST * self.each}


def way(training: Training) -> Beyond:
    def alike(job: Job, other: Job, call: int, until: int, ranks: int) -> None:
        end = training.iterations if until < 0 else training.iteration(until)
        check_steps_alike(job, other, training.iteration(call), end, ranks)

    def begin(folder: Path, *flags: str, **options: Any) -> RunningJob:
        return training.start(folder, "--step-time=200", *flags, **options)

    return Beyond(begin, alike, training.iteration, 2, training.each)


def launch(training: Training, folder: Path, *flags: str, **options: Any) -> RunningJob:
    """It is held before the call at which it is to grow."""
    running = way(training).begin(folder, *flags, **options)
    running.hold(training.iteration(AT - AHEAD))
    running.wait_for("job_started", WAIT_S)
    return running


def replica_of(training: Training, rank: int) -> set[int]:
    """As launched with two replicas; those beyond the launch follow."""
    if rank >= training.launched or not training.name.startswith("pp2"):
        first = rank // training.each * training.each
        return set(range(first, first + training.each))
    return {rank % 2, rank % 2 + 2}


@pytest.mark.parametrize("victim", [0, 2, -2])
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_in_each_size_as_started_in_it(training: Training, victim: int, tmp_path: Path) -> None:
    """2 -> 3 -> 2 replicas: on each part of the way bit for bit a job that is started with as many from that
    iteration's state."""
    how, grown = way(training), MOST * training.each
    victim %= grown
    running = launch(training, tmp_path / "run", f"--save-to={tmp_path}", config=how.config(replace="never"))
    grow(running, MOST, AT, training.iteration(LOST - 4), WAIT_S)
    inject(running, rank=victim, at="backward", step=LOST)
    running.hold(None)
    job = running.wait(WAIT_S)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_clean(job)
    larger, smaller = changes(job)
    assert (larger.step, set(larger.ranks)) == (AT, set(range(grown))), job.explain()
    assert smaller.step in (LOST - 1, LOST, LOST + 1), job.explain()
    assert set(smaller.ranks) == set(range(grown)) - replica_of(training, victim), job.explain()
    for change, until in ((larger, smaller.step), (smaller, -1)):
        ranks = len(change.ranks)
        state = f"--start-from={tmp_path}/{training.iteration(change.step)}.pt"
        config = {"elastic": {"min": 1, "max": ranks // training.each}}
        new = training.start(tmp_path / f"from-{change.step}", state, config=config, nproc=ranks).wait(WAIT_S)
        assert new.code == 0, new.explain()
        how.alike(job, new, change.step, until, ranks)
        check_clean(new)


@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_there_and_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    """2 -> 3 -> 2 -> 3 replicas."""
    how, ranks = way(training), set(range(MOST * training.each))
    victim %= len(ranks)
    running = launch(training, tmp_path / "run", config=how.config(replace="never"))
    grow(running, MOST, AT, training.iteration(LOST - 4), WAIT_S)
    inject(running, rank=victim, at="backward", step=LOST)
    running.hold(training.iteration(BACK - AHEAD))
    running.wait_for("recovery_finished", WAIT_S, count=2)
    grow(running, MOST, BACK, wait_s=WAIT_S)
    job = running.wait(WAIT_S)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_clean(job)
    first, middle, last = changes(job)
    assert (set(first.ranks), set(last.ranks)) == (ranks, ranks), job.explain()
    assert set(middle.ranks) == ranks - replica_of(training, victim), job.explain()
    other = how.commanded(tmp_path, [(c.step, len(c.ranks) // training.each) for c in (first, middle, last)])
    for one, until in ((first, middle.step), (middle, last.step), (last, -1)):
        how.alike(job, other, one.step, until, len(one.ranks))


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_there_and_replaced(training: Training, tmp_path: Path) -> None:
    """One beyond the launch, and one of it, die in the larger size, and are filled again."""
    how, victims = way(training), (2 * training.each, training.each)
    running = launch(training, tmp_path / "run", config=how.config())
    grow(running, MOST, AT, training.iteration(LOST - 4), WAIT_S)
    for number, victim in enumerate(victims):
        inject(running, rank=victim, at="backward", step=LOST + 10 * number)
    running.hold(None)
    job = running.wait(WAIT_S)
    assert job.code == 0, job.explain()
    check_fired(job, len(victims))
    check_clean(job)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], *([v] for v in victims)], job.explain()
    (change,) = changes(job)
    assert (change.step, len(change.ranks)) == (AT, MOST * training.each), job.explain()
    how.alike(job, how.commanded(tmp_path, [(AT, MOST)]), AT, -1, len(change.ranks))


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", TRAININGS[:3], ids=str)
def test_a_newcomer_dies_on_its_way_in(training: Training, state: str, tmp_path: Path) -> None:
    """It leaves again, with its replica, and the others go on as if nobody had come."""
    how = way(training)
    faults = [f"rank={MOST * training.each - 1},fault=sigkill,at=recovery:{state}"]
    running = launch(training, tmp_path / "run", config=how.config(replace="never"), inject=faults)
    assert command(running, MOST, AT) == ""
    running.wait_for_newcomers(WAIT_S)
    running.hold(None)
    job = running.wait(WAIT_S)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_clean(job)
    launched: Change = changes(job)[-1]
    assert launched.ranks == tuple(range(training.launched)), job.explain()
    undisturbed = how.begin(tmp_path / "other", config=how.config()).wait(WAIT_S)
    assert undisturbed.code == 0, undisturbed.explain()
    how.alike(job, undisturbed, launched.step, -1, training.launched)
