"""Which rank is to blame when ranks stand still, which is slow, and when the controller asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashrecovery import events as ev
from flashrecovery.config import Timeouts
from flashrecovery.controller.hang import HangDetector, OwnWork, Stragglers, slow, usual_of
from flashrecovery.controller.state.rank_record import HeartbeatHealth, Place, RankProcess, RankRecord
from flashrecovery.groups.registry import CONTROL_GROUP, GroupProgress, come_to
from flashrecovery.plan.hang import (
    EVERYBODY,
    UNKNOWN,
    Group,
    Operation,
    Progress,
    RankPosition,
    VerdictKind,
    judge,
    victims_of,
)
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.control.overhead import STEPS
from flashrecovery.worker.control.overhead import Pace as WorkerPace
from tests.unit.test_machine import World

WORLD = Group("0")


def group(name: str, *ranks: int) -> tuple[Group, tuple[int, ...]]:
    return Group(name, hash(ranks) & 0xFFFF), ranks


def position(
    rank: int,
    counts: Mapping[Group, int],
    *waits: Operation,
    size: int = 4,
    age: float = 20.0,
    answered: bool = True,
    pairs: Mapping[Group, Mapping[int, tuple[int, int]]] | None = None,
) -> RankPosition:
    progress = {g: Progress(size, n, (pairs or {}).get(g, {})) for g, n in counts.items()}
    return RankPosition(rank, age, 10.0, 7, answered, False, waits, progress, f"stack of {rank}" if not waits else "")


def inside(number: int, where: Group = WORLD, op: str = "all_reduce") -> Operation:
    return Operation(where, op, number)


# -- the judgement --------------------------------------------------------------------------------


def test_who_has_not_come_to_the_collective_is_the_culprit() -> None:
    waiting = [position(r, {WORLD: 6}, inside(5)) for r in (0, 2, 3)]
    found = judge([*waiting, position(1, {WORLD: 5})])
    assert found.kind is VerdictKind.CULPRITS and list(found.accused) == [1]
    assert "3 ranks wait for it in group 0, all_reduce #5" in found.accused[1]
    assert "in no collective" in found.accused[1] and "stack of 1" in found.accused[1]


def test_a_victim_that_others_wait_for_is_not_accused() -> None:
    """Ranks 0 and 1 wait for 2 in one group; 2 waits for 3 in another; 3 loops."""
    left, right = Group("left", 1), Group("right", 2)
    found = judge(
        [
            position(0, {left: 4}, inside(3, left), size=3),
            position(1, {left: 4}, inside(3, left), size=3),
            position(2, {left: 3, right: 9}, inside(8, right), size=3),
            position(3, {right: 8}, size=2),
        ]
    )
    assert list(found.accused) == [3] and "1 rank waits for it in group right, all_reduce #8" in found.accused[3]


def test_a_rank_that_lags_inside_an_older_collective_is_followed_to_whom_it_waits_for() -> None:
    """Rank 1 waits in #4, to which rank 2 has not come either; the others are in #5."""
    found = judge(
        [
            position(0, {WORLD: 6}, inside(5)),
            position(1, {WORLD: 5}, inside(4)),
            position(2, {WORLD: 4}),
            position(3, {WORLD: 6}, inside(5)),
        ]
    )
    assert list(found.accused) == [2]


def test_pipeline_stages_are_followed() -> None:
    """Stage 0 waits for a gradient of 1, stage 2 for an activation of 1; stage 1 has received and loops."""
    pipe = Group("pp")
    found = judge(
        [
            position(0, {pipe: 0}, Operation(pipe, "recv", 0, 1, False), size=3, pairs={pipe: {1: (2, 1)}}),
            position(1, {pipe: 0}, size=3, pairs={pipe: {0: (0, 2), 2: (1, 0)}}),
            position(2, {pipe: 0}, Operation(pipe, "recv", 1, 1, False), size=3, pairs={pipe: {1: (0, 2)}}),
        ]
    )
    assert list(found.accused) == [1] and "recv #0 with rank 1" in found.accused[1]


def test_a_send_that_its_peer_has_received_is_no_wait() -> None:
    pipe = Group("pp")
    found = judge(
        [
            position(0, {pipe: 0}, Operation(pipe, "send", 0, 1, False), size=2, pairs={pipe: {1: (1, 0)}}),
            position(1, {pipe: 0}, Operation(pipe, "recv", 1, 0, False), size=2, pairs={pipe: {0: (0, 2)}}),
        ]
    )
    assert list(found.accused) == [0]


