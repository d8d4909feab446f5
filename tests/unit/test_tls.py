"""TLS between agents, controller and tools: real handshakes on loopback, and what is wrong is named before anything
starts."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest
from cryptography import x509

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.session import ControllerSession
from flashrecovery.agent.peers.client import probe
from flashrecovery.cli.status import access_of
from flashrecovery.config import RunConfig, TlsSettings, load_run_config
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import RunDir, RunFiles
from flashrecovery.job import rendezvous_of, with_tls
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from flashrecovery.rpc.tls import Tls, given, made
from tests.support.peers import peer_service
from tests.unit.test_impostors import SETTINGS, controlling, until
from tests.unit.test_session_heartbeats import NoWorkers, no_lead, no_leave

TOKEN = "the-token-of-this-test-job"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one job's certificate; `other` is another authority's, and `named` made out to a name only."""
    path = tmp_path_factory.mktemp("tls")
    made(path, ("127.0.0.1", "localhost"))
    made(path / "other", ("127.0.0.1", "localhost"))
    made(path / "named", ("job.example",))
    return path


def settings_in(folder: Path, **others: object) -> TlsSettings:
    files = {"certificate": folder / "certificate.pem", "key": folder / "key.pem", "ca": folder / "ca.pem"}
    return TlsSettings.model_validate({**files, **others})


def tls_in(folder: Path, name: str = "") -> Tls:
    found = given(settings_in(folder, name=name or None), "127.0.0.1")
    assert found is not None
    return found


async def status(port: int, access: Access) -> pb.JobStatus:
    async with access.dial(f"127.0.0.1:{port}", CONTROLLER, 5.0) as channel:
        found: pb.JobStatus = await rpc.ControllerStub(channel).Status(pb.StatusRequest(), timeout=5)
        return found


def test_a_session_and_the_agents_among_themselves_over_tls(folder: Path, tmp_path: Path) -> None:
    """Also with certificates that are made out to a name which all nodes share."""

    async def main(access: Access, run_dir: Path) -> None:
        async with controlling(run_dir, access=access) as (service, port):
            agent = NoWorkers()
            session = ControllerSession(
                f"127.0.0.1:{port}", access, cast(Agent, agent), SETTINGS.timeouts, no_lead, no_leave
            )
            peers = peer_service(access, session)
            await peers.start("127.0.0.1")
            running = asyncio.create_task(session.run(peers.port))
            await until(lambda: service._agents.is_connected("a"))
            agent.send(pb.AgentMessage(notice=pb.Notice(kind="test", text="x")))
            await until(lambda: session._link.sent > 0 and service._agents.links["a"].received > 0)
            assert (await probe(f"127.0.0.1:{peers.port}", access, 5.0)).reachable
            agent.finished.set_result(None)
            await running
            await peers.stop()

    asyncio.run(main(Access(TOKEN, tls_in(folder)), tmp_path / "a"))
    asyncio.run(main(Access(TOKEN, tls_in(folder / "named", "job.example")), tmp_path / "b"))


def test_what_is_said_cannot_be_read_on_its_way(folder: Path, tmp_path: Path) -> None:
    """The same call in the clear can: the recorder works."""

    async def main(access: Access) -> bytes:
        seen = bytearray()
        async with controlling(tmp_path / ("tls" if access.tls else "clear"), access=access) as (_, port):

            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                up, down = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(copy(reader, down), copy(up, writer))

            async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    while data := await source.read(1 << 16):
                        seen.extend(data)
                        to.write(data)
                        await to.drain()
                to.close()

            server = await asyncio.start_server(carry, "127.0.0.1", 0)
            middle = server.sockets[0].getsockname()[1]
            async with access.dial(f"127.0.0.1:{middle}", CONTROLLER, 5.0) as channel:
                call = pb.InjectRequest(rank=99, fault="what-is-said-here", phase="")
                reply = await rpc.ControllerStub(channel).Inject(call, timeout=5)
                assert not reply.accepted
            server.close()
        return bytes(seen)

    assert b"what-is-said-here" in asyncio.run(main(Access(TOKEN)))
    assert b"what-is-said-here" not in asyncio.run(main(Access(TOKEN, tls_in(folder))))


def test_another_authority_a_wrong_name_and_no_tls_are_refused(folder: Path, tmp_path: Path) -> None:
    mine = tls_in(folder)

    async def main() -> None:
        async with controlling(tmp_path / "run", access=Access(TOKEN, mine)) as (_, port):
            assert (await status(port, Access(TOKEN, Tls(mine.ca)))).state == "starting"
            with pytest.raises(StrangerError, match=f"127.0.0.1:{port} has no certificate of this job's: .*issuer"):
                await status(port, Access(TOKEN, tls_in(folder / "other")))
            with pytest.raises(StrangerError, match="no certificate of this job's: Hostname mismatch"):
                await status(port, Access(TOKEN, replace(mine, name="elsewhere.example")))
            with pytest.raises(grpc.aio.AioRpcError):
                await status(port, Access(TOKEN))
            with pytest.raises(StrangerError, match="does not know this job's token"):  # the proof goes on inside
                await status(port, Access("another-token-of-this-length", mine))
        async with controlling(tmp_path / "plain", access=Access(TOKEN)) as (_, port):
            with pytest.raises(StrangerError, match="does not speak TLS"):
                await status(port, Access(TOKEN, mine))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            with pytest.raises(grpc.aio.AioRpcError):  # no process is there
                await status(free.getsockname()[1], Access(TOKEN, mine))

    asyncio.run(main())


