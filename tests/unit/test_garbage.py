"""Someone on the controller's or an agent's port who keeps to HTTP/2, and to nothing else: frames made by hand."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from flashrecovery.agent.peers.client import probe
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER
from flashrecovery.rpc.log_throttle import Seldom
from flashrecovery.rpc.message_auth import CHALLENGE_KEY, HELLO
from tests.support.peers import peer_service
from tests.unit.test_impostors import ACCESS, Job, controlling, until

_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PREFIX = "/flashrecovery.v1."


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def head(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a gRPC call, each spelled out."""
    usual = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    usual += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    return b"".join(b"\0" + bytes([len(n)]) + n + bytes([len(v)]) + v for n, v in (*usual, *more))


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))

    async def heard(self) -> dict[int, list[bytes]]:
        """What has come on stream 1 until its end, or the connection's: payloads by kind of frame."""
        found: dict[int, list[bytes]] = {}
        try:
            while True:
                size, kind, flags, stream = struct.unpack(">IBBI", b"\0" + await self._reader.readexactly(9))
                payload = await self._reader.readexactly(size)
                if kind == _SETTINGS and not flags & _ACK:
                    self.send(frame(_SETTINGS, _ACK, 0))
                if stream == 1:
                    found.setdefault(kind, []).append(payload)
                    if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                        return found
        except (asyncio.IncompleteReadError, ConnectionError):
            return found


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    one = Raw(reader, writer)
    one.send(_BEGIN, frame(_SETTINGS, 0, 0))
    try:
        yield one
    finally:
        writer.close()


async def called(
    port: int, path: bytes, *more: tuple[bytes, bytes], message: bytes | None = None
) -> dict[int, list[bytes]]:
    """What comes of a call; without a ``message`` it is begun and nothing of it is sent."""
    async with raw(port) as one:
        one.send(frame(_HEADERS, _END_HEADERS, 1, head(path, *more)))
        if message is not None:
            one.send(frame(_DATA, _END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message))
        return await asyncio.wait_for(one.heard(), 10)


@pytest.mark.parametrize("method", ["Who", "Session", "Trunk", "Status", "Inject"])
def test_a_stranger_is_refused_before_a_message_of_it_has_come(method: str, tmp_path: Path) -> None:
    """A unary call's request may have 256 MiB."""

    async def main() -> None:
        async with controlling(tmp_path / "run") as (_, port):
            found = await called(port, f"{PREFIX}Controller/{method}".encode())
            assert b"grpc-status" in found[_HEADERS][-1] and b"no proof" in found[_HEADERS][-1], found
            assert _DATA not in found

    asyncio.run(main())


