"""From the machine's decisions to few messages and back: batches, gathered answers, and the parts of the rank table."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import closing
from pathlib import Path

from flashrecovery.agent.monitoring.reply_batching import Gather, alike, singly
from flashrecovery.controller.service.batches import Batches, gather_s
from flashrecovery.controller.service.rank_table_publisher import RankTablePublisher
from flashrecovery.controller.state.outbox import Outbox, Publish, Send
from flashrecovery.controller.state.rank_table import Parts, RankTable, affected
from flashrecovery.events import RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb

# -- batches and answers --------------------------------------------------------------------------


def hold(serial: int, rank: int) -> pb.Command:
    return pb.Command(serial=serial, generation=2, rank=rank, hold=pb.Hold())


def reply(serial: int, **fields: str) -> pb.AgentMessage:
    return pb.AgentMessage(reply=pb.Reply(serial=serial, rank=serial - 1, **fields))  # type: ignore[arg-type]


def test_each_agent_gets_one_message_with_its_commands_in_order() -> None:
    batches = Batches()
    for serial, (node, rank) in enumerate((("a", 0), ("b", 2), ("a", 1), ("a", 0)), start=1):
        batches.add(node, hold(serial, rank))
    (to_a, first), (to_b, second) = batches.take(100)
    assert (to_a, to_b) == ("a", "b") and second == hold(2, 2)
    assert [c.serial for c in first.batch.commands] == [1, 3, 4] and first.generation == 2
    assert first.batch.gather_s == gather_s(100) > 0
    assert batches.take(100) == []


def test_small_jobs_wait_for_nothing() -> None:
    assert gather_s(1) == gather_s(16) == 0 and gather_s(10**6) <= 0.05


def gathered(*events: int | str, within_s: float) -> list[pb.AgentMessage]:
    """What is sent while answers (serials) come, ``error`` answers the first, ``other`` is another message, ``wait``
    lets the time pass."""

    async def main() -> list[pb.AgentMessage]:
        sent: list[pb.AgentMessage] = []
        gather = Gather(sent.append)
        gather.expect([hold(1, 0), hold(2, 1), hold(3, 2)], within_s)
        for event in events:
            if event == "wait":
                await asyncio.sleep(2 * within_s)
            elif event == "error":
                gather.send(reply(1, error_type="X"))
            elif event == "other":
                gather.send(pb.AgentMessage(notice=pb.Notice(kind="other")))
            else:
                assert isinstance(event, int)
                gather.send(reply(event))
        gather.flush()
        return sent

    return asyncio.run(main())


def test_ranks_that_say_the_same_say_it_once() -> None:
    held = pb.Reply(serial=4, generation=2, rank=1, position=pb.Position(version=3))
    same, other = pb.Reply(), pb.Reply()
    same.CopyFrom(held)
    other.CopyFrom(held)
    same.rank = 2
    other.rank, other.position.version = 5, 4
    first, second = alike([held, same, other])
    assert (first.rank, list(first.also)) == (1, [2])
    assert (second.rank, list(second.also)) == (5, [])


def test_answers_that_differ_in_what_ranks_hold_and_need_are_one() -> None:
    """What is the same is said, and read, once."""
    replies = [pb.Reply(serial=3, rank=rank, live_version=7) for rank in (1, 2, 5)]
    for one in replies:
        one.held.add(kind="copy", version=7, shards=[f"capsule@{one.rank - 1}"], nbytes=[8])
        one.needs.add(name=f"capsule@{one.rank}", nbytes=8)
    replies[2].live_version = 6
    wanted = [(list(one.held), list(one.needs)) for one in replies]
    first, second = alike(replies)
    assert (first.rank, list(first.also), first.live_version) == (1, [2], 7) and not first.held and not first.needs
    assert [(own.rank, (list(own.held), list(own.needs))) for own in first.own] == [(1, wanted[0]), (2, wanted[1])]
    assert not second.own and (list(second.held), list(second.needs)) == wanted[2]


def test_a_command_to_several_ranks_is_one_for_each() -> None:
    command = pb.Command(serial=4, generation=2, ranks=[3, 5], stop=pb.Stop(finish_to=7))
    expected = [pb.Command(serial=4, generation=2, rank=r, stop=pb.Stop(finish_to=7)) for r in (3, 5)]
    assert list(singly(command)) == expected


def test_answers_to_one_order_travel_together() -> None:
    async def main() -> list[pb.AgentMessage]:
        sent: list[pb.AgentMessage] = []
        gather = Gather(sent.append)
        gather.expect([pb.Command(serial=4, ranks=[3, 5], hold=pb.Hold())], 10.0)
        for rank in (3, 5):
            gather.send(pb.AgentMessage(reply=pb.Reply(serial=4, rank=rank)))
        return sent

    (message,) = asyncio.run(main())
    assert (message.reply.rank, list(message.reply.also)) == (3, [5])


def serials(message: pb.AgentMessage) -> list[int]:
    if message.WhichOneof("body") == "reply":
        return [message.reply.serial]
    return [r.serial for r in message.replies.replies]


def test_answers_to_one_batch_travel_together() -> None:
    assert [serials(m) for m in gathered(2, 1, 3, within_s=10)] == [[2, 1, 3]]


def test_answers_wait_no_longer_than_they_may() -> None:
    assert [serials(m) for m in gathered(2, 1, "wait", 3, within_s=0.02)] == [[2, 1], [3]]
    assert [serials(m) for m in gathered(2, 1, 3, within_s=0)] == [[2], [1], [3]]


def test_an_error_waits_for_nobody() -> None:
    assert [serials(m) for m in gathered(2, "error", 3, within_s=10)] == [[2, 1], [3]]


def test_whatever_else_is_said_keeps_its_place() -> None:
    sent = gathered(2, 1, "other", 3, within_s=10)
    assert [m.WhichOneof("body") for m in sent] == ["replies", "notice", "reply"]


def test_an_answer_that_nobody_asked_for_passes() -> None:
    assert [serials(m) for m in gathered(9, within_s=10)] == [[9]]


# -- what is pending ------------------------------------------------------------------------------


def test_the_outbox_knows_what_is_pending_without_looking_through_it() -> None:
    outbox = Outbox()
    for rank in range(4):
        outbox.order("n", pb.Command(rank=rank), 10.0 + rank, "hold" if rank % 2 else "replace")
    outbox.expect(0, "replace", 5.0)
    assert outbox.waits_for("hold") and outbox.waits_for("replace") and not outbox.waits_for("stop")
    outbox.forget("replace", 0)
    outbox.forget("replace", 2)
    assert not outbox.waits_for("replace") and outbox.expired(9.0) == []
    assert outbox.expired(11.5) == [("hold", 1)] and outbox.expired(11.5) == []
    outbox.keep(lambda _, rank: rank == 1)
    assert not outbox.pending and not outbox.waits_for("hold")
    outbox.order("n", pb.Command(rank=7), 12.0, "stop")
    assert outbox.waits_for("stop")
    outbox.clear()
    assert not outbox.waits_for("stop") and outbox.expired(99.0) == []


def test_an_order_to_many_ranks_is_one_message_a_node_and_waits_for_each_of_them() -> None:
    outbox = Outbox()
    outbox.send_all({"a": [0, 1], "b": [2], "": [3]}, pb.Command(generation=2, hold=pb.Hold()), 10.0, "hold")
    sends = outbox.take()
    assert all(isinstance(s, Send) for s in sends)
    told = {s.node: s.command for s in sends if isinstance(s, Send)}
    assert {node: list(c.ranks) for node, c in told.items()} == {"a": [0, 1], "b": [2], "": [3]}
    (serial,) = {c.serial for c in told.values()}
    assert outbox.acknowledge(serial, [9]) == ("hold", []) and outbox.acknowledge(serial + 1, [0]) == (None, [])
    assert outbox.acknowledge(serial, [9, 0]) == ("hold", [0]) and outbox.acknowledge(serial, [0]) == ("hold", [])
    outbox.keep(lambda what, rank: (what, rank) != ("hold", 2))
    assert outbox.waits_for("hold")
    assert [outbox.expired(10.0), outbox.expired(10.0)] == [[("hold", 1), ("hold", 3)], []]
    assert not outbox.waits_for("hold") and not outbox.pending
    outbox.send_all({}, pb.Command(), 10.0, "stop")
    assert not outbox.waits_for("stop")


# -- rank table -----------------------------------------------------------------------------------


def table(homes: list[str], pids: list[int] | None = None, stride: int = 2) -> RankTable:
    entries = [
        pb.RankEntry(rank=r, node=node, peer=f"{node}:1", pid=pids[r] if pids else r) for r, node in enumerate(homes)
    ]
    return RankTable(tuple(entries), stride)


def test_no_agent_misses_a_change_of_its_part() -> None:
    pick = random.Random(5)
    names = [f"n{i:02}" for i in range(14)]
    for _ in range(300):
        homes = [names[r // 2] for r in range(20)]
        pids = list(range(20))
        old = Parts(table(homes, pids))
        for _ in range(pick.randrange(1, 4)):
            rank = pick.randrange(20)
            homes[rank], pids[rank] = pick.choice([homes[rank], pick.choice(names)]), pick.randrange(100)
        new = Parts(table(homes, pids, stride=pick.choice([2, 2, 2, 4])))
        told = affected(old, new)
        for name in names:
            if new.has_ranks(name) and name not in told:
                assert sorted(old.part_for(name).ranks, key=str) == sorted(new.part_for(name).ranks, key=str)


def test_one_lost_rank_concerns_a_few_agents() -> None:
    homes = [f"n{r // 8:04}" for r in range(8000)]
    pids = list(range(8000))
    old = Parts(table(homes, pids, stride=8))
    pids[4000] = 9
    assert affected(old, Parts(table(homes, pids, stride=8))) == {"n0498", "n0499", "n0500"}


def test_the_table_goes_into_its_file_and_to_whom_it_concerns(tmp_path: Path) -> None:
    with closing(RunDir(tmp_path)) as run_dir, closing(RankTablePublisher(run_dir)) as publisher:
        homes = [f"n{r // 2}" for r in range(20)]
        links: dict[str, object] = {f"n{i}": object() for i in range(10)} | {"spare": object()}
        first = dict(publisher.publish(Publish(1, table(homes)), links))
        assert set(first) == set(links)
        links["n7"] = object()  # its agent was restarted
        pids = list(range(20))
        pids[5] = 99
        second = dict(publisher.publish(Publish(2, table(homes, pids)), links))
        assert {"n2", "spare", "n7"} <= set(second) and "n5" not in second
        assert 99 in [e.pid for e in second["n2"].rank_table.ranks]
        publisher.close()
        written = json.loads(run_dir.ranktable_path.read_text())
        assert written["generation"] == 2 and written["ranks"][5]["pid"] == 99
