"""The controller's side of :mod:`flashrecovery.plan.electors`: it names them, and decides only while they hear it."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.config import Timeouts
from flashrecovery.controller.job_state import AGENT, JobState
from flashrecovery.controller.liveness import Liveness
from flashrecovery.controller.nodes import NodeState
from flashrecovery.controller.quorum import Quorum
from flashrecovery.plan.electors import Elector, Eligible
from flashrecovery.proto import flashrecovery_pb2 as pb

_FRESH = 0.5
"""Part of ``node_silence_s`` within which the electors must have been heard before anything is decided: if they were
cut off together with a silent node, they were heard hardly later than it."""


class Electorate:
    """What ``quorum`` means for this job. ``now``: CLOCK_MONOTONIC seconds."""

    def __init__(self, quorum: Quorum, job: JobState, liveness: Liveness, limits: Timeouts) -> None:
        self._quorum = quorum
        self._job = job
        self._liveness = liveness
        self._silence_s = limits.node_silence_s

    @property
    def term(self) -> int:
        return self._quorum.term

    @property
    def named(self) -> bool:
        """Whether there have been any electors."""
        return self._quorum.version > 0

    def may_decide(self, now: float) -> bool:
        """Whether nobody else can have been elected meanwhile."""
        return self._heard(now, _FRESH * self._silence_s)

    def suspended(self, now: float) -> bool:
        """Whether the agents that still hear this controller should take it for lost."""
        return now >= self._quorum.until and not self._heard(now, self._silence_s)

    def known(self, node: str, version: int) -> None:
        """``node`` knows the electors of this version."""
        self._quorum.known(node, version)

    def raised_to(self, promised: int, now: float) -> bool:
        """An agent has voted for one that was not elected, for the others are here. It follows no older term, so this
        controller takes that one; whether it did."""
        if promised <= self._quorum.term or not self.may_decide(now):
            return False
        self._quorum.term = promised
        return True

    def changed(self) -> bool:
        """Whether there are other electors now, of whom all agents must be told."""
        if not self._quorum.may_change(self._lives):
            return False
        living = [n for n in self._job.nodes.values() if n.state in (NodeState.ACTIVE, NodeState.SPARE)]
        return self._quorum.changed([Eligible(Elector(n.name, n.peer, n.incarnation), n.domain) for n in living])

    def command(self) -> pb.Command:
        """What the agents are told."""
        q = self._quorum
        electors = [pb.Elector(node=e.node, peer=e.peer, incarnation=e.incarnation) for e in q.electors]
        message = pb.Electors(term=q.term, version=q.version, electors=electors, leader=q.leader)
        return pb.Command(generation=self._job.generation, rank=AGENT, electors=message)

    def notice(self, *, suspended: bool) -> ev.Notice:
        """For the log."""
        text = "are not heard: nothing is decided here, and the workers are halted" if suspended else "are heard again"
        kind = "quorum_lost" if suspended else "quorum_held"
        return ev.Notice(generation=self._job.generation, kind=kind, text=f"more than half of the electors {text}")

    def _lives(self, elector: Elector) -> bool:
        node = self._job.nodes.get(elector.node)
        return node is not None and node.incarnation == elector.incarnation and node.alive

    def _heard(self, now: float, within_s: float) -> bool:
        nodes = self._job.nodes

        def age(node: str) -> float:
            return self._liveness.age(node, now) if node in nodes and nodes[node].alive else float("inf")

        return self._quorum.heard(age, within_s)
