"""A model's and an optimizer's state as boxes of whole tensors, which any other layout can read.

Megatron says where each of this rank's parameters lies in the whole model (``sharded_state_dict``). What is stepped on
lies where its parameter does. The distributed optimizer cuts through parameters, though: its part of one is a range of
the flattened parameter, which Megatron gathers before it writes. A range of a flattened tensor is a few boxes of it (of
a matrix: the end of a row, whole rows, the beginning of a row), and a torch.distributed.checkpoint may consist of any
boxes. So each rank writes its own part, without communication, and the files mean the same.

==============================  ====================================================
``<parameter>``                 the weight (layers are stacked: one more dimension)
``optimizer.state.param.*``     what the distributed optimizer steps on
``optimizer.state.fp32_param.*``  the fp32 copy of another optimizer
``optimizer.state.exp_avg.*``   Adam's state, ...
==============================  ====================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import FixedShard, writer_of
from flashrecovery.errors import UnsupportedError
from fr_megatron.optimizers import Names, is_distributed, pairs, record

STATE = "optimizer.state"


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor.

    Attributes:
        key: of the whole tensor.
        tensor: live, contiguous.
        begin, shape: the box is ``tensor.flatten()[begin:][:prod(shape)].view(shape)``.
        whole, offset: shape of the whole tensor, and the box's place in it.
        flexible: the whole tensor may have another shape in a checkpoint (a padded vocabulary).
    """

    key: str
    tensor: torch.Tensor
    begin: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    flexible: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same box of ``tensor``, the live one or a copy. A view."""
        return tensor.reshape(-1)[self.begin : self.begin + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Stepped:
    """A model parameter and what one of Megatron's optimizers steps on for it. ``start``: where that begins in the
    flattened parameter. ``writer``: which of the ranks that hold the same writes it."""

    inner: Any
    model: torch.nn.Parameter
    main: torch.nn.Parameter
    start: int
    writer: int

    @property
    def state(self) -> dict[str, Any]:
        """The basic optimizer's state of the parameter; empty before its first step."""
        found: dict[str, Any] = self.inner.optimizer.state.get(self.main, {})
        return found


def find_stepped(inner_optimizers: Sequence[Any], names: Names) -> list[Stepped]:
    """All that this rank steps on."""
    found = []
    for inner in inner_optimizers:
        for model, main in pairs(inner):
            start = inner._get_model_param_range_map(model)["param"].start if is_distributed(inner) else 0
            made = record((model, main), names)
            writer = writer_of(FixedShard(made.name, made.holders, main))  # the rank that digests it
            found.append(Stepped(inner, model, main, start, writer))
    return found


def described(chunks: Sequence[Any], metadata: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(chunk, what Megatron says about a part of it), without communication."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return [
        (chunk, leaf)
        for chunk in chunks
        for leaf in nested_values(chunk.module.sharded_state_dict(metadata=dict(metadata)))
    ]


def pieces(parts: Sequence[tuple[Any, Any]], stepped: Sequence[Stepped], *, written: bool) -> Iterator[Piece]:
    """This rank's pieces, or with ``written`` those that it has to write: each is then written by one rank.

    Raises:
        UnsupportedError: something is in the description that is no part of the live model.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

    known = {id(s.model): s for s in stepped}
    for chunk, leaf in parts:
        if not isinstance(leaf, (ShardedTensor, ShardedTensorFactory)):
            continue
        own = known.get(id(leaf.data))
        if own is None:
            part_of_others = chunk.ddp_config.use_distributed_optimizer and leaf.data.requires_grad
            if not written or (not part_of_others and is_main_replica(leaf.replica_id)):
                yield from cut(leaf, "", leaf.data, 0)
            continue
        if written and not _writes(leaf, own):
            continue
        weight = leaf.data.detach()
        if written and is_distributed(own.inner):
            # Only the own part is up to date before the all-gather (overlap_param_gather).
            yield from cut(leaf, "", weight.view(-1)[own.start : own.start + own.main.numel()], own.start)
        else:
            yield from cut(leaf, "", weight, 0)
        for name, tensor in _stepped_on(own):
            yield from cut(leaf, f"{STATE}.{name}.", tensor, own.start)


def _writes(leaf: Any, own: Stepped) -> bool:
    """Whether this rank writes ``leaf``. Megatron's replica is (pipeline, tensor, data parallel), and it lets the first
    data-parallel rank write; here the ranks share the work."""
    replica = leaf.replica_id if isinstance(leaf.replica_id, tuple) else (leaf.replica_id,)
    return not any(replica[:-1]) and own.writer == dist.get_rank()


def _stepped_on(own: Stepped) -> Iterator[tuple[str, torch.Tensor]]:
    if own.main is not own.model:
        yield "param" if is_distributed(own.inner) else "fp32_param", own.main
    for name, value in own.state.items():
        if isinstance(value, torch.Tensor) and value.shape == own.main.shape:
            yield name, value


def cut(leaf: Any, prefix: str, tensor: torch.Tensor, start: int) -> Iterator[Piece]:
    """Pieces of ``tensor``, which lies in the local tensor ``leaf`` from its element ``start`` on."""
    stop = start + tensor.numel()
    for child, at in _children(leaf):
        low, high = max(start, at), min(stop, at + prod(child.local_shape))
        if low >= high:
            continue
        begin = low - start
        ahead = (0,) * child.prepend_axis_num
        for origin, shape in boxes(tuple(child.local_shape), low - at, high - at):
            offset = tuple(a + b for a, b in zip(child.global_offset, ahead + origin, strict=True))
            yield Piece(
                prefix + child.key,
                tensor.detach(),
                begin,
                (1,) * len(ahead) + shape,
                tuple(child.global_shape),
                offset,
                child.allow_shape_mismatch,
            )
            begin += prod(shape)


def _children(leaf: Any) -> Iterator[tuple[Any, int]]:
    """The tensors of the checkpoint that a local tensor is written as (gate and up projection, ...), and where in it
    each begins."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    whole = leaf.data
    if not whole.is_contiguous():
        raise UnsupportedError(f"a checkpoint of {leaf.key!r}: it is not contiguous in memory")
    if not isinstance(leaf, ShardedTensorFactory):
        yield leaf, 0
        return
    for child in nested_values(leaf.build()):
        data = child.data
        if data.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not data.is_contiguous():
            raise UnsupportedError(f"a checkpoint of {leaf.key!r}: {child.key!r} is not one range of it")
        yield child, data.storage_offset() - whole.storage_offset()


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the boxes that elements ``start`` to ``stop`` of a flattened tensor are, in their order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, inside = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        for offset, size in boxes(inside, start - last * row, stop - last * row):
            yield (last, *offset), (1, *size)
        return
    for offset, size in boxes(inside, start - (first - 1) * row, row):
        yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0 for _ in inside)), (last - first, *inside)
    for offset, size in boxes(inside, 0, stop - last * row):
        yield (last, *offset), (1, *size)
