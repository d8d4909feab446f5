"""Another process listens where the controller is expected, or stands between it and an agent: they learn no secret,
cannot say anything in another's name, and do not end the job. Real gRPC on loopback."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.session import ControllerSession
from flashrecovery.agent.controller_link.session import answers as session_answers
from flashrecovery.agent.peers.client import fetch_from, keep_there, probe
from flashrecovery.agent.processes.setup_logs import SetupLogs
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.errors import AuthenticationError, ConfigError, ProtocolError, StrangerError
from flashrecovery.events import EventLog, RunDir
from flashrecovery.plan.membership.electors import Elector
from flashrecovery.plan.membership.membership import NodeStatus, Port
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access, agent_at
from flashrecovery.rpc.handshake import job_key
from flashrecovery.rpc.message_auth import CHALLENGE_KEY, HELLO
from flashrecovery.rpc.vote import ask_elector
from tests.support.peers import peer_service
from tests.unit.test_session_heartbeats import NoWorkers, no_lead, no_leave

TOKEN = "the-token-of-this-test-job"
ACCESS = Access(TOKEN)
OTHER = Access("the-token-of-another-job")
LONG_S = 120.0
"""For what comes by itself, however busy the machine is."""
TWO_NODES = {"nnodes": 2, "controller": "127.0.0.1:1"}
SETTINGS = RunConfig.model_validate(
    {**TWO_NODES, "timeouts": {"lease_s": 40.0, "node_probe_s": 25.0, "node_silence_s": 75.0}}
)
"""In no test an agent halts, or is taken for lost, because the machine is busy ..."""
SHORT = RunConfig.model_validate(TWO_NODES)
"""... but in those that wait for its lease to end."""


@asynccontextmanager
async def controlling(
    folder: Path, port: int = 0, access: Access = ACCESS, settings: RunConfig = SETTINGS
) -> AsyncIterator[tuple[Any, int]]:
    """A controller, and its port."""
    with closing(RunDir(folder)) as run_dir, closing(EventLog(run_dir.events_path)) as log:
        service = ControllerService(settings, access, log, run_dir)
        bound = await service.start("127.0.0.1", port)
        try:
            yield service, bound
        finally:
            await service.stop()


class Job:
    """An agent's real session with any process that listens at ``port``."""

    def __init__(self, port: int, settings: RunConfig = SETTINGS) -> None:
        self.agent = NoWorkers()
        self.session = ControllerSession(
            f"127.0.0.1:{port}", ACCESS, cast(Agent, self.agent), settings.timeouts, no_lead, no_leave
        )
        self.running = asyncio.create_task(self.session.run())
        self._beating = asyncio.create_task(self.agent.run())

    async def stop(self) -> None:
        self.agent.finished.set_result(None)
        self._beating.cancel()
        await asyncio.wait({self.running, self._beating})


async def until(condition: Callable[[], bool]) -> None:
    """However long that takes: no time decides a test."""
    while not condition():
        await asyncio.sleep(0.01)


