"""DistributedDataParallel: every parameter is replicated over DDP's process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flashrecovery.adapter import (
    ParamRecord,
    TorchAdapter,
    backward_waits_for_futures,
    constant,
    replicated,
    unsynchronised,
    world_size,
)
from flashrecovery.adapter.elastic import ElasticAdapter, group_of
from flashrecovery.errors import UnsupportedError
from flashrecovery.torch_native import ddp_reducer


class DDPAdapter(TorchAdapter, ElasticAdapter):
    """Protects a model wrapped in :class:`DistributedDataParallel`.

    The buckets are rebuilt at the end of the first synchronised backward rather than at the next forward, which is the
    same rebuild, done before any state changes: version 0 has the initial layout, every later version the final one.
    """

    name = "ddp"

    def __init__(self, model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        ddp_reducer.refuse_unsupported(model)
        self.ddp = model
        self._layout: ddp_reducer.BucketLayout | None = None
        """The final layout; None while the initial one is in use."""
        super().__init__(model, optimizers)

    @property
    def inner(self) -> nn.Module:
        module: nn.Module = self.ddp.module
        return module

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        ranks = dist.get_process_group_ranks(self.ddp.process_group)
        records = []
        for fqn, parameter in self.inner.named_parameters():
            if isinstance(parameter, DTensor):
                raise UnsupportedError(
                    f"DistributedDataParallel over DTensor parameters ({fqn!r}) is not supported; "
                    "use fully_shard on a 2-D mesh"
                )
            ignored = fqn in self.ddp.parameters_to_ignore
            name, holders = unsynchronised(fqn) if ignored else replicated(fqn, ranks)
            records.append(ParamRecord(fqn, name, holders, constant(parameter)))
        return tuple(records)

    def replicas(self) -> dist.ProcessGroup | None:
        return group_of(self.ddp)

    def sync_spans_world(self) -> bool:
        return dist.get_world_size(self.ddp.process_group) == world_size()

    def _synchronises(self) -> bool:
        synchronises: bool = self.ddp.require_backward_grad_sync  # not below no_sync()
        return synchronises

    # -- the bucket layout ------------------------------------------------------------------------

    def _backward_starts(self, grad: torch.Tensor) -> None:
        super()._backward_starts(grad)
        if not self.ddp.require_backward_grad_sync:
            return
        backward_waits_for_futures()
        if self._layout is None:
            engine = torch.autograd.Variable._execution_engine
            # Queued twice, so that it runs after the finalisation that DDP queues at its last gradient.
            engine.queue_callback(lambda: engine.queue_callback(self._gradients_ready))

    def _gradients_ready(self) -> None:
        if self._layout is None and ddp_reducer.rebuild_now(self.ddp):
            self._layout = ddp_reducer.read_layout(self.ddp)

    def _reset_framework(self) -> None:
        ddp_reducer.renew(self.ddp, self._layout)

    def capture_common(self) -> dict[str, Any]:
        # no_sync() leaves a trace: whether the next forward broadcasts the buffers.
        flags = [self.ddp.require_forward_param_sync, self.ddp.require_backward_grad_sync]
        return {**super().capture_common(), "buckets": self._layout, "flags": flags}

    def restore_common(self, state: dict[str, Any]) -> None:
        buckets = state["buckets"]
        layout = None if buckets is None else tuple(tuple(int(i) for i in bucket) for bucket in buckets)
        # Gradients that exist are views of the buckets if DDP wants them so: dividing by the world size differs.
        views = self.ddp.gradient_as_bucket_view and state["gradients"] != "none"
        if layout != self._layout or views:
            ddp_reducer.renew(self.ddp, layout, gradients=views)
            if views and layout is not None:  # so they have just been made
                self._zero = ddp_reducer.zero_gradients(self.ddp)
            self._layout = layout
        self.ddp.require_forward_param_sync, self.ddp.require_backward_grad_sync = state["flags"]
        try:
            super().restore_common(state)
        finally:
            self._zero = frozenset()
