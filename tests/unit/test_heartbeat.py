"""Heartbeats as datagrams, over loopback: what gets through, what does not, and what strangers can do (nothing)."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing

import pytest

from flashrecovery.agent.controller_link.backoff import Backoff
from flashrecovery.heartbeat.receiver import HeartbeatReceiver
from flashrecovery.heartbeat.sender import HeartbeatSender
from flashrecovery.heartbeat.wire import (
    ANSWER,
    BEAT,
    LIMIT,
    MAGIC,
    DatagramSeal,
    Header,
    pack_ranks,
    ticket_of,
    unpack_ranks,
)
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.link import Link
from flashrecovery.util.clock import lease_clock

TOKEN = "the-token-of-this-test-job"
PERIOD_S = 0.05


class Controller:
    """Notes what comes."""

    def __init__(self) -> None:
        self.alive = True
        self.has_stream = True
        self.every_s = 0.0
        self.heard: list[str] = []
        self.echoes: list[float] = []
        self.beats: list[pb.Heartbeat] = []
        self.batches = 0

    def hears(self, node: str, now: float, echo: float) -> bool:
        if self.alive:
            self.heard.append(node)
            self.echoes.append(echo)
        return self.alive

    def wanted_every_s(self) -> float:
        return self.every_s

    def health(self, node: str, heartbeat: pb.Heartbeat) -> None:
        self.beats.append(heartbeat)

    def connected(self, node: str) -> bool:
        return self.has_stream

    def after_beats(self) -> None:
        self.batches += 1


class Agent:
    """A sender, and when it has heard the controller."""

    def __init__(self, token: str = TOKEN) -> None:
        self.heard: list[float] = []
        self.stuck = 0
        self.link: Link[pb.AgentMessage, pb.Command] = Link()
        self.sender = HeartbeatSender(token, self.heard.append, self._is_stuck)

    def _is_stuck(self) -> None:
        self.stuck += 1


class Both:
    """Controller and agent, invited."""

    def __init__(self, token: str = TOKEN) -> None:
        self.controller = Controller()
        self.server = HeartbeatReceiver(TOKEN, self.controller, PERIOD_S)
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.server.open("127.0.0.1", self.port)
        self.link: Link[pb.Command, pb.AgentMessage] = Link()
        self.agent = Agent(token)
        self.invitation = self.server.invite("node", self.link)
        self.agent.sender.invited("127.0.0.1", self.invitation, self.agent.link)

    async def beat(self, times: int = 1, **rank: int) -> list[bool]:
        """Whether each of the heartbeats needed no company on the stream."""
        carried = []
        for _ in range(times):
            await asyncio.sleep(PERIOD_S)
            health = [pb.RankHealth(**{"rank": 1, "pid": 77, "committed": 3, **rank})]
            carried.append(self.agent.sender.carry(pb.Heartbeat(generation=4, ranks=health)))
        await asyncio.sleep(PERIOD_S)
        return carried

    def stranger(self) -> socket.socket:
        other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        other.connect(("127.0.0.1", self.port))
        other.setblocking(False)
        return other


def play(scene: Callable[[Both], Awaitable[None]], token: str = TOKEN) -> None:
    async def main() -> None:
        both = Both(token)
        try:
            await asyncio.sleep(0.01)
            await scene(both)
        finally:
            both.agent.sender.forget()
            both.server.close()

    asyncio.run(main())


def header(both: Both, counter: int, **fields: int) -> Header:
    found = {"kind": BEAT, "flags": 0, "ranks": 0, "received": 0, "sent": 0, "generation": 4, **fields}
    return Header(magic=MAGIC, ticket=both.invitation.ticket, counter=counter, **found)


# -- wire -----------------------------------------------------------------------------------------


def test_ranks_survive_the_wire() -> None:
    ranks = [
        pb.RankHealth(
            rank=i,
            pid=1 << 22,
            tag=-2 + i,
            progress=1 << 60,
            committed=-1 + i,
            progress_age_s=0.5,
            step_s=2,
            own_s=1,
            overhead_s=0.125,
            kept=max(i - 2, 0),
            kept_age_s=3.5,
        )
        for i in range(40)
    ]
    parts = pack_ranks(ranks)
    assert [number for number, _ in parts] == [25, 15]
    seal = DatagramSeal(TOKEN, b"salt")
    found: list[pb.RankHealth] = []
    for number, packed in parts:
        datagram = seal.close(Header(MAGIC, BEAT, 0, number, 5, 6, 7, 8, 9, 0.5, 4096), packed)
        assert len(datagram) <= LIMIT and ticket_of(datagram) == 5
        opened = seal.open(datagram, BEAT)
        assert opened is not None and opened[3:] == (number, 5, 6, 7, 8, 9, 0.5, 4096)
        assert seal.open(datagram, ANSWER) is None
        found += unpack_ranks(datagram)
    assert found == ranks


def over_the_wire(**values: float) -> pb.RankHealth:
    ((number, packed),) = pack_ranks([pb.RankHealth(**values)])  # type: ignore[arg-type]
    (found,) = unpack_ranks(DatagramSeal(TOKEN, b"salt").close(Header(MAGIC, BEAT, 0, number, 5, 6, 7, 8, 9), packed))
    return found


@pytest.mark.parametrize(
    ("committed", "kept", "expected"),
    [(7, 0, 0), (7, 8, 8), (7, 1, 1), (7, 9, 8), (-1, 8, 0), (1 << 40, 3, (1 << 40) + 1 - 65534)],
    ids=["none", "newest", "oldest", "ahead", "in a recovery", "very old"],
)
def test_how_old_a_kept_copy_is_takes_two_bytes(committed: int, kept: int, expected: int) -> None:
    found = over_the_wire(committed=committed, kept=kept, kept_age_s=1e9, overhead_s=0.00123)
    assert found.kept == expected and found.kept_age_s == 65504.0
    assert found.overhead_s == pytest.approx(0.00123, rel=1e-3)


def test_no_bit_of_a_datagram_can_be_changed() -> None:
    seal = DatagramSeal(TOKEN, b"salt")
    ((number, packed),) = pack_ranks([pb.RankHealth(rank=1)])
    datagram = seal.close(Header(MAGIC, BEAT, 0, number, 5, 6, 7, 8, 9), packed)
    for i in range(len(datagram)):
        changed = datagram[:i] + bytes([datagram[i] ^ 1]) + datagram[i + 1 :]
        assert seal.open(changed, BEAT) is None
    assert seal.open(datagram[:-1], BEAT) is None and seal.open(datagram + b"\0", BEAT) is None
    for other in (DatagramSeal(TOKEN, b"another salt"), DatagramSeal(TOKEN + "x", b"salt"), DatagramSeal("", b"salt")):
        assert other.open(datagram, BEAT) is None


# -- what gets through ----------------------------------------------------------------------------


def test_after_the_first_answer_the_stream_needs_no_heartbeats() -> None:
    async def scene(both: Both) -> None:
        assert await both.beat(3) == [False, True, True]
        assert both.server.gets_through("node", lease_clock())
        assert len(both.agent.heard) == len(both.controller.heard) == 3
        assert both.controller.beats[-1].generation == 4
        assert [r.committed for r in both.controller.beats[-1].ranks] == [3]
        assert both.controller.batches == 3

    play(scene)


def test_without_answers_the_stream_is_used_and_the_controller_knows() -> None:
    async def scene(both: Both) -> None:
        await both.beat(2)
        both.controller.alive = False  # hears, but does not answer
        assert (await both.beat(6))[-1] is False
        both.controller.alive = True
        both.controller.heard.clear()
        await both.beat(1)
        assert both.controller.heard and not both.server.gets_through("node", lease_clock())
        assert (await both.beat(3))[-1] is True

    play(scene)


def test_the_controller_counts_as_heard_when_the_answered_heartbeat_was_sent() -> None:
    async def scene(both: Both) -> None:
        await both.beat(2)
        before = lease_clock()
        assert both.agent.sender.carry(pb.Heartbeat())
        sent = lease_clock()
        time.sleep(0.1)  # the whole process stands still; the answer lies in the buffer
        both.server.look()
        time.sleep(0.1)
        await asyncio.sleep(0.02)
        assert before <= both.agent.heard[2] <= sent

    play(scene)


def test_a_heartbeat_brings_back_when_the_newest_answer_was_sent() -> None:
    """Of that time the controller knows for certain that it has been heard."""

    async def scene(both: Both) -> None:
        began = lease_clock()
        await both.beat(3)
        none, first, second = both.controller.echoes
        assert none == 0.0 and began < first < second < lease_clock() - PERIOD_S
        both.agent.sender.forget()
        both.agent.sender.invited("127.0.0.1", both.server.invite("node", both.link), both.agent.link)
        await asyncio.sleep(0.01)
        await both.beat(1)
        assert both.controller.echoes[-1] == 0.0, "a new connection may be to another controller"

    play(scene)


def test_an_elector_brings_it_back_at_once_and_that_is_not_answered() -> None:
    async def scene(both: Both) -> None:
        both.agent.sender.ask_for_echoes(wanted=True)
        await both.beat(3)
        heard = both.controller.echoes
        assert len(heard) == 6 and len(both.agent.heard) == 3, "each answer once"
        assert heard[0] == 0.0 and heard[1] == heard[2] < heard[3] == heard[4] < heard[5]

    play(scene)


def test_a_lost_datagram_is_sent_again_within_the_period() -> None:
    async def scene(both: Both) -> None:
        await both.beat(2)
        both.controller.alive = False
        assert both.agent.sender.carry(pb.Heartbeat())
        await asyncio.sleep(0.04)
        both.controller.alive = True
        count = len(both.agent.heard)
        await asyncio.sleep(0.1)
        assert len(both.agent.heard) == count + 1

    play(scene)


def test_acknowledgements_ride_on_datagrams() -> None:
    async def scene(both: Both) -> None:
        both.agent.link.send(pb.AgentMessage())
        both.link.send(pb.Command())
        assert both.link.accept(pb.AgentMessage(sequence=1)) and both.agent.link.accept(pb.Command(sequence=1))
        assert not both.link.settled() and not both.agent.link.settled()
        await both.beat(1)
        assert both.link.settled() and both.agent.link.settled()

    play(scene)


def test_a_stream_that_does_not_move_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecovery.heartbeat.sender._STUCK_S", 0.2)

    async def scene(both: Both) -> None:
        await both.beat(6)
        assert both.agent.stuck == 0
        both.link.send(pb.Command())  # it never arrives
        await both.beat(6)
        assert both.agent.stuck >= 1

    play(scene)


def test_a_stream_that_another_agent_carries_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecovery.heartbeat.sender._STUCK_CARRIED_S", 0.2)

    async def scene(both: Both) -> None:
        both.agent.sender.invited("127.0.0.1", both.invitation, both.agent.link, carried=True)
        await asyncio.sleep(0.01)
        both.link.send(pb.Command())  # it never arrives
        await both.beat(6)
        assert both.agent.stuck >= 1

    play(scene)


def test_a_stream_does_not_count_as_still_while_the_controller_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecovery.heartbeat.sender._STUCK_S", 0.3)
    monkeypatch.setattr("flashrecovery.heartbeat.sender._BUSY_S", 0.1)

    async def scene(both: Both) -> None:
        await both.beat(3)
        both.link.send(pb.Command())
        asyncio.get_running_loop().remove_reader(both.server._socket)
        await both.beat(6)  # no answers
        both.server.look()  # and all at once
        await asyncio.sleep(0.01)
        assert both.agent.stuck == 0

    play(scene)


def test_an_agent_learns_that_the_controller_has_no_stream_of_it_any_more() -> None:
    """Its relay's stream is lost, and the relay does not say so: it is alive for the controller, and connects again."""

    async def scene(both: Both) -> None:
        await both.beat(3)
        assert both.agent.stuck == 0
        both.controller.has_stream = False
        await both.beat(1)
        assert both.agent.stuck >= 1
        assert both.agent.heard and len(both.controller.heard) >= 4

    play(scene)