def test_a_rank_that_does_not_answer_is_the_culprit_of_those_who_may_wait_for_it() -> None:
    mute = position(3, {}, answered=False)
    found = judge([*(position(r, {WORLD: 6}, inside(5)) for r in range(3)), mute])
    assert list(found.accused) == [3] and "control thread does not answer" in found.accused[3]
    # Another process is seen not to have come, and all members of that group have answered.
    small = Group("small", 1)
    others = [position(0, {small: 2}, inside(1, small), size=2), position(1, {small: 1}, size=2)]
    assert list(judge([*others, mute]).accused) == [1]


def test_a_deadlock_is_told_with_its_members_and_one_of_them_is_replaced() -> None:
    a, b = Group("a", 1), Group("b", 2)
    found = judge(
        [
            position(0, {a: 1, b: 0}, inside(0, a), size=2),
            position(1, {a: 0, b: 1}, inside(0, b), size=2),
            position(2, {WORLD: 3}, inside(2), size=3),
        ]
    )
    assert found.kind is VerdictKind.DEADLOCK and sorted(found.accused) == [0, 1]
    assert "rank 0 waits for rank 1 in group a, all_reduce #0" in found.text
    assert "rank 1 waits for rank 0 in group b, all_reduce #0" in found.text
    assert [rank for rank, _ in victims_of(found)] == [0]
    pipe = Group("pp")
    sent = Operation(pipe, "send", 0, 0, False)
    found = judge(
        [
            position(0, {a: 1, pipe: 0}, inside(0, a), size=2),
            position(1, {a: 0, pipe: 0}, sent, size=2, pairs={pipe: {0: (1, 0)}}),
        ]
    )
    assert [rank for rank, _ in victims_of(found)] == [1], "it has sent something, and may be anywhere now"


def test_where_everybody_has_come_nobody_is_accused() -> None:
    found = judge([position(r, {WORLD: 6}, inside(5)) for r in range(4)])
    assert found.kind is VerdictKind.STUCK and "all_reduce #5 in group 0" in found.text
    assert (
        judge([position(r, {WORLD: 6}, inside(5), age=9.0 if r else 90.0) for r in range(4)]).kind is VerdictKind.LATER
    )
    unlike = [position(r, {WORLD: 6}, inside(5, op="broadcast" if r == 2 else "all_reduce")) for r in range(4)]
    found = judge(unlike)
    assert found.kind is VerdictKind.UNLIKE and "rank 2: broadcast" in found.text and "ranks 0, 1 and 3" in found.text


def test_nobody_is_accused_before_his_time_or_by_hearsay() -> None:
    waiting = [position(r, {WORLD: 6}, inside(5)) for r in (0, 2, 3)]
    assert judge([*waiting, position(1, {WORLD: 5}, age=9.0)]).kind is VerdictKind.LATER
    assert judge(waiting, absent=1).kind is VerdictKind.LATER, "the culprit's node has not answered"
    anybody = position(1, {WORLD: 5}, Operation(WORLD, "recv_any", 0, UNKNOWN, False))
    assert judge([*waiting, anybody]).kind is VerdictKind.NO_CULPRIT, "it may wait for anybody"


def test_ranks_whose_waiting_is_not_seen_are_told_apart_by_their_counts() -> None:
    """As with NCCL, where a wait returns at once and the thread blocks in something else."""
    ahead = [position(r, {WORLD: 6}) for r in (0, 2, 3)]
    found = judge([*ahead, position(1, {WORLD: 5})])
    assert list(found.accused) == [1] and "5 of 6 collectives in group 0" in found.accused[1]
    assert judge([*ahead, position(1, {WORLD: 6})]).kind is VerdictKind.NO_CULPRIT, "all alike"
    assert judge([*ahead, position(1, {WORLD: 6}, age=9.0)]).kind is VerdictKind.LATER, "about to be alike"
    found = judge([*(position(r, {WORLD: 6}, age=1.0) for r in (0, 2, 3)), position(1, {WORLD: 6})])
    assert list(found.accused) == [1], "the others move"


def on_device(rank: int, counts: Mapping[Group, int], *newest: Operation, ahead: int = 0, **more: Any) -> RankPosition:
    """As a rank with NCCL says it: how far its device has come, the newest operations there, what is only launched."""
    said = position(rank, counts, *(replace(op, certain=False) for op in newest), **more)
    return replace(said, groups={g: replace(progress, ahead=ahead) for g, progress in said.groups.items()})


