"""Elastic jobs grow beyond their launch where that was not possible before: megatron-core without the distributed
optimizer, and replicas of several ranks (megatron-core's tensor and pipeline parallelism, HSDP, DistributedDataParallel
over layers that the script divides). As a job that was resized by command at the same steps, bit for bit, which goes on
as a job that was *started* in that size from that step's state. A replica comes as a whole or not at all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.runtime.environment import NEW_RANK_ENV
from tests.integration.test_elastic_controller import WithController
from tests.support import elastic_replicas
from tests.support.elastic import changes, command, inject, sizes_of
from tests.support.elastic_divided import END, Kind, Resized, check_as_commanded, megatron, needing, resized_once
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

pytestmark = [pytest.mark.timeout(500), pytest.mark.grid]
DISTRIBUTED = "--use-distributed-optimizer"
TP = ("--tensor-model-parallel-size", "2", "--bf16")
PP = ("--pipeline-model-parallel-size", "2", "--layers", "2", "--bf16")


def of_replicas(name: str, *flags: str) -> Kind:
    """``tests/scripts/elastic_replicas.py``."""
    alike, goes_on = elastic_replicas.check_steps_alike, elastic_replicas.check_goes_on_alike
    return Kind(name, elastic_replicas.SCRIPT, flags, alike, goes_on, each=elastic_replicas.EACH)


KINDS = {
    kind.name: kind
    for kind in (
        megatron("plain", "--bf16"),
        megatron("tp", *TP, each=2),
        megatron("tp-distributed", *TP, DISTRIBUTED, each=2),
        megatron("pp", *PP, each=2),
        megatron("pp-distributed", *PP, DISTRIBUTED, each=2),
        megatron("pp-tied", *PP, "--tie-head", DISTRIBUTED, each=2),
        of_replicas("hsdp"),
        of_replicas("hsdp-stride", "--stride", "--clip"),
        of_replicas("tensor", "--kind", "tensor"),
    )
}
SEVERAL = [name for name, kind in KINDS.items() if kind.each > 1]
AT, LOST, BACK = 8, 13, 26
STATES = ("regrouping", "restoring", "reshaping", "verifying", "resuming")


def params(names: Sequence[str]) -> list[Any]:
    return [pytest.param(KINDS[name], id=name, marks=needing(KINDS[name])) for name in names]


def slowly(kind: Kind) -> tuple[str, str]:
    """Who comes has to be there before the step at which it is to come in."""
    return ("--step-time", "1200" if "megatron" in kind.script.name else "700")


def beyond(kind: Kind, **more: Any) -> dict[str, Any]:
    """Launched with two replicas, and there may be three."""
    return {"elastic": {"min": 1, "max": 3, **more}, "slots": 3 * kind.each}


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    made: dict[str, Resized] = {}

    def job(kind: Kind, sizes: Sequence[tuple[int, int]]) -> Job:
        if kind.name not in made:
            launched = 2 * kind.each
            made[kind.name] = resized_once(tmp_path_factory, *slowly(kind), launched=launched, config=beyond(kind))
        return made[kind.name](kind, sizes)

    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Job]:
    """The job of two replicas that stays as it is."""

    @cache
    def job(kind: Kind) -> Job:
        made = launch(kind, tmp_path_factory.mktemp(f"{kind.name}-undisturbed") / "run").wait(300)
        assert made.code == 0, made.explain()
        check_clean(made)
        return made

    return job


def launch(kind: Kind, folder: Path, *faults: str, **elastic: Any) -> RunningJob:
    running = kind.start(folder, *slowly(kind), config=beyond(kind, **elastic), nproc=2 * kind.each, inject=faults)
    running.wait_for("job_started", 120)
    return running


def grow(running: RunningJob, count: int, step: int) -> None:
    """Have it grown to three replicas before this step, in its so manieth recovery."""
    assert command(running, 3, step) == ""
    running.wait_for("job_resized", 120, count=count)
    running.wait_for("recovery_finished", count=count)


def everybody(kind: Kind) -> set[int]:
    return set(range(3 * kind.each))


def replica_of(kind: Kind, rank: int) -> set[int]:
    """As launched with two replicas; those beyond the launch follow replica by replica."""
    if rank >= 2 * kind.each or not kind.name.startswith(("pp", "hsdp-stride")):
        first = rank // kind.each * kind.each
        return set(range(first, first + kind.each))
    return {rank % 2 + 2 * run for run in range(kind.each)}


def newcomer(running: RunningJob, rank: int) -> int:
    """The process that is being built up as this rank."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                variables = (process / "environ").read_bytes().split(b"\0") if process.name.isdigit() else []
                if f"{NEW_RANK_ENV}={rank}".encode() in variables and str(running.run_dir).encode() in b"".join(
                    variables
                ):
                    return int(process.name)
        time.sleep(0.05)
    raise AssertionError(f"no process for rank {rank}")