class Middle(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Takes every call and hands it on as it is, to the true service at ``to`` or to no one; and keeps everything.

    ``change`` sees (method, number of the message, whether it goes up, message), and gives what is handed on; None:
    nothing. Where it hands on to no one it says ``answers``, and that all is well.
    """

    def __init__(self, to: str = "") -> None:
        self.to = to
        self.calls: list[tuple[str, tuple[tuple[str, Any], ...], list[bytes]]] = []
        self.said: list[bytes] = []
        self.change: Callable[[str, int, bool, bytes], bytes | None] = lambda method, i, up, message: message
        self.answers: tuple[bytes, ...] = (b"",)
        self.status: Callable[[str], tuple[grpc.StatusCode, str] | None] = lambda method: None
        self.port = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method
        known = tuple((k, v) for k, v in details.invocation_metadata or () if k.startswith("flashrecovery-"))
        heard: list[bytes] = []
        self.calls.append((method, known, heard))

        async def carry(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async def up() -> AsyncIterator[bytes]:
                async for message in messages:
                    heard.append(message)
                    changed = self.change(method, len(heard), True, message)
                    if changed is not None:
                        yield changed

            refused = self.status(method)
            if refused is not None:
                await context.abort(*refused)
            if not self.to:  # it listens to everything, and answers whatever it likes
                async for _ in up():
                    pass
                for answer in self.answers:
                    yield answer
                return
            async with grpc.aio.insecure_channel(self.to) as channel:
                forward: Any = channel
                i = 0
                try:
                    async for message in self._answers_of(forward, method, up(), known):
                        i += 1
                        self.said.append(message)
                        changed = self.change(method, i, False, message)
                        if changed is not None:
                            yield changed
                except grpc.aio.AioRpcError as e:
                    await context.abort(e.code(), e.details())

        return grpc.stream_stream_rpc_method_handler(carry)

    async def _answers_of(
        self, forward: Any, method: str, messages: AsyncIterator[bytes], known: Any
    ) -> AsyncIterator[bytes]:
        """What the true service says to that call. A Hello is answered before its one message is read: written to a
        stream, that message may come after the end of the call, which grpc.aio makes its own INTERNAL."""
        if method == HELLO:
            async for message in messages:
                yield await forward.unary_unary(method)(message, metadata=known)
            return
        async for answer in forward.stream_stream(method)(messages, metadata=known):
            yield answer

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[Middle]:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((self,))
        self.port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0.1)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def everything(self) -> bytes:
        """That it has got to see."""
        got = [method.encode() for method, _, _ in self.calls] + self.said
        for _, known, heard in self.calls:
            got += [w if isinstance(w, bytes) else w.encode() for pair in known for w in pair] + heard
        return b"|".join(got)


def secrets_of(token: str) -> list[bytes]:
    """What must be in no one's hands, in every usual disguise."""
    plain = [token.encode(), job_key(token), hashlib.sha256(token.encode()).digest()]
    return [d for p in plain for d in (p, p.hex().encode(), base64.b64encode(p).rstrip(b"="), p[:12], p[-12:])]


def test_who_listens_gets_a_random_number_and_nothing_else() -> None:
    """Every way in which an agent, or a user, speaks to someone."""

    async def main() -> None:
        async with Middle().listening() as fake:
            assert not (await probe(fake.address, ACCESS, LONG_S)).reachable
            for call in (fetch_from(fake.address, ACCESS, 0), keep_there(fake.address, ACCESS, 0, b"log")):
                with pytest.raises(StrangerError):
                    await call
            job = Job(fake.port)
            await asyncio.wait({job.running})
            with pytest.raises(ConfigError, match=f"--controller {fake.address}: what listens at {fake.address}"):
                job.running.result()
            await job.stop()
            assert len(fake.calls) >= 4
            for method, known, heard in fake.calls:
                assert (method, heard) == (HELLO, [b""])
                assert [(key, len(value)) for key, value in known] == [(CHALLENGE_KEY, 32)]
            assert len({known for _, known, _ in fake.calls}) == len(fake.calls)

    asyncio.run(main())


ANSWERS = {
    "garbage": (b"\xff" * 40,),
    "nothing": (),
    "an empty one": (b"",),
    "no text for a name": (b"\x12\x02\xff\xfe",),
    "a long name": (pb.Answer(nonce=b"n" * 32, name="x" * 3_000, proof=b"p" * 32).SerializeToString(),),
    "much": (b"\x12" * (1 << 20),),
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_whatever_a_stranger_answers_it_is_one(answers: tuple[bytes, ...], caplog: pytest.LogCaptureFixture) -> None:
    """To everything that is asked of other agents and of a controller; nothing else is raised, nor logged by gRPC."""

    async def main() -> None:
        async with Middle().listening() as fake:
            fake.answers = answers
            seen = await probe(fake.address, ACCESS, LONG_S)
            assert not seen.reachable and fake.address in seen.evidence and len(seen.evidence) < 500
            assert ("RESOURCE_EXHAUSTED" in seen.evidence) is (answers is ANSWERS["much"])  # it is not received
            reply = await ask_elector(Elector("b", fake.address, "1"), pb.VoteRequest(term=1), ACCESS)
            assert not reply.granted and fake.address in reply.reason
            assert not await session_answers(fake.address, ACCESS)
            for call in (fetch_from(fake.address, ACCESS, 0), keep_there(fake.address, ACCESS, 0, b"log")):
                with pytest.raises(StrangerError):
                    await call
            job = Job(fake.port)
            await asyncio.wait({job.running})
            with pytest.raises(ConfigError, match=f"--controller {fake.address}: what listens at {fake.address}"):
                job.running.result()
            await job.stop()
            assert {method for method, _, _ in fake.calls} == {HELLO}

    asyncio.run(main())
    assert not [r for r in caplog.records if r.name.startswith("grpc")]


def test_garbage_where_the_controller_was_does_not_end_an_agent(tmp_path: Path) -> None:
    """Nor does it at the ports of the agents that it then asks: it goes on to look, and halts as one that is cut
    off."""

    async def main() -> None:
        async with controlling(tmp_path / "run", settings=SHORT) as (service, port):
            job = Job(port, SHORT)
            await until(lambda: service._agents.is_connected("a"))
        fake = Middle()
        fake.answers = (b"\xff" * 40,)
        async with fake.listening(port), Middle().listening() as other:
            other.answers = (b"\xff" * 40,)
            job.agent.neighbours = lambda: [other.address]  # type: ignore[method-assign]
            await until(lambda: job.session._stranger and job.agent.halted > 0)
            asked = len(other.calls)
            await until(lambda: len(other.calls) > asked + 1)
            assert not job.running.done() and job.session._lookout.node_status is NodeStatus.CUT_OFF
        async with controlling(tmp_path / "again", port, settings=SHORT) as (service, _):
            await until(lambda: service._agents.is_connected("a") and job.agent.gone_on > 0)
            await job.stop()
        assert job.running.result() is None

    asyncio.run(main())


@pytest.mark.parametrize("joined", [False, True])
def test_an_answer_that_is_left_out_is_a_lost_connection(joined: bool, tmp_path: Path) -> None:
    """Of a call with one answer: that it has ended well is a status, which is not sealed."""

    async def main() -> None:
        async with (
            controlling(tmp_path / "run") as (service, port),
            Middle(f"127.0.0.1:{port}").listening() as middle,
        ):
            job = Job(middle.port)
            if joined:
                await until(lambda: service._agents.is_connected("a"))
            middle.change = lambda method, i, up, message: None if not up and method.endswith("Who") else message
            before = len(middle.calls)
            job.session.drop()
            await until(lambda: len([c for c in middle.calls[before:] if c[0].endswith("Who")]) > 1)
            assert not job.running.done()
            with pytest.raises(AuthenticationError, match="left out"):
                async with ACCESS.dial(middle.address, CONTROLLER, LONG_S) as channel:
                    await rpc.ControllerStub(channel).Who(pb.WhoRequest(), timeout=LONG_S)
            middle.change = lambda method, i, up, message: message
            await until(lambda: service._agents.is_connected("a"))
            await job.stop()
        assert job.running.result() is None

    asyncio.run(main())


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION]
)
def test_before_it_has_joined_an_agent_names_what_listens_there(code: grpc.StatusCode) -> None:
    async def main() -> None:
        async with Middle().listening() as fake:
            fake.status = lambda method: (code, "go away")
            job = Job(fake.port)
            await asyncio.wait({job.running})
            said = rf"--controller 127.0.0.1:{fake.port}: .*some other gRPC or HTTP server.*{code.name}"
            with pytest.raises(ConfigError, match=said):
                job.running.result()
            await job.stop()

    asyncio.run(main())


