"""Elastic jobs whose state is sharded among the ranks (FSDP2, ZeRO-1 to 3) grow beyond their launch: as a job that was
resized by command at the same steps, bit for bit, which goes on as a job that was started in that size from that step's
state. And a rank that dies on the way in, or afterwards, takes nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic import grow, often
from tests.support.elastic_beyond import STATES, Beyond
from tests.support.elastic_checkpoints import fell_back, saving
from tests.support.elastic_sharded import DDP, END, FSDP2, Kind, Resized, megatron, needing, zero
from tests.support.jobs import check_clean

pytestmark = [pytest.mark.timeout(400), pytest.mark.grid]
KINDS = [
    pytest.param(FSDP2, id="fsdp2"),
    *(pytest.param(kind, id=kind.name, marks=needing(kind)) for kind in (zero(1), zero(2), zero(3))),
]
SHARDS = megatron("shards", "--bf16", "--use-distributed-optimizer")
MEGATRON = [pytest.param(SHARDS, id=SHARDS.name, marks=needing(SHARDS))]
BEYOND = Beyond(most=4, at=10, lost=16, back=32)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return BEYOND.resized_once(tmp_path_factory)


@pytest.mark.parametrize("victims", often([(0,), (1,), (2,), (3,), (0, 1)], ()))
@pytest.mark.parametrize("kind", [*KINDS, *MEGATRON])
def test_there_and_killed_and_back(kind: Kind, victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """2 -> 4 -> 3 -> 4, and 2 -> 4 -> 2 -> 4: those of the launch may leave as well as the others, also all of them."""
    BEYOND.there_and_killed_and_back(kind, victims, tmp_path, resized)


@pytest.mark.parametrize("kind", [*KINDS, *MEGATRON])
def test_those_beyond_are_replaced(kind: Kind, tmp_path: Path, resized: Resized) -> None:
    """One of them, and one of the launch, die in the larger size, and are filled again."""
    BEYOND.there_and_replaced(kind, (3, 1), tmp_path, resized)


@pytest.mark.parametrize("state", STATES)
def test_one_beyond_dies_while_it_comes_in(state: str, tmp_path: Path, resized: Resized) -> None:
    """It has left again before it has taken a step; the other one has come."""
    BEYOND.one_dies_while_it_comes_in(FSDP2, state, tmp_path, resized)


@pytest.mark.parametrize("state", often(STATES, ()))
@pytest.mark.parametrize("victim", [1, 3])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_one_that_dies_on_the_way_in_is_replaced(
    kind: Kind, victim: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """One of the launch, or one beyond it. One beyond the launch has no part of the old sharding, although that is the
    launch's."""
    BEYOND.one_dies_on_the_way_in_and_is_replaced(kind, victim, state, tmp_path, resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("kind", [pytest.param(DDP, id="ddp"), *KINDS[:1], KINDS[2]])
def test_another_controller_knows_them(kind: Kind, victim: int, tmp_path: Path, resized: Resized) -> None:
    BEYOND.another_controller_knows_them(kind, victim, tmp_path, resized)


@pytest.mark.parametrize("victims", often([(0, 2), (1, 3)], ()))
def test_they_go_back_to_a_checkpoint_of_more_ranks_than_the_launch_had(
    victims: tuple[int, ...], tmp_path: Path, resized: Resized
) -> None:
    """Two are lost at once, which have kept each other's copies: two are left, as many as at the launch, but not the
    same ones."""
    config = {**BEYOND.config(FSDP2, replace="never"), **saving(tmp_path / "checkpoints", 0.5)}
    running = FSDP2.start(tmp_path / "run", "--step-time", "250", config=config, nproc=2)
    running.hold(BEYOND.at - 8)
    running.wait_for("job_started", 120)
    grow(running, 4, BEYOND.at)
    before = len([event for event in running.events() if event["event"] == "checkpoint_saved"])
    running.wait_for("checkpoint_saved", count=before + 2)  # of all four
    running.kill(*victims)
    job = running.wait(240)
    version = fell_back(job, 4, 2, END)
    FSDP2.goes_on_alike(job, resized(FSDP2, [(BEYOND.at, 4), (version, 2)]), version, 2, END)
    check_clean(job)
