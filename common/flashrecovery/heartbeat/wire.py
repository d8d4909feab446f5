"""The datagrams: a header, the health of up to 25 ranks, and a keyed digest of both.

Every connection of an agent has its own key, derived from the job's token and a salt that the controller draws and
sends on the (sealed) stream: a datagram of another connection, job or controller never fits. Within a connection
the counter only rises: what comes again is dropped. Fixed-width fields, little-endian; nothing is parsed before the
digest has been checked.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.handshake import job_key

MAGIC = b"FRB4"
BEAT = 1
"""Agent to controller."""
ANSWER = 2
"""Controller to agent; its counter is that of the heartbeat."""
ANSWERED = 1
"""Flag of a heartbeat: answers arrive, the controller need not beat on the stream as well."""
GONE = 2
"""Flag of an answer: the controller has no stream of this agent any more; the relay that carried it is lost."""
ECHO = 4
"""Flag of a heartbeat: it only brings an answer's ``stamp`` back, at once, and is not answered itself."""

_HEADER = struct.Struct("<4sBBHQQQQIdQ")
_TICKET = struct.Struct("<8xQ")
_RANK = struct.Struct("<IIqQqffffeeHB")
_DIGEST_BYTES = 16
_RANKS = 25
LIMIT = _HEADER.size + _RANKS * _RANK.size + _DIGEST_BYTES
"""Bytes of the largest datagram; below every usual MTU, so that none is fragmented."""
_NOTHING_KEPT = 0xFFFF
_LONGEST_S = 65504.0
"""The largest number of two bytes."""
_SHORTEST = _HEADER.size + _DIGEST_BYTES


class Stream(Protocol):
    """The :class:`~flashrecovery.runtime.link.Link` whose acknowledgements the datagrams carry. A
    protocol, as it lies above."""

    @property
    def sent(self) -> int:
        """Number of the newest message."""

    @property
    def received(self) -> int:
        """Number of the newest message from the other side."""

    def acknowledge(self, number: int) -> None:
        """The other side has got everything up to this one."""


class Header(NamedTuple):
    """What every datagram says.

    Attributes:
        ticket: names the connection.
        counter: of the heartbeat, rising.
        received, sent: newest message number of the stream that the sender has got, and has sent.
        stamp: of an answer: when it was sent, by the controller's clock. Of a heartbeat: the newest that has arrived,
            0.0 for none.
        tokens: of a step, see ``Heartbeat.tokens_per_step``.
    """

    magic: bytes
    kind: int
    flags: int
    ranks: int
    ticket: int
    counter: int
    received: int
    sent: int
    generation: int
    stamp: float = 0.0
    tokens: int = 0


class DatagramSeal:
    """Makes and checks the datagrams of one connection."""

    def __init__(self, token: str, salt: bytes) -> None:
        secret = job_key(token)
        key = hashlib.blake2b(salt, digest_size=32, key=secret, person=b"frecovery-beats").digest()
        self._keyed = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key)

    def _digest(self, body: bytes | memoryview) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(body)
        return keyed.digest()

    def close(self, header: Header, ranks: bytes = b"") -> bytes:
        """The datagram."""
        body = _HEADER.pack(*header) + ranks
        return body + self._digest(body)

    def open(self, datagram: bytes, kind: int) -> Header | None:
        """The header of an intact datagram of this kind; None for any other."""
        body = memoryview(datagram)[:-_DIGEST_BYTES]
        if not _SHORTEST <= len(datagram) <= LIMIT or not hmac.compare_digest(
            self._digest(body), datagram[-_DIGEST_BYTES:]
        ):
            return None
        header = Header._make(_HEADER.unpack_from(datagram))
        whole = len(datagram) == _SHORTEST + header.ranks * _RANK.size
        return header if header.magic == MAGIC and header.kind == kind and whole else None


def ticket_of(datagram: bytes) -> int | None:
    """The connection to which a datagram says it belongs; None if it cannot be a datagram of ours. Nothing is checked
    yet."""
    if not _SHORTEST <= len(datagram) <= LIMIT or not datagram.startswith(MAGIC):
        return None
    ticket: int = _TICKET.unpack_from(datagram)[0]
    return ticket


def pack_ranks(ranks: Iterable[pb.RankHealth]) -> list[tuple[int, bytes]]:
    """(number of ranks, bytes) for each datagram that they need; one of no ranks if there are none."""
    packed = [
        _RANK.pack(
            r.rank,
            r.pid,
            r.tag,
            r.progress,
            r.committed,
            r.progress_age_s,
            r.step_s,
            r.own_s,
            r.own_least_s,
            min(r.overhead_s, _LONGEST_S),
            min(r.kept_age_s, _LONGEST_S),
            _behind(r),
            r.work,
        )
        for r in ranks
    ]
    parts = [packed[i : i + _RANKS] for i in range(0, len(packed), _RANKS)] or [[]]
    return [(len(part), b"".join(part)) for part in parts]


def unpack_ranks(datagram: bytes) -> Iterator[pb.RankHealth]:
    """The ranks of a datagram that :meth:`DatagramSeal.open` has accepted."""
    for (
        rank,
        pid,
        tag,
        progress,
        committed,
        age_s,
        step_s,
        own_s,
        own_least_s,
        overhead_s,
        kept_age_s,
        behind,
        work,
    ) in _RANK.iter_unpack(memoryview(datagram)[_HEADER.size : -_DIGEST_BYTES]):
        yield pb.RankHealth(
            rank=rank,
            pid=pid,
            tag=tag,
            progress=progress,
            committed=committed,
            progress_age_s=age_s,
            step_s=step_s,
            own_s=own_s,
            own_least_s=own_least_s,
            overhead_s=overhead_s,
            kept=0 if behind == _NOTHING_KEPT else committed + 1 - behind,
            kept_age_s=kept_age_s,
            work=work,
        )


def _behind(rank: pb.RankHealth) -> int:
    """How far the copy that this rank keeps is behind its own version; one that is ahead counts as up to date."""
    return min(max(rank.committed + 1 - rank.kept, 0), _NOTHING_KEPT - 1) if rank.kept else _NOTHING_KEPT
