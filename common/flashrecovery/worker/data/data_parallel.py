"""Which ranks have this one's place in the other replicas of a plain model, and among which its batches are split.

These are two questions. What leaves and comes as a whole is what has the whole state together. In tensor parallelism
the same ranks compute a micro-batch together; those of an HSDP replica have the state together, and each of them
computes its own micro-batches. Both are the same with recovery and without it, so the models themselves are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashrecovery.errors import UnsupportedError


class Switchable(Protocol):
    """A model of FSDP2, which communicates in each micro-batch, and reduces gradients in the selected ones."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...


def data_parallel_group(models: Sequence[torch.nn.Module]) -> dist.ProcessGroup | None:
    """The ranks that take their own samples; the other ranks of a replica take the same samples as one of them. None:
    all ranks of the job do.

    Raises UnsupportedError if a model of FSDP2 is sharded otherwise, too, or over some of the ranks only."""
    for model in models:
        _refuse_other_dimensions(model)
    return next((group for model in models if (group := group_of(model)) is not None), None)


def group_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """Over which DistributedDataParallel replicates a model. None: it is none."""
    group: dist.ProcessGroup | None = model.process_group if isinstance(model, DistributedDataParallel) else None
    return group


def communicates(model: torch.nn.Module) -> TypeGuard[Switchable]:
    """Whether a model communicates in each micro-batch. FSDP2 need not be imported to tell."""
    return callable(getattr(model, "set_requires_gradient_sync", None))


def _refuse_other_dimensions(model: torch.nn.Module) -> None:
    """All ranks of FSDP2's mesh take their own samples: there is no dimension in which the layers are divided."""
    parameters = model.named_parameters()
    if not communicates(model):
        return
    for name, parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue  # put together at the moment, or left alone
        mesh, placements = parameter.device_mesh, parameter.placements
        hybrid = len(placements) == 2 and placements[0].is_replicate() and not placements[1].is_replicate()
        if mesh.size() != dist.get_world_size() or not (len(placements) == 1 or hybrid):
            raise UnsupportedError(
                f"elastic_batches() with parameter {name!r} on {mesh} as {placements}: which ranks take samples of "
                "their own is known of FSDP2 on a mesh of one dimension, or of (replicate, shard), of all ranks; not "
                "with tensor parallelism beside it"
            )
