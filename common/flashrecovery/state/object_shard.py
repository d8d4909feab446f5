"""Small plain state as shards: the *common* state (equal on all ranks) and the *rank-local state* (this rank's own).

Both are byte strings per version, kept for the last three versions in this process; the rank-local state is also in the
shared page, where it outlives the process. A large one is there alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from flashrecovery.state import witness
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec, TensorSpec
from flashrecovery.state.version import VERSIONS_KEPT

COMMON = "common"


class StoredElsewhere(Protocol):
    """Bytes that are kept elsewhere, and may be gone: in the page, of which this layer knows nothing."""

    @property
    def nbytes(self) -> int:
        """0: they are gone."""

    def read(self) -> bytes | None:
        """None: they are gone."""


class ObjectShard(Shard):
    """A byte string per version, transferred like any other shard."""

    def __init__(self, name: str, holders: tuple[int, ...]) -> None:
        self.name = name
        self.holders = holders
        self._versions: dict[int, bytes | StoredElsewhere] = {}
        self._early: set[int] = set()
        self._incoming: torch.Tensor | None = None

    def keep(self, version: int, data: bytes | StoredElsewhere, *, early: bool = False) -> None:
        """The content at ``version``; the oldest others are dropped, so that three are kept. ``early``: unless the step
        before it changes it later."""
        self._versions[version] = data
        (self._early.add if early else self._early.discard)(version)
        for old in sorted(self._versions.keys() - {version})[: 1 - VERSIONS_KEPT]:
            del self._versions[old]

    def finish(self, version: int, end: bytes = witness.UNKNOWN) -> None:
        """The content at ``version`` is final, with ``end`` in the place of its last bytes if that is known. What is
        stored elsewhere is finished there."""
        self._early.discard(version)
        data = self._versions.get(version)
        if end != witness.UNKNOWN and isinstance(data, bytes):
            self._versions[version] = witness.put(data, end)

    def drop_after(self, version: int) -> None:
        """Forget what belongs to steps that have been undone."""
        for newer in [v for v in self._versions if v > version]:
            del self._versions[newer]

    def at(self, version: int) -> bytes | None:
        data = self._versions.get(version)
        return data if data is None or isinstance(data, bytes) else data.read()

    def kept_at(self, version: int) -> bytes:
        """The content at ``version``. Raises KeyError if it is not kept."""
        data = self.at(version)
        if data is None:
            raise KeyError(version)
        return data

    def versions(self) -> list[int]:
        return sorted(v for v, data in self._versions.items() if isinstance(data, bytes) or data.nbytes)

    def early(self, version: int) -> bool:
        """Whether the content at ``version`` is not final."""
        return version in self._early

    def nbytes(self) -> int:
        return max((len(d) if isinstance(d, bytes) else d.nbytes for d in self._versions.values()), default=0)

    def tensors(self) -> dict[str, torch.Tensor]:
        newest = max(self.versions(), default=None)
        return {"bytes": as_tensor(self.kept_at(newest) if newest is not None else b"")}

    def tensors_at(self, version: int) -> tuple[ShardSpec, list[torch.Tensor]]:
        """The content at ``version`` in the form of a transfer's source. Raises KeyError if it is not kept."""
        tensor = as_tensor(self.kept_at(version))
        return ShardSpec({"bytes": TensorSpec(tuple(tensor.shape), tensor.dtype)}), [tensor]

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        self._incoming = torch.empty(spec.tensors["bytes"].shape, dtype=torch.uint8)
        return {"bytes": self._incoming}

    def adopt(self, version: int) -> None:
        """What has been received into ``allocate``'s tensor is the content at ``version``."""
        if self._incoming is not None:
            self.keep(version, self._incoming.numpy().tobytes())
            self._incoming = None


def as_tensor(data: bytes) -> torch.Tensor:
    """A uint8 tensor with a copy of ``data``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
