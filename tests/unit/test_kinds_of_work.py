"""What a training thread does is in its page, and decides when it counts as hung."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashrecovery.config import RunConfig, Timeouts, validate
from flashrecovery.controller.hang import HangDetector
from flashrecovery.errors import ConfigError
from flashrecovery.heartbeat.wire import ANSWERED, BEAT, MAGIC, DatagramSeal, Header, pack_ranks, unpack_ranks
from flashrecovery.plan.hang import Deadlines, Group, Operation, Progress, RankPosition, VerdictKind, Work, judge
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import Page
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.own_loops.loop_data import LoopData
from flashrecovery.worker.step import compilation
from tests.unit.test_hang_verdict import answer, records

DEADLINES = Deadlines(step_s=10.0, first_step_s=100.0, evaluation_s=200.0, save_s=5.0, factor=4.0)
WORLD = Group("0")


@pytest.fixture
def gate() -> Iterator[Gate]:
    page = Page.create("work")
    made = Gate(page)
    made.initialised()
    yield made
    page.close()


def work(gate: Gate) -> Work:
    return gate.page.health().work


def test_the_page_says_what_the_rank_does(gate: Gate) -> None:
    gate.resume(0, 0)
    assert work(gate) is Work.FIRST_STEP
    gate.begin()
    assert work(gate) is Work.FIRST_STEP
    gate.mutate()
    gate.commit()
    assert work(gate) is Work.EVALUATION
    with gate.saving():
        assert work(gate) is Work.SAVE
    assert work(gate) is Work.EVALUATION
    gate.fetches()
    assert work(gate) is Work.STEP
    gate.begin()
    with gate.saving():
        assert work(gate) is Work.SAVE
    assert work(gate) is Work.STEP
    gate.resume(1, 1)
    assert work(gate) is Work.EVALUATION, "the script may evaluate before it comes to its block"


@pytest.mark.parametrize("kind", [DataStream, LoopData])
def test_what_follows_a_fetch_between_two_steps_is_no_step(gate: Gate, kind: type[DataStream | LoopData]) -> None:
    """A script evaluates at the end of an epoch, where the fetch has found nothing, or fetches before it does."""
    found: list[Work] = []
    data = kind(found.append(work(gate)) or number for number in range(3))
    data.register_fetch_pre_hook(gate.fetches)
    data.register_fetch_post_hook(gate.has_fetched)
    fetch = data.fetch if isinstance(data, LoopData) else data.__next__
    if isinstance(data, LoopData):
        data.enter(data.loader)
    gate.resume(0, 0)
    fetch()
    assert work(gate) is Work.FIRST_STEP
    gate.enter_block()
    gate.begin()
    gate.mutate()
    gate.commit()
    fetch()
    assert work(gate) is Work.STEP, "in the block"
    gate.leave_block()
    fetch()
    assert work(gate) is Work.EVALUATION and found == [Work.FIRST_STEP, Work.STEP, Work.STEP]
    with pytest.raises(StopIteration):
        fetch()
    assert work(gate) is Work.EVALUATION


def test_the_end_of_a_save_is_progress(gate: Gate) -> None:
    before = gate.page.health().progress
    with pytest.raises(OSError), gate.saving():
        raise OSError("the disk is full")
    assert gate.page.health().progress == before + 2 and work(gate) is Work.STEP


def test_a_compilation_in_any_step_has_the_time_of_a_first_one(gate: Gate) -> None:
    gate.begin()
    gate.mutate()
    gate.commit()
    gate.begin()
    found: list[Work] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        found.append(work(gate))
        return graph.forward

    compilation.watch(gate.page)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # forgets callbacks that are registered
    before = gate.page.health().progress
    assert torch.equal(torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2)), torch.ones(2))
    assert found == [Work.FIRST_STEP] and work(gate) is Work.STEP
    assert gate.page.health().progress > before, "what it took is no time without progress"

    def fails(graph: torch.fx.GraphModule, _: object) -> object:
        raise ValueError("does not compile")

    with pytest.raises(Exception, match="does not compile"):
        torch.compile(lambda x: x + 2, backend=fails)(torch.zeros(2))
    assert work(gate) is Work.STEP


@pytest.mark.parametrize(
    ("work", "usual_s", "own_step_s", "limit_s"),
    [
        (Work.STEP, 1.0, 0.0, 10.0),
        (Work.STEP, 5.0, 0.0, 20.0),
        (Work.STEP, 1.0, 60.0, 60.0),
        (Work.FIRST_STEP, 0.0, 0.0, 100.0),
        (Work.EVALUATION, 1.0, 60.0, 200.0),
        (Work.EVALUATION, 1.0, 900.0, 900.0),
        (Work.SAVE, 1.0, 0.0, 10.0),
    ],
)
def test_no_kind_has_less_time_than_a_step(work: Work, usual_s: float, own_step_s: float, limit_s: float) -> None:
    assert DEADLINES.limit_s(work, usual_s, own_step_s) == limit_s


@pytest.mark.parametrize("kind", list(Work))
def test_the_evidence_names_the_kind_and_its_key(kind: Work) -> None:
    waits = Operation(WORLD, "barrier", 3)
    positions = [
        RankPosition(0, 50.0, 1800.0, work=Work.EVALUATION, operations=(waits,), groups={WORLD: Progress(2, 4)}),
        RankPosition(1, 50.0, 40.0, work=kind, groups={WORLD: Progress(2, 3)}),
    ]
    found = judge(positions)
    key = {Work.STEP: "hang_step_s", Work.FIRST_STEP: "hang_first_step_s", Work.SAVE: "hang_save_s"}
    assert f"({key.get(kind, 'hang_evaluation_s')})" in found.accused[1]
    late = [positions[0], RankPosition(1, 50.0, 60.0, work=kind, groups={WORLD: Progress(2, 3)})]
    assert judge(late).kind is VerdictKind.LATER, "it has more time than that"


def test_a_rank_in_an_evaluation_is_asked_and_accused_by_that_deadline() -> None:
    limits = Timeouts(hang_step_s=5.0, hang_evaluation_s=50.0, ping_s=1.0)
    for age_s, hangs in ((6.0, False), (51.0, True)):
        detector, ranks = HangDetector(limits), records(age_s, age_s)
        for record in ranks:
            record.health.heard(pb.RankHealth(progress_age_s=age_s, step_s=0.1, work=Work.EVALUATION), 0.0, counts=True)
        assert detector.due(ranks, 0.0) is hangs
        # Another rank has made the controller ask: that changes nothing for this one.
        verdict = None
        for now in (1.0, 2.0):
            number = detector.begin(["n"], now)
            replies = [answer(0, 4, waits=True), answer(1, 3, waits=False)]
            for reply in replies:
                reply.age_s, reply.work = age_s, Work.EVALUATION
            detector.answered("n", pb.HangReports(look=number, ranks=replies))
            verdict = detector.verdict(ranks, now + 0.01)
        assert (verdict is not None and [*verdict.accused] == [1]) is hangs, verdict


def test_the_kind_is_in_each_heartbeat() -> None:
    sent = [pb.RankHealth(rank=i, work=kind) for i, kind in enumerate(Work)]
    ((number, packed),) = pack_ranks(sent)
    header = Header(MAGIC, BEAT, ANSWERED, number, 1, 1, 0, 0, 0)
    assert [r.work for r in unpack_ranks(DatagramSeal("t", b"s").close(header, packed))] == [*Work]


def test_the_old_key_is_refused_with_the_new_ones_name() -> None:
    with pytest.raises(ConfigError, match=r"hang_floor_s.*it is called 'hang_step_s' now"):
        validate(RunConfig, {"timeouts": {"hang_floor_s": 300}}, "config.yaml")