def test_whose_device_does_not_come_to_it_is_told_from_those_whose_device_waits() -> None:
    """All hosts have launched the same, and run ahead. The kernel of rank 1 before operation 5 does not end."""
    waiting = [on_device(r, {WORLD: 6}, inside(5), ahead=2) for r in (0, 2, 3)]
    found = judge([*waiting, on_device(1, {WORLD: 5}, inside(4), ahead=3)])
    assert found.kind is VerdictKind.CULPRITS and list(found.accused) == [1]
    assert "its device does not come to operations that it has launched (3 in group 0)" in found.accused[1]
    assert "3 ranks wait for it in group 0, all_reduce #5" in found.accused[1]


def test_a_device_that_waits_in_a_receive_is_none() -> None:
    """Two pipelines of two stages: rank 2 has not come to what it sends, 3 waits for it, and 1 for 3."""
    first, last = group("replicas", 0, 2), group("replicas", 1, 3)
    pipes = [group("pipe", 0, 1), group("pipe", 2, 3)]
    receive = Operation(pipes[1][0], "recv", 4, peer=2)
    found = judge(
        [
            on_device(0, {first[0]: 3, pipes[0][0]: 0}, inside(2, first[0]), size=2, pairs={pipes[0][0]: {1: (5, 0)}}),
            on_device(1, {last[0]: 3, pipes[0][0]: 0}, inside(2, last[0]), size=2, pairs={pipes[0][0]: {0: (0, 5)}}),
            on_device(2, {first[0]: 2, pipes[1][0]: 0}, size=2, ahead=2, pairs={pipes[1][0]: {3: (4, 0)}}),
            on_device(3, {last[0]: 2, pipes[1][0]: 0}, receive, size=2, ahead=1, pairs={pipes[1][0]: {2: (0, 5)}}),
        ]
    )
    assert found.kind is VerdictKind.CULPRITS and list(found.accused) == [2], found


def test_what_a_device_has_come_to() -> None:
    """Of 7 collectives and of sends and receives with rank 3, as launched; (peer, number, whether it sends) of what it
    has not come to."""
    assert come_to(7, {3: (4, 5)}, []) == GroupProgress(7, {3: (4, 5)})
    ahead = [(EVERYBODY, 5, False), (3, 2, True), (EVERYBODY, 6, False), (3, 4, False), (3, 3, True)]
    assert come_to(7, {3: (4, 5)}, ahead) == GroupProgress(5, {3: (2, 4)}, 5)


def test_a_rank_alone() -> None:
    assert list(judge([position(0, {})]).accused) == [0]
    assert list(judge([position(2, {WORLD: 6}), position(3, {WORLD: 6})], done=2).accused) == [2, 3]


def test_groups_of_one_name_and_other_members_are_kept_apart() -> None:
    first, second = Group("tp", 1), Group("tp", 2)
    found = judge(
        [
            position(0, {first: 3}, inside(2, first), size=2),
            position(1, {first: 2}, size=2),
            position(2, {second: 9}, inside(8, second), size=2),
            position(3, {second: 9}, inside(8, second), size=2),
        ]
    )
    assert list(found.accused) == [1]


def test_a_rank_that_skips_a_step_alone_is_told_from_those_that_wait_in_it() -> None:
    """It is in the package's own barrier, at the end of the step."""
    own = Group(CONTROL_GROUP, 1)
    found = judge(
        [
            position(0, {own: 16, WORLD: 10}, inside(15, own, "barrier"), size=2),
            position(1, {own: 15, WORLD: 11}, inside(10), size=2),
        ]
    )
    assert found.kind is VerdictKind.DEADLOCK
    assert "rank 1 waits for rank 0 in group 0, all_reduce #10" in found.text, found.text
    assert "flashrecovery's own barrier #15, before an optimizer step or at the block's end" in found.text, found.text
    assert "rank 0 came there without what rank 1 waits in: skip or retry a step on all ranks" in found.text, found.text


def test_a_verdict_on_many_ranks_takes_no_square_of_time() -> None:
    world = 4000
    half = [position(r, {WORLD: 6}, inside(5), size=world) for r in range(0, world, 2)]
    rest = [position(r, {WORLD: 5}, size=world) for r in range(1, world, 2)]
    assert len(judge([*half, *rest]).accused) == world // 2
    other = Group("odd", 1)
    crossed = [position(r, {WORLD: 5, other: 1}, inside(0, other), size=world) for r in range(1, world, 2)]
    even = [position(r, {WORLD: 6, other: 0}, inside(5), size=world) for r in range(0, world, 2)]
    assert judge([*even, *crossed]).kind is VerdictKind.DEADLOCK


# -- when the agents are asked --------------------------------------------------------------------

LIMITS = Timeouts(hang_step_s=5.0, ping_s=1.0)


