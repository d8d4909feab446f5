"""What the adapters for all ZeRO stages have in common.

The moments of a step, for every stage (the order is deepspeed's)::

    forward (each micro-batch)  -> sealed()      the last one comes before the last gradient reduction
    forward of the last one     -> synchronising()    of the first one with a pipeline or unmanaged accumulation
    norm / overflow all-reduce                   spans the world: no rank passes it before all have sealed
    basic optimizer's pre-hook  -> mutating()    before the first write to a master weight
    parameter all-gather (ZeRO-1, 2, 3)          a death here tears the step: all go back to their pre-step copies
    counters, scheduler, end of `with step:`     the core commits

A step that overflows (fp16) mutates no shard: it changes the loss scale and the counters, which are common state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flashrecovery.adapter import (
    CheckpointFormat,
    GradientWatch,
    Method,
    OptimizerAttributes,
    ParamRecord,
    ParamShard,
    Setters,
    Shard,
    StepHooks,
    TorchAdapter,
    constant,
    faults,
    owners_of,
    plain_fields,
    replicated,
    world_size,
)
from flashrecovery.adapter.elastic import ElasticAdapter, ShardLayout, ShardPlace
from flashrecovery.errors import UnsupportedError
from fr_deepspeed.beta_powers import beta_powers
from fr_deepspeed.capabilities import BACKWARD, ENGINE_STEP, UNMANAGED, is_managed
from fr_deepspeed.checkpoint import EngineCheckpoint
from fr_deepspeed.elastic import in_this_size, resize_engine, tied_to_size
from fr_deepspeed.experts import reset_experts
from fr_deepspeed.layout import ranks_of
from fr_deepspeed.muon import before_momentum, is_muon, reset_muon
from fr_deepspeed.offload import offloads
from fr_deepspeed.pipeline import capture_pipeline, reset_schedule, restore_pipeline
from fr_deepspeed.random import capture_tracker, reset_checkpointing, restore_tracker

_COUNTERS = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "_step_applied",
    "_is_gradient_accumulation_boundary",
)
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Attributes of the engine's config that ``engine.set_train_batch_size`` and ``set_train_micro_batch_size`` change.
(Between two calls of a pipeline, the script changes them in a replacement, too.)"""