def test_an_agent_with_another_authority_ends_and_says_why(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with controlling(tmp_path / "run", access=Access(TOKEN, tls_in(folder))) as (_, port):
            access = Access(TOKEN, tls_in(folder / "other"))
            agent = NoWorkers()
            session = ControllerSession(
                f"127.0.0.1:{port}", access, cast(Agent, agent), SETTINGS.timeouts, no_lead, no_leave, alone=True
            )
            with pytest.raises(ConfigError, match=f"--controller 127.0.0.1:{port}: .*no certificate of this job's"):
                await asyncio.wait_for(session.run(), 20)

    asyncio.run(main())


# -- the configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tls", "said"),
    [
        ({"certificate": "a", "key": "b"}, "tls: tls.ca missing; certificate, key and ca are needed together"),
        ({"ca": "a"}, "tls: tls.certificate, tls.key missing"),
        ({"name": "x"}, "tls.name = 'x' needs tls.certificate"),
        ({"auto": True, "ca": "a"}, "give either it or these three"),
        ({"auto": True, "controller": "h:1"}, "tls.auto = true is for jobs of one node; with controller = h:1"),
        ({"cert": "a"}, "unknown key 'tls.cert'"),
        ({"auto": "perhaps"}, "tls.auto = 'perhaps'"),
    ],
)
def test_keys_that_do_not_go_together(tls: dict[str, object], said: str) -> None:
    above = {"controller": tls.pop("controller")} if "controller" in tls else {}
    with pytest.raises(ConfigError) as refused:
        load_run_config(None, {"tls": tls, **above})
    assert said in str(refused.value)


def broken(folder: Path, to: Path) -> Iterator[tuple[dict[str, object], str]]:
    """Settings that cannot work, and what is said of them."""
    shutil.copytree(folder, to)
    garbage = to / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    (to / "empty.pem").write_text("")
    yield {"key": to / "none.pem"}, f"tls.key = {to / 'none.pem'}: No such file"
    yield {"ca": to}, f"tls.ca = {to}: Is a directory"
    yield {"ca": garbage}, f"tls.ca = {garbage}: this is no certificate"
    yield {"ca": to / "empty.pem"}, f"tls.ca = {to / 'empty.pem'}"
    yield (
        {"certificate": garbage},
        f"tls.certificate = {garbage}, tls.key = {to / 'key.pem'}: a certificate and its own",
    )
    yield {"key": to / "other" / "key.pem"}, "a certificate and its own key"
    yield {"ca": to / "other" / "ca.pem"}, f"issued by tls.ca = {to / 'other' / 'ca.pem'}"
    yield {"name": "elsewhere.example"}, "made out to tls.name elsewhere.example"


def test_files_that_cannot_work_are_named(folder: Path, tmp_path: Path) -> None:
    for others, said in broken(folder, tmp_path / "copy"):
        with pytest.raises(ConfigError) as refused:
            given(settings_in(tmp_path / "copy", **others), "127.0.0.1")
        assert said in str(refused.value)
    with pytest.raises(ConfigError, match=r"made out to this node's address 10\.1\.2\.3; for another name, set tls"):
        given(settings_in(folder), "10.1.2.3")


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecovery.rpc.tls._VALID_DAYS", -0.5)
    made(tmp_path, ("127.0.0.1",))
    with pytest.raises(ConfigError, match=r"others would refuse it .*expired.*valid now"):
        given(settings_in(tmp_path), "127.0.0.1")


# -- made for one job -----------------------------------------------------------------------------


def test_a_job_of_one_node_makes_its_own(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"tls": {"auto": True}})
    place = with_tls(rendezvous_of(config), config, tmp_path)
    tls = place.access.tls
    assert tls is not None
    assert (tmp_path / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert given(settings_in(tmp_path / "tls"), "127.0.0.1") == tls
    assert given(settings_in(tmp_path / "tls", name="localhost"), "127.0.0.1") is not None
    ca = x509.load_pem_x509_certificate(tls.ca)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert ca.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc) > datetime.timedelta(days=3600)

    async def main() -> None:
        run_dir = RunDir(tmp_path)
        run_dir.write_controller("127.0.0.1:1", 1, place.access.token, "", tls.ca.decode(), tls.name)
        run_dir.close()
        async with controlling(tmp_path / "run", access=place.access) as (_, port):
            found = RunFiles(tmp_path).controller()  # as the tools find it
            assert found is not None
            assert (await status(port, access_of(found))).state == "starting"

    asyncio.run(main())


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"tls.auto = true needs the extra `tls`: pip install 'flashrecovery\[tls\]'"):
        made(tmp_path, ("127.0.0.1",))


def test_without_the_key_there_is_no_tls(tmp_path: Path) -> None:
    config = RunConfig()
    assert with_tls(rendezvous_of(config), config, tmp_path).access.tls is None and not list(tmp_path.iterdir())
