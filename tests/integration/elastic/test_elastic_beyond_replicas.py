"""Elastic jobs grow beyond their launch: megatron-core without the distributed optimizer, and where replicas have
several ranks (HSDP, layers that a script divides, tensor and pipeline parallelism). As a job that was resized by
command at the same steps, bit for bit, which goes on as a job that was *started* in that size from that step's state. A
replica comes as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_beyond import DISTRIBUTED, LAUNCHED, SLOWLY, STATES, Beyond, of_replicas
from tests.support.elastic_sharded import Kind, Resized, megatron, needing
from tests.support.jobs import Job, check_clean

pytestmark = [pytest.mark.timeout(500), pytest.mark.grid]
TP = ("--tensor-model-parallel-size", "2", "--bf16")
PP = ("--pipeline-model-parallel-size", "2", "--layers", "2", "--bf16")
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
BEYOND = Beyond(most=3, at=8, lost=13, back=26)


def params(names: Sequence[str]) -> list[Any]:
    return [pytest.param(KINDS[name], id=name, marks=needing(KINDS[name])) for name in names]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return BEYOND.resized_once(tmp_path_factory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Job]:
    """The job of two replicas that stays as it is."""
    made: dict[str, Job] = {}

    def job(kind: Kind) -> Job:
        if kind.name not in made:
            folder = tmp_path_factory.mktemp(f"{kind.name}-undisturbed")
            running = kind.start(folder / "run", *SLOWLY, config=BEYOND.config(kind), nproc=LAUNCHED * kind.each)
            made[kind.name] = running.wait(300)
            assert made[kind.name].code == 0, made[kind.name].explain()
            check_clean(made[kind.name])
        return made[kind.name]

    return job


@pytest.mark.parametrize("victim", [0, 2, -2])
@pytest.mark.parametrize("kind", params(list(KINDS)))
def test_in_each_size_as_started_in_it(kind: Kind, victim: int, tmp_path: Path) -> None:
    """2 -> 3 -> 2 replicas."""
    BEYOND.in_each_size_as_started_in_it(kind, of_all(kind, victim), tmp_path)


@pytest.mark.parametrize("victim", [0, 2, -2])
@pytest.mark.parametrize("kind", params(list(KINDS)))
def test_there_and_killed_and_back(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    """2 -> 3 -> 2 -> 3: replicas of the launch may leave as well as the other one."""
    BEYOND.there_and_killed_and_back(kind, [of_all(kind, victim)], tmp_path, resized)


@pytest.mark.parametrize("kind", params(list(KINDS)))
def test_there_and_replaced(kind: Kind, tmp_path: Path, resized: Resized) -> None:
    """One beyond the launch, and one of it, die in the larger size, and are filled again."""
    BEYOND.there_and_replaced(kind, [2 * kind.each, kind.each], tmp_path, resized)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", params(["tp-distributed", "pp-distributed", "hsdp"]))
def test_one_beyond_dies_while_it_comes_in(
    kind: Kind, state: str, tmp_path: Path, resized: Resized, undisturbed: Callable[[Kind], Job]
) -> None:
    """Its replica has left again before it has taken a step, as a whole."""
    if state == "reshaping" and DISTRIBUTED not in kind.flags:
        pytest.skip("nothing is sharded again")
    BEYOND.one_dies_while_it_comes_in(kind, state, tmp_path, resized, undisturbed)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victim", [1, -1])
@pytest.mark.parametrize("kind", params(["tp", "tp-distributed", "pp-distributed"]))
def test_one_that_dies_on_the_way_in_is_replaced(
    kind: Kind, victim: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """One of the launch, or one beyond it: it is filled again, in the old size or in the new one."""
    if state == "reshaping" and DISTRIBUTED not in kind.flags:
        pytest.skip("nothing is sharded again")
    BEYOND.one_dies_on_the_way_in_and_is_replaced(kind, of_all(kind, victim), state, tmp_path, resized)


@pytest.mark.parametrize("kind", params(["tp-distributed", "hsdp"]))
def test_one_that_dies_before_its_first_step_keeps_its_replica_out(
    kind: Kind, tmp_path: Path, undisturbed: Callable[[Kind], Job]
) -> None:
    """The other joining process of it ends, too, and no rank has paused."""
    BEYOND.one_dies_before_its_first_step(kind, tmp_path, undisturbed)


@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("kind", params(["tp-distributed", "pp-distributed", "hsdp"]))
def test_another_controller_knows_them(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    BEYOND.another_controller_knows_them(kind, of_all(kind, victim), tmp_path, resized)


def of_all(kind: Kind, rank: int) -> int:
    """A rank of the grown job; the last one is -1."""
    return rank % (BEYOND.most * kind.each)


@pytest.mark.parametrize("kind", params(["tensor", "hsdp", "tp-distributed", "pp"]))
def test_one_replica_of_several_ranks_is_refused(kind: Kind, tmp_path: Path) -> None:
    """Before the first step: process groups of all ranks and those of a replica are the same."""
    job = kind.start(tmp_path / "run", config=BEYOND.config(kind), nproc=kind.each).wait(120)
    assert job.code != 0 and "one replica of 2 ranks at the launch" in job.explain(), job.explain()
    assert "a launch with two replicas is allowed" in job.explain() and not job.of("job_started"), job.explain()
    check_clean(job)


def test_too_few_micro_batches_are_refused(tmp_path: Path) -> None:
    """With HSDP each rank computes its own micro-batches: seven replicas would be fourteen."""
    kind, config = KINDS["hsdp"], {"elastic": {"min": 1, "max": 7}}
    job = kind.start(tmp_path / "run", config=config, nproc=2 * kind.each).wait(120)
    assert job.code != 0 and "at most 6 is allowed" in job.explain(), job.explain()
    assert not job.of("job_started"), job.explain()
    check_clean(job)
