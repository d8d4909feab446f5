"""Who leads when the controller is lost with its node: electors, majorities, votes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from flashrecovery.agent.lease import Standing
from flashrecovery.agent.patience import AGAIN_S, EAGER_S, LOOK_S, next_attempt_s, next_question_s
from flashrecovery.agent.peers import Seen
from flashrecovery.agent.session import ATTEMPT_S
from flashrecovery.agent.succession import AFTER_VOTE_S, TURN_S, Succession
from flashrecovery.config import Timeouts
from flashrecovery.controller.quorum import Quorum
from flashrecovery.controller.takeover import QUIET
from flashrecovery.plan.electors import Elector, Eligible, choose
from flashrecovery.proto import flashrecovery_pb2 as pb

LEASE_S = 0.4


def elector(name: str) -> Elector:
    return Elector(name, f"{name}:1", f"{name}-life")


def eligible(*names: str) -> list[Eligible]:
    """``a`` or ``a@switch``."""
    parts = [n.partition("@") for n in names]
    return [Eligible(elector(name), domain or name) for name, _, domain in parts]


# -- who they are ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a b", ""),
        ("a b c", "a b c"),
        ("a b c d", "a b c"),
        ("a b c d e f g", "a b c d e"),
        ("b c d", ""),  # the leader is no node of the job
        ("a@x b@x c@x d@y e@z f@x", "a d e b c"),
    ],
)
def test_choice(nodes: str, expected: str) -> None:
    assert [e.node for e in choose(eligible(*nodes.split()), "a")] == expected.split()


def test_who_is_elector_stays_it() -> None:
    present = choose(eligible("a", "x", "y"), "a")
    assert {e.node for e in choose(eligible("a", "b", "c", "x", "y"), "a", present)} == {"a", "b", "c", "x", "y"}
    assert {e.node for e in choose(eligible("a", "b", "x", "y"), "a", present)} == {"a", "x", "y"}


# -- the controller's side ------------------------------------------------------------------------


def heard(quorum: Quorum, *names: str) -> bool:
    return quorum.heard(lambda node: 0.0 if node in names else float("inf"), 1.0)


def settled(*names: str) -> Quorum:
    quorum = Quorum("a")
    assert quorum.changed(eligible(*names))
    for name in names:
        quorum.known(name, quorum.version)
    return quorum


def test_more_than_half_decide() -> None:
    quorum = settled("a", "b", "c")
    assert heard(quorum, "a", "b") and not heard(quorum, "a") and not heard(quorum, "x", "y")


def test_without_electors_a_controller_decides_alone() -> None:
    assert heard(Quorum("")) and not Quorum("").changed(eligible("a", "b", "c"))
    assert heard(Quorum("a")) and not Quorum("a").changed(eligible("a", "b"))


def test_a_change_needs_both_majorities_until_both_know() -> None:
    quorum = settled("a", "b", "c")
    assert quorum.changed(eligible("a", "b", "d"))  # c is lost
    assert heard(quorum, "a", "b") and not heard(quorum, "a", "d")
    quorum.known("a", 2)
    assert not quorum.changed(eligible("a", "b", "d", "e", "f")), "one change at a time"
    quorum.known("b", 1)
    assert not heard(quorum, "a", "d"), "an older version is not this one"
    quorum.known("b", 2)
    assert heard(quorum, "a", "d")


def test_two_nodes_are_left() -> None:
    quorum = settled("a", "b", "c")
    assert quorum.changed(eligible("a", "b")) and quorum.electors == ()
    assert not heard(quorum, "a")
    quorum.known("a", 2)
    quorum.known("b", 2)
    assert heard(quorum, "a")


# -- the agents' side -----------------------------------------------------------------------------


@dataclass
class Nodes:
    """Agents that may hear the controller, and each other."""

    names: str
    silent_s: dict[str, float] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        electors = [pb.Elector(node=n, peer=f"{n}:1", incarnation=f"{n}-life") for n in self.names]
        self.agents = {}
        for name in self.names:
            agent = Succession(
                name,
                lambda n=name: f"{n}-life",  # type: ignore[misc]
                lambda n=name: self.silent_s.get(n, 9.0),  # type: ignore[misc]
                LEASE_S,
                lambda n=name: self.left.append(n),  # type: ignore[misc]
            )
            agent.learn(pb.Electors(term=1, version=1, electors=electors, leader="a"))
            self.agents[name] = agent

    def stand(self, name: str) -> int | None:
        async def ask(e: Elector, request: pb.VoteRequest) -> pb.VoteReply:
            if e.node in self.cut or name in self.cut:
                return pb.VoteReply(reason="no answer")
            return self.agents[e.node].vote(request)

        return asyncio.run(self.agents[name].stand(ask))


def test_a_majority_elects() -> None:
    nodes = Nodes("abc", cut={"a"})
    assert nodes.stand("b") == 2
    assert nodes.left == ["b", "c"], "they serve the one before no more"
    assert nodes.stand("c") == 3, "and another one later"


def test_nobody_is_elected_without_a_majority() -> None:
    nodes = Nodes("abcde", cut={"a", "d", "e"})
    assert nodes.stand("b") is None


def test_nobody_is_elected_while_the_controller_is_heard() -> None:
    nodes = Nodes("abc", silent_s={"a": 0.1, "c": 0.1})
    assert nodes.stand("b") is None
    assert not nodes.left and nodes.agents["b"].promised == 0 and nodes.agents["b"].follows(1, known=True), (
        "it can go back"
    )


def test_a_vote_is_given_once_a_term() -> None:
    agent = Nodes("abc").agents["c"]

    def request(**values: object) -> pb.VoteRequest:
        return pb.VoteRequest(**{"term": 2, "version": 1, "voter": "c", "incarnation": "c-life", **values})  # type: ignore[arg-type]

    assert agent.vote(request(preliminary=True)).granted
    assert not agent.vote(request(incarnation="an earlier life")).granted
    assert not agent.vote(request(version=0)).granted
    assert agent.vote(request(candidate="b")).granted
    assert not agent.vote(request(candidate="a")).granted
    assert not agent.follows(1, known=True) and agent.follows(2, known=False)


def test_who_has_voted_does_not_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes("abc", cut={"a"})
    assert nodes.stand("b") == 2
    voter = nodes.agents["c"]
    assert not voter.turn(TURN_S), "it is its turn, but b has just been elected"
    now = time.monotonic()
    waits_s = voter.turn_in(TURN_S)
    assert AFTER_VOTE_S - 1 < waits_s <= AFTER_VOTE_S, "no longer than it must: then it is its turn again"
    assert voter.turn_in(TURN_S / 2) == pytest.approx(AFTER_VOTE_S + TURN_S / 2, abs=0.1), "it is not: the next one"
    monkeypatch.setattr(time, "monotonic", lambda: now + AFTER_VOTE_S)
    assert voter.turn(TURN_S) and voter.turn_in(TURN_S) == 2 * TURN_S


def test_an_election_does_not_wait_for_who_is_frozen() -> None:
    nodes = Nodes("abcde")

    async def ask(e: Elector, request: pb.VoteRequest) -> pb.VoteReply:
        if e.node in "ad":
            await asyncio.sleep(60)
        return nodes.agents[e.node].vote(request)

    async def elect() -> int | None:
        return await asyncio.wait_for(nodes.agents["b"].stand(ask), 10)

    assert asyncio.run(elect()) == 2


def test_they_stand_one_after_the_other() -> None:
    nodes = Nodes("abc")
    at = {name: [i for i in range(6) if a.turn(i * TURN_S)] for name, a in nodes.agents.items()}
    assert at == {"a": [], "b": [0, 2, 4], "c": [1, 3, 5]}


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_who_looks_less_often_misses_no_turn(names: str) -> None:
    nodes = Nodes(names)
    for name, agent in nodes.agents.items():
        stood, now = [], EAGER_S
        while now < EAGER_S + 20:
            stood += [int(now / TURN_S)] if agent.turn(now) else []
            pause = next_question_s(Standing.CUT_OFF, now, agent.turn_in(now), Timeouts())
            assert LOOK_S < pause <= Timeouts().node_silence_s or agent.turn(now + pause)
            now += pause + LOOK_S
        turns = [i for i in range(int(EAGER_S / TURN_S), int((EAGER_S + 20) / TURN_S)) if agent.turn(i * TURN_S)]
        assert sorted(set(stood)) == turns and (bool(turns) or name == "a")


def test_how_often_others_are_asked() -> None:
    limits, never = Timeouts(), float("inf")
    for standing in Standing:
        assert next_question_s(standing, EAGER_S - 0.1, never, limits) == 0.0, "an election is under way"
    assert next_question_s(Standing.MEMBER, 600.0, never, limits) == 0.0, "its workers step: see test_nodes.py"
    idle = next_question_s(Standing.CUT_OFF, 600.0, never, limits)
    assert idle == next_question_s(Standing.ORPHANED, 600.0, never, limits)
    assert next_attempt_s(600.0, limits, answered=True) == next_attempt_s(1.0, limits, answered=False) == AGAIN_S
    # A new controller waits for so long for agents that have not come yet.
    slowest = max(idle, next_attempt_s(600.0, limits, answered=False)) + ATTEMPT_S
    assert 10 * AGAIN_S >= idle > 5 * AGAIN_S and slowest < QUIET * limits.node_silence_s < limits.takeover_s


def test_only_an_elected_controller_is_followed_where_there_are_electors() -> None:
    agent = Nodes("abc").agents["b"]
    assert agent.follows(1, known=True)
    assert not agent.follows(1, known=False), "another one at the same address, which nobody has elected"
    agent.learn(pb.Electors(term=1, version=2))
    assert agent.follows(1, known=False)


def test_the_newest_is_followed() -> None:
    agent = Nodes("abc").agents["b"]
    seen = [Seen("a", True), Seen("c", True, term=3, controller="c:9"), Seen("d", True, term=2, controller="d:9")]
    assert agent.newer(seen) == seen[1]
    assert agent.newer(seen[:1]) is None