def test_another_jobs_controller_is_named_as_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with controlling(tmp_path / "other", access=OTHER) as (service, port):
            job = Job(port)
            await asyncio.wait({job.running})
            with pytest.raises(ConfigError, match=r"a FlashRecovery 'controller', but .* another job's"):
                job.running.result()
            await job.stop()
            assert not service.machine.job.nodes

    asyncio.run(main())


def test_nothing_secret_goes_over_the_wire(tmp_path: Path) -> None:
    """All that a session says, in both directions, through someone who listens."""

    async def main() -> None:
        async with (
            controlling(tmp_path / "run") as (service, port),
            Middle(f"127.0.0.1:{port}").listening() as middle,
        ):
            job = Job(middle.port)
            await until(lambda: service._agents.is_connected("a"))
            for i in range(20):
                service._agents.post("a", pb.Command(rank=0, fault=pb.Fault(fault=f"number {i}")))
            await until(lambda: len([c for c in job.agent.commands if c == "fault"]) == 20)
            await job.stop()
            seen = middle.everything()
            assert b"number 19" in seen  # it does see what is said
            assert not [secret for secret in secrets_of(TOKEN) if secret in seen]

    asyncio.run(main())


def _code_of(address: str, method: str, metadata: Any, messages: Sequence[bytes]) -> grpc.StatusCode | None:
    """How the server ends this call. Not by grpc.aio: there a write that comes after the end is its own error."""
    with grpc.insecure_channel(address) as channel:
        anything: Any = channel
        return anything.stream_stream(method)(iter(messages), metadata=metadata).code()