def test_health_is_taken_as_often_as_it_is_wanted() -> None:
    async def scene(both: Both) -> None:
        both.controller.every_s = 0.2
        await both.beat(8)
        assert len(both.controller.heard) == 8 and 2 <= len(both.controller.beats) <= 4
        both.controller.beats.clear()
        await both.beat(4, rank=0)
        assert len(both.controller.beats) >= 3  # rank 0's always

    play(scene)


def test_in_a_large_job_health_is_taken_as_often_as_the_controller_can_keep_up_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashrecovery.heartbeat.receiver._FEED_S", 10.0)

    async def scene(both: Both) -> None:
        await both.beat(3)
        assert len(both.controller.beats) >= 3  # a small job: every one
        both.controller.beats.clear()
        for i in range(100):
            both.server.invite(f"other{i}", Link())
        await both.beat(3)
        assert len(both.controller.heard) >= 6 and not both.controller.beats
        monkeypatch.setattr("flashrecovery.heartbeat.receiver._FEED_S", 0.0)
        await both.beat()
        assert both.controller.beats

    play(scene)


def test_on_the_stream_heartbeats_get_seldom_while_nothing_comes_back() -> None:
    backoff = Backoff()
    assert all(backoff.due(now, 0.25) for now in (1.0, 1.25, 1.5))  # the controller answers, on the stream
    sent = [now / 4 for now in range(80) if backoff.due(now / 4, now / 4)]  # from 0 s on it is silent
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert gaps == sorted(gaps) and gaps[0] == 0.25 and gaps[-1] == 2.0 and len(sent) < 16


