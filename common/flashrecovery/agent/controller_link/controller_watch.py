"""What an agent does about a controller that it does not hear: this node's status, and which controller it is to
follow.

:mod:`flashrecovery.plan.membership.membership` says whether this node's workers may go on, and
:mod:`flashrecovery.agent.peers.election` whether there is another controller to follow, or this node has to become it.
The connection itself is made in :mod:`.session`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.backoff import next_question_s
from flashrecovery.agent.controller_link.lease import ControllerLease
from flashrecovery.agent.peers.client import Asking, probe_all, probe_port
from flashrecovery.agent.peers.election import Election
from flashrecovery.config import Timeouts
from flashrecovery.plan.membership.leases import LEASE_PROBE, LOOK_S
from flashrecovery.plan.membership.membership import NodeStatus, Port, Seen, lost, node_status, reach
from flashrecovery.rpc.channel import Access
from flashrecovery.rpc.vote import ask_elector
from flashrecovery.runtime.addresses import split_address

log = logging.getLogger("flashrecovery")

Lead = Callable[[Election, int], Awaitable[str]]
"""Start a controller here, which has been elected for this term; returns its address."""
Leave = Callable[[], Awaitable[None]]
"""Another node's controller is followed now: if there was one in this process, its time is over."""


class ControllerConnection(Protocol):
    """What the watch knows of the connection to the controller, and may do to it. A protocol, as the session that has
    it makes the watch (:class:`.session.ControllerSession`)."""

    @property
    def joined(self) -> bool:
        """Whether a controller has taken this agent in."""

    @property
    def suspended(self) -> bool:
        """Whether the controller is there, and does not know whether its electors still hear it."""

    @property
    def gathering(self) -> bool:
        """Whether the controller, for all that it has said, does not know the job yet."""

    @property
    def stranger(self) -> bool:
        """Whether another process answers at the controller's address."""

    def drop(self) -> None:
        """End it, so that a new one is made."""

    def drop_if_stuck(self, silent_s: float, *, port_accepts: bool) -> None:
        """End it if nothing can be hoped of it any more, after this silence."""

    def follow(self, term: int, address: str) -> None:
        """Go over to the controller of that term, which listens at ``address``."""