def test_a_recorded_call_is_refused_when_it_comes_again(tmp_path: Path) -> None:
    """A kill of a rank, a vote, a whole session: each counts once, and for the service that it was said to."""

    async def main() -> None:
        async with (
            controlling(tmp_path / "run") as (service, port),
            controlling(tmp_path / "same") as (_, second),
            Middle(f"127.0.0.1:{port}").listening() as middle,
        ):
            async with ACCESS.dial(middle.address, CONTROLLER, LONG_S) as channel:
                stub = rpc.ControllerStub(channel)
                await stub.Status(pb.StatusRequest(), timeout=LONG_S)
                reply = await stub.Inject(pb.InjectRequest(rank=99, fault="sigkill"), timeout=LONG_S)
                assert "99" in reply.error
                call = stub.Session()
                await call.write(pb.AgentMessage(register=pb.Register(node="a", host="h", slots=1, incarnation="1")))
                assert (await call.read()).HasField("heartbeat")
                call.cancel()
            recorded = [c for c in middle.calls if c[0] != HELLO]
            assert len(recorded) == 3
            await until(lambda: not service._agents.connected())
            for to in (port, second):
                for method, known, heard in recorded:
                    refused = await asyncio.to_thread(_code_of, f"127.0.0.1:{to}", method, known, heard)
                    assert refused is grpc.StatusCode.UNAUTHENTICATED
            assert not service._agents.connected()

    asyncio.run(main())


def test_a_ticket_is_good_for_its_own_method_and_metadata_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with controlling(tmp_path / "run") as (_, port), Middle().listening() as middle:
            middle.to = f"127.0.0.1:{port}"
            async with ACCESS.dial(middle.address, CONTROLLER, LONG_S) as channel:
                middle.status = lambda method: (grpc.StatusCode.UNAVAILABLE, "kept for later")
                with pytest.raises(grpc.aio.AioRpcError):
                    await rpc.ControllerStub(channel).Status(pb.StatusRequest(), timeout=LONG_S)
            (_, known, heard) = middle.calls[-1]
            assert heard == [] and known
            async with grpc.aio.insecure_channel(middle.to) as straight:
                anything: Any = straight
                more = (*known, ("flashrecovery-controller", "x"))
                for method, metadata in (("Inject", known), ("Trunk", known), ("Status", more), ("Status", ())):
                    call = anything.stream_stream(f"/flashrecovery.v1.Controller/{method}")(
                        iter([b"x" * 16]), metadata=metadata
                    )
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call.read()
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("what", ["changed", "repeated", "swapped"])
def test_a_message_that_is_changed_on_its_way_ends_the_connection_and_not_the_job(
    up: bool, what: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            controlling(tmp_path / "run") as (service, port),
            Middle(f"127.0.0.1:{port}").listening() as middle,
        ):
            last = [b"x" * 20]
            hit: list[int] = []

            def change(method: str, i: int, goes_up: bool, message: bytes) -> bytes:
                if not method.endswith("Session") or goes_up is not up or i != 3 or hit:
                    if method.endswith("Session") and goes_up is up:
                        last[0] = message
                    return message
                hit.append(i)
                return {
                    "changed": message[:-1] + bytes([message[-1] ^ 1]),
                    "repeated": last[0],
                    "swapped": message[:16] + last[0][16:],
                }[what]

            middle.change = change
            job = Job(middle.port)

            def say() -> bool:
                if service._agents.is_connected("a"):
                    service._agents.post("a", pb.Command(rank=0, keep_undo=pb.KeepUndo(step=1)))
                job.agent.send(pb.AgentMessage(notice=pb.Notice(kind="test", text="x")))
                return bool(hit)

            await until(say)
            sessions = len([c for c in middle.calls if c[0].endswith("Session")])
            # the link sends again whatever that connection has lost, on the next one
            await until(lambda: len([c for c in middle.calls if c[0].endswith("Session")]) > sessions)
            link = service._agents.links["a"]
            await until(lambda: service._agents.is_connected("a") and link.settled())
            assert not job.running.done() and not job.agent.halted
            await job.stop()

    asyncio.run(main())


