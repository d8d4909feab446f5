"""Variables of the environment that a script's loops change: those of a version come back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

_OURS = (b"FLASHRECOVERY", b"TORCHELASTIC")
_OF_RANKS = frozenset(
    (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE", b"LOCAL_WORLD_SIZE", b"GROUP_RANK", b"GROUP_WORLD_SIZE", b"ROLE_RANK")
) | frozenset((b"ROLE_WORLD_SIZE", b"MASTER_ADDR", b"MASTER_PORT"))
"""Each process has its own, and a job that is resized changes them."""


class EnvironmentChanges:
    """What has changed in this process since :meth:`begin`, where a replacement begins, too."""

    def __init__(self) -> None:
        self._base: dict[bytes, bytes] = {}

    def begin(self) -> None:
        self._base = dict(os.environb)

    def now(self) -> dict[bytes, bytes | None]:
        """By name; None: it is gone."""
        return dict(_differences(self._base, dict(os.environb)))

    def put(self, changes: Mapping[bytes, bytes | None]) -> None:
        """As :meth:`now` gave them."""
        wanted = {name: self._base.get(name) for name in self.now()} | dict(changes)
        for name, value in wanted.items():
            if value is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = value


def _differences(before: Mapping[bytes, bytes], now: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, bytes | None]]:
    if before == now:
        return
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and name not in _OF_RANKS and not name.startswith(_OURS):
            yield name, now.get(name)
