"""What the machine wants done, and which answers it waits for.

Every command has a serial number, one to many ranks a common one. With a deadline it is *pending* until all of its
ranks have acknowledged it; a rank that misses the deadline is a victim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.controller.state.rank_table import RankTable
from flashrecovery.kinds import Ordered
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
    table: RankTable


@dataclass(frozen=True)
class Blame:
    """Remember that a node has failed, or slows the others down. ``kind``: as in
    :class:`~flashrecovery.plan.membership.node_failures.NodeMark`."""

    node: str
    kind: str
    generation: int
    detail: str


Action = Send | Emit | Publish | Blame


@dataclass
class Order:
    """A command whose acknowledgement by some ranks is waited for; ``deadline`` in CLOCK_MONOTONIC seconds, for some
    ranks a ``later`` one."""

    what: Ordered
    deadline: float
    waiting: set[int]
    later: dict[int, float] = field(default_factory=dict)

    def deadline_of(self, rank: int) -> float:
        return self.later.get(rank, self.deadline)

    @property
    def soonest(self) -> float:
        """The first deadline of a rank that is waited for."""
        if not self.later:
            return self.deadline
        return min((self.deadline_of(rank) for rank in self.waiting), default=self.deadline)


@dataclass
class Outbox:
    """Actions in order, and the pending orders by serial number. Looking is cheap however many there are."""

    actions: list[Action] = field(default_factory=list)
    pending: dict[int, Order] = field(default_factory=dict)
    _kinds: Counter[str] = field(default_factory=Counter)
    _single: dict[tuple[str, int], set[int]] = field(default_factory=dict)  # orders to one rank, for forget()
    _soonest: float = float("inf")  # no deadline is before this time
    _serial: int = 0

    def take(self) -> list[Action]:
        """The actions since the last call."""
        actions, self.actions = self.actions, []
        return actions

    def put_back(self, actions: Sequence[Action]) -> None:
        """These have been taken, and have to wait."""
        self.actions[:0] = actions

    def drop_commands(self) -> None:
        """Nothing that was to be sent is sent."""
        self.actions = [action for action in self.actions if not isinstance(action, Send)]

    def blame(self, blame: Blame) -> None:
        """Have a failure of a node remembered."""
        self.actions.append(blame)

    def emit(self, event: ev.Event) -> None:
        self.actions.append(Emit(event))

    def publish(self, generation: int, table: RankTable) -> None:
        self.actions.append(Publish(generation, table))

    def send(self, node: str | None, command: pb.Command) -> None:
        """Send ``command`` without waiting for an answer."""
        self._serial += 1
        command.serial = self._serial
        self.actions.append(Send(node, command))

    def order(self, node: str, command: pb.Command, deadline: float, what: Ordered) -> None:
        """Send ``command``, and wait for its acknowledgement by the command's rank."""
        self.send(node, command)
        self._await(what, deadline, {command.rank})

    def send_all(
        self, ranks_of: Mapping[str, Sequence[int]], command: pb.Command, deadline: float, what: Ordered
    ) -> None:
        """Send the same to many ranks, and wait for all of them: one message a node. ``ranks_of``: by node."""
        self._serial += 1
        command.serial = self._serial
        self._await(what, deadline, {rank for ranks in ranks_of.values() for rank in ranks})
        for node, ranks in ranks_of.items():
            one = pb.Command()
            one.CopyFrom(command)
            one.ranks.extend(ranks)
            self.actions.append(Send(node, one))

    def expect(self, rank: int, what: Ordered, deadline: float) -> None:
        """Wait for what another controller has asked for."""
        self._serial += 1
        self._await(what, deadline, {rank})

    def _await(self, what: Ordered, deadline: float, ranks: set[int]) -> None:
        if not ranks:
            return
        self.pending[self._serial] = Order(what, deadline, ranks)
        self._kinds[what] += 1
        self._soonest = min(self._soonest, deadline)
        if len(ranks) == 1:
            (rank,) = ranks
            self._single.setdefault((what, rank), set()).add(self._serial)

    def acknowledge(self, serial: int, ranks: Iterable[int]) -> tuple[Ordered | None, list[int]]:
        """What was sent under this number, and which of ``ranks`` it was waiting for until now."""
        order = self.pending.get(serial)
        if order is None:
            return None, []
        waiting = order.waiting
        found = [rank for rank in ranks if rank in waiting]
        waiting.difference_update(found)
        if not waiting:
            del self.pending[serial]
            self._kinds[order.what] -= 1
            for rank in found:
                singles = self._single.get((order.what, rank), set())
                singles.discard(serial)
                if not singles:
                    self._single.pop((order.what, rank), None)
        return order.what, found

    def prolong(self, serial: int, ranks: Iterable[int], deadline: float) -> None:
        """These ranks have heard the command and may take until ``deadline`` to carry it out."""
        order = self.pending.get(serial)
        if order is not None:
            order.later.update({rank: deadline for rank in ranks if rank in order.waiting})

    def forget(self, what: Ordered, rank: int) -> None:
        """Wait for this of ``rank`` alone no longer."""
        for serial in list(self._single.get((what, rank), ())):
            self.acknowledge(serial, [rank])

    def keep(self, condition: Callable[[Ordered, int], bool]) -> None:
        """Forget whatever does not meet ``condition(what, rank)``."""
        for serial, order in list(self.pending.items()):
            self.acknowledge(serial, [rank for rank in order.waiting if not condition(order.what, rank)])

    def clear(self) -> None:
        """Wait for nothing."""
        self.pending.clear()
        self._kinds.clear()
        self._single.clear()

    def waits_for(self, what: Ordered) -> bool:
        """Whether any command of this kind is pending."""
        return self._kinds[what] > 0

    def expired(self, now: float) -> list[tuple[Ordered, int]]:
        """What is pending past its deadline, and of which ranks; pending no longer."""
        if now < self._soonest:
            return []
        late = [
            (order.what, rank, serial)
            for serial, order in self.pending.items()
            if now >= order.soonest
            for rank in sorted(order.waiting)
            if now >= order.deadline_of(rank)
        ]
        for _, rank, serial in late:
            self.acknowledge(serial, [rank])
        self._soonest = min((o.soonest for o in self.pending.values()), default=float("inf"))
        return [(what, rank) for what, rank, _ in late]
