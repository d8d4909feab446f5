"""Elastic jobs whose state is divided among the ranks (FSDP2, ZeRO-1 to 3) grow beyond their launch: as a job that was
resized by command at the same steps, bit for bit, which goes on as a job that was started in that size from that step's
state. And who dies on the way in, or afterwards, takes nothing with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_elastic_controller import WithController
from tests.support.elastic import changes, command, inject, often
from tests.support.elastic_checkpoints import fell_back, saving
from tests.support.elastic_divided import (
    DDP,
    END,
    FSDP2,
    Kind,
    Resized,
    check_as_commanded,
    megatron,
    needing,
    resized_once,
    zero,
)
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

pytestmark = [pytest.mark.timeout(400), pytest.mark.grid]
KINDS = [
    pytest.param(FSDP2, id="fsdp2"),
    *(pytest.param(kind, id=kind.name, marks=needing(kind)) for kind in (zero(1), zero(2), zero(3))),
]
SHARDS = megatron("shards", "--bf16", "--use-distributed-optimizer")
MEGATRON = [pytest.param(SHARDS, id=SHARDS.name, marks=needing(SHARDS))]
AT, LOST, BACK = 10, 16, 32
STATES = ("regrouping", "restoring", "reshaping", "verifying", "resuming")


def slowly(kind: Kind) -> tuple[str, str]:
    """Who comes has to be there before the step at which it is to come in."""
    return ("--step-time", "800" if "megatron" in kind.script.name else "250")


def beyond(**more: Any) -> dict[str, Any]:
    return {"elastic": {"min": 1, "max": 4, **more}, "slots": 4}


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    made: dict[tuple[str, str], Resized] = {}

    def job(kind: Kind, sizes: Sequence[tuple[int, int]]) -> Job:
        flags = slowly(kind)
        if flags not in made:
            made[flags] = resized_once(tmp_path_factory, *flags, launched=2, config=beyond())
        return made[flags](kind, sizes)

    return job


def grow(running: RunningJob, count: int, step: int) -> None:
    """Have it grown to four replicas before this step, in its so manieth recovery."""
    assert command(running, 4, step) == ""
    running.wait_for("job_resized", count=count)
    running.wait_for("recovery_finished", count=count)


@pytest.mark.parametrize("victims", often([(0,), (1,), (2,), (3,), (0, 1)], ()))
@pytest.mark.parametrize("kind", [*KINDS, *MEGATRON])
def test_there_and_killed_and_back(kind: Kind, victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """2 -> 4 -> 3 -> 4, and 2 -> 4 -> 2 -> 4: those of the launch may leave as well as the others, also all of them."""
    running = kind.start(tmp_path / "run", *slowly(kind), config=beyond(replace="never"), nproc=2)
    running.wait_for("job_started", 120)
    grow(running, 1, AT)
    for rank in victims:
        inject(running, rank=rank, at="backward", step=LOST)
    running.wait_for("recovery_finished", count=2)
    grow(running, 3, BACK)
    job = running.wait(240)
    check_fired(job, len(victims))
    assert [change.ranks for change in changes(job)][-1] == (0, 1, 2, 3), job.explain()
    assert job.of("job_resized")[-1]["came"] == list(victims), job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("kind", [*KINDS, *MEGATRON])
def test_those_beyond_are_replaced(kind: Kind, tmp_path: Path, resized: Resized) -> None:
    """One of them, and one of the launch, die in the larger size, and are filled again."""
    running = kind.start(tmp_path / "run", *slowly(kind), config=beyond(), nproc=2)
    running.wait_for("job_started", 120)
    grow(running, 1, AT)
    inject(running, rank=3, at="backward", step=LOST)
    inject(running, rank=1, at="backward", step=LOST + 4)
    job = running.wait(240)
    check_fired(job, 2)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], [3], [1]], job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("state", STATES)
def test_one_beyond_dies_while_it_comes_in(state: str, tmp_path: Path, resized: Resized) -> None:
    """It has left again before it has taken a step; the other one has come."""
    faults = [f"rank=3,fault=sigkill,at=recovery:{state}"]
    config = beyond(replace="never")
    running = FSDP2.start(tmp_path / "run", *slowly(FSDP2), config=config, nproc=2, inject=faults)
    running.wait_for("job_started", 120)
    assert command(running, 4, AT) == ""
    job = running.wait(240)
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2), job.explain()
    check_as_commanded(FSDP2, job, resized)


@pytest.mark.parametrize("state", often(STATES, ()))
@pytest.mark.parametrize("victim", [1, 3])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_one_that_dies_on_the_way_in_is_replaced(
    kind: Kind, victim: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """One of the launch, or one beyond it: where there is room it is filled again, in the old size or in the new one.
    One beyond the launch has no part of the old division, although that is the launch's."""
    faults = [f"rank={victim},fault=sigkill,at=recovery:{state}"]
    running = kind.start(tmp_path / "run", *slowly(kind), config=beyond(), nproc=2, inject=faults)
    running.wait_for("job_started", 120)
    assert command(running, 4, AT) == ""
    job = running.wait(240)
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2, 3), job.explain()
    check_as_commanded(kind, job, resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("kind", [pytest.param(DDP, id="ddp"), *KINDS[:1], KINDS[2]])
def test_another_controller_knows_them(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    """It is lost while all train in the larger size; then a rank is."""
    flags = ("--steps", str(END), *kind.flags, *slowly(kind))
    job = WithController(tmp_path / "job", kind.script, beyond(replace="never"), *flags, nproc=2)
    job.wait_for("job_started")
    assert job.command(4, AT) == ""
    job.wait_for("recovery_finished")
    job.wait_for_step(AT + 2)
    job.kill()
    job.begin()
    job.wait_for_step(LOST)
    os.kill(job.pid(victim), signal.SIGKILL)
    ended = job.result()
    assert ended.notices("taken_over"), ended.explain()
    assert [change.ranks for change in changes(ended)][-1] == tuple({0, 1, 2, 3} - {victim}), ended.explain()
    check_as_commanded(kind, ended, resized)


@pytest.mark.parametrize("victims", often([(0, 2), (1, 3)], ()))
def test_they_go_back_to_a_checkpoint_of_more_ranks_than_the_launch_had(
    victims: tuple[int, ...], tmp_path: Path, resized: Resized
) -> None:
    """Two are lost at once, which have kept each other's copies: two are left, as many as at the launch, but not the
    same ones."""
    config = {**beyond(replace="never"), **saving(tmp_path / "checkpoints", 0.5)}
    running = FSDP2.start(tmp_path / "run", *slowly(FSDP2), config=config, nproc=2)
    running.wait_for("job_started", 120)
    grow(running, 1, AT)
    before = len([event for event in running.events() if event["event"] == "checkpoint_saved"])
    running.wait_for("checkpoint_saved", count=before + 2)  # of all four
    running.kill(*victims)
    job = running.wait(240)
    version = fell_back(job, 4, 2, END)
    FSDP2.goes_on_alike(job, resized(FSDP2, [(AT, 4), (version, 2)]), version, 2, END)
    check_clean(job)
