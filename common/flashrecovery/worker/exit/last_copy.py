"""What a rank leaves when its job ends before the last step, in memory of the node's snapshot process.

Where copies are made in every step there is nothing to add. Where every shard has replicas none are made; then each
rank's part of the newest version is written once, when the job ends, and found by the next launch with ``--resume``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashrecovery.plan import Kind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.flat_buffer import Beside, Layout, Outliving, Slot
from flashrecovery.snapshot.memory import HEADER
from flashrecovery.state.shard import ShardSource


class LastCopy:
    """One rank's. ``last``: where it is kept; ``page``: the same of what an agent has kept of a rank that was gone."""

    def __init__(self, last: Outliving, page: Outliving) -> None:
        self._slot = Slot(last)
        self._page = page
        self._page_left = page.left

    def left(self, local_state: str) -> list[tuple[int, dict[str, bytes]]]:
        """(version, plain state by shard) of what an earlier launch has left. ``local_state``: name of that shard."""
        found = []
        if self._slot.version >= 0:
            found.append((self._slot.version, dict(self._slot.beside.plain)))
        page = self._page_left
        if page is not None and page.version >= 0:
            found.append((page.version, {local_state: bytes(page.map[HEADER : HEADER + page.nbytes])}))
        return found

    @property
    def shards(self) -> tuple[str, ...]:
        """The shards of which an earlier launch has left a copy."""
        return self._slot.layout.shards if self._slot.version >= 0 else ()

    def inventory(self) -> list[pb.Held]:
        """The shards of tensors of which an earlier launch has left a copy."""
        shards = self._slot.layout.shards
        if self._slot.version < 0 or not shards:
            return []
        return [pb.Held(kind=Kind.UNDO, version=self._slot.version, shards=shards)]

    def source(self, shard: str, version: int) -> ShardSource | None:
        """None if it is not held."""
        if self._slot.version != version or shard not in self._slot.layout.shards:
            return None
        return ShardSource(shard, *self._slot.content(shard))

    def keep(self, version: int, sources: Sequence[ShardSource], beside: Beside) -> None:
        """Copy them as ``version``."""
        tensors = {one.name: dict(zip(one.spec.tensors, one.tensors, strict=True)) for one in sources}
        slot = self._slot
        slot.shape(Layout.of(tensors), pin=False, share=True)
        live = [tensor for some in tensors.values() for tensor in some.values()]
        if live:
            with torch.no_grad():
                torch._foreach_copy_(slot.views, live)
        slot.describe({one.name: dict(one.spec.values) for one in sources if one.spec.values})
        slot.finish(version, beside)

    def drop(self) -> None:
        """The job has gone on from what was left, or from something else: it is of no use any more."""
        if self._slot.shared is not None:
            self._slot.free()
        if self._page_left is not None:
            self._page_left = None
            self._page.keep(None)