@pytest.mark.parametrize("victim", [0, 2, -2])
@pytest.mark.parametrize("kind", params(list(KINDS)))
def test_in_each_size_as_started_in_it(kind: Kind, victim: int, tmp_path: Path) -> None:
    """2 -> 3 -> 2 replicas, whenever the third one is there: on each part of the way bit for bit a job that is started
    with as many from that step's state."""
    victim, end, grown = victim % (3 * kind.each), 28, 3 * kind.each
    flags = (*slowly(kind), "--steps", str(end))
    config = beyond(kind, replace="never")
    running = kind.start(tmp_path / "run", *flags, "--save-to", str(tmp_path), config=config, nproc=2 * kind.each)
    running.wait_for("job_started", 120)
    assert command(running, 3, AT) == ""
    first = running.wait_for("job_resized", 120)["step"]
    running.wait_for("recovery_finished")
    lost = max(first, running.newest_step()) + 4
    inject(running, rank=victim, at="backward", step=lost)
    job = running.wait(300)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_clean(job)
    larger, smaller = changes(job)
    assert (larger.step, set(larger.ranks)) == (first, everybody(kind)), job.explain()
    assert smaller.step in (lost - 1, lost, lost + 1), job.explain()
    assert set(smaller.ranks) == everybody(kind) - replica_of(kind, victim), job.explain()
    as_started(kind, job, larger.step, smaller.step, grown, tmp_path, end)
    as_started(kind, job, smaller.step, end, 2 * kind.each, tmp_path, end)


