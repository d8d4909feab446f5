"""Digests of tensors and shards: xxh3-128 to compare copies, SHA-256 for digests that people compare.

A digest covers the *values in index order*, so a transposed view and its contiguous copy agree, and looks at what
really lies on a device. Two that are compared are made in the same way: either all bytes are read, those on a device
through the host in pieces; or of tensors that lie on a device on both sides their fingerprints are taken, which are
computed there (:mod:`.fingerprint`), and of the others all bytes. The host could compute fingerprints as well, but
xxh3 is many times faster there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from flashrecovery.state.exact import exact_contiguous
from flashrecovery.state.fingerprint import Fingerprints
from flashrecovery.state.spec import ShardSpec, encode_spec

_PIECE = 32 << 20
"""Bytes copied from a device at a time."""


class _Hasher(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of the tensor's bytes in index order, hex. Any strided tensor on any device."""
    return _digest_of(xxhash.xxh3_128(), [tensor])


def shard_digest(
    tensors: Iterable[torch.Tensor], spec: ShardSpec | None = None, known: Mapping[int, bytes] | None = None
) -> str:
    """xxh3-128 of a shard's tensors in the given order; with ``spec`` also of its structure and values. Hex.

    ``known``: fingerprints that are taken in place of the bytes, by the tensors' places.
    """
    hasher = xxhash.xxh3_128(encode_spec(spec) if spec is not None else b"")
    for place, tensor in enumerate(tensors):
        if known and place in known:
            hasher.update(known[place])
        else:
            _update(hasher, tensor)
    return hasher.hexdigest()


def shard_digests(
    shards: Mapping[str, tuple[Sequence[torch.Tensor], ShardSpec | None]], on_device: Callable[[torch.Tensor], bool]
) -> dict[str, str]:
    """The digests of several shards, with one wait for the device. Of tensors of which ``on_device`` is true (on all
    ranks whose digests are compared) the fingerprints are taken, see :func:`shard_digest`."""
    prints = Fingerprints()
    numbers = {
        name: {place: prints.add(t) for place, t in enumerate(tensors) if on_device(t)}
        for name, (tensors, _) in shards.items()
    }
    found = prints.results()
    return {
        name: shard_digest(tensors, spec, {place: found[number] for place, number in numbers[name].items()})
        for name, (tensors, spec) in shards.items()
    }


def sha256_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the sorted names. Hex."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        hasher.update(f"{name}\0{t.dtype}\0{tuple(t.shape)}\0".encode())
        _update(hasher, t)
    return hasher.hexdigest()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat uint8, sharing it. Writing to it writes to the tensor."""
    # Not reshape(): it keeps the stride of a single element, of which no bytes can be viewed.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _digest_of(hasher: _Hasher, tensors: Iterable[torch.Tensor]) -> str:
    for t in tensors:
        _update(hasher, t)
    return hasher.hexdigest()


def _update(hasher: _Hasher, tensor: torch.Tensor) -> None:
    for piece in _host_bytes(tensor):
        hasher.update(piece)


def _host_bytes(tensor: torch.Tensor) -> Iterator[np.ndarray[Any, Any]]:
    if tensor.numel() == 0:
        return
    # A non-contiguous tensor costs one contiguous copy on its own device.
    flat = byte_view(exact_contiguous(tensor))
    if flat.device.type == "cpu":
        yield flat.numpy()
    else:
        yield from _staged(flat)


def _staged(flat: torch.Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """The bytes of a device's tensor, piece by piece; each is valid until the next one is asked for."""
    # The next piece is copied while this one is hashed; page-locked, or the copy would wait for its own staging.
    pinned = flat.device.type == "cuda"
    pieces = flat.split(_PIECE)
    staged = [torch.empty(pieces[0].numel(), dtype=torch.uint8, pin_memory=pinned) for _ in pieces[:2]]

    def copy(index: int) -> torch.Event | None:
        staged[index % 2][: pieces[index].numel()].copy_(pieces[index], non_blocking=pinned)
        return torch.cuda.current_stream(flat.device).record_event() if pinned else None

    copied = copy(0)
    for index, piece in enumerate(pieces):
        if copied is not None:
            copied.synchronize()
        if index + 1 < len(pieces):
            copied = copy(index + 1)
        yield staged[index % 2][: piece.numel()].numpy()
