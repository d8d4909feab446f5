"""A module without a data-parallel wrapper: the script synchronises gradients itself, or there is one rank."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from flashrecovery.torch_native.base import TorchAdapter
from flashrecovery.torch_native.placement import placed_on_mesh, replicated, world_size
from flashrecovery.torch_native.shards import ParamRecord, constant


class PlainAdapter(TorchAdapter):
    """Protects a plain module. Its parameters are taken to be equal on all ranks; DTensors say where they lie."""

    name = "plain"

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        records = []
        for fqn, parameter in self.inner.named_parameters():
            if isinstance(parameter, DTensor):
                name, holders = placed_on_mesh(fqn, parameter.device_mesh, parameter.placements)
            else:
                name, holders = replicated(fqn, range(world_size()))
            records.append(ParamRecord(fqn, name, holders, constant(parameter)))
        return tuple(records)

    def sync_spans_world(self) -> bool:
        return False
