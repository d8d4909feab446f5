"""Which ranks hold an equal piece of a parameter, and what that piece is called.

A shard's name carries the coordinate that makes it unique, so that equal names mean equal bits::

    param/lin.weight                 replicated over the whole world (DDP)
    param/lin.weight#dp_shard=1/4    piece 1 of 4; the holders are the ranks with this coordinate (FSDP2, HSDP)
    param/lin.weight#group=2         replicated, but only over a group whose lowest rank is 2
    param/lin.weight#stand=1         the same in an elastic job: the ranks whose model rank in their replicas is 1
    param/lin.weight#rank=3          not synchronised: it exists on rank 3 alone
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from flashrecovery.errors import UnsupportedError
from flashrecovery.runtime import page_reserve
from flashrecovery.runtime.naming import of_group


def backed_by_pages(new: torch.Tensor) -> torch.Tensor:
    """``new``, which has just been allocated with plain ``torch.empty``, and with it all of its storage. The content is
    undefined, as before. In a replacement it may get pages that exist already
    (:mod:`flashrecovery.runtime.page_reserve`)."""
    if new.device.type == "cpu":
        storage = new.untyped_storage()
        page_reserve.back(storage.data_ptr(), storage.nbytes())
    return new


def zeros_backed_by_pages(new: torch.Tensor) -> torch.Tensor:
    """As :func:`backed_by_pages`, and ``new`` and all of its storage are zero. Pages that exist already are not written
    for it: they are as the kernel has made them."""
    if new.device.type != "cpu":
        return new.zero_()
    storage = new.untyped_storage()
    zero = page_reserve.back(storage.data_ptr(), storage.nbytes())
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    content[: zero.start].zero_()
    content[zero.stop :].zero_()
    return new


def world_size() -> int:
    """Ranks in the job; 1 without process groups."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def global_rank() -> int:
    """This process's rank; 0 without process groups."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def mesh_spans_world(mesh: DeviceMesh) -> bool:
    return mesh.size() == world_size()


def replicated(fqn: str, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Name and holders of a parameter that is equal on ``ranks``."""
    holders = tuple(sorted(ranks))
    group = of_group(holders, world_size())
    return f"param/{fqn}" + (f"#{group}" if group else ""), holders


def unsynchronised(fqn: str) -> tuple[str, tuple[int, ...]]:
    """Name and holders of a parameter that no framework keeps equal anywhere else."""
    if world_size() == 1:
        return f"param/{fqn}", (global_rank(),)
    return f"param/{fqn}#rank={global_rank()}", (global_rank(),)


def placed_on_mesh(fqn: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[str, tuple[int, ...]]:
    """Name and holders of a DTensor's local piece on this rank.

    Raises:
        UnsupportedError: for a placement that is neither replicated nor sharded (partial sums).
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(f"parameter {fqn!r} lies on a device mesh that rank {global_rank()} is not part of")
    ranks = mesh.mesh
    parts: list[str] = []
    index: list[int | slice] = []
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            index.append(slice(None))
            continue
        if not (placement.is_shard() or _is_strided_shard(placement)):
            raise UnsupportedError(
                f"parameter {fqn!r} has placement {placement}; only replicated and sharded ones hold state"
            )
        names = mesh.mesh_dim_names
        parts.append(f"{names[dim] if names else 'shard'}={coordinate[dim]}/{mesh.size(dim)}")
        index.append(coordinate[dim])
    holders = tuple(sorted(int(r) for r in ranks[tuple(index)].reshape(-1).tolist()))
    if not mesh_spans_world(mesh):
        parts.append(f"group={int(ranks.min())}")
    return f"param/{fqn}" + ("#" + ",".join(parts) if parts else ""), holders


def _is_strided_shard(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor behind ``tensor``, sharing its memory; never a copy."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


MemoryLayout = tuple[int, torch.Size, tuple[int, ...]]
"""The address of a tensor's first element, its shape and its strides."""


def addresses(tensors: Sequence[torch.Tensor]) -> list[MemoryLayout]:
    """Where each tensor's :func:`local_tensor` lies."""
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    return [(t.data_ptr(), t.shape, t.stride()) for t in local]


def like_placed(local: torch.Tensor, template: DTensor) -> DTensor:
    """Wrap ``local`` as a DTensor with the mesh, placements and global shape of ``template``."""
    return wrapped(local, template, template.placements, template.shape, template.stride())


def wrapped(
    local: torch.Tensor,
    template: DTensor,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """``local`` itself as a DTensor of this global shape, on the mesh of ``template``.

    DTensor.from_local() would make a view of it, which not every class of tensors can, and which may be of another
    dtype then."""
    spec = template._spec
    if spec.tensor_meta is None:
        raise UnsupportedError(f"a DTensor of shape {tuple(shape)} cannot be made: its template has no dtype")
    meta = type(spec.tensor_meta)(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, type(spec)(spec.mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