def test_no_status_from_anybody_ends_an_agent_that_has_joined(tmp_path: Path) -> None:
    """Only what the controller itself says, sealed, may end it."""

    async def main() -> None:
        async with (
            controlling(tmp_path / "run") as (service, port),
            Middle(f"127.0.0.1:{port}").listening() as middle,
        ):
            job = Job(middle.port)
            await until(lambda: service._agents.is_connected("a") and job.session._joined)
            for code in grpc.StatusCode:
                if code is not grpc.StatusCode.OK:
                    middle.status = lambda method, code=code: (code, "you are not wanted")  # type: ignore[misc]
                    seen = len(middle.calls)
                    job.session.drop()
                    await until(lambda: len(middle.calls) > seen)  # noqa: B023 - awaited here
                    await asyncio.sleep(0.05)
                    assert not job.running.done(), code
            middle.status = lambda method: None
            await until(lambda: service._agents.is_connected("a"))
            await job.stop()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["another job's controller", "a recorder", "an old one that asks for a token"])
def test_a_stranger_on_the_controllers_port_means_that_it_is_gone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent goes on, takes the controller for dead as if its port were closed, and finds it when it is back."""

    async def main() -> None:
        async with controlling(tmp_path / "run", settings=SHORT) as (service, port):
            job = Job(port, SHORT)
            await until(lambda: service._agents.is_connected("a"))
        fake = Middle()
        if kind.startswith("an old"):
            fake.status = lambda method: (grpc.StatusCode.UNAUTHENTICATED, "wrong or missing job token")
        stranger = controlling(tmp_path / "x", port, OTHER) if kind.startswith("another") else fake.listening(port)
        async with stranger:
            await until(lambda: job.session._stranger and job.session._hearing.silent_s > SHORT.timeouts.lease_s)
            await until(lambda: job.session._lookout.port is Port.REFUSES)
            await asyncio.sleep(1.0)
            assert not job.running.done() and job.agent.halted == 0
        assert {method for method, _, _ in fake.calls} <= {HELLO}
        async with controlling(tmp_path / "again", port, settings=SHORT) as (service, _):
            await until(lambda: service._agents.is_connected("a"))
            await until(lambda: not job.session._stranger and job.session._lookout.node_status is NodeStatus.MEMBER)
            await job.stop()
        assert job.running.result() is None

    with caplog.at_level(logging.WARNING, "flashrecovery"):
        asyncio.run(main())
    told = [r for r in caplog.records if "the process at the expected address is not of this job" in r.getMessage()]
    assert len(told) == 1  # of some ten attempts


def test_who_forwards_a_dead_agents_port_to_a_living_one_does_not_make_it_alive() -> None:
    async def main() -> None:
        alive = peer_service(ACCESS)
        await alive.start("127.0.0.1")
        try:
            address = f"127.0.0.1:{alive.port}"
            assert (await probe(address, ACCESS, LONG_S)).reachable
            async with Middle(address).listening() as dead:
                seen = await probe(dead.address, ACCESS, LONG_S)
                assert not seen.reachable and agent_at(dead.address) in seen.evidence
        finally:
            await alive.stop()

    asyncio.run(main())


def test_a_set_up_log_that_is_cut_short_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process that ends the stream early: that it has ended is not sealed."""
    monkeypatch.setattr("flashrecovery.agent.peers.client._PART_BYTES", 10)

    async def main() -> None:
        keeper = peer_service(ACCESS)
        await keeper.start("127.0.0.1")
        address = f"127.0.0.1:{keeper.port}"
        try:
            await keep_there(address, ACCESS, 1, b"0123456789" * 3)
            assert await fetch_from(address, ACCESS, 1) == b"0123456789" * 3
            async with ACCESS.dial(address, agent_at(address), LONG_S) as channel:

                async def some() -> AsyncIterator[pb.SetupLogPart]:
                    yield pb.SetupLogPart(rank=1, data=b"cut")

                assert not (await rpc.PeerStub(channel).Keep(some(), timeout=LONG_S)).kept
            assert await fetch_from(address, ACCESS, 1) == b"0123456789" * 3
            await keep_there(address, ACCESS, 2, b"")
            assert await fetch_from(address, ACCESS, 2) == b""
            monkeypatch.setattr(
                "flashrecovery.agent.peers.service.log_parts", lambda rank, log: [pb.SetupLogPart(data=log[:10])]
            )
            with pytest.raises(ProtocolError, match="did not come whole"):
                await fetch_from(address, ACCESS, 1)
        finally:
            await keeper.stop()

    asyncio.run(main())