def records(*ages: float, step_s: float = 0.1) -> list[RankRecord]:
    return [
        RankRecord(
            r,
            place=Place.RUNNING,
            process=RankProcess(r),
            home="n",
            health=HeartbeatHealth(progress_age_s=age, heard_at=0.0, step_s=step_s),
        )
        for r, age in enumerate(ages)
    ]


def answer(rank: int, count: int, *, waits: bool, progress: int = 3) -> pb.HangReport:
    message = pb.HangReport(rank=rank, pid=rank, answered=True, progress=progress, age_s=6.0, step_s=0.1)
    message.groups.add(group="0", size=2, collectives=count)
    if waits:
        message.operations.add(group="0", op="barrier", peer=-1, number=count - 1, certain=True)
    return message


def test_the_agents_are_asked_when_a_rank_is_late() -> None:
    assert not HangDetector(LIMITS).due(records(4.0, 4.9), 0.0)
    assert HangDetector(LIMITS).due(records(1.0, 5.1), 0.0)
    assert not HangDetector(LIMITS).due(records(1.0, 5.1, step_s=2.0), 0.0), "ten usual steps"
    slow_rank = records(1.0, 5.1)
    slow_rank[1].hang_step_s = 60.0
    assert not HangDetector(LIMITS).due(slow_rank, 0.0), "its framework says so"
    assert HangDetector(LIMITS).due(records(4.0, 4.0), 1.5), "time passes, also without a heartbeat"


def test_only_what_two_looks_say_alike_counts() -> None:
    for second_progress, certain in ((3, True), (4, False)):
        lookout, ranks = HangDetector(LIMITS), records(6.0, 6.0)
        verdicts = []
        for progress, now in ((3, 0.0), (second_progress, 0.3)):
            assert lookout.due(ranks, now)
            number = lookout.begin(["n"], now)
            assert lookout.verdict(ranks, now + 0.01) is None, "not answered yet"
            replies = [answer(0, 4, waits=True), answer(1, 3, waits=False, progress=progress)]
            lookout.answered("n", pb.HangReports(look=number, ranks=replies))
            verdicts.append(lookout.verdict(ranks, now + 0.02))
        assert verdicts[0] is None
        assert (verdicts[1] is not None and list(verdicts[1].accused) == [1]) is certain


def test_a_deadlock_is_told_early_where_the_data_of_a_rank_has_ended() -> None:
    """And nothing else is: a rank that computes for long is no one's fault."""
    for deadlock in (True, False):
        lookout, ranks = HangDetector(LIMITS), records(3.1, 3.1)
        assert not lookout.due(ranks, -1.0)
        lookout.ended[1] = "the data of rank 1 has ended in step 4"
        verdict = None
        for now in (0.0, 0.6, 2.0, 5.0):
            assert lookout.due(ranks, now)
            number = lookout.begin(["n"], now)
            first, second = answer(0, 4, waits=True), answer(1, 3, waits=False)
            second.groups.add(group="own", size=2, collectives=2)
            first.groups.add(group="own", size=2, collectives=1)
            first.age_s = second.age_s = 3.1
            if deadlock:
                second.operations.add(group="own", op="barrier", peer=-1, number=1, certain=True)
            lookout.answered("n", pb.HangReports(look=number, ranks=[first, second]))
            verdict = lookout.verdict(ranks, now + 0.02)
            if verdict is not None:
                break
        assert (verdict is not None and verdict.kind is VerdictKind.DEADLOCK) is deadlock, verdict


def test_a_node_that_does_not_answer_is_not_waited_for_and_its_ranks_are_not_accused() -> None:
    lookout, ranks = HangDetector(LIMITS), records(6.0, 6.0)
    ranks[1].home = "other"
    now = 0.0
    for _ in range(4):
        assert lookout.due(ranks, now)
        number = lookout.begin(["n", "other"], now)
        lookout.answered("n", pb.HangReports(look=number, ranks=[answer(0, 4, waits=True)]))
        assert lookout.verdict(ranks, now + 0.5) is None
        assert lookout.verdict(ranks, now + 1.1) is None
        now += 40.0


def test_late_and_foreign_answers_count_for_nothing() -> None:
    lookout, ranks = HangDetector(LIMITS), records(6.0, 6.0)
    assert lookout.due(ranks, 0.0)
    number = lookout.begin(["n"], 0.0)
    old = pb.HangReports(look=number - 1, ranks=[answer(1, 3, waits=False)])
    lookout.answered("n", old)
    lookout.answered("stranger", pb.HangReports(look=number, ranks=[answer(1, 3, waits=False)]))
    assert lookout.verdict(ranks, 0.1) is None


