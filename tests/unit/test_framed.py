"""Messages that are posted arrive whole, in their order, with their descriptors, and no process waits for the other
end."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from flashrecovery.runtime import framed
from flashrecovery.runtime.framed import Framed


def pair() -> tuple[socket.socket, socket.socket]:
    """Neither of them blocks."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_descriptors_may_be_closed_once_a_message_is_posted() -> None:
    """Also where the other end does not read yet, and there is more than the socket takes."""
    ours, theirs = pair()
    before = open_descriptors()
    sender, reader, whole = Framed(ours), Framed(theirs), []
    messages = [bytes([number]) * size for number, size in enumerate((3, 500_000, 0, 700_000, 9))]
    for number, message in enumerate(messages):
        read, write = os.pipe()
        all_sent = sender.post(message, (write,))
        assert all_sent is (number == 0)
        os.close(write)
        whole.append(read)
    assert not sender.flush(), "the other end has read nothing"
    arrived: list[bytes] = []
    while len(arrived) < len(messages):
        arrived += reader.arrived()
        all_sent = sender.flush()
    assert all_sent and arrived == messages and len(reader.descriptors) == len(messages)
    for number, (read, write) in enumerate(zip(whole, reader.descriptors, strict=True)):
        os.write(write, b"%d" % number)
        assert os.read(read, 9) == b"%d" % number, "each has come with its message"
        os.close(write)
        assert os.read(read, 9) == b"", "no other end of it is open"
        os.close(read)
    assert open_descriptors() == before
    ours.close()
    theirs.close()


def test_nothing_is_left_of_what_is_dropped() -> None:
    ours, theirs = pair()
    before = open_descriptors()
    sender = Framed(ours)
    for _ in range(3):
        sender.post(bytes(500_000), (0, 1))
    assert open_descriptors() > before
    sender.drop()
    assert open_descriptors() == before and sender.flush()
    ours.close()
    theirs.close()


def test_the_other_end_is_gone() -> None:
    ours, theirs = pair()
    theirs.close()
    before = open_descriptors()
    sender = Framed(ours)
    with pytest.raises(BrokenPipeError):
        sender.post(b"x", (0, 1))
    assert open_descriptors() == before and sender.flush()
    ours.close()


def too_many(*_: object) -> int:
    raise OSError(errno.ETOOMANYREFS, "no room")


def test_a_message_that_finds_no_room_is_sent_neither_now_nor_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    before = open_descriptors()
    sender, reader = Framed(ours), Framed(theirs)
    with monkeypatch.context() as patched:
        patched.setattr(framed.socket, "send_fds", too_many)
        with pytest.raises(OSError, match="no room"):
            sender.post(b"first", (0,))
    assert sender.post(b"second", (0,)) and reader.arrived() == [b"second"]
    os.close(reader.descriptors.pop())
    assert open_descriptors() == before
    ours.close()
    theirs.close()


def test_a_message_that_is_cut_off_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came after it would be read as its end."""
    ours, theirs = pair()
    reader = Framed(theirs)

    class NoRoom(socket.socket):
        def send(self, *_: object) -> int:
            raise OSError(errno.ENOBUFS, "no room")

    no_room = NoRoom(fileno=ours.detach())
    sender = Framed(no_room)
    with monkeypatch.context() as patched:
        patched.setattr(framed.socket, "send_fds", lambda sock, *rest: socket.socket.send(sock, rest[0][0][:2]))
        with pytest.raises(OSError, match="no room"):
            sender.post(b"first", (0,))
    assert reader.arrived() == [], "two bytes"
    with pytest.raises(ConnectionResetError):
        reader.arrived()
    no_room.close()
    theirs.close()
