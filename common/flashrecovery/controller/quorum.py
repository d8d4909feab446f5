"""Whether this controller may decide: more than half of its electors are heard. Pure; times are seconds.

A change of the electors counts once more than half of the old and of the new ones know of it; until then both
majorities are needed, so an election by the old ones and a decision with the new ones cannot both succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flashrecovery.plan.electors import MOST, Elector, Eligible, choose, majority


@dataclass
class Quorum:
    """One for the life of a controller.

    Attributes:
        leader: node of the controller; "" for one outside of the nodes, which has no electors.
        term: number of its election; 1 for the first controller.
        version: of ``electors``.
        until: on a clock of the caller, for how long the controller need not hear its electors, which have just
            elected it and are on their way.
    """

    leader: str
    term: int = 1
    version: int = 0
    electors: tuple[Elector, ...] = ()
    until: float = float("-inf")
    _before: tuple[Elector, ...] = ()
    _settled: bool = True
    _knowing: set[str] = field(default_factory=set)

    def may_change(self, lives: Callable[[Elector], bool]) -> bool:
        """Whether :meth:`changed` could find other electors; without it the nodes need not be listed."""
        whole = len(self.electors) == MOST and all(lives(e) for e in self.electors)
        return bool(self.leader) and self._settled and not whole

    def changed(self, nodes: Sequence[Eligible]) -> bool:
        """Whether there are other electors now, of whom all agents must be told. ``nodes``: those that live."""
        if not self.may_change(lambda e: any(n.elector == e for n in nodes)):
            return False
        chosen = choose(nodes, self.leader, self.electors)
        if chosen == self.electors:
            return False
        self._before, self.electors = self.electors, chosen
        self.version += 1
        self._knowing, self._settled = set(), False
        return True

    def known(self, node: str, version: int) -> None:
        """``node`` knows the electors of ``version``."""
        if version != self.version or self._settled:
            return
        self._knowing.add(node)
        if _decide(self._before, self._knowing) and _decide(self.electors, self._knowing):
            self._before, self._settled = (), True

    def heard(self, age: Callable[[str], float], within_s: float) -> bool:
        """Whether enough electors have been heard within this time. ``age``: seconds since a node was heard."""
        heard = {e.node for e in (*self.electors, *self._before) if age(e.node) < within_s}
        return _decide(self.electors, heard) and _decide(self._before, heard)


def _decide(electors: Sequence[Elector], nodes: set[str]) -> bool:
    return not electors or sum(e.node in nodes for e in electors) >= majority(len(electors))
