"""When the controller was heard last, and for how long the workers of this node may therefore begin to change their
state. Times are seconds by :func:`.lease_clock`, which goes on while the host is suspended."""

from __future__ import annotations

import time

from flashrecovery.config import Timeouts
from flashrecovery.plan.membership.leases import NODE_PROBE, works_for_s
from flashrecovery.util.clock import lease_clock


class ControllerLease:
    """What one agent knows of when it was heard. It begins as if the controller had just answered.

    Attributes:
        heard_at: when the newest heartbeat was sent that a controller has answered.
        missed_since: since when none was answered, by CLOCK_MONOTONIC, so that time in which the host is suspended
            counts.
        excused_until: until then the workers may go on without an answer, because of what other agents have said
            (:meth:`excuse`).
        in_doubt: this node's ranks may have been given away, because the agent did not run for so long, or was cut off,
            and no controller that would know has said otherwise since then.
    """

    def __init__(self, limits: Timeouts) -> None:
        self._limits = limits
        self.excused_until = float("-inf")
        self._vouched_at = self._registered_at = float("-inf")
        self._awake_at = lease_clock()
        self.in_doubt = False
        self.begin()

    def begin(self) -> None:
        """Another controller is followed from now on, and has as long to be heard as any."""
        self.heard_at = self._came_at = lease_clock()
        self.missed_since = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the sending of the last heartbeat that a controller has answered."""
        return lease_clock() - self.heard_at

    def nothing_came_s(self) -> float:
        """Seconds since anything has come from a controller that may decide."""
        return lease_clock() - self._came_at

    def came(self) -> None:
        """Something has come from a controller."""
        self._came_at = lease_clock()

    def heard(self, when: float, *, gathering: bool = False) -> None:
        """The controller has answered something that was sent at ``when``. ``gathering``: it does not know yet whether
        the one before it has given this node's ranks away."""
        self.came()
        self.answered(when)
        self.in_doubt &= gathering or self.silent_s >= self._limits.lease_s

    def answered(self, when: float) -> None:
        """As :meth:`heard`, by a controller that has taken this node's ranks away."""
        self.heard_at, self.missed_since = max(self.heard_at, when), time.monotonic()

    def cut_off(self) -> None:
        """This node is on the side of a partition without the controller, which may give its ranks away from now on."""
        self.in_doubt = True

    def excuse(self, asked_at: float, seconds: float) -> None:
        """What others have answered to questions of ``asked_at`` lets the workers go on for so long after that."""
        self.excused_until = asked_at + seconds
        if asked_at <= self._registered_at:  # it says nothing of the controller to which this node has come since
            self._end_excuse()

    def registers(self) -> None:
        """This node is about to come to a controller. That one knows nothing of what was lent without any: it counts
        this node's silence from now on, and gives the ranks away after that."""
        self._registered_at = lease_clock()
        self._end_excuse()

    def _end_excuse(self) -> None:
        until = self._registered_at + works_for_s(self._limits.node_silence_s)
        self.excused_until = min(self.excused_until, until)

    def vouched(self, asked_at: float, now: float, *, found: bool, gathering: bool = False) -> bool:
        """Other agents were asked at ``asked_at`` to tell the controller that this node lives. ``found``: one of them
        did, and the controller has counted it as heard; ``gathering``: as for :meth:`heard`. Returns whether that, or
        an earlier time, still counts."""
        if found and not (self.in_doubt and gathering):
            self._vouched_at = asked_at
        held = now - self._vouched_at < self._limits.lease_s
        self.in_doubt &= not held
        return held

    def look_at_clock(self) -> float:
        """The time. Has this agent stood still for so long that it could not answer those that were to look after it,
        the ranks of this node may be given away by now."""
        now = lease_clock()
        stood_s, self._awake_at = now - self._awake_at, now
        if stood_s >= NODE_PROBE * self._limits.node_probe_s and self.silent_s >= self._limits.node_silence_s:
            self.in_doubt = True
        return now

    def lent_until(self) -> float:
        """The time until which the workers may begin to change their state, whatever becomes of this agent."""
        # In doubt it takes an answer: that another controller is followed now is none, nor that it gathers.
        known_at = self._vouched_at if self.in_doubt else max(self.heard_at, self._vouched_at)
        return max(known_at + works_for_s(self._limits.node_silence_s), self.excused_until)
