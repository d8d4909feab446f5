"""What a shard consists of, without its content; and the same as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashrecovery.state import codec


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a shard."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        numel = 1
        for n in self.shape:
            numel *= n
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class ShardSpec:
    """What a shard consists of at one version: its tensors by key, and small plain values by key.

    It travels in front of the bytes, so that a replacement whose optimizer state is still empty (state is created
    lazily by the first step) can make room for it.
    """

    tensors: Mapping[str, TensorSpec]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors' content."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode_spec(spec: ShardSpec) -> bytes:
    """A spec as bytes, equal for equal specs with equal key order."""
    tensors = [(key, t.shape, str(t.dtype)[6:]) for key, t in spec.tensors.items()]
    return codec.dumps((tensors, dict(spec.values)))


def decode_spec(data: bytes) -> ShardSpec:
    """The inverse of :func:`encode_spec`."""
    tensors, values = codec.loads(data)
    return ShardSpec({key: TensorSpec(tuple(shape), getattr(torch, dtype)) for key, shape, dtype in tensors}, values)
