"""HSDP with another number of replicas: ``fully_shard`` on a mesh of (replicate, shard).

A replica is the ranks of one shard group. Every other replica has all the rows, so nothing is sharded otherwise: the
parameters, their optimizer state and the memory for gathered parameters stay as they are. What follows the number of
replicas is the mesh, what FSDP2 has read from it, and the averages, which FSDP2 takes from the groups' sizes each time.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from flashrecovery import groups
from flashrecovery.adapter import fsdp2_state, meshes
from flashrecovery.adapter.fsdp2_shard_layout import forget_dispatch, mesh_infos, meshes_of, refuse_unresizable


class FSDP2Replicas:
    """The replicas of one model, whose meshes are as they were launched.

    Raises UnsupportedError for what cannot have another number of them.
    """

    def __init__(self, root: FSDPModule) -> None:
        refuse_unresizable(root)
        self._root = root
        self._infos = mesh_infos(root)
        self._meshes: list[tuple[DeviceMesh, torch.Tensor]] = [
            (mesh, mesh.mesh.clone()) for mesh in meshes_of(self._infos)
        ]

    def resize(self) -> None:
        """The process groups have other members now."""
        me = torch.distributed.get_rank()
        for mesh, launched in self._meshes:
            meshes.renumber(mesh, mesh_now(launched), me)
        for info in self._infos:
            info.replicate_mesh_size = info.mesh.size(info.replicate_mesh_dim)
            info.replicate_mesh_rank = info.mesh.get_local_rank(info.replicate_mesh_dim)
        for entry in fsdp2_state.sharded_parameters(self._root).values():
            mesh = entry.mesh_info.mesh
            part = entry.shard_mesh
            if part is not mesh:
                meshes.renumber_part(part, mesh)
            spec = entry.sharded_param._spec  # a new one, because it keeps a hash of the mesh as it was
            entry.sharded_param._spec = type(spec)(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)
            entry._sharding_spec = entry.sharded_param._spec
        forget_dispatch()


def mesh_now(launched: torch.Tensor) -> torch.Tensor:
    """The present form of a mesh of (replicate, shard), given as launched: the numbers, shape (replicas, ranks of
    each), of the ranks that there are now; a column for each model rank, of the ranks that have it."""
    places = [groups.numbers_now(peers) for peers in launched.T.tolist()]
    return torch.tensor(places, dtype=launched.dtype).T.contiguous()
