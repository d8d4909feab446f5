"""A payload cut into messages.

Both sides of a transfer compute the same messages, from the specs alone: small tensors are packed together, large ones
travel in parts, each straight from and into its own memory where it is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashrecovery.state.digest import byte_view
from flashrecovery.state.exact import exact_contiguous, exact_copy
from flashrecovery.state.spec import TensorSpec

PACK_BYTES = 32 << 20
"""Largest message, and the size of a staging buffer."""
DIRECT_BYTES = 1 << 20
"""Contiguous tensors of at least this size are sent without a copy."""
WINDOW = 4
"""Messages under way for each peer and direction: bounds staging memory to WINDOW * PACK_BYTES."""


@dataclass(frozen=True)
class TensorSlice:
    """``nbytes`` bytes of tensor number ``index``, from byte ``start``; whole tensors unless it is a large
    one.
    """

    index: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Message:
    pieces: tuple[TensorSlice, ...]
    nbytes: int


def messages(specs: Sequence[TensorSpec], most: int | None = None) -> Iterator[Message]:
    """The messages of a payload of these tensors, of at most ``most`` bytes (otherwise ``PACK_BYTES``); both sides
    compute the same ones."""
    if most is None:
        most = PACK_BYTES
    packed: list[TensorSlice] = []
    size = 0
    for index, spec in enumerate(specs):
        nbytes = spec.nbytes
        if nbytes >= min(DIRECT_BYTES, most):
            for start in range(0, nbytes, most):
                part = min(most, nbytes - start)
                yield Message((TensorSlice(index, start, part),), part)
        elif nbytes:
            if size + nbytes > most:
                yield Message(tuple(packed), size)
                packed, size = [], 0
            packed.append(TensorSlice(index, 0, nbytes))
            size += nbytes
    if packed:
        yield Message(tuple(packed), size)


def direct(message: Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of the message itself, if it is one range of a contiguous tensor."""
    piece = message.pieces[0]
    tensor = tensors[piece.index]
    if len(message.pieces) > 1 or not tensor.is_contiguous():
        return None
    return byte_view(tensor)[piece.start : piece.start + piece.nbytes]


def pack(message: Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    offset = 0
    for piece in message.pieces:
        source = byte_view(exact_contiguous(tensors[piece.index]))[piece.start : piece.start + piece.nbytes]
        buffer[offset : offset + piece.nbytes].copy_(source)
        offset += piece.nbytes


def unpack(message: Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    offset = 0
    for piece in message.pieces:
        target = tensors[piece.index]
        content = buffer[offset : offset + piece.nbytes]
        if target.is_contiguous():
            byte_view(target)[piece.start : piece.start + piece.nbytes].copy_(content)
        else:
            _write_strided(target, piece.start, content)
        offset += piece.nbytes


def _write_strided(target: torch.Tensor, start: int, content: torch.Tensor) -> None:
    """Bytes into a strided tensor: through a contiguous copy of it."""
    whole = exact_contiguous(target)
    byte_view(whole)[start : start + content.numel()].copy_(content)
    exact_copy(target, whole)


def flip_a_bit(tensor: torch.Tensor) -> None:
    damaged = exact_contiguous(tensor)
    byte_view(damaged)[:1].bitwise_xor_(1)
    if not tensor.is_contiguous():
        exact_copy(tensor, damaged)
