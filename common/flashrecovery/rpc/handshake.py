"""How two sides show each other that they know the job's token, and seal what they then say. Pure: no I/O, no clock.

The token itself is never sent, nor anything from which it could be taken but by guessing it. The caller sends a random
number (:class:`Caller`). The listener (:class:`Listener`) adds its own number and answers with a proof: an HMAC-SHA256
over both numbers and its own name. It proves first, so a stranger who listens learns nothing but a random number, and
its answer is good for this caller and this name only: what one service of the job says cannot be passed off as the word
of another one.

From token, name and both numbers both sides make the key of a *session*. Every call in it carries a ticket (its number
and an HMAC over number, method and metadata), with which the caller proves itself before anything of the call is
looked at; a number counts once, so a call that is sent again is refused. Every message of a call is sealed with an HMAC
under a key of this call and this direction, over its place in the call and its content: on the way it can be neither
changed, repeated, left out nor put elsewhere. What is not kept from others is its content (:mod:`.token`, TLS), and
that a connection can be cut.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from functools import lru_cache
from hashlib import pbkdf2_hmac
from typing import NamedTuple

from flashrecovery.errors import AuthenticationError, StrangerError

NONCE_BYTES = 32
_TAG_BYTES = 16
_NUMBER_BYTES = 8
_TICKET_BYTES = NONCE_BYTES + _NUMBER_BYTES + _TAG_BYTES
_ROUNDS = 100_000
"""Rounds of the key's derivation: an attacker who has recorded a proof and guesses the token pays for them with each
guess."""
_BEGIN_S = 30.0
"""A session's calls must begin within this time; they may last for as long as they like."""
_MOST_SESSIONS = 1 << 16
"""Kept at a time, some hundred bytes each; the oldest go first. Anybody can begin one."""

Draw = Callable[[int], bytes]


@lru_cache(maxsize=16)
def job_key(token: str) -> bytes:
    """The key that stands for the token everywhere."""
    return pbkdf2_hmac("sha256", token.encode(), b"flashrecovery job token", _ROUNDS)


class Answer(NamedTuple):
    """A listener's answer to a caller's random number. ``name``: that of the service."""

    nonce: bytes
    name: str
    proof: bytes


class Seal:
    """One direction of one call, at one of its ends: makes the seals or checks them, in order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._place = 0

    def _next_tag(self, body: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(self._place.to_bytes(_NUMBER_BYTES, "big"))
        keyed.update(body)
        self._place += 1
        return keyed.digest()[:_TAG_BYTES]

    def close(self, body: bytes) -> bytes:
        """The sealed message."""
        return self._next_tag(body) + body

    def open(self, message: bytes) -> bytes:
        """The content of ``message``. Raises AuthenticationError if it is not the other side's next message."""
        body = message[_TAG_BYTES:]
        if not hmac.compare_digest(self._next_tag(body), message[:_TAG_BYTES]):
            raise AuthenticationError("a message was changed on its way, repeated or left out")
        return body


class Seals(NamedTuple):
    """The seals of one call, at one of its ends."""

    outgoing: Seal
    incoming: Seal


class Caller:
    """The side that dials. ``name``: of the service that is to listen there."""

    def __init__(self, key: bytes, name: str, draw: Draw = secrets.token_bytes) -> None:
        self._key = key
        self._name = name
        self._session = b""
        self._nonce = b""
        self._calls = 0
        self.nonce = draw(NONCE_BYTES)

    def accept(self, answer: Answer) -> None:
        """The listener's answer; after it, calls can be made.

        Raises:
            StrangerError: it does not know the token, or is another service than the one that is called.
        """
        transcript = _transcript(answer.name, self.nonce, answer.nonce)
        if len(answer.nonce) != NONCE_BYTES or not hmac.compare_digest(_proof(self._key, transcript), answer.proof):
            raise StrangerError("it does not know this job's token: another job's, most likely")
        if answer.name != self._name:
            raise StrangerError(f"it is {answer.name!r} of this job, and not {self._name!r}")
        self._nonce, self._session = answer.nonce, _session_key(self._key, transcript)

    def call(self, what: bytes) -> tuple[bytes, Seals]:
        """The next call's ticket and seals. ``what`` is called: method and metadata."""
        if not self._session:
            raise AuthenticationError("the listener has not proven itself yet")
        self._calls += 1
        number = self._calls.to_bytes(_NUMBER_BYTES, "big")
        ticket = self._nonce + number + _ticket_tag(self._session, number, what)
        up, down = _call_keys(self._session, number, what)
        return ticket, Seals(Seal(up), Seal(down))