def test_a_taken_port_leaves_the_stream() -> None:
    async def scene(both: Both) -> None:
        second = HeartbeatReceiver(TOKEN, Controller(), PERIOD_S)
        second.open("127.0.0.1", both.port)
        assert second.invite("node", Link()) == pb.ControllerHeartbeat()
        agent = Agent()
        agent.sender.invited("127.0.0.1", pb.ControllerHeartbeat(), agent.link)
        assert not agent.sender.carry(pb.Heartbeat())

    play(scene)


def test_nobody_listens() -> None:
    async def scene(both: Both) -> None:
        both.server.close()
        assert await both.beat(4) == [False] * 4 and not both.agent.heard

    play(scene)


# -- strangers ------------------------------------------------------------------------------------


def test_a_wrong_token_gets_no_answer() -> None:
    async def scene(both: Both) -> None:
        assert await both.beat(4) == [False] * 4
        assert not both.controller.heard and not both.agent.heard and both.server.refused >= 4

    play(scene, token="another-token-of-this-length")


def garbage(both: Both) -> Iterator[bytes]:
    ticket = both.invitation.ticket
    whole = DatagramSeal(TOKEN, both.invitation.salt).close(header(both, 1))
    yield b""
    yield b"\0" * 64
    yield os.urandom(60)
    yield os.urandom(4096)
    yield os.urandom(60_000)
    yield MAGIC + os.urandom(100)
    yield whole[:-1]
    yield whole + b"\0"
    yield whole + bytes(60_000)
    yield whole[:8] + (ticket ^ 1).to_bytes(8, "little") + whole[16:]
    yield DatagramSeal(TOKEN, b"another salt").close(header(both, 2))
    yield DatagramSeal(TOKEN, both.invitation.salt).close(header(both, 3, kind=ANSWER))
    yield DatagramSeal(TOKEN, both.invitation.salt).close(header(both, 4, ranks=9))


