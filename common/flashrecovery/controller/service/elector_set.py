"""The controller's side of :mod:`flashrecovery.plan.membership.electors`: it names them, and decides only while they
hear it.

How long they have heard it is known by its own clock: they bring back the time at which it sent what they received.
That a message of theirs has arrived proves nothing; it may have waited while this process stood still, and its sender
have voted for another controller since.
"""

from __future__ import annotations

import asyncio

from flashrecovery import events as ev
from flashrecovery.config import Timeouts
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.membership.electors import Elector, Eligible
from flashrecovery.plan.membership.leases import decides_for_s
from flashrecovery.plan.membership.quorum import Quorum
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.vote import AskElector

_RENEWAL_S = 0.5
"""Seconds from one attempt to get a newer term to the next."""


class ElectorSet:
    """What ``quorum`` means for this job. ``now``: by :func:`flashrecovery.util.clock.lease_clock`."""

    def __init__(self, quorum: Quorum, job: JobState, limits: Timeouts) -> None:
        self._quorum = quorum
        self._job = job
        self._silence_s = limits.node_silence_s
        self._decides_s = decides_for_s(limits.node_silence_s)
        self._echoed: dict[tuple[str, str], float] = {}  # node, incarnation -> by this controller's clock
        self._renewed_at = float("-inf")
        self._promised = 0  # the newest term that an elector has named in its answer

    @property
    def term(self) -> int:
        return self._quorum.term

    @property
    def named(self) -> bool:
        """Whether there have been any electors."""
        return self._quorum.version > 0

    @property
    def voters(self) -> tuple[Elector, ...]:
        """The electors that have to know of a change of the electors before it is settled."""
        return self._quorum.voters

    def echoed(self, node: str, sent_at: float) -> None:
        """The agent of ``node`` has received what this controller sent at this time (0.0: nothing yet)."""
        record = self._job.nodes.get(node)
        if record is not None and record.alive and sent_at > 0.0:
            life = node, record.incarnation
            self._echoed[life] = max(self._echoed.get(life, 0.0), sent_at)

    def may_decide(self, now: float) -> bool:
        """Whether no other controller can have been elected meanwhile."""
        return self._heard(now, self._decides_s)

    def suspended(self, now: float) -> bool:
        """Whether the agents that still hear this controller should take it for lost."""
        return now >= self._quorum.until and not self._heard(now, self._silence_s)

    def known(self, node: str, version: int) -> bool:
        """``node`` knows the electors of this version. Whether a change is settled by it."""
        elector = next((e for e in self._quorum.voters if e.node == node and self._lives(e)), None)
        return elector is not None and self._quorum.known(elector, version, self._gone)

    def needs_newer(self, promised: int, now: float) -> bool:
        """Whether to ask for a newer term: an agent has voted for one that was not elected, for the others are here,
        and follows no older one."""
        if not self.named:
            return False  # no elector could vote: a restarted controller, perhaps while another is elected
        if promised <= self._quorum.term or now - self._renewed_at < _RENEWAL_S or not self.may_decide(now):
            return False
        self._renewed_at = now
        return True

    async def renew(self, promised: int, ask: AskElector) -> bool:
        """Have the electors vote for this controller, for a term in which no other one can have been elected: newer
        than ``promised``. Whether they have.

        Some may have granted the last attempt, which was not enough, and grant nothing more for its term: so each
        attempt is for a newer one than any elector has named.
        """
        quorum, version = self._quorum, self._quorum.version
        term = max(promised, quorum.term, self._promised) + 1

        async def granted(elector: Elector) -> Elector | None:
            request = pb.VoteRequest(
                term=term,
                version=version,
                candidate=quorum.leader,
                voter=elector.node,
                incarnation=elector.incarnation,
                renews=quorum.term,
            )
            reply = await ask(elector, request)
            self._promised = max(self._promised, reply.term)
            return elector if reply.granted else None

        votes = await asyncio.gather(*(granted(e) for e in quorum.voters))
        if quorum.version != version or quorum.term >= term or not quorum.agree({e for e in votes if e is not None}):
            return False  # the electors have changed meanwhile, or do not want it
        quorum.renewed(term)
        return True

    def changed(self) -> bool:
        """Whether the electors have changed, so that all agents must be informed."""
        if not self._quorum.may_change(self._lives):
            return False
        living = [n for n in self._job.nodes.values() if n.state in (NodeState.ACTIVE, NodeState.SPARE)]
        return self._quorum.changed([Eligible(Elector(n.name, n.peer, n.incarnation), n.domain) for n in living])

    def command(self) -> pb.Command:
        """The message to the agents."""
        q = self._quorum
        electors = [pb.Elector(node=e.node, peer=e.peer, incarnation=e.incarnation) for e in q.electors]
        before = [pb.Elector(node=e.node, peer=e.peer, incarnation=e.incarnation) for e in q.before]
        message = pb.Electors(term=q.term, version=q.version, electors=electors, leader=q.leader, before=before)
        return pb.Command(generation=self._job.generation, rank=AGENT, electors=message)

    def notice(self, *, suspended: bool) -> ev.Notice:
        """The notice for the log that the controller has lost, or has again, more than half of its electors."""
        lost = "are not heard: this controller decides nothing, and the workers are halted"
        text = lost if suspended else "are heard again"
        kind = NoticeKind.QUORUM_LOST if suspended else NoticeKind.QUORUM_HELD
        return ev.Notice(generation=self._job.generation, kind=kind, text=f"more than half of the electors {text}")

    def _lives(self, elector: Elector) -> bool:
        node = self._job.nodes.get(elector.node)
        return node is not None and node.incarnation == elector.incarnation and node.alive

    def _gone(self, elector: Elector) -> bool:
        """Whether its node has come with an agent that was started again."""
        node = self._job.nodes.get(elector.node)
        return node is not None and node.incarnation != elector.incarnation

    def _heard(self, now: float, within_s: float) -> bool:
        def age(elector: Elector) -> float:
            sent_at = self._echoed.get((elector.node, elector.incarnation), float("-inf"))
            return now - sent_at if self._lives(elector) else float("inf")

        return self._quorum.heard(age, within_s, self._gone)