class _Session:
    __slots__ = ("began", "key", "last")

    def __init__(self, key: bytes, began: float) -> None:
        self.key = key
        self.began = began
        self.last = 0


class Listener:
    """The side that is called. Times are seconds of any clock that only rises."""

    def __init__(self, key: bytes, name: str, draw: Draw = secrets.token_bytes, most: int = _MOST_SESSIONS) -> None:
        self._key = key
        self._draw = draw
        self._most = most
        self._sessions: dict[bytes, _Session] = {}  # the oldest first
        self.name = name

    def listen_as(self, name: str) -> None:
        """Callers know it by this name from now on."""
        self.name = name

    def answer(self, nonce: bytes, now: float) -> Answer:
        """The answer to a caller's random number. Raises AuthenticationError if ``nonce`` is none."""
        if len(nonce) != NONCE_BYTES:
            raise AuthenticationError(f"a challenge has {NONCE_BYTES} bytes, and not {len(nonce)}")
        self._forget(now)
        own = self._draw(NONCE_BYTES)
        transcript = _transcript(self.name, nonce, own)
        self._sessions[own] = _Session(_session_key(self._key, transcript), now)
        return Answer(own, self.name, _proof(self._key, transcript))

    def admit(self, ticket: bytes, what: bytes, now: float) -> Seals | None:
        """The seals of a call with this ticket; None: refused. A ticket opens once, in the order of their numbers."""
        self._forget(now)
        nonce, number, tag = ticket[:NONCE_BYTES], ticket[NONCE_BYTES:-_TAG_BYTES], ticket[-_TAG_BYTES:]
        session = self._sessions.get(nonce)
        if len(ticket) != _TICKET_BYTES or session is None:
            return None
        if not hmac.compare_digest(_ticket_tag(session.key, number, what), tag):
            return None
        if int.from_bytes(number, "big") <= session.last:
            return None
        session.last = int.from_bytes(number, "big")
        up, down = _call_keys(session.key, number, what)
        return Seals(Seal(down), Seal(up))

    @property
    def sessions(self) -> int:
        """How many are kept."""
        return len(self._sessions)

    def _forget(self, now: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions))
            if len(self._sessions) < self._most and now - self._sessions[oldest].began <= _BEGIN_S:
                return
            del self._sessions[oldest]


def joined(*parts: bytes) -> bytes:
    """The parts as one byte string, which can be taken apart in one way only."""
    return b"".join(len(p).to_bytes(4, "big") + p for p in parts)


def _transcript(name: str, caller: bytes, listener: bytes) -> bytes:
    return joined(b"flashrecovery 1", name.encode(), caller, listener)


def _proof(key: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, joined(b"listener proves", transcript), "sha256")


def _session_key(key: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, joined(b"session", transcript), "sha256")


def _ticket_tag(session: bytes, number: bytes, what: bytes) -> bytes:
    return hmac.digest(session, joined(b"ticket", number, what), "sha256")[:_TAG_BYTES]


def _call_keys(session: bytes, number: bytes, what: bytes) -> tuple[bytes, bytes]:
    """(of what the caller says, of what the listener says)"""
    up = hmac.digest(session, joined(b"caller says", number, what), "sha256")
    return up, hmac.digest(session, joined(b"listener says", number, what), "sha256")
