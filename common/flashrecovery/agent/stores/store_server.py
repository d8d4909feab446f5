"""Process that hosts the TCPStore (see :mod:`.store`); dies with its agent.

It also forgets keys that no rank can ask for any more. Each generation's groups meet under a separate prefix, and
gloo leaves the addresses of all ranks there, n^2 bytes a group. A rank that attaches in a generation has dropped the
one before.
"""

from __future__ import annotations

import re
import signal
import sys
from typing import Protocol

from flashrecovery.agent.stores.bare_torch import tcp_store
from flashrecovery.runtime.process_control import die_with_parent
from flashrecovery.runtime.resolver import without_names

_PERIOD_S = 30.0
_GENERATION = re.compile(r"fr/gen(\d+)/")


class Keys(Protocol):
    """What a TCPStore can do besides what every store can."""

    def num_keys(self) -> int:
        """How many there are."""

    def list_keys(self) -> list[str]:
        """All of them."""

    def delete_key(self, key: str) -> bool:
        """Forget one."""


class Sweep:
    """Called periodically: forgets the generations before the one that was newest at the previous call. So a rank that
    is still leaving a generation finds its keys. Cheap while nothing changes."""

    def __init__(self, store: Keys) -> None:
        self._store = store
        self._newest = 0
        self._known = -1

    def __call__(self) -> None:
        if self._store.num_keys() == self._known:
            return
        found = [(int(m[1]), key) for key in self._store.list_keys() if (m := _GENERATION.match(key)) is not None]
        for generation, key in found:
            if generation < self._newest:
                self._store.delete_key(key)
        newest = max((generation for generation, _ in found), default=0)
        self._known = self._store.num_keys() if newest <= self._newest else -1
        self._newest = max(newest, self._newest)


def main() -> None:
    fd, port, parent, again = (int(a) for a in sys.argv[1:5])
    die_with_parent(parent)
    TCPStore = tcp_store(whole=bool(again))
    with without_names():  # it connects to itself first
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=fd)
    sweep = Sweep(store)
    while signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, _PERIOD_S) is None:
        sweep()
    del store


if __name__ == "__main__":
    main()
