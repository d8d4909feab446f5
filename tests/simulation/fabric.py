"""The ranks' own network: collectives and transfers, as far as a recovery has to do with them.

Every operation is made of one-way messages, which need some time and may be cut off by the sender's death or its
leaving the group. So of two ranks in one collective one may leave it whole and the other never.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.loop import Process
from tests.simulation.network import Network

PauseBarrier = tuple[int, str, int]
"""A collective: generation, name, number."""


class PeerLost(RuntimeError):
    """A communication error: a peer is gone, or the group has been abandoned."""


@dataclass
class Port:
    """One rank's access. ``generation``: of the groups that it is in now; -1: none."""

    fabric: Fabric
    rank: int
    process: Process
    generation: int = -1
    alone: bool = False
    broken: bool = False
    pending_since: float | None = None
    members: tuple[int, ...] = ()
    """The ranks in the groups."""
    _mail: dict[Hashable, Any] = field(default_factory=dict)
    _waiting: dict[Hashable, asyncio.Future[Any]] = field(default_factory=dict)
    _unsent: list[asyncio.Handle] = field(default_factory=list)
    _counter: int = 0
    _gathered: dict[PauseBarrier, dict[int, Any]] = field(default_factory=dict)

    def abandon(self) -> None:
        """Every pending operation fails, and those that would be begun in these groups."""
        self.broken = True
        for timer in self._unsent:
            if self.fabric.random.random() < 0.5:
                timer.cancel()
        self._unsent.clear()
        self._fail("abandoned")

    def _fail(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(PeerLost(why))

    def detach(self) -> None:
        self.generation = -1

    def peer_lost(self, generation: int) -> None:
        """A connection has broken."""
        if generation == self.generation and not self.broken:
            self.broken = True
            self._fail("connection closed by peer")

    async def attach(self, generation: int, deadline_s: float, members: tuple[int, ...] = ()) -> None:
        """New groups; returns when everybody is there. ``members``: () are all."""
        self.members = members or tuple(range(self.fabric.world))
        self.generation, self.broken, self._counter = generation, False, 0
        self._mail = {k: v for k, v in self._mail.items() if k[0] >= generation}  # type: ignore[index]
        self._gathered = {k: v for k, v in self._gathered.items() if k[0] >= generation}
        met: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[generation, "hello", 0] = met
        self.fabric.come(self)
        try:
            await asyncio.wait_for(met, deadline_s)
        except asyncio.TimeoutError:
            raise PeerLost("not all ranks have come") from None

    def met(self) -> None:
        """All ranks have come to this generation's groups."""
        self._complete((self.generation, "hello", 0))

    async def gather(self, what: str, value: Any) -> list[Any]:
        """A collective: everybody's value, by rank. What this rank sends to the others leaves at once or in two parts,
        so that its death may leave some of them without it."""
        if self.broken or self.generation < 0:
            raise PeerLost("the group is gone")
        self._counter += 1
        fabric, key = self.fabric, (self.generation, what, self._counter)
        others = [r for r in self.members if r != self.rank]
        if fabric.random.random() < 0.15:
            fabric.random.shuffle(others)
            middle = fabric.random.randrange(len(others) + 1)
            self._unsent.append(
                self.process.call(0.02 * fabric.random.random(), self._tell, others[middle:], key, value)
            )
            others = others[:middle]
        self._unsent.append(self.process.call(0.002 * fabric.random.random() ** 2, self._tell, others, key, value))
        del self._unsent[:-40]
        self._gathered.setdefault(key, {})[self.rank] = value
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self._look(key, 0.0)
        await future
        values = self._gathered.pop(key)
        return [values[r] for r in self.members]

    def _tell(self, ranks: list[int], key: PauseBarrier, value: Any) -> None:
        """This part of a collective leaves now."""
        network, here = self.fabric.network, self.process.host
        for rank in ranks:
            target = self.fabric.ports.get(rank)
            if target is None or target.process.dead:
                continue
            there = target.process.host
            if network.reaches(here, there) and there.up:
                target._gathered.setdefault(key, {})[self.rank] = value
                target._look(key, network.delay(here, there))
            else:
                self.fabric.blocked.append((self, rank, key, value))

    def _look(self, key: PauseBarrier, delay_s: float) -> None:
        """Is this collective complete here?"""
        if key in self._waiting and len(self._gathered[key]) == len(self.members):
            self.process.call(delay_s, self._complete, key)

    def _complete(self, key: PauseBarrier) -> None:
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(None)

    def send(self, rank: int, key: Hashable, value: Any) -> None:
        """To one rank, in these groups."""
        if self.broken or self.generation < 0:
            raise PeerLost("the group is gone")
        fabric, generation = self.fabric, self.generation
        wait_s = fabric.random.random() ** 4 * 0.01

        def leaves() -> None:
            target = fabric.ports.get(rank)
            if self.process.dead or target is None:
                return
            network, here, there = fabric.network, self.process.host, target.process.host
            if network.reaches(here, there) and there.up:
                delay = network.delay(here, there)
                target.process.call(delay, target._arrive, (generation, self.rank, key), value)
            else:
                fabric.stalled(self, rank, generation, key, value)

        self._unsent.append(self.process.call(wait_s, leaves))
        del self._unsent[:-40]

    def _arrive(self, key: Hashable, value: Any) -> None:
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(value)
        else:
            self._mail[key] = value

    async def receive(self, rank: int, key: Hashable) -> Any:
        """From one rank."""
        if self.broken or self.generation < 0:
            raise PeerLost("the group is gone")
        whole = (self.generation, rank, key)
        if whole in self._mail:
            return self._mail.pop(whole)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[whole] = future
        return await future


class Fabric:
    """All ranks' ports. A rank's is that of the process which has come to the newest groups: a node that has stood
    still may start another one late, for a rank that it has lost meanwhile."""

    def __init__(self, network: Network, rng: random.Random, world: int) -> None:
        self.network = network
        self.random = rng
        self.world = world
        self.ports: dict[int, Port] = {}
        self._meetings: dict[int, dict[int, Port]] = {}
        self.blocked: list[tuple[Port, int, PauseBarrier, Any]] = []
        self._stalled: list[tuple[Port, int, int, Hashable, Any]] = []

    def open(self, rank: int, process: Process) -> Port:
        port = Port(self, rank, process)
        if rank not in self.ports or self.ports[rank].process.dead:
            self.ports[rank] = port
        process.at_end.append(lambda: self._ended(port))
        return port

    def come(self, port: Port) -> None:
        """To the TCPStore, where the groups of a generation are made; a rank that comes early waits."""
        known = self.ports[port.rank]
        if known.process.dead or known.generation <= port.generation:
            self.ports[port.rank] = port
        self._meetings.setdefault(port.generation, {})[port.rank] = port
        self._meet(port.generation)

    def _meet(self, generation: int) -> None:
        here = list(self._meetings[generation].values())
        if {port.rank for port in here} != set(here[0].members) or any(
            p.process.dead or p.generation != generation or p.members != here[0].members for p in here
        ):
            return
        hosts = {p.process.host.ip: p.process.host for p in here}.values()
        if all(self.network.reaches(a, b) and b.up for a in hosts for b in hosts):
            del self._meetings[generation]
            for port in here:
                port.process.call(0.002 * (1 + self.random.random()), port.met)

    def stalled(self, port: Port, rank: int, generation: int, key: Hashable, value: Any) -> None:
        """The path is blocked; it may be whole again later."""
        self._stalled.append((port, rank, generation, key, value))

    def heal(self) -> None:
        """Paths have changed: what has waited may go."""
        waiting, self._stalled = self._stalled, []
        for port, rank, generation, key, value in waiting:
            if not port.process.dead and port.generation == generation and not port.broken:
                port.send(rank, key, value)
        for generation in list(self._meetings):
            self._meet(generation)
        blocked, self.blocked = self.blocked, []
        for port, rank, gathering, number in blocked:
            if not port.process.dead and port.generation == gathering[0] and not port.broken:
                port.process.call(0.1, port._tell, [rank], gathering, number)

    def _ended(self, port: Port) -> None:
        """Its kernel closes its connections: the others notice, one after the other."""
        for other in self.ports.values():
            if other is not port and self.network.reaches(port.process.host, other.process.host):
                other.process.call(0.001 + 0.05 * self.random.random() ** 2, other.peer_lost, port.generation)
