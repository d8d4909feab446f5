"""megatron-core on the contract of the recovery core: all parallel layouts, with and without the distributed optimizer.

The moments of a step (the order is Megatron's)::

    forward of each micro-batch, each chunk  -> sealed()     the last one comes before the last gradient reduction
    gradient reduction over dp_cp, expt_dp   <- synchronising() before its first part
    grad-norm all-reduce over tp x pp (with the distributed optimizer: the instance)
    basic optimizer's pre-hook               -> mutating()
    all-gather of the parameters (distributed optimizer without overlap_param_gather)
    scheduler, end of the step               the core commits

A rank that has left the gradient reduction knows that its data-parallel peers have sealed; one that has left the
grad-norm all-reduce knows it of the peers of *those*, which together are the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashrecovery.adapter import (
    CheckpointFormat,
    GradientWatch,
    Method,
    ParamRecord,
    ParamShard,
    Shard,
    StepHooks,
    TorchAdapter,
    numbers_now,
    owners_of,
    plain_fields,
)
from flashrecovery.adapter.elastic import ElasticAdapter, ShardLayout, ShardPlace
from flashrecovery.adapter.relayout import LogicalState, RelayoutAdapter
from flashrecovery.errors import UnsupportedError
from fr_megatron import elastic
from fr_megatron.buckets import Buckets, forget_answers
from fr_megatron.checkpoint import MegatronCheckpoint
from fr_megatron.expert_groups import groups_for, scalers_for
from fr_megatron.fsdp2 import TorchFSDP2
from fr_megatron.joint_shard_layout import JointShardLayout
from fr_megatron.layout import ShardedParameters
from fr_megatron.logical import MegatronLogical
from fr_megatron.megatron_fsdp import MegatronFSDP
from fr_megatron.optimizers import dealt, inner_optimizers, pairs, scalers, torch_optimizers, trains_experts
from fr_megatron.own_loop import OwnLoop
from fr_megatron.random import capture_tracker, restore_tracker
from fr_megatron.reform import fill, reform
from fr_megatron.replicas import SharedPlaces, experts_or_context, replica_group
from fr_megatron.shard_layout import FlatLayout, OptimizerShardLayout, buffers_of
from fr_megatron.support import check
from fr_megatron.wrapper import Wrapper


def adapter_for(
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any = None,
    loop: OwnLoop | None = None,
    membership: Mapping[str, int] | None = None,
    known: Mapping[str, Any] | None = None,
) -> MegatronAdapter:
    """The adapter for the arguments of :class:`MegatronAdapter`.

    Raises:
        UnsupportedError: a setting or wrapper that cannot be protected, by name.
    """
    check(chunks, optimizer)
    return MegatronAdapter(chunks, optimizer, scheduler, loop, membership, known)


class MegatronAdapter(TorchAdapter, ElasticAdapter, RelayoutAdapter):
    """Protects the model chunks of this rank (several with a virtual pipeline) and their optimizer.

    Args:
        chunks: each in a wrapper of ``megatron.core.distributed`` (see :mod:`.wrapper`).
        optimizer: of ``get_megatron_optimizer``.
        scheduler: an ``OptimizerParamScheduler``, or None.
        loop: what a script with a loop of its own uses; None for Megatron-LM's.
        membership: with the distributed optimizer, of all parameters that it trains the numbers of their groups, by
            name, if they are known (a rank knows only those of its own parts).
        known: facts about the layout (:class:`flashrecovery.plan.strategy.relayout.LayoutFacts`) that the loop knows
        better than
            the model does.
    """

    name = "megatron"
    whole_framework = True
    framework_packages = frozenset({"megatron", "transformer_engine", "apex"})

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any = None,
        loop: OwnLoop | None = None,
        membership: Mapping[str, int] | None = None,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._loop = loop
        self._inner = inner_optimizers(optimizer)
        self._wrapper = _wrapper_of(self._chunks, optimizer)
        self._all_shards: list[Shard] | None = None
        self._reports_synchronising = False
        super().__init__(nn.ModuleList(chunks), torch_optimizers(optimizer))
        self._membership = membership or {}
        self._known = dict(known or {})
        self._launched = elastic.lists_of_ranks()
        divisible = self._membership and isinstance(self._wrapper, Buckets)
        self._places = SharedPlaces.of(self._chunks[0]) if divisible else None
        self._shard_layout: ShardLayout | None = None

    # -- shards -----------------------------------------------------------------------------------

    def entry_modules(self) -> Sequence[nn.Module]:
        return self._chunks

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        return tuple(self._wrapper.stepped(pair) for inner in self._inner for pair in pairs(inner))

    def shards(self) -> Sequence[Shard]:
        if self._all_shards is None:
            stepped = [ParamShard(r, owners_of(r.get(), self.optimizers)) for r in self._records]
            self._all_shards = [*stepped, *self._wrapper.weights(), *self._wrapper.frozen()]
        return self._all_shards

    def _computing(self) -> Sequence[nn.Parameter]:
        return self._wrapper.computing()

    def _gradient_watch(self) -> GradientWatch:
        parameters = [p for chunk in self._chunks for p in chunk.parameters()]
        return GradientWatch(lambda: parameters, "main_grad", at_once=True)

    def _setting(self) -> Iterable[Method]:
        return [(inner, "reload_model_params") for inner in self._inner]

    # -- moments of a step ------------------------------------------------------------------------

    def watch(self, hooks: StepHooks) -> None:
        super().watch(hooks)
        self._reports_synchronising = self._wrapper.before_reduction(hooks.synchronising)

    def _synchronises(self) -> bool:
        return not self._reports_synchronising

    def sync_spans_world(self) -> bool:
        return True

    # -- another number of replicas ---------------------------------------------------------------

    def only_as_launched(self, most: int) -> str:
        if experts_or_context() or any(getattr(chunk.config, "num_moe_experts", None) for chunk in self._chunks):
            return f"{self.name} with MoE layers or context parallelism"
        if len(self._chunks) > 1:
            return f"{self.name} with several model chunks on a rank (virtual pipelines)"
        shard_layout = self.shard_layout()
        return shard_layout.too_small_for(most) if isinstance(shard_layout, OptimizerShardLayout) else ""

    def tied_to_size(self) -> Sequence[str]:
        found = tuple(elastic.tied_to_size(self._chunks, self._optimizer))
        shard_layout = None if found else self.shard_layout()
        if shard_layout is not None:
            shard_layout.check()
        return found

    def replicas(self) -> dist.ProcessGroup | None:
        return replica_group()

    def resized(self) -> None:
        lists = {name: numbers_now(ranks) for name, ranks in self._launched.items()}
        elastic.resize(self._chunks, lists)

    def shard_layout(self) -> ShardLayout | None:
        if self._shard_layout is None and self._places is not None and isinstance(self._wrapper, Buckets):
            self._shard_layout = self._sharded(self._wrapper, self._places)
        return self._shard_layout

    def _sharded(self, wrapper: Buckets, places: SharedPlaces) -> ShardLayout:
        """As the job was launched.

        Raises UnsupportedError if this rank trains experts alone, which divide nothing with all data-parallel ranks."""
        found: dict[bool, OptimizerShardLayout] = {}
        for number, inner in enumerate(self._inner):
            expert = trains_experts(inner)
            if not buffers_of(self._chunks, expert=expert):
                continue  # another stage has such parameters: here there is an optimizer of none
            found[expert] = OptimizerShardLayout(
                *(self._chunks, inner, self._membership, wrapper.group(expert=expert), self._parts),
                partial(self._install, inner, expert, places),
                expert=expert,
                number=number,
            )
        if False not in found:
            raise UnsupportedError(
                "an elastic job with the distributed optimizer in which a rank trains nothing but experts: another "
                "parameter of each stage that is trained is allowed"
            )
        if True not in found and places.one_each:
            return found[False]
        return JointShardLayout(found[False], found.get(True), places.sharers, places.number, places.groups)

    def logical(self) -> LogicalState | None:
        return MegatronLogical(self._chunks, self._optimizer, self.shards, places=self._places, known=self._known)

    def _parts(self) -> Mapping[str, ParamShard]:
        """What this rank steps on."""
        stepped = [shard for shard in self.shards() if isinstance(shard, ParamShard)][: len(self._records)]
        return {record.fqn: shard for record, shard in zip(self._records, stepped, strict=True)}

    def _install(
        self,
        inner: Any,
        expert: bool,
        places: SharedPlaces,
        place: ShardPlace,
        tensors: Mapping[str, torch.Tensor],
        description: Mapping[str, Any],
        layout: FlatLayout,
    ) -> None:
        """Go on with these parts of the dense parameters, or of the experts."""
        each, first = (places.each, places.first) if expert else (1, 0)
        reform(self._chunks, inner, self._membership, place, expert=expert, each=each)
        fill(self._chunks, inner, tensors, description, layout, expert=expert)
        if isinstance(self._wrapper, Buckets):
            group = self._wrapper.group(expert=expert)
            self._wrapper.sharded_for(ShardedParameters(place, group, each, first), expert=expert)
        self._records = self._find_parameters()
        self._all_shards = None
        self._looks = 0

    # -- reset, capture, restore ------------------------------------------------------------------

    def _reset_framework(self) -> None:
        from megatron.core import parallel_state

        self._wrapper.reset(self._inner)
        forget_answers(self._optimizer)
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(0)

    def _gradient_presence(self) -> str:
        return "none"  # every step begins with zero_grad_buffer() and zero_grad()

    def capture_common(self) -> dict[str, Any]:
        return {
            **super().capture_common(),
            "wrapper": self._wrapper.flags(),
            "scalers": {i: scaler.state_dict() for i, scaler in scalers(self._optimizer).items()},
            # Not its load_state_dict(), which steps: the groups' learning rates are restored as they were.
            "scheduler": {} if self._scheduler is None else plain_fields(self._scheduler),
            "loop": {} if self._loop is None else self._loop.capture_common(),
        }

    def restore_common(self, state: dict[str, Any]) -> None:
        mine = [optimizer.param_groups for optimizer in self.optimizers]
        super().restore_common({**state, "hyperparameters": groups_for(mine, state["hyperparameters"])})
        self._wrapper.set_flags(state["wrapper"])
        found = scalers(self._optimizer)
        of_scalers = scalers_for(found, state["scalers"])
        for i, scaler in found.items():
            scaler.load_state_dict(of_scalers[i])
        if self._scheduler is not None:
            vars(self._scheduler).update(state["scheduler"])
        if self._loop is not None:
            self._loop.restore_common(state["loop"])
        with torch.no_grad():
            for inner in self._inner:
                if hasattr(inner, "_copy_main_params_to_model_params"):
                    inner._copy_main_params_to_model_params()

    def _tracked_streams(self) -> dict[str, Any]:
        return capture_tracker()

    def _restore_streams(self, states: dict[str, Any]) -> None:
        restore_tracker(states)

    def checkpoint_format(self) -> CheckpointFormat | None:
        if not MegatronCheckpoint.fits(self._chunks) or dealt(self._optimizer):
            return None
        return MegatronCheckpoint(self._chunks, self._optimizer, self._scheduler)

    # -- fault injection --------------------------------------------------------------------------

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        points = dict(super().fault_points())
        gathering = self._wrapper.gathering(self._inner, self.optimizers[0])
        if gathering is not None:
            points["param-gather"] = gathering
        return points


def _wrapper_of(chunks: Sequence[Any], optimizer: Any) -> Wrapper:
    """The wrapper of chunks that :func:`fr_megatron.support.check` allows."""
    kinds = {"TorchFullyShardedDataParallel": TorchFSDP2, "FullyShardedDataParallel": MegatronFSDP}
    kind = kinds.get(type(chunks[0]).__name__)
    return Buckets(chunks, optimizer) if kind is None else kind(chunks)