class ControllerWatch:
    """Keeps this node's status, lends the workers their time by it, and finds the controller to follow.

    Attributes:
        node_status: as of the last answer or the last questions.
        port: how the controller's port answered when it was asked last.
    """

    def __init__(
        self,
        agent: Agent,
        connection: ControllerConnection,
        hearing: ControllerLease,
        election: Election,
        access: Access,
        limits: Timeouts,
        lead: Lead,
        leave: Leave,
        *,
        alone: bool,
    ) -> None:
        """``alone``: there is one node only, whose workers need no lease."""
        self._agent = agent
        self._connection = connection
        self._hearing = hearing
        self._election = election
        self._access = access
        self._limits = limits
        self._lead, self._leave = lead, leave
        self._alone = alone
        self.node_status = NodeStatus.MEMBER
        self.port = Port.SILENT
        self._ask_at = 0.0
        self._lost_at: float | None = None

    async def run(self) -> None:
        """Ask others whenever the controller has been silent for a lease; for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._hearing.look_at_clock()
            silent_s = now - self._hearing.heard_at
            if not self._connection.joined or silent_s < self._limits.lease_s:
                self._ask_at = now
                continue
            if now >= self._ask_at:
                await self.ask()
                self._ask_at = now + next_question_s(self.node_status, silent_s, self._turn_in_s(), self._limits)
            self._connection.drop_if_stuck(silent_s, port_accepts=self.port is Port.ACCEPTS)

    def heard(self, when: float, *, gathering: bool = False) -> None:
        """The controller that is followed has answered something that was sent at that time. ``gathering``: it does
        not know the job yet."""
        self._hearing.heard(when, gathering=gathering)
        self._lost_at = None
        if self.node_status is NodeStatus.ORPHANED:
            self.node_status = NodeStatus.MEMBER
        elif self.node_status is NodeStatus.CUT_OFF and not self._hearing.in_doubt:
            self.node_status = NodeStatus.MEMBER
            self._agent.go_on()
        self.lend()

    def fenced(self) -> None:
        """The controller has taken this node's ranks away: the node starts again without a past."""
        self.node_status = NodeStatus.MEMBER

    def follows_another(self) -> None:
        """Another controller is followed from now on."""
        self._lost_at = None
        self._hearing.begin()

    def registers(self) -> None:
        """This node is about to come to a controller: the workers' time is made to end in time for that one."""
        self._hearing.registers()
        self.lend()

    def lend(self) -> None:
        """Tell the workers how long they may begin to change their state, whatever becomes of this agent."""
        if self._alone or not self._connection.joined:
            return
        until = self._hearing.lent_until()
        if until > float("-inf"):
            self._agent.lend(until)

    def _turn_in_s(self) -> float:
        """Seconds until this node may stand for election the next time."""
        return float("inf") if self._lost_at is None else self._election.turn_in(time.monotonic() - self._lost_at)

    async def ask(self) -> None:
        """Find out this node's status, and which controller it follows."""
        asked_at = self._hearing.look_at_clock()
        wait_s = LEASE_PROBE * self._limits.node_probe_s
        host, port = split_address(self._election.controller, "--controller")
        electors = self._election.electors
        asked = {e.peer for e in electors if e.node != self._agent.node} | set(self._agent.neighbours())
        asking = Asking(self._agent.node, self._agent.incarnation())
        answer, seen = await asyncio.gather(
            probe_port(host, port, wait_s), probe_all(sorted(asked), self._access, wait_s, asking)
        )
        now = self._hearing.look_at_clock()
        found = reach(seen, electors, self._agent.node)
        if self._connection.stranger and answer is Port.ACCEPTS:
            answer = Port.REFUSES  # another process has the port: the controller's is gone
        self.port = answer
        if self._hearing.heard_at > asked_at or self._hearing.silent_s < self._limits.lease_s:
            return
        if self.node_status is not NodeStatus.CUT_OFF:  # once cut off, only the controller itself restores it
            held = self._hearing.vouched(asked_at, now, found=found.vouched, gathering=self._connection.gathering)
            now_is = node_status(
                Port.SILENT if self._connection.suspended else answer,
                replace(found, vouched=held),
                self._hearing.silent_s,
                self._limits,
            )
            if now_is is not self.node_status:
                log.warning("the controller has not been heard for %.2f s: %s", self._hearing.silent_s, now_is.value)
                self.node_status = now_is
            self._hearing.excuse(asked_at, self._excused_s(now_is, seen))
            self.lend()
            if now_is is NodeStatus.CUT_OFF:
                self._hearing.cut_off()
                self._agent.halt()
                self._connection.drop()
        await self._succeed(answer, seen)

    def _excused_s(self, node_status: NodeStatus, seen: Sequence[Seen]) -> float:
        """For how long after the questions that led to a verdict the workers may do without an answer: to the next one.
        (Not after the verdict: this host may have been suspended since it has asked.) After a standstill a port that
        accepts is no excuse, for what is behind it may have given the ranks away, nor is a closed one if others
        lead, or have heard of a newer generation: the controller may have given the ranks away before it died."""
        changed = self._election.newer(seen) is not None or any(s.generation > self._agent.generation for s in seen)
        if self._hearing.in_doubt and (node_status is NodeStatus.MEMBER or changed):
            return 0.0
        if node_status is NodeStatus.ORPHANED:
            return 2 * self._limits.node_silence_s
        return 2 * (LOOK_S + LEASE_PROBE * self._limits.node_probe_s) if node_status is NodeStatus.MEMBER else 0.0

    async def _succeed(self, answer: Port, seen: Sequence[Seen]) -> None:
        """Follow a newer controller, or become one if this one is lost and it is this node's turn."""
        newer = self._election.newer(seen)
        if newer is not None and newer.controller == self._election.controller:
            self._election.follow(newer.term, newer.controller)  # its electors have elected it again
        elif newer is not None:
            self._connection.follow(newer.term, newer.controller)
            await self._leave()
            return
        if not lost(self.node_status, answer, self._hearing.silent_s, self._limits):
            return
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if not self._election.turn(now - self._lost_at):
            return
        term = await self._election.campaign(lambda e, request: ask_elector(e, request, self._access))
        if term is not None:
            self._connection.follow(term, await self._lead(self._election, term))
