"""Whether a script divides sequences where there is tensor parallelism: seen in one layout, and known in all later
ones, in which nothing says so. MoE layers need it there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flashrecovery.plan.strategy.relayout import LayoutFacts, StayingFacts, best, why_another_job
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import SEQUENCE_PARALLEL_ENV, rank_env
from flashrecovery.worker.reshard.relayout import RankStaging
from tests.unit.test_found_layout import came, found
from tests.unit.test_replan import FACTS, World
from tests.unit.test_replan_experts import EXPERTS


def facts_of_worker(of: LayoutFacts) -> LayoutFacts:
    """What a worker says whose framework says this."""
    batches = {"global_batch": of.global_batch, "micro_batch": of.micro_batch}
    rest = {name: value for name, value in vars(of).items() if name not in {**batches, "takes": "", "elastic": False}}
    worker = RankStaging.__new__(RankStaging)
    worker._state = SimpleNamespace(facts=lambda: rest)  # type: ignore[assignment]
    worker._batches = SimpleNamespace(settings=batches)  # type: ignore[assignment]
    return worker._gather_facts(elastic=of.elastic)


@pytest.mark.parametrize("seen", [True, False])
def test_what_was_seen_with_tensor_parallelism_stays_known_without(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the next layout are told, and say so: to a controller that comes later, too."""
    world = World()
    world.job.parallel.facts = replace(FACTS, sequence_parallel=seen).text()
    world.kill(1)
    world.stop()
    world.reply("staging")
    orders = [command.replace for command in world.sent if command.HasField("replace")]
    assert orders and {order.sequence_parallel for order in orders} == {seen}
    environ = rank_env(world.job.config, 0, 2, orders[0])
    assert (SEQUENCE_PARALLEL_ENV in environ) is seen
    monkeypatch.delenv(SEQUENCE_PARALLEL_ENV, raising=False)
    if seen:
        monkeypatch.setenv(SEQUENCE_PARALLEL_ENV, environ[SEQUENCE_PARALLEL_ENV])
    plain = replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3})
    found = facts_of_worker(plain)
    assert found == replace(plain, sequence_parallel=seen)
    assert why_another_job(StayingFacts(plain, "", 9), StayingFacts(found, "", 9), "tp=1,pp=1,dp=3") == ""
    world.start(found)
    assert LayoutFacts.parse(world.job.parallel.facts) == found
    assert filled_again(world).sequence_parallel is seen


def filled_again(world: World) -> pb.Replace:
    """What is said of a rank that dies in that layout."""
    return world.machine._placement._order(world.job.ranks[0], detached=True)


@pytest.mark.parametrize("seen", [True, False])
def test_another_controller_has_it_from_the_ranks(seen: bool) -> None:
    machine = found(parallelism={"min": 1, "replace": "never"})
    message = came("a", [0, 1, 2], plan="tp=1,pp=1,dp=3", attempt=1)
    for worker in message.workers:
        layout = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 3}
        worker.joined.facts = replace(EXPERTS, layout=layout, sequence_parallel=seen).text()
    machine.on_register(message, 0.0)
    chosen = {estimate.strategy.tp for estimate in best(LayoutFacts.parse(machine.job.parallel.facts), 4, 2).ranked}
    assert chosen == ({1, 2, 4} if seen else {1})