def test_garbage_does_no_harm() -> None:
    async def scene(both: Both) -> None:
        with closing(both.stranger()) as stranger:
            sent = [stranger.send(datagram) for datagram in garbage(both)]
            await asyncio.sleep(0.1)
            assert both.server.refused == len(sent) and not both.controller.heard
            with pytest.raises(BlockingIOError):
                stranger.recv(LIMIT)
        assert (await both.beat(3))[-1] is True

    play(scene)


def test_what_comes_again_or_late_is_dropped() -> None:
    async def scene(both: Both) -> None:
        seal = DatagramSeal(TOKEN, both.invitation.salt)
        with closing(both.stranger()) as stranger:
            for counter, heard in ((5, 1), (5, 1), (4, 1), (6, 2)):
                stranger.send(seal.close(header(both, counter)))
                await asyncio.sleep(0.02)
                assert len(both.controller.heard) == heard
            both.invitation = both.server.invite("node", Link())  # a new connection
            stranger.send(seal.close(header(both, 7)))  # of the old one
            await asyncio.sleep(0.02)
            assert len(both.controller.heard) == 2

    play(scene)


def test_a_forged_or_repeated_answer_is_not_heard() -> None:
    async def scene(both: Both) -> None:
        await both.beat(2)
        heard = list(both.agent.heard)
        true, forger = (
            DatagramSeal(TOKEN, both.invitation.salt),
            DatagramSeal("another-token-of-this-length", both.invitation.salt),
        )
        for seal, counter in ((forger, 3), (true, 1), (true, 2), (true, 99)):
            both.agent.sender.datagram_received(seal.close(header(both, counter, kind=ANSWER)), None)
        both.agent.sender.datagram_received(os.urandom(60), None)
        assert both.agent.heard == heard

    play(scene)


def test_a_heartbeat_on_its_way_when_its_connection_ends_is_no_strangers() -> None:
    async def scene(both: Both) -> None:
        await both.beat(2)
        both.server.forget("node")
        heard = len(both.controller.heard)
        await both.beat(2)
        assert both.server.refused == 0 and len(both.controller.heard) == heard

    play(scene)


def test_a_node_that_was_taken_for_lost_gets_no_answer() -> None:
    async def scene(both: Both) -> None:
        await both.beat(2)
        both.controller.alive = False
        count = len(both.agent.heard)
        await both.beat(3)
        assert len(both.agent.heard) == count

    play(scene)
