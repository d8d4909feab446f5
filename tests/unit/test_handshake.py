"""Who does not know the token gets nowhere, whatever they record, repeat, mix and change; who knows it gets through."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from flashrecovery.errors import AuthenticationError, StrangerError
from flashrecovery.rpc.handshake import NONCE_BYTES, Answer, Caller, Listener, Seal, Seals, job_key, joined

TOKEN = "the-token-of-this-test-job"
OTHER = "another-token-of-this-length"


def met(token: str = TOKEN, name: str = "controller") -> tuple[Caller, Listener]:
    """Both sides, after the handshake."""
    caller, listener = Caller(job_key(token), name), Listener(job_key(token), name)
    caller.accept(listener.answer(caller.nonce, 0.0))
    return caller, listener


def test_who_knows_the_token_gets_through() -> None:
    caller, listener = met()
    for what in (b"one call", b"another"):
        ticket, mine = caller.call(what)
        theirs = listener.admit(ticket, what, 1.0)
        assert theirs is not None
        for body in (b"", b"a", b"a" * 100_000):
            assert theirs.incoming.open(mine.outgoing.close(body)) == body
            assert mine.incoming.open(theirs.outgoing.close(body)) == body


@pytest.mark.parametrize("token", ["", OTHER, TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_a_listener_with_another_token_is_a_stranger(token: str) -> None:
    caller = Caller(job_key(TOKEN), "controller")
    with pytest.raises(StrangerError, match="does not know this job's token"):
        caller.accept(Listener(job_key(token), "controller").answer(caller.nonce, 0.0))
    with pytest.raises(AuthenticationError, match="not proven itself"):
        caller.call(b"what")


def test_a_service_of_the_job_is_not_taken_for_another_one() -> None:
    """Someone forwards the port of a dead agent to a living one, and would have it seem alive."""
    caller = Caller(job_key(TOKEN), "agent 10.0.0.1:5")
    said = Listener(job_key(TOKEN), "agent 10.0.0.2:5").answer(caller.nonce, 0.0)
    with pytest.raises(StrangerError, match=r"'agent 10\.0\.0\.2:5' of this job, and not 'agent 10\.0\.0\.1:5'"):
        caller.accept(said)
    with pytest.raises(StrangerError, match="does not know"):
        caller.accept(said._replace(name="agent 10.0.0.1:5"))


def test_an_own_answer_that_is_sent_back_proves_nothing() -> None:
    """What a service answers to a challenge is no answer for another challenge, also for one that it makes itself."""
    service = Listener(job_key(TOKEN), "controller")
    caller = Caller(job_key(TOKEN), "controller")
    for recorded in (service.answer(Caller(job_key(TOKEN), "controller").nonce, 0.0), Answer(b"", "controller", b"")):
        with pytest.raises(StrangerError):
            caller.accept(recorded)


def test_what_one_side_says_is_never_taken_for_the_other_sides() -> None:
    caller, listener = met()
    ticket, mine = caller.call(b"what")
    theirs = listener.admit(ticket, b"what", 0.0)
    assert theirs is not None
    with pytest.raises(AuthenticationError):
        mine.incoming.open(mine.outgoing.close(b"to myself"))
    with pytest.raises(AuthenticationError):
        theirs.incoming.open(theirs.outgoing.close(b"to myself"))


def test_a_ticket_opens_one_call_once() -> None:
    caller, listener = met()
    first, _ = caller.call(b"Status")
    second, _ = caller.call(b"Status")
    assert listener.admit(first, b"Inject", 0.0) is None
    assert listener.admit(first, b"Status", 0.0) is not None
    assert listener.admit(first, b"Status", 0.0) is None
    assert listener.admit(second, b"Status", 0.0) is not None
    assert listener.admit(first, b"Status", 0.0) is None
    assert Listener(job_key(TOKEN), "controller").admit(caller.call(b"Status")[0], b"Status", 0.0) is None


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0), (0, 1, 1), (0, 1, 3)])
def test_messages_come_once_and_in_their_order(order: tuple[int, ...]) -> None:
    """Also where they are all alike."""
    caller, listener = met()
    ticket, mine = caller.call(b"what")
    theirs = listener.admit(ticket, b"what", 0.0)
    assert theirs is not None
    said = [mine.outgoing.close(b"alike") for _ in range(4)]
    *right, wrong = order
    for i in right:
        assert theirs.incoming.open(said[i]) == b"alike"
    with pytest.raises(AuthenticationError, match="repeated or left out"):
        theirs.incoming.open(said[wrong])


def test_sessions_of_nobody_are_forgotten() -> None:
    listener = Listener(job_key(TOKEN), "controller", most=10)
    callers = [Caller(job_key(TOKEN), "controller") for _ in range(25)]
    for caller in callers:
        caller.accept(listener.answer(caller.nonce, 0.0))
    assert listener.sessions == 10
    assert listener.admit(callers[0].call(b"x")[0], b"x", 0.0) is None
    assert listener.admit(callers[-1].call(b"x")[0], b"x", 30.0) is not None
    assert listener.admit(callers[-1].call(b"x")[0], b"x", 30.1) is None
    assert listener.sessions == 0


@pytest.mark.parametrize("nonce", [b"", b"x", b"x" * (NONCE_BYTES - 1), b"x" * (NONCE_BYTES + 1), b"x" * 100_000])
def test_a_challenge_has_one_length(nonce: bytes) -> None:
    listener = Listener(job_key(TOKEN), "controller")
    with pytest.raises(AuthenticationError, match=f"{len(nonce)}"):
        listener.answer(nonce, 0.0)
    assert listener.sessions == 0


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_different_parts_never_read_alike(a: list[bytes], b: list[bytes]) -> None:
    assert (joined(*a) == joined(*b)) == (a == b)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_garbage_is_no_ticket_and_no_message(garbage: bytes) -> None:
    caller, listener = met()
    assert listener.admit(garbage, b"what", 0.0) is None
    ticket, _ = caller.call(b"what")
    theirs = listener.admit(ticket, b"what", 0.0)
    assert theirs is not None
    with pytest.raises(AuthenticationError):
        theirs.incoming.open(garbage)


def test_the_key_says_nothing_about_the_token_and_every_proof_is_another_one() -> None:
    listener = Listener(job_key(TOKEN), "controller")
    nonce = bytes(NONCE_BYTES)
    first, second = listener.answer(nonce, 0.0), listener.answer(nonce, 0.0)
    assert first.proof != second.proof and first.nonce != second.nonce
    assert TOKEN.encode() not in job_key(TOKEN) + first.proof


# -- any process that is between them ----------------------------------------------------------------------

NAMES = ("controller", "agent a:1")


@dataclass(eq=False)
class End:
    """One end of a call: what it has said, and how much of what the other end says it has taken."""

    seals: Seals
    said: list[bytes] = field(default_factory=list)
    taken: int = 0
    broken: bool = False
    other: End | None = None


@dataclass(frozen=True)
class Made:
    """An answer, by whom and for which challenge."""

    answer: Answer
    by: Listener
    nonce: bytes


@dataclass(frozen=True, eq=False)
class Ticket:
    bytes_: bytes
    what: bytes
    caller: Caller
    number: int
    end: End


class Network(RuleBasedStateMachine):
    """Someone carries everything between callers and listeners: to whom they like, as often and in whatever order they
    like, mixed and changed. They know another token, and use it."""

    answers = Bundle("answers")
    callers = Bundle("callers")
    tickets = Bundle("tickets")
    ends = Bundle("ends")
    messages = Bundle("messages")

    @initialize()
    def begin(self) -> None:
        drawn = count()

        def draw(size: int) -> bytes:  # so that a failure is found again
            return next(drawn).to_bytes(size, "big")

        self.draw = draw
        self.listeners = {
            (token, name): Listener(job_key(token), name, draw) for token in (TOKEN, OTHER) for name in NAMES
        }
        self.met: dict[Caller, Listener] = {}
        self.admitted: dict[Caller, int] = {}

    @rule(target=callers, name=st.sampled_from(NAMES))
    def dial(self, name: str) -> Caller:
        return Caller(job_key(TOKEN), name, self.draw)

    @rule(target=answers, caller=callers, token=st.sampled_from((TOKEN, OTHER)), name=st.sampled_from(NAMES))
    def hello(self, caller: Caller, token: str, name: str) -> Made:
        listener = self.listeners[token, name]
        return Made(listener.answer(caller.nonce, 0.0), listener, caller.nonce)

    @rule(caller=callers, a=answers, b=answers, c=answers)
    def answer_mixed(self, caller: Caller, a: Made, b: Made, c: Made) -> None:
        said = Answer(a.answer.nonce, b.answer.name, c.answer.proof)
        right = self.listeners[TOKEN, caller._name]
        true = any(said == made.answer and made.by is right and made.nonce == caller.nonce for made in (a, b, c))
        if caller in self.met:
            return
        if not true:
            with pytest.raises(StrangerError):
                caller.accept(said)
            return
        caller.accept(said)
        self.met[caller] = right

    @rule(caller=callers, made=answers)
    def answer(self, caller: Caller, made: Made) -> None:
        self.answer_mixed(caller, made, made, made)

    @rule(target=tickets, caller=callers, what=st.sampled_from((b"Status", b"Inject")))
    def call(self, caller: Caller, what: bytes) -> Ticket | None:
        if caller not in self.met:
            return None
        ticket, seals = caller.call(what)
        return Ticket(ticket, what, caller, caller._calls, End(seals))

    @rule(
        target=ends,
        ticket=tickets,
        what=st.sampled_from((b"Status", b"Inject")),
        token=st.sampled_from((TOKEN, OTHER)),
        name=st.sampled_from(NAMES),
        flip=st.one_of(st.none(), st.integers(0, 8 * 56 - 1)),
    )
    def admit(self, ticket: Ticket | None, what: bytes, token: str, name: str, flip: int | None) -> End | None:
        if ticket is None:
            return None
        listener = self.listeners[token, name]
        found = listener.admit(flipped(ticket.bytes_, flip), what, 0.0)
        fresh = ticket.number > self.admitted.get(ticket.caller, 0)
        right = listener is self.met[ticket.caller] and what == ticket.what and flip is None and fresh
        assert (found is not None) == right
        if found is None:
            return None
        self.admitted[ticket.caller] = ticket.number
        end = End(found, other=ticket.end)
        ticket.end.other = end
        return end

    @rule(target=messages, end=ends, body=st.binary(max_size=3), here=st.booleans())
    def say(self, end: End | None, body: bytes, here: bool) -> bytes:
        if end is None:
            return b""
        speaker = end if here else end.other
        assert speaker is not None
        speaker.said.append(speaker.seals.outgoing.close(body))
        return speaker.said[-1]

    @rule(end=ends, message=messages, here=st.booleans(), flip=st.one_of(st.none(), st.integers(0, 8 * 16 - 1)))
    def hear(self, end: End | None, message: bytes, here: bool, flip: int | None) -> None:
        hearer = end if end is None or here else end.other
        if hearer is None or hearer.broken or not message:
            return
        assert hearer.other is not None
        given_ = flipped(message, flip)
        expected = hearer.other.said[hearer.taken : hearer.taken + 1]
        if [given_] == expected:
            assert hearer.seals.incoming.open(given_) == given_[16:]
            hearer.taken += 1
            return
        with pytest.raises(AuthenticationError):
            hearer.seals.incoming.open(given_)
        hearer.broken = True  # the call is given up


def flipped(data: bytes, bit: int | None) -> bytes:
    """With one bit changed."""
    if bit is None or not data:
        return data
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_seals_of_two_keys_differ() -> None:
    assert Seal(b"a").close(b"body") != Seal(b"b").close(b"body")
