"""The data-parallel group of plain models: who stands at this rank's place in the other replicas.

It is the same with recovery and without it, so the models themselves are asked, and no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def data_parallel_group(models: Sequence[torch.nn.Module]) -> dist.ProcessGroup | None:
    """Of the first model that says it; None: each rank is a replica."""
    return next((group for model in models if (group := group_of(model)) is not None), None)


def group_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """Over which a model is replicated: DistributedDataParallel's group, or that of the dimension of a mesh in which
    FSDP2 (HSDP) replicates. None: it does not say so, or FSDP2 shards it over all ranks."""
    if isinstance(model, DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group
    if not callable(getattr(model, "set_requires_gradient_sync", None)):
        return None  # not of FSDP2, which need not be imported to tell
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_replicate():
                    return parameter.device_mesh.get_group(dimension)
    return None
