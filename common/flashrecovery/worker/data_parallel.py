"""Who stands at this rank's place in the other replicas of a plain model, and among whom its batches are divided.

These are two questions. What leaves and comes as a whole is what has the whole state together. In tensor parallelism
the same ranks compute a micro-batch together; those of an HSDP replica have the state together, and each of them
computes micro-batches of its own. Both are the same with recovery and without it, so the models themselves are asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def data_parallel_group(models: Sequence[torch.nn.Module]) -> dist.ProcessGroup | None:
    """The ranks among which the micro-batches are divided; None: all."""
    wrapped = (model for model in models if isinstance(model, DistributedDataParallel))
    return next((group_of(model) for model in wrapped), None)


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
