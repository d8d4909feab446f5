"""The stores under which groups connect: one for all of them, or the servers over which they are spread.

A connection to a server is made when a group first needs it, on the thread that connects the groups, and kept for all
generations. Every use of a store is wrapped, so that
:func:`~.exchange.abandon` wakes its waits.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashrecovery.groups.state import STATE
from flashrecovery.groups.torch_private import DEFAULT_TIMEOUT, GroupRequest, PrefixStore, Store, TCPStore
from flashrecovery.plan.membership.stores import server_of
from flashrecovery.runtime.environment import STORES_ENV

Address = tuple[str, int]

_PROBE = ["flashrecovery/there?"]


class StoreSource(Protocol):
    """Where groups get their stores from."""

    @property
    def servers(self) -> int:
        """How many there are."""

    def connected(self, server: int) -> Store:
        """A store on this server; may block."""


@dataclass(frozen=True)
class OneStore:
    """A store that is there already."""

    store: Store

    @property
    def servers(self) -> int:
        return 1

    def connected(self, server: int) -> Store:
        return self.store


@dataclass
class _Clients:
    """This process's connections to TCPStores, by server."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: dict[Address, Store] = field(default_factory=dict)
    doubtful: set[Address] = field(default_factory=set)

    def get(self, address: Address, timeout_s: float) -> Store:
        with self.lock:
            client = self.made.get(address)
            doubtful = address in self.doubtful
        if client is None or (doubtful and not _answers(client)):
            timeout = datetime.timedelta(seconds=timeout_s)
            client = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
        with self.lock:
            self.made[address] = client
            self.doubtful.discard(address)
        return client

    def doubt(self, addresses: Sequence[Address]) -> None:
        with self.lock:
            self.doubtful.update(addresses)

    def keep(self, addresses: Sequence[Address]) -> None:
        with self.lock:
            self.made = {address: client for address, client in self.made.items() if address in addresses}


_CLIENTS = _Clients()


def _answers(client: Store) -> bool:
    try:
        client.check(_PROBE)
    except RuntimeError:  # the connection is broken
        return False
    return True


@dataclass(frozen=True)
class Servers:
    """TCPStores that live longer than one generation. ``timeout_s``: for a new connection."""

    addresses: tuple[Address, ...]
    timeout_s: float

    @property
    def servers(self) -> int:
        return len(self.addresses)

    def connected(self, server: int) -> Store:
        return _CLIENTS.get(self.addresses[server], self.timeout_s)

    def doubt(self) -> None:
        """Something has failed: ask each connection whether it still holds before it is used again."""
        _CLIENTS.doubt(self.addresses)

    def settled(self) -> None:
        """All groups have met here: connections to other servers are not needed any more."""
        _CLIENTS.keep(self.addresses)


def _beyond(ranks: Sequence[int]) -> str:
    """Tells a group within a replica that the launch did not have from the one within the launch's replica in whose
    place its ranks have run the script: both have the same name (:mod:`flashrecovery.plan.elastic.new_ranks`)."""
    return f"{min(ranks)}/" if STATE.shape is not None and min(ranks) >= STATE.shape.world else ""


class StoresInUse:
    """What the groups of one generation, or of the start, use of ``source``, under ``prefix``. After :meth:`stop` every
    wait ends, also in a store that is being connected meanwhile."""

    def __init__(self, module: Any, source: StoreSource, world: int, prefix: str, *, at_start: bool = False) -> None:
        self.at_start = at_start
        self._module, self._source, self._world, self._prefix = module, source, world, prefix
        self._lock = threading.Lock()
        self._wrapped: dict[int, Store] = {}
        self._stopped: str | None = None

    def of(self, request: GroupRequest, suffix: str = "") -> Store:
        """The store of this group. May block until its server takes the connection."""
        server = server_of(request.ranks, self._world, self._source.servers)
        return PrefixStore(f"{self._prefix}{request.name}/{_beyond(request.ranks)}{suffix}", self._on(server))

    def _on(self, server: int) -> Store:
        with self._lock:
            known = self._wrapped.get(server)
        if known is not None:
            return known
        wrapped: Store = self._module.wrap_store(self._source.connected(server))
        with self._lock:
            self._wrapped[server] = wrapped
            if self._stopped is not None:
                self._module.stop_store(wrapped, self._stopped)
        return wrapped

    def stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = reason
            for store in self._wrapped.values():
                self._module.stop_store(store, reason)


def start_stores(module: Any, world: int) -> StoresInUse | None:
    """The servers that the environment names for the groups of the script's start; None if there is only one."""
    named = json.loads(os.environ.get(STORES_ENV, "[]"))
    if len(named) < 2:
        return None
    addresses = tuple((str(host), int(port)) for host, port in named)
    prefix = f"fr/start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
    return StoresInUse(module, Servers(addresses, DEFAULT_TIMEOUT.total_seconds()), world, prefix, at_start=True)


def stop_all(reason: str) -> None:
    """Wake every wait in the stores of the groups that there are, and of those that are being attached."""
    with STATE.lock:
        in_use = [stores for stores in (STATE.attaching, STATE.spread) if stores is not None]
    for stores in in_use:
        stores.stop(reason)