def as_started(kind: Kind, job: Job, step: int, until: int, ranks: int, folder: Path, end: int) -> None:
    """From ``step`` until before ``until`` the job is as one that is started with so many ranks from its state."""
    begin = ("--start-from", str(folder / f"{step}.pt"), "--steps", str(end))
    config = {"elastic": {"min": 1, "max": ranks // kind.each}}
    new = kind.start(folder / f"from-{step}", *begin, config=config, nproc=ranks).wait(240)
    assert new.code == 0, new.explain()
    kind.steps_alike(job, new, step, until, ranks)
    if until == end:
        kind.goes_on_alike(job, new, step, ranks, end)
    check_clean(new)


@pytest.mark.parametrize("victim", [0, 2, -2])
@pytest.mark.parametrize("kind", params(list(KINDS)))
def test_there_and_killed_and_back(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    """2 -> 3 -> 2 -> 3: replicas of the launch may leave as well as the other one."""
    victim %= 3 * kind.each
    running = launch(kind, tmp_path / "run", replace="never")
    grow(running, 1, AT)
    inject(running, rank=victim, at="backward", step=LOST)
    running.wait_for("recovery_finished", 60, count=2)
    grow(running, 3, BACK)
    job = running.wait(300)
    check_fired(job)
    first, middle, last = (set(change.ranks) for change in changes(job))
    assert (first, middle, last) == (everybody(kind), everybody(kind) - replica_of(kind, victim), everybody(kind))
    assert set(job.of("job_resized")[-1]["came"]) == replica_of(kind, victim), job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("kind", params(list(KINDS)))
def test_there_and_replaced(kind: Kind, tmp_path: Path, resized: Resized) -> None:
    """One beyond the launch, and one of it, die in the larger size, and are filled again."""
    running = launch(kind, tmp_path / "run")
    grow(running, 1, AT)
    victims = [2 * kind.each, kind.each]
    for number, victim in enumerate(victims):
        inject(running, rank=victim, at="backward", step=LOST + 5 * number)
    job = running.wait(300)
    check_fired(job, 2)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], *([v] for v in victims)], job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", params(["tp-distributed", "pp-distributed", "hsdp"]))
def test_one_beyond_dies_while_it_comes_in(
    kind: Kind, state: str, tmp_path: Path, resized: Resized, undisturbed: Callable[[Kind], Job]
) -> None:
    """Its replica has left again before it has taken a step, as a whole."""
    if state == "reshaping" and kind.name == "hsdp":
        pytest.skip("nothing is divided anew")
    fault = f"rank={3 * kind.each - 1},fault=sigkill,at=recovery:{state}"
    running = launch(kind, tmp_path / "run", fault, replace="never")
    assert command(running, 3, AT) == ""
    job = running.wait(300)
    check_fired(job)
    (*_, last) = changes(job)
    assert set(last.ranks) == set(range(2 * kind.each)), job.explain()
    if sizes_of(job) == [(last.step, 2 * kind.each)]:  # nobody has taken a step with it
        assert job.code == 0, job.explain()
        kind.goes_on_alike(job, undisturbed(kind), 0, 2 * kind.each, END)
        check_clean(job)
    else:
        check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victim", [1, -1])
@pytest.mark.parametrize("kind", params(["tp", "tp-distributed", "pp-distributed"]))
def test_one_that_dies_on_the_way_in_is_replaced(
    kind: Kind, victim: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """One of the launch, or one beyond it: it is filled again, in the old size or in the new one."""
    if state == "reshaping" and DISTRIBUTED not in kind.flags:
        pytest.skip("nothing is divided anew")
    fault = f"rank={victim % (3 * kind.each)},fault=sigkill,at=recovery:{state}"
    running = launch(kind, tmp_path / "run", fault)
    assert command(running, 3, AT) == ""
    job = running.wait(300)
    check_fired(job)
    assert set(changes(job)[-1].ranks) == everybody(kind), job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("kind", params(["tp-distributed", "hsdp"]))
def test_one_that_dies_before_its_first_step_keeps_its_replica_out(
    kind: Kind, tmp_path: Path, undisturbed: Callable[[Kind], Job]
) -> None:
    """The other newcomer of it ends, too, and nobody has paused."""
    running = launch(kind, tmp_path / "run")
    assert command(running, 3, BACK) == ""
    os.kill(newcomer(running, 3 * kind.each - 1), signal.SIGKILL)
    job = running.wait(300)
    assert len(job.notices("newcomer_given_up")) == kind.each, job.explain()
    assert job.code == 0 and not job.of("failure_detected") and not job.of("job_resized"), job.explain()
    kind.goes_on_alike(job, undisturbed(kind), 0, 2 * kind.each, END)
    check_clean(job)


@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("kind", params(["tp-distributed", "pp-distributed", "hsdp"]))
def test_another_controller_knows_them(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    """It is lost while all train in the larger size; then a rank is."""
    victim %= 3 * kind.each
    flags = ("--steps", str(END), *kind.flags, *slowly(kind))
    config = beyond(kind, replace="never")
    job = WithController(tmp_path / "job", kind.script, config, *flags, nproc=2 * kind.each, env=kind.env)
    job.wait_for("job_started")
    assert job.command(3, AT) == ""
    job.wait_for("recovery_finished")
    job.wait_for_step(AT + 2)
    job.kill()
    job.begin()
    job.wait_for_step(LOST)
    os.kill(job.pid(victim), signal.SIGKILL)
    ended = job.result()
    assert ended.notices("taken_over"), ended.explain()
    assert set(changes(ended)[-1].ranks) == everybody(kind) - replica_of(kind, victim), ended.explain()
    check_as_commanded(kind, ended, resized)


def test_one_replica_of_several_ranks_is_refused(tmp_path: Path) -> None:
    """Before the first step: process groups of all ranks and those of a replica are the same."""
    kind = KINDS["tensor"]
    job = kind.start(tmp_path / "run", config=beyond(kind), nproc=kind.each).wait(120)
    assert job.code != 0 and "one replica of 2 ranks at the launch" in job.explain(), job.explain()
    assert not job.of("job_started"), job.explain()
    check_clean(job)


def test_too_few_micro_batches_are_refused(tmp_path: Path) -> None:
    """With HSDP each rank computes micro-batches of its own: seven replicas would be fourteen."""
    kind, config = KINDS["hsdp"], {"elastic": {"min": 1, "max": 7}}
    job = kind.start(tmp_path / "run", config=config, nproc=2 * kind.each).wait(120)
    assert job.code != 0 and "at most 6 is allowed" in job.explain(), job.explain()
    assert not job.of("job_started"), job.explain()
    check_clean(job)