def one_part_changed(method: str, i: int, up: bool, message: bytes) -> bytes | None:
    return message[:-1] + bytes([message[-1] ^ 1]) if method.endswith("Fetch") and not up and i == 2 else message


def last_part_left_out(method: str, i: int, up: bool, message: bytes) -> bytes | None:
    return None if method.endswith("Fetch") and not up and i == 3 else message


def all_parts_left_out(method: str, i: int, up: bool, message: bytes) -> bytes | None:
    return None if method.endswith("Fetch") and not up else message


LOST = {
    "on its way as it is": None,
    "changed": one_part_changed,
    "cut short": last_part_left_out,
    "nothing comes": all_parts_left_out,
    "a stranger answers": "stranger",
    "another agent answers": "forwarded",
    "no process answers": "closed",
    "the keeper does not have it": "not kept",
}


EVERY_RUN = ("changed", "another agent answers", "no process answers")


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, id=name, marks=() if name in EVERY_RUN else pytest.mark.slow) for name, what in LOST.items()],
)
def test_a_set_up_log_that_cannot_be_fetched_is_missed_by_its_rank_only(
    what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node takes over a rank of a lost one, in a real process; a third one keeps what its set-up collectives had
    returned, and someone is in between. What they do may cost that, and never the node."""
    monkeypatch.setattr("flashrecovery.agent.peers.client._PART_BYTES", 10)
    kept = b"0123456789" * 3
    script = tmp_path / "train.py"
    script.write_text("")
    config = RunConfig.model_validate({"nproc_per_node": 1, "nnodes": 2, "controller": "127.0.0.1:1", "health": "none"})

    async def main() -> None:
        keeper = peer_service(ACCESS)
        await keeper.start("127.0.0.1")
        if what != "not kept":
            await keep_there(f"127.0.0.1:{keeper.port}", ACCESS, 0, kept)
        said: list[pb.AgentMessage] = []
        async with Middle("" if what == "stranger" else f"127.0.0.1:{keeper.port}").listening() as middle:
            middle.change = what if callable(what) else middle.change
            if what != "forwarded":
                assert keeper._server is not None
                keeper._server._listener.name = agent_at(middle.address)
            with closing(RunDir(tmp_path / "run")) as run_dir:
                agent = Agent(config, [str(script)], run_dir, Identity.of(config, "127.0.0.1"), ACCESS)
                agent.connect(said.append, lambda message: None)
                replace = pb.Replace(detached=True, setup_from=["127.0.0.1:1" if what == "closed" else middle.address])
                agent.handle(pb.Command(rank=0, generation=1, replace=replace))
                await until(lambda: agent.finished.done() or any(m.HasField("started") for m in said))
                assert not agent.finished.done(), agent.finished.exception()
                notices = [m.notice for m in said if m.notice.kind == "setup_log_lost"]
                assert agent._ranks[0].page.read_setup_log() == (kept if what is None else None)
                assert [n.rank for n in notices] == [] if what is None else [0]
                assert what is None or "set-up collectives are lost" in notices[0].text
                await agent.shutdown(None)
        await keeper.stop()

    asyncio.run(main())


def test_a_set_up_log_that_did_not_come_whole_is_not_taken_for_kept() -> None:
    """What is in between ends the stream early: the keeper says that it is not whole, and it is given again."""

    class Page:
        def read_setup_log(self) -> bytes:
            return b"what they had returned"

    async def main() -> None:
        keeper = peer_service(ACCESS)
        await keeper.start("127.0.0.1")
        async with Middle(f"127.0.0.1:{keeper.port}").listening() as middle:
            assert keeper._server is not None
            keeper._server._listener.name = agent_at(middle.address)
            entries = [pb.RankEntry(rank=0, node="a"), pb.RankEntry(rank=1, node="b", peer=middle.address)]
            table = pb.RankTable(ranks=entries, stride=1, world_size=2)
            processes: Any = {0: SimpleNamespace(page=Page(), dead=False, pid=1, attempt=0)}
            logs = SetupLogs(ACCESS)
            middle.change = lambda method, i, up, message: None if method.endswith("Keep") and up else message
            with pytest.raises(ProtocolError, match="did not come whole"):
                await keep_there(middle.address, ACCESS, 0, b"log")
            await logs.spread(table, processes, "a")
            middle.change = lambda method, i, up, message: None if method.endswith("Keep") and not up else message
            await logs.spread(table, processes, "a")  # it is kept, but no process knows
            tries = len(middle.calls)
            middle.change = lambda method, i, up, message: message
            await logs.spread(table, processes, "a")
            assert len(middle.calls) > tries and await fetch_from(middle.address, ACCESS, 0) == Page().read_setup_log()
            tries = len(middle.calls)
            await logs.spread(table, processes, "a")
            assert len(middle.calls) == tries
        await keeper.stop()

    asyncio.run(main())


def test_an_agent_that_can_no_longer_watch_its_controller_ends(tmp_path: Path) -> None:
    """Its node would never halt when it is cut off."""

    async def main() -> None:
        async with controlling(tmp_path / "run", settings=SHORT) as (service, port):
            job = Job(port, SHORT)
            await until(lambda: service._agents.is_connected("a"))

            async def fails() -> None:
                raise ZeroDivisionError

            job.session._lookout.ask = fails  # type: ignore[method-assign]
        await asyncio.wait({job.running})
        with pytest.raises(ZeroDivisionError):
            job.running.result()
        job._beating.cancel()

    asyncio.run(main())


def test_strangers_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def calls(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = rpc.ControllerStub(channel)
            for _ in range(50):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Status(pb.StatusRequest(), timeout=LONG_S)

    async def main() -> None:
        async with controlling(tmp_path / "run") as (_, port):
            await calls(port)

    with caplog.at_level(logging.WARNING, "flashrecovery"):
        asyncio.run(main())
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1 and "/flashrecovery.v1.Controller/Status" in lines[0], lines


def test_the_caller_finds_a_changed_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            controlling(tmp_path / "run") as (_, port),
            Middle(f"127.0.0.1:{port}").listening() as middle,
        ):
            middle.change = lambda method, i, up, message: message if up or method == HELLO else message + b"x"
            async with ACCESS.dial(middle.address, CONTROLLER, LONG_S) as channel:
                with pytest.raises(AuthenticationError, match="changed on its way"):
                    await rpc.ControllerStub(channel).Status(pb.StatusRequest(), timeout=LONG_S)

    asyncio.run(main())
