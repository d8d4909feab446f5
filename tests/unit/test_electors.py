"""Which node leads when the controller is lost with its node: electors, majorities, votes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

import pytest

from flashrecovery.agent.controller_link.backoff import AGAIN_S, EAGER_S, next_attempt_s, next_question_s
from flashrecovery.agent.controller_link.session import ATTEMPT_S
from flashrecovery.agent.peers.election import AFTER_VOTE_S, TURN_S, Election
from flashrecovery.config import Timeouts
from flashrecovery.controller.service.elector_set import ElectorSet
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.takeover import QUIET
from flashrecovery.plan.membership.electors import Elector, Eligible, choose, first_version
from flashrecovery.plan.membership.leases import LOOK_S
from flashrecovery.plan.membership.membership import NodeStatus, Seen
from flashrecovery.plan.membership.quorum import Quorum
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
    return quorum.heard(lambda e: 0.0 if e.node in names else float("inf"), 1.0)


def settled(*names: str) -> Quorum:
    quorum = Quorum("a")
    assert quorum.changed(eligible(*names))
    for name in names:
        quorum.known(elector(name), quorum.version)
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
    assert not quorum.known(elector("a"), 2)
    assert not quorum.changed(eligible("a", "b", "d", "e", "f")), "one change at a time"
    assert not quorum.known(elector("b"), 1)
    assert not heard(quorum, "a", "d"), "an older version is not this one"
    assert not quorum.known(Elector("b", "b:1", "another life"), 2) and quorum.before
    assert not heard(quorum, "a", "d"), "an agent that was restarted is no elector: it remembers no vote"
    assert quorum.known(elector("b"), 2) and not quorum.before
    assert heard(quorum, "a", "d")


def test_two_nodes_are_left() -> None:
    quorum = settled("a", "b", "c")
    assert quorum.changed(eligible("a", "b")) and quorum.electors == ()
    assert not heard(quorum, "a")
    quorum.known(elector("a"), 2)
    quorum.known(elector("b"), 2)
    assert heard(quorum, "a")


def test_a_controller_whose_other_electors_were_all_started_again_decides() -> None:
    """No rank is left that could have been elected, or could be."""
    quorum = settled("a", "b", "c")
    ended = {"b", "c"}

    def age(e: Elector) -> float:
        return 0.0 if e.node == "a" else float("inf")

    assert quorum.heard(age, 1.0, lambda e: e.node in ended)
    assert quorum.changed(eligible("a", "b2", "c2"))
    assert quorum.known(elector("a"), 2, lambda e: e.node in ended) is False, "the new ones do not know of it"
    quorum.known(elector("b2"), 2, lambda e: e.node in ended)
    assert quorum.known(elector("c2"), 2, lambda e: e.node in ended) and not quorum.before
    ended.discard("c")
    assert not settled("a", "b", "c").heard(age, 1.0, lambda e: e.node in ended), "c may lead"


def test_a_new_term_begins_with_a_version_above_all_before() -> None:
    known = tuple(elector(n) for n in "abc")
    elected = Quorum.elected("b", 2, known, (), 0.0)
    assert elected.version > 10**6 and elected.version < Quorum.elected("b", 3, known, (), 0.0).version
    elected.renewed(7)
    assert elected.version == first_version(7) and elected.electors == known
    unsettled = Quorum.elected("b", 2, known, (elector("a"), elector("d"), elector("e")), 0.0)
    assert heard(unsettled, "a", "b", "d") and not heard(unsettled, "a", "b")


@dataclass
class Job:
    """What a set of electors looks at."""

    nodes: dict[str, NodeRecord]
    generation: int = 0

    @staticmethod
    def of(names: str) -> Job:
        registers = [pb.Register(node=n, host=n, peer_port=1, incarnation=f"{n}-life") for n in names]
        return Job({r.node: NodeRecord.of(r) for r in registers})


def elector_set(quorum: Quorum, job: Job) -> ElectorSet:
    return ElectorSet(quorum, cast(JobState, job), Timeouts())


def test_a_controller_decides_by_the_sending_of_what_its_electors_have_received() -> None:
    """Not by the arrival of what they send: that may have waited while this process stood still."""
    job = Job.of("abc")
    known = elector_set(settled("a", "b", "c"), job)
    known.echoed("a", 100.0)
    known.echoed("b", 100.0)
    known.echoed("c", 0.0)
    assert known.may_decide(100.3)
    known.echoed("b", 99.0)  # comes late
    assert known.may_decide(100.3) and not known.may_decide(100.5)
    assert not known.suspended(100.5) and known.suspended(100.8)
    known.echoed("a", 200.0)
    known.echoed("b", 200.0)
    job.nodes["b"].incarnation = "another life"
    assert not known.may_decide(200.1), "it remembers no vote"
    known.echoed("b", 200.0)
    assert not known.may_decide(200.1), "and is no elector"


def test_a_controller_that_has_named_no_electors_gets_no_newer_term() -> None:
    """It may have been started again, by the old command, while the others have elected another one."""
    assert not elector_set(Quorum("a"), Job.of("ab")).needs_newer(5, 10.0)


@pytest.mark.parametrize(("refusing", "renewed"), [("", True), ("c", True), ("bc", False)])
def test_a_newer_term_is_won_by_votes(refusing: str, renewed: bool) -> None:
    known = elector_set(settled("a", "b", "c"), Job.of("abc"))
    for name in "abc":
        known.echoed(name, 10.0)
    assert not known.needs_newer(1, 10.1) and not known.needs_newer(5, 99.0), "another one may have been elected"
    assert known.needs_newer(5, 10.1) and not known.needs_newer(5, 10.2), "one attempt at a time"

    async def ask(e: Elector, request: pb.VoteRequest) -> pb.VoteReply:
        assert (request.term, request.renews, request.candidate, request.version) == (6, 1, "a", 1)
        return pb.VoteReply(granted=e.node not in refusing)

    assert asyncio.run(known.renew(5, ask)) is renewed
    assert known.term == (6 if renewed else 1)


def test_after_a_vain_attempt_the_next_one_is_for_a_term_that_nobody_has_promised() -> None:
    """The node that asks for it has promised term 2, and no vote for term 3 counts twice."""
    known = elector_set(settled("a", "b", "c"), Job.of("abc"))
    agents = Nodes("abc").agents
    reached = {"a"}

    async def ask(e: Elector, request: pb.VoteRequest) -> pb.VoteReply:
        return agents[e.node].vote(request) if e.node in reached else pb.VoteReply(reason="no answer")

    assert not asyncio.run(known.renew(2, ask)) and agents["a"].promised == 3
    reached = {"a", "b"}
    assert asyncio.run(known.renew(2, ask)) and known.term == 4


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
            agent = Election(
                name,
                lambda n=name: f"{n}-life",  # type: ignore[misc]
                lambda n=name: self.silent_s.get(n, 9.0),  # type: ignore[misc]
                LEASE_S,
                lambda n=name: self.left.append(n),  # type: ignore[misc]
            )
            agent.learn(pb.Electors(term=1, version=1, electors=electors, leader="a"))
            self.agents[name] = agent

    def campaign(self, name: str) -> int | None:
        async def ask(e: Elector, request: pb.VoteRequest) -> pb.VoteReply:
            if e.node in self.cut or name in self.cut:
                return pb.VoteReply(reason="no answer")
            return self.agents[e.node].vote(request)

        return asyncio.run(self.agents[name].campaign(ask))


def test_a_majority_elects() -> None:
    nodes = Nodes("abc", cut={"a"})
    assert nodes.campaign("b") == 2
    assert nodes.left == ["b", "c"], "they serve the one before no more"
    assert nodes.campaign("c") == 3, "and another one later"


def test_nobody_is_elected_without_a_majority() -> None:
    nodes = Nodes("abcde", cut={"a", "d", "e"})
    assert nodes.campaign("b") is None


def test_nobody_is_elected_while_the_controller_is_heard() -> None:
    nodes = Nodes("abc", silent_s={"a": 0.1, "c": 0.1})
    assert nodes.campaign("b") is None
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


def test_the_controller_that_is_followed_gets_a_newer_term_once() -> None:
    nodes = Nodes("abc", silent_s={"b": 0.0})
    agent = nodes.agents["b"]

    def ask(term: int, candidate: str = "a", renews: int = 1) -> bool:
        request = pb.VoteRequest(
            term=term, version=1, candidate=candidate, voter="b", incarnation="b-life", renews=renews
        )
        return agent.vote(request).granted

    assert not ask(5, candidate="c") and not ask(5, renews=2), "another one"
    assert ask(5) and agent.promised == 5 and not nodes.left, "it goes on to follow it"
    assert not ask(5) and not ask(4), "once a term, and none below"
    assert not agent.follows(1, known=True) and agent.follows(5, known=True)
    assert ask(6)


def test_who_is_asked_in_vain_lets_go_of_a_controller_that_may_not_decide() -> None:
    nodes = Nodes("abc", silent_s={"c": 0.1}, cut={"a"})
    assert not nodes.agents["c"].is_wanted() and nodes.campaign("b") is None
    assert nodes.agents["c"].is_wanted()


def test_an_election_needs_both_majorities_while_a_change_is_not_settled() -> None:
    """The old electors b, c and the new ones a, d could else elect two controllers for one term."""
    nodes = Nodes("abcde")
    old = [pb.Elector(node=n, peer=f"{n}:1", incarnation=f"{n}-life") for n in "abc"]
    new = [pb.Elector(node=n, peer=f"{n}:1", incarnation=f"{n}-life") for n in "ade"]
    for name in "abcde":
        nodes.agents[name].learn(pb.Electors(term=1, version=1, electors=old, leader="a"))
    for name in "de":
        nodes.agents[name].learn(pb.Electors(term=1, version=2, electors=new, before=old, leader="a"))
    assert nodes.agents["d"].is_elector and not Nodes("bc").agents["b"].before
    nodes.cut = {"b", "c"}
    assert nodes.campaign("d") is None, "a, d and e are enough of the new ones, but not of the old ones"
    nodes.cut = {"a"}
    assert nodes.campaign("d") is not None


def test_a_new_elector_that_has_not_been_told_votes() -> None:
    """The change from a, b, c to a, b, d has been settled by a and b, and then a was lost."""
    nodes = Nodes("abcd", cut={"a", "c"})
    old = [pb.Elector(node=n, peer=f"{n}:1", incarnation=f"{n}-life") for n in "abc"]
    new = [pb.Elector(node=n, peer=f"{n}:1", incarnation=f"{n}-life") for n in "abd"]
    for name in "bcd":
        nodes.agents[name].learn(pb.Electors(term=1, version=1, electors=old, leader="a"))
    nodes.agents["b"].learn(pb.Electors(term=1, version=2, electors=new, leader="a"))
    assert not nodes.agents["d"].is_elector
    nodes.silent_s["d"] = 0.0
    assert nodes.campaign("b") is None, "it hears the controller"
    nodes.silent_s["d"] = 9.0
    assert nodes.campaign("b") == 2 and nodes.agents["d"].promised == 2
    again = pb.VoteRequest(term=2, version=2, candidate="c", voter="d", incarnation="d-life")
    assert not nodes.agents["d"].vote(again).granted, "once a term"
    same = pb.VoteRequest(term=3, version=1, candidate="c", voter="d", incarnation="d-life")
    assert not nodes.agents["d"].vote(same).granted, "of the electors that it knows it is none"


def test_who_has_voted_does_not_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes("abc", cut={"a"})
    assert nodes.campaign("b") == 2
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
        return await asyncio.wait_for(nodes.agents["b"].campaign(ask), 10)

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
            pause = next_question_s(NodeStatus.CUT_OFF, now, agent.turn_in(now), Timeouts())
            assert LOOK_S < pause <= Timeouts().node_silence_s or agent.turn(now + pause)
            now += pause + LOOK_S
        turns = [i for i in range(int(EAGER_S / TURN_S), int((EAGER_S + 20) / TURN_S)) if agent.turn(i * TURN_S)]
        assert sorted(set(stood)) == turns and (bool(turns) or name == "a")


def test_how_often_others_are_asked() -> None:
    limits, never = Timeouts(), float("inf")
    for node_status in NodeStatus:
        assert next_question_s(node_status, EAGER_S - 0.1, never, limits) == 0.0, "an election is under way"
    assert next_question_s(NodeStatus.MEMBER, 600.0, never, limits) == 0.0, "its workers step: see test_nodes.py"
    idle = next_question_s(NodeStatus.CUT_OFF, 600.0, never, limits)
    assert idle == next_question_s(NodeStatus.ORPHANED, 600.0, never, limits)
    assert next_attempt_s(600.0, limits, answered=True) == next_attempt_s(1.0, limits, answered=False) == AGAIN_S
    # A new controller waits for so long for agents that have not come yet.
    slowest = max(idle, next_attempt_s(600.0, limits, answered=False)) + ATTEMPT_S
    assert 10 * AGAIN_S >= idle > 5 * AGAIN_S and slowest < QUIET * limits.node_silence_s < limits.takeover_s


def test_only_an_elected_controller_is_followed_where_there_are_electors() -> None:
    agent = Nodes("abc").agents["b"]
    assert agent.follows(1, known=True)
    assert not agent.follows(1, known=False), "another one at the same address, which no one has elected"
    agent.learn(pb.Electors(term=1, version=2))
    assert agent.follows(1, known=False)


def test_a_term_that_others_have_told_of_is_not_forgotten_when_older_electors_are_named() -> None:
    """Its controller was elected again while the message was on its way (simulation, seed 1421)."""
    agent = Nodes("abc").agents["b"]
    agent.term = 3
    agent.learn(pb.Electors(term=1, version=2, leader="a"))
    assert (agent.term, agent.version) == (3, 2)


def test_the_newest_is_followed() -> None:
    agent = Nodes("abc").agents["b"]
    seen = [Seen("a", True), Seen("c", True, term=3, controller="c:9"), Seen("d", True, term=2, controller="d:9")]
    assert agent.newer(seen) == seen[1]
    assert agent.newer(seen[:1]) is None
