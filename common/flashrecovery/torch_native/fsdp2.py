"""FSDP2 (``fully_shard``) on a 1-D mesh, HSDP on a 2-D mesh: a DTensor's placements say which rank has which piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter import (
    ParamRecord,
    ParamShard,
    StepHooks,
    TorchAdapter,
    attribute_of,
    constant,
    faults,
    fsdp2_state,
    mesh_spans_world,
    placed_on_mesh,
    unsynchronised,
)
from flashrecovery.adapter.elastic import ElasticAdapter, ShardLayout
from flashrecovery.adapter.fsdp2_replicas import FSDP2Replicas
from flashrecovery.adapter.fsdp2_shard_layout import FSDP2ShardLayout, Sharded, replicates
from flashrecovery.errors import UnsupportedError


class FSDP2Adapter(TorchAdapter, ElasticAdapter):
    """Protects a model whose root has been given to ``fully_shard``.

    In the shard dimension every piece is unique (its copy is the core's business), in the replicate dimension of HSDP
    the ranks with the same coordinate hold equal pieces.
    """

    name = "fsdp2"

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not isinstance(model, FSDPModule):
            raise UnsupportedError("FSDP2: the root module has not been given to fully_shard")
        self.fsdp: FSDPModule = model
        fsdp2_state.check(model)
        fsdp2_state.initialise(model)
        self._shard_layout: FSDP2ShardLayout | None = None
        self._replicas: FSDP2Replicas | None = None
        self._flags = fsdp2_state.Flags(model)
        self._last_reduction: fsdp2_state.LastReduction | None = None
        super().__init__(model, optimizers)

    def replicas(self) -> dist.ProcessGroup | None:
        """Those that have the same rows, in HSDP; asked of what FSDP2 keeps, as parameters may be put together now."""
        if not replicates(self.fsdp):
            return None
        entry = next(iter(fsdp2_state.sharded_parameters(self.fsdp).values()))
        mesh, dimension = entry.mesh_info.mesh, entry.mesh_info.replicate_mesh_dim
        group: dist.ProcessGroup = mesh.get_group(dimension)
        return group

    def shard_layout(self) -> ShardLayout | None:
        if replicates(self.fsdp):  # every replica has all of it
            if self._replicas is None:
                self._replicas = FSDP2Replicas(self.fsdp)
            return None
        if self._shard_layout is None:
            shards = {shard.name: shard for shard in self.shards() if isinstance(shard, ParamShard)}
            of_fqn = {record.fqn: shards[record.name] for record in self._records}
            entries = fsdp2_state.sharded_parameters(self.fsdp).items()
            sharded = [Sharded(fqn, entry, of_fqn[fqn]) for fqn, entry in entries]
            self._shard_layout = FSDP2ShardLayout(self.fsdp, self.optimizers, sharded, self._look_again)
        return self._shard_layout

    def tied_to_size(self) -> Sequence[str]:
        """Names of state that cannot be resharded: what an optimizer keeps in its attributes is this rank's own part,
        in an unknown shape."""
        beside = () if replicates(self.fsdp) else self.kept_beside()
        return [*super().tied_to_size(), *(f"FSDP2 and what {kind} keeps in its attributes" for kind in beside)]

    def resized(self) -> None:
        if self._replicas is not None:
            self._replicas.resize()

    def _look_again(self) -> None:
        """The tensors of the shards are others."""
        self._looks = 0

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        records = []
        sharded = fsdp2_state.sharded_parameters(self.fsdp)
        for fqn, entry in sharded.items():
            parameter = entry.sharded_param
            assert isinstance(parameter, DTensor)
            name, holders = placed_on_mesh(fqn, parameter.device_mesh, parameter.placements)
            records.append(ParamRecord(fqn, name, holders, attribute_of(entry, "sharded_param")))
        registered = fsdp2_state.registered_on_modules(sharded.values())
        for fqn, parameter in self.root.named_parameters():
            if id(parameter) in registered:
                continue
            if isinstance(parameter, DTensor):
                name, holders = placed_on_mesh(fqn, parameter.device_mesh, parameter.placements)
            else:
                name, holders = unsynchronised(fqn)  # ignored_params: FSDP2 does not touch them
            records.append(ParamRecord(fqn, name, holders, constant(parameter)))
        return tuple(records)

    def _trainable(self) -> Sequence[Callable[[], nn.Parameter]]:
        return [record.get for record in self._records]

    def sync_spans_world(self) -> bool:
        parameters = fsdp2_state.sharded_parameters(self.fsdp).values()
        trained = [e.sharded_param for e in parameters if e.sharded_param.requires_grad]
        return bool(trained) and all(mesh_spans_world(p.device_mesh) for p in trained)

    def watch(self, hooks: StepHooks) -> None:
        super().watch(hooks)
        self._last_reduction = fsdp2_state.LastReduction(self.fsdp, hooks.synchronising)

    def _synchronises(self) -> bool:
        if self._last_reduction is not None:
            self._last_reduction.choose()
        return False  # said later than at the end of the forward pass, by the last unit

    def _reset_framework(self) -> None:
        fsdp2_state.reset(self.fsdp)

    def capture_common(self) -> dict[str, Any]:
        return {**super().capture_common(), "fsdp": self._flags.now()}

    def restore_common(self, state: dict[str, Any]) -> None:
        # An evaluation of the set-up leaves the root's parameters gathered, with the values of the set-up, and an order
        # of forward passes by which the next backward pass would gather ahead. The survivors have neither any more.
        fsdp2_state.reset(self.fsdp)
        super().restore_common(state)
        fsdp2_state.restore_flags(self.fsdp, state["fsdp"])

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        middle = fsdp2_state.middle_unit(self.fsdp)
        return {
            **super().fault_points(),
            "param-gather": lambda callback: faults.before_gather(middle, callback),
        }
