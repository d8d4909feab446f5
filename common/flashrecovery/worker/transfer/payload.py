"""The tensors of a transfer, in the order in which both sides count them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashrecovery.errors import ProtocolError
from flashrecovery.state.spec import TensorSpec
from flashrecovery.worker.transfer.chunks import Message, direct


@dataclass(frozen=True)
class Payload:
    """Tensors that are sent or received, and where each stands in the header: all, or a part of them."""

    specs: Sequence[TensorSpec]
    tensors: Sequence[torch.Tensor]
    places: Sequence[int] = ()

    def where(self, chosen: Sequence[bool]) -> Payload:
        places = [i for i, wanted in enumerate(chosen) if wanted]
        return Payload([self.specs[i] for i in places], [self.tensors[i] for i in places], places)


def placed(
    names: Sequence[str], targets: Sequence[list[torch.Tensor]]
) -> Iterator[tuple[str, list[torch.Tensor], int]]:
    """Each shard's name and tensors, and the place of its first tensor in the payload."""
    at = 0
    for name, tensors in zip(names, targets, strict=True):
        yield name, tensors, at
        at += len(tensors)


def first_with_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The first one that is not empty."""
    return next(i for i, t in enumerate(tensors) if t.numel())


def checked(name: str, key: str, tensor: torch.Tensor, wanted: TensorSpec) -> torch.Tensor:
    if tuple(tensor.shape) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
        raise ProtocolError(
            f"shard {name!r}: tensor {key!r} was allocated as {tuple(tensor.shape)} {tensor.dtype}, "
            f"but {tuple(wanted.shape)} {wanted.dtype} is coming"
        )
    return tensor.detach()


def in_place(message: Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of the message itself, if it is one range of a contiguous host tensor."""
    return direct(message, tensors) if tensors[message.pieces[0].index].device.type == "cpu" else None


def staging_buffer(message: Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    on_device = any(tensors[p.index].device.type == "cuda" for p in message.pieces)
    return torch.empty(message.nbytes, dtype=torch.uint8, pin_memory=on_device)