# -- in the machine -------------------------------------------------------------------------------


def test_a_hang_across_nodes_is_recovered_from() -> None:
    world = World(2, nnodes=2, controller="h:1", timeouts={"hang_step_s": 5.0})
    world.join("a")
    world.join("b")
    while world.machine.job.state is not State.RUNNING or world.version[0] < 1:
        world.step()
    m = world.machine
    for _ in range(40):
        world.now += 0.25
        health = [
            pb.RankHealth(rank=r.rank, pid=r.process.pid, committed=1, progress_age_s=world.now, step_s=0.1)
            for r in m.job.ranks.values()
        ]
        m.on_heartbeat(pb.Heartbeat(ranks=health), world.now)
        m.on_tick(world.now)
        world.collect()
        looks = [c.look for _, c in world.inbox if c.HasField("look")]
        world.inbox.clear()
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))) if looks else ():
            replies = []
            for rank in ranks:
                reply = answer(rank, 3 if rank == 2 else 4, waits=rank != 2)
                reply.pid, reply.age_s, reply.groups[0].size = m.job.ranks[rank].process.pid, world.now, 4
                replies.append(reply)
            m.watch.on_hang_reports(node, pb.HangReports(look=looks[0].number, ranks=replies))
        m.on_tick(world.now)
        world.collect()
        if m.job.state is not State.RUNNING:
            break
    (failure,) = world.of(ev.FailureDetected)
    assert isinstance(failure, ev.FailureDetected)
    assert (failure.rank, failure.kind) == (2, "hang") and "3 ranks wait for it" in failure.evidence
    assert m.job.ranks[2].place is Place.EMPTY and m.job.generation == 1


# -- slow ranks -----------------------------------------------------------------------------------


def test_a_slow_rank_is_told_from_those_that_wait_for_it() -> None:
    paces = [OwnWork(r, 0.03, 0.028, 0.1) for r in range(3)] + [OwnWork(3, 0.09, 0.085, 0.1)]
    usual = usual_of(paces)
    assert [p.rank for p in paces if slow(p, usual)] == [3]
    assert not slow(OwnWork(3, 0.09, 0.04, 0.1), usual), "not in every one of its last steps"
    assert not slow(OwnWork(3, 0.0009, 0.0008, 0.1), 0.0003), "not worth speaking of"
    assert usual_of(paces[:1]) == 0.0 and usual_of([OwnWork(0, 0.1, 0.0, 0.1), OwnWork(1, 0.1, 0.1, 0.1)]) == 0.0


def test_a_slow_rank_is_told_once_until_it_is_fast_again() -> None:
    stragglers = Stragglers()

    def look(own_s: float, now: float) -> list[int]:
        ranks = [
            RankRecord(r, health=HeartbeatHealth(step_s=0.1, own_s=own, own_least_s=own))
            for r, own in enumerate((0.03, own_s, 0.03, 0.03))
        ]
        return [rank for rank, _ in stragglers.check(ranks, now)]

    assert look(0.03, 0.0) == [] and look(0.06, 1.0) == [], "not at every call"
    assert look(0.06, 3.0) == [1] and look(0.06, 6.0) == []
    assert look(0.042, 9.0) == [] and stragglers.slow == {1}, "still slow"
    assert look(0.03, 12.0) == [] and stragglers.slow == frozenset()
    assert look(0.06, 15.0) == [1]


def test_own_work_is_what_is_left_of_a_step_without_collectives() -> None:
    pace = WorkerPace()
    now = underway = 0
    for _ in range(STEPS + 1):
        assert pace.least_ns == 0
        pace.committed(now, underway)
        now, underway = now + 100, underway + 70
    assert (pace.own_ns, pace.least_ns) == (30, 30)
    pace.committed(now + 500, underway)
    assert pace.least_ns == 30 and pace.own_ns > 100, "one slow step is none in a row"
    pace.restart()
    assert (pace.own_ns, pace.least_ns) == (0, 0)


def test_where_the_devices_clock_tells_the_hosts_is_not_asked() -> None:
    pace = WorkerPace()
    pace.committed(0, 0)  # the first operation of NCCL is yet to come
    pace.committed(1000, 0)
    for _ in range(STEPS):
        assert pace.least_ns == 0, "what the host's clock has told is forgotten"
        pace.committed(2000, 0, 0)
        pace.committed(3000, 0, 30)
    assert (pace.own_ns, pace.least_ns) == (30, 30)
    pace.committed(4000, 0, 0)
    assert (pace.own_ns, pace.least_ns) == (30, 30), "a step that was not measured"
