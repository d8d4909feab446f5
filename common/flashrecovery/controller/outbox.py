"""What the machine wants done, and which answers it waits for.

Every command has a serial number. One with a deadline is *pending* until it is acknowledged; who misses the deadline is
a victim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass(frozen=True)
class Send:
    """Send ``command`` to the agent of ``node`` (for a Replace: that is to hold the rank); None: to all of them."""

    node: str | None
    command: pb.Command


@dataclass(frozen=True)
class Emit:
    """Write one event."""

    event: ev.Event


@dataclass(frozen=True)
class Publish:
    """Make this the job's rank table."""

    generation: int
    table: pb.RankTable


Action = Send | Emit | Publish


@dataclass(frozen=True)
class Pending:
    """An acknowledgement that is waited for; ``deadline`` in CLOCK_MONOTONIC seconds."""

    rank: int
    what: str
    deadline: float


@dataclass
class Outbox:
    """Actions in order, and the pending commands by serial number. Looking is cheap however many there are."""

    actions: list[Action] = field(default_factory=list)
    pending: dict[int, Pending] = field(default_factory=dict)
    _kinds: Counter[str] = field(default_factory=Counter)
    _serials: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    _soonest: float = float("inf")  # no deadline is before this time
    _serial: int = 0

    def take(self) -> list[Action]:
        """The actions since the last call."""
        actions, self.actions = self.actions, []
        return actions

    def emit(self, event: ev.Event) -> None:
        self.actions.append(Emit(event))

    def publish(self, generation: int, table: pb.RankTable) -> None:
        self.actions.append(Publish(generation, table))

    def send(self, node: str | None, command: pb.Command, deadline: float | None = None, what: str = "") -> None:
        """Send ``command``; with a deadline its acknowledgement by the command's rank is waited for."""
        self._serial += 1
        command.serial = self._serial
        if deadline is not None:
            self._await(Pending(command.rank, what, deadline))
        self.actions.append(Send(node, command))

    def expect(self, rank: int, what: str, deadline: float) -> None:
        """Wait for what another controller has asked for."""
        self._serial += 1
        self._await(Pending(rank, what, deadline))

    def _await(self, pending: Pending) -> None:
        self.pending[self._serial] = pending
        self._kinds[pending.what] += 1
        self._serials.setdefault((pending.what, pending.rank), set()).add(self._serial)
        self._soonest = min(self._soonest, pending.deadline)

    def acknowledge(self, serial: int) -> Pending | None:
        """The pending command of this serial number, which no longer is."""
        pending = self.pending.pop(serial, None)
        if pending is not None:
            self._kinds[pending.what] -= 1
            serials = self._serials[pending.what, pending.rank]
            serials.discard(serial)
            if not serials:
                del self._serials[pending.what, pending.rank]
        return pending

    def forget(self, what: str, rank: int) -> None:
        """Wait for this of ``rank`` no longer."""
        for serial in list(self._serials.get((what, rank), ())):
            self.acknowledge(serial)

    def keep(self, condition: Callable[[Pending], bool]) -> None:
        """Forget every pending command that does not meet ``condition``."""
        for serial in [serial for serial, p in self.pending.items() if not condition(p)]:
            self.acknowledge(serial)

    def clear(self) -> None:
        """Wait for nothing."""
        self.keep(lambda _: False)

    def waits_for(self, what: str) -> bool:
        """Whether any command of this kind is pending."""
        return self._kinds[what] > 0

    def expired(self, now: float) -> Pending | None:
        """One pending command whose deadline has passed, no longer pending; None if there is none."""
        if now < self._soonest:
            return None
        for serial, pending in self.pending.items():
            if now >= pending.deadline:
                return self.acknowledge(serial)
        self._soonest = min((p.deadline for p in self.pending.values()), default=float("inf"))
        return None
