"""Someone stands where a rank of the recovery's own group dials, dials where one listens, or reads along: they see no
secret, nothing that they have seen opens a connection, and the ranks go on.

Real backends on loopback, two in this process.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.groups.native_build import native
from flashrecovery.groups.torch_private import HashStore

MAGIC = b"STREAM02"
HELLO, ANSWER, PROOF = 32, 32, 16
"""Bytes: magic, number, rank, tag; number, proof; proof."""
LISTENS, DIALS = 1, 2
HOST = "127.0.0.1"
WAIT_S = 20.0
CONTENT = bytes(range(100, 164))
FORGED = struct.pack("=QQ", 0, len(CONTENT)) + bytes(len(CONTENT))
"""A message in its place. The first connection of a stream is the one that counts."""


class Pair:
    """Two ranks; rank 0 dials rank 1 in most of what follows."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.store = HashStore()
        wait = timedelta(seconds=wait_s)
        self.ranks = [native().sparse_backend(self.store, rank, 2, HOST, wait) for rank in (0, 1)]
        self.port = self.entry(1)[1]

    def entry(self, rank: int) -> tuple[bytes, int]:
        """Its secret, and where it listens."""
        said: bytes = self.store.get(str(rank))
        return said[:16], struct.unpack("=H", said[16:18])[0]

    def listens_at(self, rank: int, port: int) -> None:
        """Any process that has this port has taken the rank's place."""
        self.store.set(str(rank), self.entry(rank)[0] + struct.pack("=H", port) + HOST.encode())

    def sends(self, tag: int) -> Any:
        """Rank 0, to rank 1."""
        return self.ranks[0].send([tensor_of(CONTENT)], 1, tag)

    def receives(self, tag: int) -> None:
        got = torch.zeros(len(CONTENT), dtype=torch.uint8)
        self.ranks[1].recv([got], 0, tag).wait()
        assert got.numpy().tobytes() == CONTENT

    def talk(self, tag: int) -> None:
        work = self.sends(tag)
        self.receives(tag)
        work.wait()


@contextmanager
def pair(wait_s: float = WAIT_S) -> Iterator[Pair]:
    both = Pair(wait_s)
    try:
        yield both
    finally:
        both.ranks.clear()