@pytest.mark.parametrize("nonce", [b"n" * 32, b"", b"n" * 31, b"n" * 90])
def test_a_challenge_is_answered_before_a_message_has_come(nonce: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        async with controlling(tmp_path / "run") as (_, port):
            found = await called(port, HELLO.encode(), (CHALLENGE_KEY.encode(), b64encode(nonce)))
            if len(nonce) != 32:
                assert f"and not {len(nonce)}".encode() in found[_HEADERS][-1] and _DATA not in found
                return
            answer = pb.Answer.FromString(b"".join(found[_DATA])[5:])
            assert answer.name == CONTROLLER and len(answer.nonce) == len(answer.proof) == 32

    asyncio.run(main())


GARBAGE: dict[str, tuple[bytes, tuple[tuple[bytes, bytes], ...]]] = {
    "no text in a header": (f"{PREFIX}Controller/Status".encode(), ((b"flashrecovery-x", b"\xff\xfe"),)),
    "no text in a header's name": (f"{PREFIX}Controller/Status".encode(), ((b"flashrecovery-\xff", b"x"),)),
    "a ticket that is none": (f"{PREFIX}Controller/Status".encode(), ((b"flashrecovery-ticket-bin", b"AAAA"),)),
    "a greeting without a number": (HELLO.encode(), ()),
    "no text in the method": (b"/\xff\xfe/x", ()),
    "no method": (b"/", ()),
}


@pytest.mark.parametrize("path, more", GARBAGE.values(), ids=GARBAGE)
def test_garbage_does_no_harm_and_does_not_fill_the_log(
    path: bytes, more: tuple[tuple[bytes, bytes], ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The session of an agent goes on, others are let in, and at most one line of a kind is logged."""

    async def main() -> None:
        async with controlling(tmp_path / "run") as (service, port):
            job = Job(port)
            await until(lambda: service._agents.is_connected("a"))
            began = job.session._attempt
            for _ in range(20):
                await called(port, path, *more, message=b"\xff" * 40)
            service._agents.post("a", pb.Command(rank=0, keep_undo=pb.KeepUndo(step=1)))
            await until(lambda: "keep_undo" in job.agent.commands)
            assert job.session._attempt is began and not job.agent.halted
            async with ACCESS.dial(f"127.0.0.1:{port}", CONTROLLER, 5.0) as channel:
                await rpc.ControllerStub(channel).Status(pb.StatusRequest(), timeout=5)
            await job.stop()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    kinds = Counter((r.name, r.getMessage().split("(")[0][:60]) for r in caplog.records)
    assert not [kind for kind, count in kinds.items() if count > 1], kinds
    assert sum(kinds.values()) <= 5, kinds


def test_a_method_that_nobody_serves_ends_its_own_call_only() -> None:
    """grpcio (1.85) reads its name in the loop that takes every call, and ends with it if it is no text."""

    async def main() -> None:
        peers = peer_service(ACCESS)
        await peers.start("127.0.0.1")
        address = f"127.0.0.1:{peers.port}"
        try:
            for path in (b"/\xff", b"/", f"{PREFIX}Peer/None".encode(), f"{PREFIX}Controller/Status".encode()):
                found = await called(peers.port, path)
                assert b"CANCELLED" in found[_HEADERS][-1], found
                assert (await probe(address, ACCESS, 5.0)).reachable, path
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await rpc.ControllerStub(channel).Status(pb.StatusRequest(), timeout=5)
        finally:
            await peers.stop()

    asyncio.run(main())


def test_grpcs_core_says_nothing_of_malformed_headers(tmp_path: Path) -> None:
    """Its C++ part writes a line to stderr for each of them, which no logger sees."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flashrecovery.cli.main", "controller", "--bind", f"127.0.0.1:{port}"]
    command += ["--nnodes", "2", "--run-dir", str(tmp_path / "run")]
    with (tmp_path / "stderr").open("wb") as err:
        process = subprocess.Popen(command, stderr=err)
    try:
        asyncio.run(_malformed(port))
    finally:
        process.terminate()
        assert process.wait(20) is not None
    said = (tmp_path / "stderr").read_text().splitlines()
    assert len(said) <= 5, said[:20]


async def _malformed(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    for _ in range(30):
        await called(port, b"/x", (b"grpc-timeout", b"zzz"), (b"grpc-status", b"zz"))


def test_of_each_kind_one_line_a_minute_gets_through(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    logger = logging.getLogger("flashrecovery.tests.seldom")
    logger.addFilter(Seldom(60.0, lambda: now[0]))
    for second in range(0, 130, 10):
        now[0] = float(second)
        logger.error("cannot read %s", second)
        logger.error(ValueError(second))
        try:
            raise KeyError(second)
        except KeyError:
            logger.exception("cannot read %s", second)
    more = " (5 more since the last such line)"
    assert [r.getMessage() for r in caplog.records] == [
        *("cannot read 0", "0", "cannot read 0"),
        *(f"cannot read 60{more}", f"60{more}", f"cannot read 60{more}"),
        *(f"cannot read 120{more}", f"120{more}", f"cannot read 120{more}"),
    ]


def test_kinds_of_lines_that_strangers_make_up_do_not_add_up(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flashrecovery.tests.kinds")
    logger.addFilter(Seldom(60.0, lambda: 0.0))
    for number in range(10_000):
        logger.error(f"{number} is no number")
    assert 0 < len(caplog.records) <= 101
