"""Elastic jobs on Megatron-LM's unmodified loop grow beyond their launch: as a job that was resized by command at the
same calls, bit for bit, which goes on as one that was started in that size from that iteration's state."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import AHEAD, Change, Course, changes, check_steps_alike, command, grow, inject
from tests.support.elastic_back import WAIT_S, Way
from tests.support.elastic_megatron_lm import DISTRIBUTED, Training, check_logged, evaluations, logged
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, RunningJob, check_clean, check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import finished

skip_module_without("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * WAIT_S), needs_checkout]
TP2 = ("--tensor-model-parallel-size=2",)
MOST, ITERATIONS = 3, 28


def training(name: str, *flags: str, each: int = 1, **loop: int) -> Training:
    return Training(name, flags, launched=2 * each, each=each, **{"iterations": ITERATIONS, **loop})


TRAININGS = (
    training("plain"),
    training("distributed-bf16", *DISTRIBUTED, "--bf16"),
    training("tp2", *TP2, each=2),
    training("tp2-distributed", *TP2, *DISTRIBUTED, "--bf16", each=2),
)
AT, LOST, BACK = (TRAININGS[0].call("train", number) for number in (8, 12, 23))
NORM = "--log-params-norm"
LOOKED_AT = (
    training("plain-looked-at", NORM, logs=3, evaluates=6),
    training("tp2-distributed-looked-at", *TP2, *DISTRIBUTED, "--bf16", NORM, each=2, logs=3, evaluates=6),
)
SAVED = (
    training("plain-saved", iterations=20, evaluates=4, saves=12),
    training("tp2-saved", *TP2, each=2, iterations=20, evaluates=4, saves=12),
)


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


def launch(training: Training, folder: Path, *flags: str, at: int = AT, **options: Any) -> RunningJob:
    """It is held before the call at which it is to grow."""
    running = way(training).begin(folder, *flags, **options)
    running.hold(training.iteration(at - AHEAD))
    running.wait_for("job_started", WAIT_S)
    return running


def ended(running: RunningJob, faults: int = 1) -> Job:
    """Well, after that many faults, and nothing is left of it."""
    job = finished(running.wait(WAIT_S))
    check_fired(job, faults)
    check_clean(job)
    return job


def check_as_commanded(job: Job, how: Beyond, found: Sequence[Change], folder: Path) -> Job:
    """After each of these changes it is as a job that was resized by command at the same calls, which is returned."""
    other = how.commanded(folder, [(c.step, len(c.ranks) // how.each) for c in found])
    for one, until in zip(found, [*(c.step for c in found[1:]), -1], strict=True):
        how.alike(job, other, one.step, until, len(one.ranks))
    return other


def replica_of(training: Training, rank: int) -> set[int]:
    """All ranks of the replica of this one."""
    first = rank // training.each * training.each
    return set(range(first, first + training.each))


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
    job = ended(running)
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
    job = ended(running)
    first, middle, last = found = changes(job)
    assert (set(first.ranks), set(last.ranks)) == (ranks, ranks), job.explain()
    assert set(middle.ranks) == ranks - replica_of(training, victim), job.explain()
    check_as_commanded(job, how, found, tmp_path)


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_there_and_replaced(training: Training, tmp_path: Path) -> None:
    """One beyond the launch, and one of it, die in the larger size, and are filled again."""
    how, victims = way(training), (2 * training.each, training.each)
    running = launch(training, tmp_path / "run", config=how.config())
    grow(running, MOST, AT, training.iteration(LOST - 4), WAIT_S)
    for number, victim in enumerate(victims):
        inject(running, rank=victim, at="backward", step=LOST + 10 * number)
    running.hold(None)
    job = ended(running, faults=len(victims))
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], *([v] for v in victims)], job.explain()
    (change,) = changes(job)
    assert (change.step, len(change.ranks)) == (AT, MOST * training.each), job.explain()
    how.alike(job, how.commanded(tmp_path, [(AT, MOST)]), AT, -1, len(change.ranks))


@pytest.mark.parametrize("replica", [0, 2])
@pytest.mark.parametrize("training", LOOKED_AT, ids=str)
def test_what_the_loop_sees_and_says(training: Training, replica: int, tmp_path: Path) -> None:
    """It grows amid the iterations of which a log is the mean, and in an evaluation a replica of the launch or the one
    beyond it loses its first rank, which reads its samples. What evaluations find, and all that is logged (by a rank
    beyond the launch, while it is the last one), is as by command."""
    how, ranks = way(training), set(range(MOST * training.each))
    victim = replica * training.each
    at, lost, back = training.call("train", 10), training.call("evaluate", 11), training.call("train", 23)
    assert (10 + 1) % training.logs and (23 + 1) % training.logs == 0  # one log is of both sizes
    running = launch(training, tmp_path / "run", config=how.config(replace="never"), at=at)
    grow(running, MOST, at, training.iteration(lost) - 1, WAIT_S)
    inject(running, rank=victim, at="data", step=lost)
    running.hold(training.iteration(back - AHEAD))
    running.wait_for("recovery_finished", WAIT_S, count=2)
    grow(running, MOST, back, wait_s=WAIT_S)
    job = ended(running)
    _, middle, _ = found = changes(job)
    assert set(middle.ranks) == ranks - replica_of(training, victim), job.explain()
    assert middle.step in ((lost - 1, lost) if training.sharded else (lost,)), job.explain()
    other = check_as_commanded(job, how, found, tmp_path)
    check_logged(other, training, found)
    assert logged(job) == logged(other), job.explain()
    assert evaluations(job) == evaluations(other), job.explain()
    two, three = training.launched, len(ranks)
    assert sorted(evaluations(job)) == [(5, two), (11, two), (17, two), (23, three), (27, three)], job.explain()


@pytest.mark.parametrize("training", SAVED, ids=str)
def test_a_checkpoint_of_megatrons(training: Training, tmp_path: Path) -> None:
    """Written by three replicas of a job that was launched with two, and loaded by a job of three, which goes on as it,
    evaluations included, and by one of two, which grows beyond its launch: its joining process loads what the job was
    launched with."""
    how, at, saved, ranks = way(training), training.call("train", 8), tmp_path / "saved", MOST * training.each
    running = launch(training, tmp_path / "run", *saves(saved, training.saves), config=how.config(), at=at)
    grow(running, MOST, at, wait_s=WAIT_S)
    job = finished(running.wait(WAIT_S))
    (change,) = changes(job)
    assert (change.step, len(change.ranks)) == (at, ranks), job.explain()
    # That of the end is the newest.
    shutil.rmtree(saved / f"iter_{training.iterations:07}")
    (saved / "latest_checkpointed_iteration.txt").write_text(str(training.saves))
    load, config = f"--load={saved}", {"elastic": {"min": 1, "max": MOST}}
    larger = finished(training.start(tmp_path / "larger", load, config=config, nproc=ranks).wait(WAIT_S))
    check_same_from(training.saves, job, larger, training)
    # The other one has written its own before anybody comes. Its calls are counted from its first iteration.
    smaller = how.begin(tmp_path / "smaller", load, *saves(saved, 14), config=how.config())
    smaller.hold(14)
    smaller.wait_for("job_started", WAIT_S)
    wait_until_saved(smaller, saved, 14)
    grow(smaller, MOST, 14, wait_s=WAIT_S)
    grown = finished(smaller.wait(WAIT_S))
    (change,) = changes(grown)
    course = Course.of(grown)
    assert {number for number, *_ in course.losses} == {*range(training.saves, training.iterations)}, grown.explain()
    for number in range(17, training.iterations):
        assert len(course.states[number + 1, ranks]) == 1, grown.explain()
        assert all(len(course.losses[number, rank, ranks]) == 1 for rank in range(ranks)), grown.explain()


def wait_until_saved(running: RunningJob, place: Path, iteration: int) -> None:
    """The newest of Megatron's checkpoints there is that of this iteration."""
    deadline = time.monotonic() + WAIT_S
    while (place / "latest_checkpointed_iteration.txt").read_text() != str(iteration):
        assert time.monotonic() < deadline and running.popen.poll() is None, running.wait(1).explain()
        time.sleep(0.1)


