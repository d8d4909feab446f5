"""Device meshes of a job that changes its size: the object that a script has, with other ranks in it.

What of a mesh depends on the ranks is taken from a new one; its process groups are the ones that it has, which the core
gives other members. All that is private to torch about this stands in this file.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

_PARTS = ("_layout", "_rank_map", "_flatten_rank_map", "_rank", "_coordinate_on_dim", "_hash")
"""What of a device mesh depends on the number of ranks, and on this one's."""


def whole(mesh: DeviceMesh) -> bool:
    """Whether it is no part of another mesh, and has none whose ranks are counted otherwise."""
    return mesh._root_mesh is None and not mesh._flatten_mapping


def renumber(mesh: DeviceMesh, ranks: torch.Tensor, me: int) -> None:
    """``mesh`` consists of these ``ranks`` from now on, of which this process is ``me``. Its process groups have been
    given their new members already."""
    new = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False, _rank=me)
    for name in _PARTS:
        setattr(mesh, name, getattr(new, name))


def renumber_part(part: DeviceMesh, of: DeviceMesh) -> None:
    """The same for the last dimension of ``of``, which has been renumbered, in its other dimensions only."""
    part._rank_map, part._flatten_rank_map, part._rank = of._rank_map, of._flatten_rank_map, of._rank
    part._coordinate_on_dim, part._hash = tuple((part.mesh == part._rank).nonzero()[0].tolist()), None
