"""ZeRO-3: each rank holds a slice of every parameter; slices are concatenated per sub-group.

``fp32_partitioned_groups_flat[s]`` and its optimizer state exist on one rank only. The 16-bit slices are their rounded
copies, and whole parameters are gathered when a module needs them: neither is state. After a reset *no* parameter is
whole, not even a persistent one, which is how a new engine begins: all ranks then gather the same ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashrecovery.adapter import FixedShard, Method, ParamRecord, ParamShard, Shard, settle_state
from flashrecovery.adapter.elastic import ShardPlace
from flashrecovery.errors import UnsupportedError
from fr_deepspeed.backward import reset_backward_hooks
from fr_deepspeed.capabilities import (
    BUCKETS3,
    COORDINATOR_BACKWARD,
    COORDINATOR_LEAVES,
    MANGLED,
    PARTITION_RANK,
    REDUCED3,
)
from fr_deepspeed.elastic import resize_engine
from fr_deepspeed.engine import EngineAdapter
from fr_deepspeed.layout import partition_record
from fr_deepspeed.learned3 import ExternalParameters
from fr_deepspeed.reform3 import reform3
from fr_deepspeed.shard_layout import fill_partition
from fr_deepspeed.slices import SliceShardLayout, frozen_name


class Stage3Adapter(EngineAdapter):
    """Protects an engine with ``DeepSpeedZeroOptimizer_Stage3``."""

    name = "deepspeed-zero3"
    framework_attributes = ("ds_", "applied_pre_backward_ref_cnt")

    def __init__(self, engine: Any, optimizer: Any) -> None:
        self._partitions = list(engine.optimizer.fp32_partitioned_groups_flat)
        self._reduced: set[int] | None = None
        """Whose gradients DeepSpeed has reduced in this step: its own set of them where it keeps one, which its step
        drops, or ours."""
        self._frozen_then: frozenset[int] = frozenset()
        """The parameters with an optimizer that were frozen in this micro-batch's forward pass."""
        self._left_out: set[int] = set()
        """Those that were frozen in the first micro-batch of this step, and had no gradient in it."""
        if REDUCED3.takes("seen"):
            self._see_reductions(engine.optimizer)
        super().__init__(engine, optimizer)
        self._weights = self._partitions
        self._external = ExternalParameters(engine.module)
        self._shard_layout = SliceShardLayout(engine.optimizer, self._partition_shards, self._frozen, self._install)

    @property
    def _optimized(self) -> Sequence[nn.Parameter]:
        return [p for group in self.engine.optimizer.fp16_groups for p in group]

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        group = self.engine.optimizer.dp_process_group
        return tuple(partition_record(f"partition/{s}", p, group, self._place) for s, p in enumerate(self._partitions))

    def _record_shard(self, record: ParamRecord) -> Shard:
        return ParamShard(record, {0: self.basic})  # which has it in its groups only while it steps on it

    def _frozen_shards(self) -> list[Shard]:
        group = self.engine.optimizer.dp_process_group
        records = [partition_record(f"param/{fqn}", _slice(p), group, self._place) for fqn, p in self._frozen().items()]
        return [FixedShard(record.name, record.holders, record.get()) for record in records]

    def _frozen(self) -> dict[str, nn.Parameter]:
        """The parameters that no optimizer trains."""
        trained = {id(p) for p in self._optimized}
        return {fqn: p for fqn, p in self.inner.named_parameters() if id(p) not in trained}

    def sync_spans_world(self) -> bool:
        return not self._muon and super().sync_spans_world()  # its momentum is written before the norm is reduced

    def _setting(self) -> Iterable[Method]:
        zero = self.engine.optimizer
        return [*super()._setting(), (zero, "set_full_hp_param"), (zero, "set_local_hp_param")]

    # -- another number of replicas ---------------------------------------------------------------

    def _partition_shards(self) -> Sequence[ParamShard]:
        return [shard for shard in self.shards() if isinstance(shard, ParamShard)]

    def _install(self, place: ShardPlace, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
        """Go on with these slices, which are those of this place."""
        zero = self.engine.optimizer
        self._place = place
        self._reset_optimizer()  # no parameter may be whole
        resize_engine(self.engine)
        reform3(self.engine, place)
        for number, partition in enumerate(zero.fp32_partitioned_groups_flat):
            fill_partition(self.basic, partition, number, tensors, description["groups"][number])
        settle_state(self.basic)
        with torch.no_grad():
            for fqn, parameter in self._frozen().items():
                _slice(parameter).copy_(tensors[frozen_name(fqn)])
        self._partitions = self._weights = list(zero.fp32_partitioned_groups_flat)
        self._records = self._find_parameters()
        self._all_shards = None
        self._looks = 0
        self._find_what_loading_makes()
        self._derive_weights()

    # -- gradients --------------------------------------------------------------------------------

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._hooks is not None and torch.is_grad_enabled():
            self._expect_gradients()
        super()._after_forward(module, inputs, output)

    def _expect_gradients(self) -> None:
        """Called before the backward pass of each micro-batch."""
        zero, engine = self.engine.optimizer, self.engine
        first = engine.micro_steps % engine.gradient_accumulation_steps() == 0
        if zero._offload_boundary_param_ids is not self._reduced if REDUCED3.takes("noted") else first:
            self._begin_reductions(set())
        elif not first:
            if self._reduced is None:
                raise UnsupportedError(
                    f"the first forward pass with gradients is that of micro-batch {engine.micro_steps}, amid an "
                    "optimizer step: begin with the first one of a step"
                )
            self._check_gradients(self._reduced)
        self._frozen_then = frozenset(p.ds_id for p in self._optimized if not p.requires_grad)  # type: ignore[attr-defined]

    def _begin_reductions(self, reduced: set[int] | None) -> None:
        """Record reductions in ``reduced`` from now on; None: do not record them."""
        self._reduced = reduced
        self._left_out.clear()
        if REDUCED3.takes("noted"):
            self.engine.optimizer._offload_boundary_param_ids = set() if reduced is None else reduced

    def _see_reductions(self, zero: Any) -> None:
        partition: Callable[..., Any] = zero.partition_grads

        def partition_grads(params_to_release: Any, grad_partitions: Any) -> Any:
            if self._reduced is not None:
                self._reduced.update(p.ds_id for p in params_to_release)
            return partition(params_to_release, grad_partitions)

        zero.partition_grads = partition_grads

    def _gradients_ready(self) -> None:
        if self._reduced is not None:
            self._check_gradients(self._reduced)
            self._reduced = None

    def _check_gradients(self, reduced: set[int]) -> None:
        """The first micro-batch overwrites the gradients of the last step, later ones add to them: of a parameter that
        had no gradient in the first, DeepSpeed would use the *last* step's again, which a replacement does not have.
        One that is frozen (peft's adapters, when another one is set) has zeroes in its place, if nothing is offloaded.

        Raises UnsupportedError with its name.
        """
        zero = self.engine.optimizer
        parameter: Any  # deepspeed adds attributes
        for parameter in self._optimized:
            ident = parameter.ds_id
            if ident in reduced:
                fine = ident not in self._left_out
            else:
                frozen = ident in self._frozen_then and not parameter.requires_grad and not zero.offload_optimizer
                if frozen:
                    self._left_out.add(ident)
                fine = frozen or not _holds_something(zero, parameter)
            if not fine:
                raise UnsupportedError(
                    "flash_recovery does not support: ZeRO-3 where a parameter "
                    f"({zero.param_names[parameter]}) has no gradient in the first micro-batch of a step; freeze it "
                    "(requires_grad = False)"
                )

    # -- reset ------------------------------------------------------------------------------------

    def _reset_optimizer(self) -> None:
        zero = self.engine.optimizer
        reset_backward_hooks(zero)
        for group in self.basic.param_groups:
            group["params"] = []
        if BUCKETS3.takes("by dtype"):
            for bucket in zero.ipg_buckets.values():
                bucket.params.clear()
                bucket.elements = 0
        else:
            zero.params_in_ipg_bucket.clear()
        for ident in zero.params_already_reduced:
            zero.params_already_reduced[ident] = False
        zero.averaged_gradients = {}
        zero.param_reduce_events.clear()
        zero.micro_step_id = 0
        zero.inf_or_nan_tracker.zero_()
        self._begin_reductions(None)
        if zero.offload_optimizer:
            zero.norm_for_param_grads = {}
        self._release_parameters()
        self._drop_second_copies()
        self._reset_coordinator(zero.parameter_offload.get_param_coordinator())
        self._reset_modules()

    def _release_parameters(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        parameter: Any  # deepspeed adds attributes
        for parameter in self.inner.parameters():
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status == ZeroParamStatus.INFLIGHT:
                # Its gather has been abandoned: what has arrived is worth nothing.
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            elif parameter.ds_status == ZeroParamStatus.AVAILABLE:
                parameter.partition(has_been_updated=False)

    def _reset_coordinator(self, coordinator: Any) -> None:
        """The recorded trace is dropped everywhere: a replacement has none, and its ranks check a trace together."""
        from deepspeed.runtime.zero.partitioned_param_coordinator import ZeRoTraceMode

        private = vars(coordinator)
        private[MANGLED + "inflight_param_registry"].data.clear()  # never wait for what has been abandoned
        private[MANGLED + "ongoing_fetch_events"].clear()
        if COORDINATOR_LEAVES.way is not None:
            private[MANGLED + "ongoing_fetch_leaf_module_events"].clear()
        if COORDINATOR_BACKWARD.way is not None:
            private[MANGLED + "active_backward_submodules"].clear()
        private[MANGLED + "trace_mode"] = ZeRoTraceMode.INVALID
        private[MANGLED + "step_id"] = 0
        private[MANGLED + "n_available_params"] = 0
        coordinator._clear_trace_structures()
        private[MANGLED + "step_id_module_fetched_for"].clear()  # to 0.19.0 the call leaves it
        # What a module releases is remembered for ever, by its step in whichever trace there was at the time.
        remembered = getattr(type(coordinator), MANGLED + "params_to_release")
        inspect.getclosurevars(remembered).nonlocals["func"].cache_clear()  # below a decorator

    def _reset_modules(self) -> None:
        from deepspeed.runtime.zero import parameter_offload

        module: Any
        for module in self.inner.modules():
            if hasattr(module._parameters, "_in_forward"):
                module._parameters._in_forward = False
            for name in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
                if name in vars(module):
                    setattr(module, name, 0)
            if "ds_recompute_parameters" in vars(module):
                module.ds_recompute_parameters.clear()
        del parameter_offload.FWD_MODULE_STACK[1:]

    # -- capture, restore -------------------------------------------------------------------------

    def capture_common(self) -> dict[str, Any]:
        return {**super().capture_common(), "external": self._external.capture()}

    def restore_common(self, state: dict[str, Any]) -> None:
        # What this process has computed before its first step has made parameters whole, and a trace.
        self._reset_optimizer()
        self._external.restore(state["external"])
        super().restore_common(state)

    def _derive_weights(self) -> None:
        for s in range(len(self._partitions)):
            self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(s)
        self._drop_second_copies()  # a new engine has some, of its first weights

    def _drop_second_copies(self) -> None:
        """Drop hpZ's second copies of the partitions, which are made again in the next forward pass. A rank that has
        one gathers from it, in another group."""
        for parameter in self.inner.parameters():
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def _holds_something(zero: Any, parameter: Any) -> bool:
    """False if this rank's slice of a parameter is padding alone."""
    if PARTITION_RANK.way is not None:
        rank = zero._get_param_partition_rank(parameter)
    else:
        rank = dist.get_rank(zero.dp_process_group)
    return bool(parameter.partition_numel() * rank < parameter.ds_numel)


def _slice(parameter: Any) -> Any:
    """This rank's part of a parameter."""
    result: torch.Tensor = parameter.ds_tensor
    return result