def saves(place: Path, interval: int) -> tuple[str, str]:
    return f"--save={place}", f"--save-interval={interval}"


def check_same_from(number: int, job: Job, other: Job, training: Training) -> None:
    """From this iteration on both have three replicas, and compute the same."""
    check_steps_alike(job, other, number, training.iterations, MOST * training.each)
    later = [
        {at: losses for at, losses in evaluations(one).items() if at[0] >= number and at[1] == MOST * training.each}
        for one in (job, other)
    ]
    assert later[0] == later[1] and later[0], later


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", TRAININGS[:3], ids=str)
def test_a_joining_process_dies_on_its_way_in(training: Training, state: str, tmp_path: Path) -> None:
    """It leaves again, with its replica, and the others go on as if no one had come."""
    how = way(training)
    faults = [f"rank={MOST * training.each - 1},fault=sigkill,at=recovery:{state}"]
    running = launch(training, tmp_path / "run", config=how.config(replace="never"), inject=faults)
    assert command(running, MOST, AT) == ""
    running.wait_for_joining_processes(WAIT_S)
    running.hold(None)
    job = ended(running)
    launched: Change = changes(job)[-1]
    assert launched.ranks == tuple(range(training.launched)), job.explain()
    undisturbed = how.begin(tmp_path / "other", config=how.config()).wait(WAIT_S)
    assert undisturbed.code == 0, undisturbed.explain()
    how.alike(job, undisturbed, launched.step, -1, training.launched)


REFUSED = {
    "stages": (training("pp2", "--pipeline-model-parallel-size=2", each=2), 2, "elastic.max = 2 is allowed"),
    "one replica": (training("tp2", *TP2, each=2), 1, "a launch with two replicas is allowed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_the_first_step(what: str, tmp_path: Path) -> None:
    training, replicas, said = REFUSED[what]
    config = way(training).config()
    job = training.start(tmp_path / "run", config=config, nproc=replicas * training.each).wait(WAIT_S)
    assert job.code != 0 and said in job.explain(), job.explain()
    assert not job.of("job_started"), job.explain()
    check_clean(job)
