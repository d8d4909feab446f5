"""Whether this controller may decide: more than half of its electors are heard. Pure; times are seconds.

A change of the electors counts once more than half of the old and of the new ones know of it; until then both
majorities are needed, for a decision here and, as far as the electors know of the change, for an election. So an
election by the old ones and a decision, or another election, with the new ones cannot both succeed. An elector that
knows of a change does not vote for a candidate that does not; a new term begins with a version above all earlier terms.

An elector is one run of an agent: a restarted agent remembers no vote, so it does not count until it is named again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from flashrecovery.plan.membership.electors import MOST, Elector, Eligible, choose, decide, first_version

Gone = Callable[[Elector], bool]
"""Whether an elector has ended for certain."""


def _nobody(elector: Elector) -> bool:
    return False


@dataclass
class Quorum:
    """One for the life of a controller.

    Attributes:
        leader: node of the controller; "" for one outside of the nodes, which has no electors.
        term: number of its election; 1 for the first controller.
        version: of ``electors``.
        electors: the present ones.
        until: by the clock of leases, for how long the controller need not hear its electors, which have just
            elected it and are on their way.
        before: those of the version before, until the change is settled.
    """

    leader: str
    term: int = 1
    version: int = 0
    electors: tuple[Elector, ...] = ()
    until: float = float("-inf")
    before: tuple[Elector, ...] = ()
    _settled: bool = True
    _knowing: set[Elector] = field(default_factory=set)

    @classmethod
    def elected(
        cls, leader: str, term: int, electors: tuple[Elector, ...], before: tuple[Elector, ...], until: float
    ) -> Quorum:
        """The quorum of a controller that these have elected; as far as it knows, a change of them is settled or
        not."""
        return cls(leader, term, first_version(term), electors, until, before, _settled=not before)

    @property
    def voters(self) -> tuple[Elector, ...]:
        """Everyone whose vote counts."""
        return tuple(dict.fromkeys((*self.electors, *self.before)))

    def may_change(self, lives: Callable[[Elector], bool]) -> bool:
        """Whether :meth:`changed` could find other electors; without it the nodes need not be listed."""
        whole = len(self.electors) == MOST and all(lives(e) for e in self.electors)
        return bool(self.leader) and self._settled and not whole

    def changed(self, nodes: Sequence[Eligible]) -> bool:
        """Whether the electors have changed, so that all agents must be informed. ``nodes``: those that live."""
        if not self.may_change(lambda e: any(n.elector == e for n in nodes)):
            return False
        chosen = choose(nodes, self.leader, self.electors)
        if chosen == self.electors:
            return False
        self.before, self.electors = self.electors, chosen
        self.version += 1
        self._knowing, self._settled = set(), False
        return True

    def known(self, elector: Elector, version: int, gone: Gone = _nobody) -> bool:
        """``elector`` knows the electors of ``version``. Whether that has settled a change, of which those that vote
        must be informed: until then they need both majorities, too."""
        if version != self.version or self._settled:
            return False
        self._knowing.add(elector)
        self._settled = self._enough(self._knowing, gone)
        if self._settled:
            self.before = ()
        return self._settled

    def renewed(self, term: int) -> None:
        """The electors have voted for this controller again. The same ones are named again, with the term."""
        assert term > self.term, f"term {term} after term {self.term}"
        self.term, self.version, self._knowing = term, first_version(term), set()

    def heard(self, age: Callable[[Elector], float], within_s: float, gone: Gone = _nobody) -> bool:
        """Whether enough electors have been heard within this time. ``age``: seconds since an elector was heard."""
        return self._enough({e for e in self.voters if age(e) < within_s}, gone)

    def _enough(self, some: Collection[Elector], gone: Gone) -> bool:
        """Whether these are a majority, or all others have ended, so that no other controller could be elected."""
        return self.agree(some) or all(e in some or gone(e) for e in self.voters)

    def agree(self, some: Collection[Elector]) -> bool:
        """Whether these are enough."""
        return decide(self.electors, some) and decide(self.before, some)