class EngineAdapter(TorchAdapter, ElasticAdapter):
    """Protects one :class:`DeepSpeedEngine`.

    The records are the tensors that the basic optimizer steps on: parameters, fp32 masters, or this rank's partitions.
    """

    whole_framework = True
    framework_packages = frozenset({"deepspeed"})
    _shard_layout: ShardLayout | None = None
    """The layout of the optimizer's shards, if it has any."""

    def __init__(self, engine: Any, optimizer: Optimizer) -> None:
        self.engine = engine
        self.basic = optimizer
        self._param_groups = list(optimizer.param_groups)
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_shards: list[Shard] | None = None
        self._place: ShardPlace | None = None  # None: that in the groups of the launch
        self._powers = beta_powers(engine.basic_optimizer)
        self._muon = is_muon(engine.basic_optimizer) and engine.zero_optimization_stage() > 0
        self._counted = (engine.micro_steps, engine.global_steps)
        self._ranks = dist.get_process_group_ranks(engine.data_parallel_group)
        # PipelineEngine calls its module, and is itself never called.
        super().__init__(engine.module if engine.pipeline_parallelism else engine, [optimizer])
        self._drop_empty_entries()

    # -- what the stages say ----------------------------------------------------------------------

    @property
    @abstractmethod
    def _optimized(self) -> Sequence[nn.Parameter]:
        """The module's own parameters that the optimizer trains, in any form."""

    def _extra_shards(self) -> Sequence[Shard]:
        """Shards besides the records'."""
        return ()

    @abstractmethod
    def _reset_optimizer(self) -> None:
        """Drop what is half-finished in DeepSpeed's optimizer wrapper. No communication."""

    def _setting(self) -> Iterable[Method]:
        return [(self.engine.optimizer, "refresh_fp32_params")]

    def _derive_weights(self) -> None:
        """Compute from the restored shards what the module computes with. No communication."""

    def _drop_empty_entries(self) -> None:
        """A schedule-free optimizer that was set to train before ``deepspeed.initialize`` has looked into its state for
        each parameter, and so made entries of nothing. DeepSpeed has put other tensors in the parameters' place."""
        stepped = {id(record.get()) for record in self._records}
        state = self.basic.state
        for parameter in [p for p, entry in state.items() if not entry and id(p) not in stepped]:
            del state[parameter]

    # -- shards -----------------------------------------------------------------------------------

    @property
    def inner(self) -> nn.Module:
        module: nn.Module = self.engine.module
        return module

    def shards(self) -> Sequence[Shard]:
        if self._all_shards is None:
            records = [self._record_shard(r) for r in self._records]
            self._all_shards = [*records, *self._extra_shards(), *self._frozen_shards()]
        return self._all_shards

    def _record_shard(self, record: ParamRecord) -> Shard:
        return ParamShard(record, owners_of(record.get(), self.optimizers))

    def _attributes_of(self, optimizer: Optimizer) -> OptimizerAttributes:
        """The attributes of a client optimizer. What it steps on is not always in its groups (ZeRO-3)."""
        return OptimizerAttributes(
            optimizer,
            self.optimizers,
            parameters=lambda: self._weights,
            outside=lambda: (*self.inner.parameters(), *self.inner.buffers()),
            where_instead="keep them in optimizer.state (docs/optimizers.md)",
        )

    def _frozen_shards(self) -> list[Shard]:
        """Parameters that no optimizer trains. A replacement's script need not initialise them as the first launch."""
        trained = {id(p) for p in self._optimized}
        return [
            ParamShard(ParamRecord(fqn, *replicated(fqn, ranks_of(self.engine, p)), constant(p)), {})
            for fqn, p in self.inner.named_parameters()
            if id(p) not in trained
        ]

    # -- moments of a step ------------------------------------------------------------------------

    def watch(self, hooks: StepHooks) -> None:
        self._param_groups = list(self.basic.param_groups)
        super().watch(hooks)
        if self._muon:
            before_momentum(self.engine.optimizer, self._before_momentum)

    def _before_momentum(self) -> None:
        self._gradients_ready()
        if self._hooks is not None:
            self._hooks.mutating()

    def _find_what_loading_makes(self) -> None:
        """Look up parameter groups and setters, which loading a checkpoint makes new."""
        self._param_groups = list(self.basic.param_groups)
        self._setters = Setters(self._setting())

    def sync_spans_world(self) -> bool:
        # ZeRO-2 reduces each gradient to its owner only: without a norm or overflow check nothing spans the ranks.
        optimizer = self.engine.optimizer
        common = getattr(optimizer, "compute_grad_norm", True) or getattr(optimizer, "check_grad_overflow", True)
        return bool(common) and len(self._ranks) == world_size()

    def _synchronises(self) -> bool:
        # A pipeline's engine, and one whose script says itself when to step, knows it only after the forward passes.
        known = is_managed(self.engine) and not self.engine.pipeline_parallelism
        return not known or bool(self.engine.is_gradient_accumulation_boundary())

    # -- another number of replicas ---------------------------------------------------------------

    def tied_to_size(self) -> Sequence[str]:
        found = [*tied_to_size(self.engine)]
        if self.engine.zero_optimization_stage() > 0:
            kept = [type(beside.optimizer).__name__ for beside in self._besides if beside.read()[1]]
            found += [f"ZeRO and the tensors that {kind} keeps in its attributes" for kind in kept]
        if not found and self._shard_layout is not None:
            self._shard_layout.check()
        return tuple(found)

    def shard_layout(self) -> ShardLayout | None:
        return self._shard_layout

    def resized(self) -> None:
        self._ranks = dist.get_process_group_ranks(self.engine.data_parallel_group)
        resize_engine(self.engine)

    # -- reset, capture, restore ------------------------------------------------------------------

    def _reset_framework(self) -> None:
        engine = self.engine
        for parameter in self.inner.parameters():
            parameter.grad = None
        if not BACKWARD.takes("called"):
            engine._running_engine_backward = engine._manual_backward_expected = False
        if BACKWARD.takes("counted"):
            engine._running_engine_backward_count = 0
        if UNMANAGED.way is not None:
            engine._unmanaged_backward_count = 0
        if ENGINE_STEP.way is not None:
            engine._running_engine_step = False
        engine.inside_no_sync_ctxt = False
        engine.losses = None
        # A timer that was running refuses to be started again.
        getattr(engine.timers, "timers", {}).clear()
        # DeepSpeed swaps the groups while it steps on one of them, and does not swap back after an exception.
        self.basic.param_groups = self._param_groups
        if engine.pipeline_parallelism:
            reset_schedule(engine)
        reset_experts(engine)
        reset_checkpointing()
        if self._muon:
            reset_muon(engine.optimizer)
        self._reset_optimizer()

    def _drop_gradients(self) -> None:
        if not offloads(self.engine):
            super()._drop_gradients()
            return
        for record in self._records:
            gradient = record.get().grad
            if gradient is not None:
                gradient.zero_()

    def _gradient_watch(self) -> GradientWatch:
        return GradientWatch(tuple)  # see _check_accumulation

    def look_closely(self, closely: bool) -> None:
        super().look_closely(closely)
        self._check_accumulation()

    def _check_accumulation(self) -> None:
        """Raises UnsupportedError if the step before has trained on micro-batches, and has taken no optimizer step."""
        engine = self.engine
        micro_steps, global_steps = self._counted
        self._counted = (engine.micro_steps, engine.global_steps)
        if engine.micro_steps > micro_steps and engine.global_steps == global_steps:
            raise UnsupportedError(
                f"a step has ended after {engine.micro_steps - micro_steps} of {engine.gradient_accumulation_steps()} "
                "micro-batches, and no recovery could bring back their gradients: write `with step:` around "
                "`for _ in range(engine.gradient_accumulation_steps()):` (docs/limits.md)"
            )

    def capture_common(self) -> dict[str, Any]:
        engine = self.engine
        return {
            **super().capture_common(),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "replicas": engine.dp_world_size,
            "batch": {} if engine.pipeline_parallelism else {n: getattr(engine._config, n) for n in _BATCH},
            "scaler": plain_fields(self._scaler()),
            # DeepSpeed's schedulers do not keep it in their state, and refuse to say it before their first step.
            "last_lr": getattr(engine.lr_scheduler, "_last_lr", None),
            "pipeline": capture_pipeline(engine) if engine.pipeline_parallelism else {},
            "beta_powers": None if self._powers is None else self._powers.capture(),
        }

    def restore_common(self, state: dict[str, Any]) -> None:
        state = dict(in_this_size(self.engine, state))
        super().restore_common(state)
        for name, value in state["counters"].items():
            setattr(self.engine, name, value)
        self._counted = (self.engine.micro_steps, self.engine.global_steps)
        for name, value in state["batch"].items():
            setattr(self.engine._config, name, value)
        vars(self._scaler()).update(state["scaler"])
        if state["last_lr"] is not None:
            self.engine.lr_scheduler._last_lr = list(state["last_lr"])
        if state["pipeline"]:
            restore_pipeline(self.engine, state["pipeline"])
        if self._powers is not None:
            self._powers.restore(state["beta_powers"])
        with torch.no_grad():
            self._derive_weights()

    def _tracked_streams(self) -> dict[str, Any]:
        return capture_tracker()

    def _restore_streams(self, states: dict[str, Any]) -> None:
        restore_tracker(states)

    def _scaler(self) -> Any:
        """The object that keeps the loss scale and its counters; something empty where there is none."""
        optimizer = self.engine.optimizer
        return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None) or _NoScaler()

    # -- fallback checkpoint ----------------------------------------------------------------------

    def checkpoint_format(self) -> CheckpointFormat:
        return EngineCheckpoint(self.engine, self._find_what_loading_makes)

    # -- fault injection --------------------------------------------------------------------------

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        points = dict(super().fault_points())
        if self._powers is not None:
            points["optimizer"] = self._powers.arm
        if self.engine.zero_optimization_stage() > 0:
            points["param-gather"] = lambda callback: faults.before_gather_operation(self.basic, callback)
        return points

    def _middle_parameter(self) -> nn.Parameter:
        result: nn.Parameter = self._weights[len(self._weights) // 2]
        return result


class _NoScaler:
    """Stands where an engine has no loss scale."""
