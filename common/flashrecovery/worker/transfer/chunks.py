"""A payload cut into messages.

Both sides of a transfer compute the same messages, from the specs alone. Small tensors are packed together. They come
first: a shard is whole as soon as its large ones are there. Those travel in parts, each straight from and into its own
memory where it is contiguous. A part is whole elements, so that of a strided tensor no more is copied than the part.
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
    large: list[tuple[int, TensorSpec]] = []
    packed: list[TensorSlice] = []
    size = 0
    for index, spec in enumerate(specs):
        nbytes = spec.nbytes
        if nbytes >= min(DIRECT_BYTES, most):
            large.append((index, spec))
        elif nbytes:
            if size + nbytes > most:
                yield Message(tuple(packed), size)
                packed, size = [], 0
            packed.append(TensorSlice(index, 0, nbytes))
            size += nbytes
    if packed:
        yield Message(tuple(packed), size)
    for index, spec in large:
        whole_elements = max(most // spec.dtype.itemsize, 1) * spec.dtype.itemsize
        for start in range(0, spec.nbytes, whole_elements):
            part = min(whole_elements, spec.nbytes - start)
            yield Message((TensorSlice(index, start, part),), part)


def direct(message: Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of the message itself, if it is one range of a contiguous tensor."""
    piece = message.pieces[0]
    tensor = tensors[piece.index]
    if len(message.pieces) > 1 or not tensor.is_contiguous():
        return None
    return byte_view(tensor)[piece.start : piece.start + piece.nbytes]


def pack(message: Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for content, view in _contents(message, tensors, buffer):
        content.copy_(byte_view(exact_contiguous(view)))


def unpack(message: Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for content, view in _contents(message, tensors, buffer):
        if view.is_contiguous():
            byte_view(view).copy_(content)
        else:
            contiguous = torch.empty(view.shape, dtype=view.dtype, device=view.device)
            byte_view(contiguous).copy_(content)
            exact_copy(view, contiguous)


def _contents(
    message: Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes in ``buffer``, and what of a tensor they are."""
    at = 0
    for piece in message.pieces:
        tensor = tensors[piece.index].detach()
        size = tensor.element_size()
        for view in rows(tensor, piece.start // size, (piece.start + piece.nbytes) // size):
            yield buffer[at : at + view.numel() * size], view
            at += view.numel() * size


def rows(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views which together are elements ``start`` to ``stop`` of a tensor of any strides, counted row by row."""
    if stop - start == tensor.numel():
        yield tensor
    elif tensor.dim() == 1:
        yield tensor[start:stop]
    elif start < stop:
        each = tensor.numel() // tensor.shape[0]
        first, last = -(-start // each), stop // each  # the rows that are in it as a whole
        if first > last:
            yield from rows(tensor[last], start - last * each, stop - last * each)
            return
        if start < first * each:
            yield from rows(tensor[first - 1], start - (first - 1) * each, each)
        if first < last:
            yield tensor[first:last]
        if last * each < stop:
            yield from rows(tensor[last], 0, stop - last * each)


def flip_a_bit(tensor: torch.Tensor) -> None:
    damaged = exact_contiguous(tensor)
    byte_view(damaged)[:1].bitwise_xor_(1)
    if not tensor.is_contiguous():
        exact_copy(tensor, damaged)
