"""Which controller this agent follows, its vote, and its own candidacy when the controller is lost with its node.

Every election has a *term*. An elector votes once a term, never for one that is older than what it has promised, and
not while it hears a controller itself; after its vote it does not go back to the controller before. So a vote
without a majority leaves an agent without a controller; the controller that the other agents hear then has them elect
it again, for a newer term. Its electors grant that although they hear it, and keep following it.

While a change of the electors is not settled, as far as the candidate knows, it needs the votes of more than half of
the old and of the new ones (:mod:`flashrecovery.plan.membership.quorum`). Votes are kept in memory:
an agent that is started again has another incarnation, and is no elector any more. (Leader election as in Raft, without
the log: what the next controller must know, all agents tell it when they register.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from flashrecovery.plan.membership.electors import Elector, decide
from flashrecovery.plan.membership.membership import Seen
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.vote import AskElector

TURN_S = 0.5
"""Electors become candidates one after the other, this long apart: time for an election and for the news of it."""

AFTER_VOTE_S = 2.0
"""Seconds that an elector gives the candidate for which it has voted; it does not stand itself before. A controller
loses the followers that promise a later term to themselves."""

log = logging.getLogger("flashrecovery")


class Election:
    """``silent_s`` says how long nothing of a controller has *arrived*; for ``lease_s`` of that an elector refuses to
    vote for another one, because the one before may decide for so long (:mod:`flashrecovery.plan.membership.leases`).
    ``abandon`` ends the connection to the present controller, which is not served any more once another has this
    agent's vote."""

    def __init__(
        self,
        node: str,
        incarnation: Callable[[], str],
        silent_s: Callable[[], float],
        lease_s: float,
        abandon: Callable[[], None],
        controller: str = "",
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._silent_s = silent_s
        self._lease_s = lease_s
        self._abandon = abandon
        self.controller = controller
        """HOST:PORT of the controller that this agent follows."""
        self.term = 0
        self.version = 0
        self.electors: tuple[Elector, ...] = ()
        self.before: tuple[Elector, ...] = ()
        """The electors before a change that is not settled yet, as far as is known here."""
        self.promised = 0
        self._leader = ""
        self._voted_at = self._wanted_at = float("-inf")

    def forget(self) -> None:
        """Forget the controller that was followed so far: this agent is new in a job that another one leads."""
        self.term, self.version, self._leader, self.electors, self.before = 0, 0, "", (), ()

    def learn(self, message: pb.Electors) -> None:
        """The controller has named its electors. That it has been elected again may have been heard from others
        already, while this was on its way."""
        self.term = max(self.term, message.term)
        self.version, self._leader = message.version, message.leader
        self.electors = tuple(Elector(e.node, e.peer, e.incarnation) for e in message.electors)
        self.before = tuple(Elector(e.node, e.peer, e.incarnation) for e in message.before)

    @property
    def voters(self) -> tuple[Elector, ...]:
        """Everyone whose vote counts."""
        return tuple(dict.fromkeys((*self.electors, *self.before)))

    @property
    def is_elector(self) -> bool:
        """Whether this agent's own vote counts."""
        return any(e.node == self._node and e.incarnation == self._incarnation() for e in self.voters)

    def follows(self, term: int, *, known: bool) -> bool:
        """Whether to follow a controller of this term. ``known``: it is the one that has been followed so far.

        Where there are electors, only a controller that they have elected is followed.
        """
        return not self.electors or (term >= self.promised and (term > self.term or (known and term == self.term)))

    def newer(self, seen: Sequence[Seen]) -> Seen | None:
        """The newest controller that others follow, if this agent should follow it, too."""
        best = max(seen, key=lambda s: s.term, default=None)
        return best if best is not None and best.controller and best.term > self.term else None

    # -- as an elector ----------------------------------------------------------------------------

    def vote(self, request: pb.VoteRequest) -> pb.VoteReply:
        """Answer a candidate."""
        reason = ""
        if request.voter != self._node or request.incarnation != self._incarnation() or not self._votes(request):
            reason = "it is no elector any more"
        elif request.version < self.version:
            reason = "the electors have changed since"
        elif request.term <= max(self.term, self.promised):
            reason = f"term {request.term} is too old"
        elif self._renews(request):
            if not request.preliminary:
                self.promised = request.term  # to the controller that it follows, and goes on to follow
        elif self._silent_s() < self._lease_s:
            reason, self._wanted_at = "it hears the controller", time.monotonic()
        elif not request.preliminary:
            self._promise(request.term)
            self._voted_at = time.monotonic()
            log.warning("votes for node %s as controller of term %d", request.candidate, request.term)
        return pb.VoteReply(granted=not reason, term=max(self.term, self.promised), reason=reason)

    def _votes(self, request: pb.VoteRequest) -> bool:
        """Whether this node votes for the candidate. One that knows a newer set of electors belongs to it, even
        if this node has not heard of that set yet: a change can be settled before all new electors know of it."""
        return self.is_elector or request.version > self.version

    def _renews(self, request: pb.VoteRequest) -> bool:
        """Whether it is the controller that this agent follows, which wants a newer term."""
        return request.renews == self.term > 0 and request.candidate == self._leader

    def is_wanted(self) -> bool:
        """Whether a candidate has asked for this node's vote lately, and was refused because the node still hears the
        controller."""
        return time.monotonic() - self._wanted_at < AFTER_VOTE_S

    def turn(self, lost_for_s: float) -> bool:
        """Whether it is this elector's turn to stand, ``lost_for_s`` after the controller was found lost."""
        if time.monotonic() - self._voted_at < AFTER_VOTE_S:
            return False
        others = self._candidates()
        return self._node in others and int(lost_for_s / TURN_S) % len(others) == others.index(self._node)

    def turn_in(self, lost_for_s: float) -> float:
        """Seconds until its next turn begins; inf if it has none."""
        others = self._candidates()
        if self._node not in others:
            return float("inf")
        turns = TURN_S * len(others)
        after_vote_s = max(self._voted_at + AFTER_VOTE_S - time.monotonic(), 0.0)
        since_s = (lost_for_s + after_vote_s - TURN_S * others.index(self._node)) % turns
        if after_vote_s > 0 and since_s < TURN_S:
            return after_vote_s  # in the middle of its turn it may stand again
        return after_vote_s + turns - since_s

    def _candidates(self) -> list[str]:
        """The electors that may stand, as far as this one knows; none if it is no elector itself."""
        return [e.node for e in self.electors if e.node != self._leader] if self.is_elector else []

    def follow(self, term: int, controller: str) -> None:
        """Another controller leads, or the same one in a newer term. ``controller``: HOST:PORT."""
        self.term, self.controller = term, controller

    async def campaign(self, ask: AskElector) -> int | None:
        """Be a candidate, if the electors would have it. Returns the term if this node has been elected."""
        term = max(self.term, self.promised) + 1
        if not await self._poll(term, ask, preliminary=True):
            return None
        if max(self.term, self.promised) >= term or self._silent_s() < self._lease_s:
            return None  # meanwhile it has voted for another one, or the controller is there again
        self._promise(term)
        elected = await self._poll(term, ask, preliminary=False)
        return term if elected and self.promised == term else None

    async def _poll(self, term: int, ask: AskElector, *, preliminary: bool) -> bool:
        """Ask the other electors until enough of them agree; a frozen one must not delay the election."""
        electors, before = self.electors, self.before
        asked = [e for e in self.voters if e.node != self._node]

        async def answer(elector: Elector) -> tuple[Elector, pb.VoteReply]:
            request = pb.VoteRequest(
                term=term,
                version=self.version,
                candidate=self._node,
                voter=elector.node,
                incarnation=elector.incarnation,
                preliminary=preliminary,
            )
            return elector, await ask(elector, request)

        waiting = [asyncio.create_task(answer(e)) for e in asked]
        replies: dict[str, pb.VoteReply] = {}
        votes = {e for e in self.voters if e.node == self._node and e.incarnation == self._incarnation()}
        try:
            for next_one in asyncio.as_completed(waiting):
                elector, reply = await next_one
                replies[elector.node] = reply
                if reply.granted:
                    votes.add(elector)
                if decide(electors, votes) and decide(before, votes):
                    break
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        said = [f"{node}: {'yes' if r.granted else r.reason}" for node, r in replies.items()]
        log.warning("%s be controller of term %d? %s", "may" if preliminary else "shall", term, "; ".join(said))
        if not preliminary:
            self.promised = max(self.promised, *(r.term for r in replies.values()))
        return decide(electors, votes) and decide(before, votes)

    def _promise(self, term: int) -> None:
        self.promised = term
        self._abandon()