def tensor_of(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def hello(nonce: bytes, rank: int, tag: int) -> bytes:
    return MAGIC + nonce + struct.pack("=Ii", rank, tag)


def proof(secret: bytes, said: bytes, answered: bytes, listener: int, side: int) -> bytes:
    made: bytes = native().siphash(secret, said + answered + struct.pack("=II", listener, side))
    return made


def dial(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), WAIT_S)


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if it ends before."""
    got = b""
    while len(got) < size:
        try:
            more = connection.recv(size - len(got))
        except ConnectionResetError:
            return got
        if not more:
            return got
        got += more
    return got


@dataclass
class Heard:
    """What both sides have said on one connection."""

    dialled: bytes = b""
    listened: bytes = b""


class Recorder(threading.Thread):
    """Passes everything on between what dials it and ``port``; keeps it before it does."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.heard: list[Heard] = []
        self._to = port
        self._door = socket.create_server((HOST, 0))
        self.port: int = self._door.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            here, _ = self._door.accept()
            there = dial(self._to)
            there.settimeout(None)
            self.heard.append(Heard())
            for who, source, sink in (("dialled", here, there), ("listened", there, here)):
                threading.Thread(target=self._carry, args=(self.heard[-1], who, source, sink), daemon=True).start()

    def _carry(self, heard: Heard, who: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(ConnectionError):
            while more := source.recv(1 << 16):
                setattr(heard, who, getattr(heard, who) + more)
                sink.sendall(more)
            sink.shutdown(socket.SHUT_WR)


def recorded(both: Pair, tag: int) -> Heard:
    """Rank 0 has sent to rank 1 with someone in between, who has noted this."""
    recorder = Recorder(both.entry(1)[1])
    both.listens_at(1, recorder.port)
    both.talk(tag)
    (heard,) = recorder.heard
    return heard


def test_who_reads_along_sees_no_secret() -> None:
    with pair() as both:
        secrets = [both.entry(rank)[0] for rank in (0, 1)]
        heard = recorded(both, 7)
        assert len(heard.dialled) == HELLO + PROOF + 16 + len(CONTENT) and len(heard.listened) == ANSWER
        assert heard.dialled.startswith(MAGIC) and heard.dialled.endswith(CONTENT)
        for said in (heard.dialled, heard.listened):
            assert not any(secret in said or secret[::-1] in said for secret in secrets)


def test_what_was_recorded_opens_nothing() -> None:
    """Neither as it is, nor with the listener's own proof in place of the dialler's, nor for another stream."""
    with pair() as both:
        secret, port = both.entry(1)
        heard = recorded(both, 7)
        said, dialled, answered = heard.dialled[:HELLO], heard.dialled[HELLO : HELLO + PROOF], heard.listened
        assert dialled == proof(secret, said, answered[:16], 1, DIALS), "the test knows how it is made"
        assert answered[16:] == proof(secret, said, answered[:16], 1, LISTENS)
        for later in (dialled + FORGED, answered[16:] + FORGED):
            for tag in (7, 8):
                with dial(port) as connection:
                    connection.sendall(hello(said[8:24], 0, tag) + later)
                    new = read(connection, ANSWER + 1)
                    assert len(new) == ANSWER and new[:16] != answered[:16], "its own number for each connection"
        both.talk(8)
        both.talk(7)


@contextmanager
def in_its_place(both: Pair) -> Iterator[socket.socket]:
    """An impostor's door, where rank 1 is said to listen."""
    with socket.create_server((HOST, 0)) as door:
        door.settimeout(WAIT_S)
        both.listens_at(1, door.getsockname()[1])
        yield door


def _answers(both: Pair, said: bytes, how: str) -> bytes:
    """Of one who does not know the secret, but may talk to those that do."""
    secret, _ = both.entry(1)
    drawn = os.urandom(16)
    if how == "garbage":
        return b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
    if how == "what it was told":
        return said
    if how == "the same number, and nothing":
        return said[8:24] + bytes(16)
    if how == "another's secret":
        return drawn + proof(os.urandom(16), said, drawn, 1, LISTENS)
    if how == "as the side that dials":
        return drawn + proof(secret, said, drawn, 1, DIALS)
    if how == "as another rank":
        return drawn + proof(secret, said, drawn, 0, LISTENS)
    assert how == "of another stream"
    with dial(both.port) as connection:  # rank 1 itself, asked under another tag
        connection.sendall(hello(said[8:24], 0, 99))
        return read(connection, ANSWER)


IMPOSTORS = (
    "garbage",
    "what it was told",
    "the same number, and nothing",
    "another's secret",
    "as the side that dials",
    "as another rank",
    "of another stream",
)


@pytest.mark.parametrize("how", IMPOSTORS)
def test_who_listens_in_a_ranks_place_gets_a_random_number_only(how: str) -> None:
    with pair() as both:
        secret, _ = both.entry(1)
        with in_its_place(both) as door:
            work = both.sends(3)
            connection, _ = door.accept()
            connection.settimeout(WAIT_S)
            said = read(connection, HELLO)
            assert said == hello(said[8:24], 0, 3) and secret not in said
            connection.sendall(_answers(both, said, how))
            assert read(connection, 1) == b"", "no proof, and nothing of what was to be sent"
            with pytest.raises(dist.DistBackendError, match="rank 1 did does not know its secret") as caught:
                work.wait()
            assert groups.is_communication_error(caught.value)
            connection.close()
        _other_way(both, 4)


def _other_way(both: Pair, tag: int) -> None:
    """Rank 1 to rank 0: what rank 0 has met as it dialled does not matter to what dials it."""
    work = both.ranks[1].send([tensor_of(CONTENT)], 0, tag)
    got = torch.zeros(len(CONTENT), dtype=torch.uint8)
    both.ranks[0].recv([got], 1, tag).wait()
    work.wait()
    assert got.numpy().tobytes() == CONTENT


def test_the_right_answer_is_taken() -> None:
    """The same impostor, if it knew the secret: what the others fail by is the proof, and nothing else."""
    with pair() as both, in_its_place(both) as door:
        secret, _ = both.entry(1)
        work = both.sends(3)
        connection, _ = door.accept()
        with connection:
            connection.settimeout(WAIT_S)
            said, drawn = read(connection, HELLO), os.urandom(16)
            connection.sendall(drawn + proof(secret, said, drawn, 1, LISTENS))
            assert read(connection, PROOF) == proof(secret, said, drawn, 1, DIALS)
            assert read(connection, 16 + len(CONTENT)) == struct.pack("=QQ", 0, len(CONTENT)) + CONTENT
        work.wait()


@pytest.mark.parametrize("silent", ["silent", "closes"])
def test_who_listens_and_says_nothing_keeps_nobody_for_ever(silent: str) -> None:
    with pair(0.3 if silent == "silent" else WAIT_S) as both, in_its_place(both) as door:
        work = both.sends(3)
        connection, _ = door.accept()
        with connection:
            if silent == "closes":
                connection.close()
            words = "timed out" if silent == "silent" else "reset"
            with pytest.raises(dist.DistBackendError, match=f"rank 1: Connection {words}"):
                work.wait()


def test_a_wait_for_an_impostors_answer_ends_with_the_group() -> None:
    with pair() as both, in_its_place(both) as door:
        work = both.sends(3)
        connection, _ = door.accept()
        with connection:
            assert len(read(connection, HELLO)) == HELLO
            both.ranks[0].abort()
            with pytest.raises(dist.DistBackendError, match="abandoned"):
                work.wait()


STRANGERS = {
    "no hello": lambda: bytes(HELLO),
    "the old one": lambda: b"STREAM01" + bytes(24),
    "no such rank": lambda: hello(bytes(16), 2, 0),
    "the listener's own rank": lambda: hello(bytes(16), 1, 0),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_no_answer_to_who_is_none_of_the_group(what: str) -> None:
    with pair() as both, dial(both.entry(1)[1]) as connection:
        connection.sendall(STRANGERS[what]())
        assert read(connection, 1) == b""
        both.talk(0)


def test_a_wrong_proof_closes_its_connection_only(capfd: pytest.CaptureFixture[str]) -> None:
    """Many at a time, while the ranks connect: each is refused, and the log has one line at most."""
    with pair() as both:
        secret, port = both.entry(1)
        waiting = []
        for number in range(40):
            connection = dial(port)
            said = hello(os.urandom(16), 0, 50 + number)
            connection.sendall(said)
            waiting.append((connection, said, read(connection, ANSWER)))
        both.talk(1)
        for number, (connection, said, answered) in enumerate(waiting):
            wrong = {
                0: os.urandom(PROOF),
                1: answered[16:],
                2: proof(secret, said, said[8:24], 1, DIALS),
                3: proof(secret, waiting[0][1], waiting[0][2][:16], 1, DIALS) if number else bytes(PROOF),
            }[number % 4]
            connection.sendall(wrong + FORGED)
            assert read(connection, 1) == b""
            connection.close()
            if number % 10 == 0:
                both.talk(100 + number)
        for number in range(40):
            both.talk(50 + number)
    assert capfd.readouterr().err.count("does not know this rank's secret") <= 1


def test_a_right_proof_opens_once_and_for_its_stream_only() -> None:
    """What knows the secret is the rank that it says; what it has proven is no proof on another connection."""
    with pair() as both:
        secret, port = both.entry(1)
        with dial(port) as connection:
            said = hello(os.urandom(16), 0, 5)
            connection.sendall(said)
            answered = read(connection, ANSWER)
            assert answered[16:] == proof(secret, said, answered[:16], 1, LISTENS)
            right = proof(secret, said, answered[:16], 1, DIALS)
            with dial(port) as other:
                other.sendall(said)
                assert read(other, ANSWER) != answered
                other.sendall(right + FORGED)
                assert read(other, 1) == b""
            connection.sendall(right + FORGED[:16] + CONTENT)
            both.receives(5)
