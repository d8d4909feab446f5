"""Whether a node is lost: its agent's silence, confirmed by other nodes. Pure; times are seconds of the leases' clock
(:mod:`flashrecovery.util.clock`).

A node is *suspected* when its agent has been silent for ``node_silence_s``, or when its connection has broken. Then its
neighbours in the ring of nodes are asked whether they reach it. It is lost only if none does: a fault between the
controller and one node, or in the controller's own network, costs no node its ranks. A lost node is found after
``node_silence_s + node_probe_s`` at the latest. After a broken connection the neighbours are asked at once, and the
node is lost after ``node_silence_s``. It is never lost sooner, whatever the others say: a firewall may answer for a
live node, whose workers continue until its lease ends (:mod:`.leases`).

The bound for false alarms: a live node is declared dead only if nothing of it has arrived for ``node_silence_s``
(several heartbeats in a row), not even through another node (:meth:`Liveness.vouched`), *and* no neighbour has got an
answer from it. After a pause of the controller itself, every node gets the full time again before it is suspected. The
node whose agent lives in the controller's own process is never lost. If no node at all is heard, the controller itself
is cut off: all nodes keep their ranks, for as long as it would wait for new nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from flashrecovery.plan.membership.leases import Limits
from flashrecovery.plan.membership.ring import OBSERVERS, following


@dataclass(frozen=True)
class Ask:
    """Ask ``observer`` whether it reaches ``suspect``."""

    observer: str
    suspect: str


@dataclass(frozen=True)
class Lost:
    """``node`` is gone; ``silent_s`` seconds since its last sign of life."""

    node: str
    evidence: str
    silent_s: float


@dataclass(frozen=True)
class Unheard:
    """``node`` is alive, as ``observer`` says, but does not get through to the controller. ``observer`` "": no node is
    heard."""

    node: str
    observer: str
    silent_s: float


@dataclass
class _LastHeard:
    heard_at: float
    connected: bool = True
    asked: dict[str, str | None] = field(default_factory=dict)
    asked_at: float | None = None
    vouched: bool = False
    vouched_at: float = float("-inf")
    voucher: str = ""


class Liveness:
    """One for the job. Nodes enter with their first message. ``own``: the node of this process, if it has an agent."""

    def __init__(self, limits: Limits, own: str = "") -> None:
        self._limits = limits
        self._own = own
        self._last_heard: dict[str, _LastHeard] = {}
        self._checked_at: float | None = None

    def heard(self, node: str, now: float) -> None:
        """Anything has arrived from ``node``."""
        last = self._last_heard.get(node)
        if last is None:
            self._last_heard[node] = _LastHeard(now)
            return
        last.heard_at, last.connected = now, True
        if last.asked_at is not None or last.vouched:
            last.asked, last.asked_at, last.vouched = {}, None, False

    def vouches(self, observer: str, node: str, now: float) -> None:
        """``node`` has asked ``observer`` to say that it lives, and will count the controller as heard."""
        last = self._last_heard.get(node)
        if last is not None:
            last.vouched_at, last.voucher = now, observer

    def disconnected(self, node: str) -> None:
        """Its connection has ended; it may come back with another one."""
        if node in self._last_heard:
            self._last_heard[node].connected = False

    def forget(self, node: str) -> None:
        self._last_heard.pop(node, None)

    def age(self, node: str, now: float) -> float:
        """Seconds since the last sign of life."""
        last = self._last_heard.get(node)
        return now - last.heard_at if last is not None else 0.0

    def silent(self, node: str, now: float) -> bool:
        last = self._last_heard.get(node)
        if last is None or node == self._own:
            return False
        return not last.connected or now - last.heard_at >= self._limits.node_silence_s

    def answered(self, observer: str, suspect: str, reachable: bool, evidence: str) -> None:
        """An observer's answer. Late ones count for nothing."""
        last = self._last_heard.get(suspect)
        if last is not None and observer in last.asked:
            last.asked[observer] = "" if reachable else evidence or "no answer"

    def check(self, now: float) -> list[Ask | Lost | Unheard]:
        """What follows from the time that has passed; call it every few hundredths of a second."""
        self._forgive_own_pause(now)
        found: list[Ask | Lost | Unheard] = []
        heard: list[str] | None = None
        limit_s = self._limits.node_silence_s
        others = ((n, p) for n, p in self._last_heard.items() if n != self._own)
        for name, last in [(n, p) for n, p in others if not p.connected or now - p.heard_at >= limit_s]:
            if last.asked_at is None:
                last.asked_at = now
                if heard is None:  # once for all that are suspected now
                    heard = sorted(n for n in self._last_heard if not self.silent(n, now))
                last.asked = dict.fromkeys(itertools.islice(following(name, heard), OBSERVERS))
                found += [Ask(observer, name) for observer in last.asked]
            else:
                found += self._judge(name, last, last.asked_at, now)
        return found

    def _judge(self, name: str, last: _LastHeard, asked_at: float, now: float) -> list[Ask | Lost | Unheard]:
        late = now - asked_at >= self._limits.node_probe_s
        witness = next((o for o, evidence in last.asked.items() if evidence == ""), None)
        if witness is None and now - last.vouched_at < self._limits.node_silence_s:
            witness = last.voucher
        if witness is not None:
            if not late:
                return []
            first, last.vouched = not last.vouched, True
            last.asked, last.asked_at = {}, None  # and ask again
            return [Unheard(name, witness, now - last.heard_at)] if first else []
        if not late and any(evidence is None for evidence in last.asked.values()):
            return []
        silent_s = now - last.heard_at
        if silent_s < self._limits.node_silence_s:
            if now - asked_at >= self._limits.node_probe_s:
                last.asked, last.asked_at = {}, None  # what they have said is old by then: ask again
            return []
        if not last.asked and silent_s < self._limits.node_wait_s:
            if not late:
                return []
            first, last.vouched, last.asked_at = not last.vouched, True, None
            return [Unheard(name, "", silent_s)] if first else []
        del self._last_heard[name]
        how = "its agent's connection has broken" if not last.connected else "its agent is silent"
        said = [f"{o} ({evidence or 'no answer'})" for o, evidence in last.asked.items()]
        seen = f"; not reached by {', '.join(said)}" if said else "; there is no other node to ask"
        return [Lost(name, f"{how} for {silent_s:.2f} s{seen}", silent_s)]

    def _forgive_own_pause(self, now: float) -> None:
        """While this process did not run, it could not hear any node."""
        paused = now - self._checked_at if self._checked_at is not None else 0.0
        if paused > self._limits.node_silence_s / 2:
            for last in self._last_heard.values():
                last.heard_at = max(last.heard_at, now - self._limits.node_silence_s / 2)
                last.asked, last.asked_at = {}, None
        self._checked_at = now
