"""Megatron's state in words that hold for every layout: which boxes of which whole tensors each shard of a rank is.

Megatron itself says where each of a rank's parameters lies in the whole model (``sharded_state_dict``): layers are
counted through all stages (and virtual ones), rows through all tensor ranks, and a gated MLP's weight is two pieces.
What is stepped on lies where its parameter does, but that the distributed optimizer has a range of it, flattened
(:mod:`.pieces`).

=====================  ===============================================================================================
shard                  its logical tensors
=====================  ===============================================================================================
``param/...``          ``<parameter>`` where it is stepped on itself, else ``optimizer.state.fp32_param.<parameter>``
                       or, with the distributed optimizer, ``optimizer.state.param.<parameter>``; and
                       ``optimizer.state.exp_avg.<parameter>``, ... ; ``optimizer.state.step`` for all together
``weights/...``        ``<parameter>`` of each that is in the flat buffer
=====================  ===============================================================================================

16-bit weights beside an fp32 copy of the whole parameter are no state of their own: they are rounded from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashrecovery.adapter import FixedShard, ParamShard, Shard, ShardSpec, TensorSpec, settle_state
from flashrecovery.adapter.elastic import Box
from flashrecovery.adapter.relayout import (
    PARAM,
    Description,
    LogicalPart,
    LogicalState,
    ShardParts,
    StagedFiles,
    Wanted,
    forms,
)
from flashrecovery.errors import UnsupportedError
from fr_megatron import stand_ins
from fr_megatron.capabilities import CHECKPOINTS
from fr_megatron.checkpoint import METADATA
from fr_megatron.elastic import of_calculator, of_experts, of_several
from fr_megatron.expert_groups import check_alike
from fr_megatron.joint_shard_layout import experts_tensor
from fr_megatron.optimizers import Names, dealt, inner_optimizers, is_distributed, weights_name
from fr_megatron.pieces import STATE, Stepped, cut, described, find_stepped
from fr_megatron.replicas import SharedPlaces, other_slices
from fr_megatron.shard_layout import WEIGHTS, buffers_of, names_of

_STATE = STATE + ".{}."


class MegatronLogical(LogicalState):
    """The logical tensors of this rank's model chunks and optimizer. ``shards``: gives those of the adapter, what is
    stepped on first, in the optimizers' order. ``places``: in an elastic job, of this rank among those that divide the
    distributed optimizer's state. ``known``: facts that the loop knows better than the model does."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        shards: Callable[[], Sequence[Shard]],
        *,
        places: SharedPlaces | None = None,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self._chunks, self._optimizer, self._shards = chunks, optimizer, shards
        self._known = dict(known or {})
        self._inner = inner_optimizers(optimizer)
        self._place = 0 if places is None else places.first

    def describe(self) -> Description:
        self._check()
        leaves = self._leaves()
        stepped = find_stepped(self._inner, Names(self._chunks))
        shards = self._shards()
        found: dict[str, ShardParts] = {}
        for own, shard in zip(stepped, shards, strict=False):
            found[shard.name] = self._of_stepped(own, leaves)
        weights = dict(self._of_weights(leaves))
        for shard in shards[len(stepped) :]:
            if isinstance(shard, FixedShard):
                found[shard.name] = weights[shard.name.partition(",")[0]]
            else:
                found[shard.name] = self._of_frozen(shard, leaves)
        return found

    def sharded(self) -> Mapping[str, ShardParts]:
        leaves, names = self._leaves(), names_of(self._chunks)
        found: dict[str, ShardParts] = {}
        for expert in (False, True):
            for buffer in buffers_of(self._chunks, expert=expert):
                for parameter in buffer.param_index_map:
                    flat = parameter.detach().reshape(-1)
                    parts = tuple(_parts(self._leaf(parameter, leaves), flat, 0, 0))
                    fqn = names[id(parameter)]
                    name = experts_tensor(self._place, fqn) if expert else fqn
                    found[f"{name}/{PARAM}"] = ShardParts(f"{STATE}.param.", _STATE, parts)
                    found[name + WEIGHTS] = ShardParts("", _STATE, parts)
        return found

    def facts(self) -> Mapping[str, Any]:
        from megatron.core import parallel_state as state

        config = self._chunks[0].config
        dense = _dense_layers(config)
        sequence = self._known.get("sequence") or int(getattr(_inner(self._chunks[0]), "max_sequence_length", 1))
        context = state.get_context_parallel_world_size()
        if context > 1 and sequence % (2 * context):
            raise UnsupportedError(
                f"another layout with context_parallel_size = {context} and a model whose max_sequence_length is "
                f"{sequence}: one that {2 * context} divides is allowed, and it has to be the samples' length"
            )
        return {
            "layout": {
                "tp": state.get_tensor_model_parallel_world_size(),
                "pp": state.get_pipeline_model_parallel_world_size(),
                "cp": context,
                "ep": state.get_expert_model_parallel_world_size(),
                "dp": state.get_data_parallel_world_size(),
            },
            "layers": config.num_layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_query_groups or config.num_attention_heads,
            "inner": config.ffn_hidden_size if dense else config.moe_ffn_hidden_size,
            **(_experts(config, dense) if config.num_moe_experts else {}),
            "vocab": int(getattr(_inner(self._chunks[0]), "vocab_size", 1)),
            "sequence": sequence,
            "heads_over_cp": "a2a" in _context_ways(config),
            "memory_bytes": _device_bytes(),
            "sequence_parallel": bool(config.sequence_parallel),
            "sharded": bool(self._chunks[0].ddp_config.use_distributed_optimizer),
            **self._known,
        }

    def check_common(self, common: Mapping[str, Any]) -> None:
        check_alike(common["hyperparameters"], common["scalers"])

    def read(self, staging: StagedFiles) -> int:
        self._check()
        described = self.describe()
        kinds = forms(staging)
        wanted: list[Wanted] = []
        places: dict[str, int] = {}
        with torch.no_grad():
            for shard in self._shards():
                live = shard.allocate(_spec(shard, kinds, places))
                like = tuple(next(iter(live.values())).shape)
                wanted += [
                    Wanted(tensor, tuple(described[shard.name].of(key, tuple(tensor.shape), like)))
                    for key, tensor in live.items()
                ]
            nbytes = staging.fill(wanted)
            for inner in self._inner:
                settle_state(inner.optimizer)
                if not is_distributed(inner) and hasattr(inner, "_copy_main_params_to_model_params"):
                    inner._copy_main_params_to_model_params()
        return nbytes

    def _check(self) -> None:
        """Raises UnsupportedError: what cannot be laid out otherwise, by name."""
        if CHECKPOINTS.way is None:
            raise UnsupportedError(f"another layout with this Megatron, which lacks {'; '.join(CHECKPOINTS.missing())}")
        if dealt(self._optimizer):
            kind = type(self._optimizer).__name__
            raise UnsupportedError(f"another layout with {kind}: the distributed optimizer is allowed")
        for name in (*of_calculator(), *of_several(self._chunks)):
            raise UnsupportedError(f"another layout with {name}")
        for chunk in self._chunks:
            if type(chunk).__name__ != "DistributedDataParallel":
                raise UnsupportedError(
                    f"another layout with {type(chunk).__name__}: megatron-core's DistributedDataParallel is allowed"
                )
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                raise UnsupportedError("another layout with overlap_param_gather: without it is allowed")
            experts = getattr(chunk.config, "num_moe_experts", None)
            for name in (*of_experts(chunk.config), *(other_slices() if experts else ())):
                raise UnsupportedError(f"another layout with {name}")
            for name in _of_sizes(chunk.config):
                raise UnsupportedError(f"another layout with {name}")
            if not hasattr(chunk.module, "sharded_state_dict"):
                raise UnsupportedError(
                    f"another layout with the model {type(chunk.module).__name__}: one with Megatron's "
                    "sharded_state_dict() is allowed"
                )

    def _leaves(self) -> dict[int, Any]:
        """What Megatron says of each parameter, by its identity."""
        found: dict[int, Any] = {}
        for _, leaf in described(self._chunks, METADATA):
            data = getattr(leaf, "data", None)
            if isinstance(data, torch.Tensor):
                found.setdefault(id(data), leaf)
        return found

    def _leaf(self, parameter: torch.Tensor, leaves: Mapping[int, Any]) -> Any:
        leaf = leaves.get(id(parameter))
        if leaf is None:
            names = {id(p): name for chunk in self._chunks for name, p in chunk.named_parameters()}
            raise UnsupportedError(
                f"another layout with parameter {names.get(id(parameter), '?')!r}: the model's sharded_state_dict() "
                "does not say where it lies"
            )
        return leaf

    def _of_stepped(self, own: Stepped, leaves: Mapping[int, Any]) -> ShardParts:
        leaf = self._leaf(own.model, leaves)
        if own.main is own.model:
            prefix = ""
        else:
            prefix = f"{STATE}.param." if is_distributed(own.inner) else f"{STATE}.fp32_param."
        parts = tuple(_parts(leaf, own.main.detach(), own.start, 0))
        if sum(part.box.size for part in parts) != own.main.numel():
            raise UnsupportedError(
                f"another layout with {leaf.key!r}: Megatron does not say of all of it where it lies"
            )
        return ShardParts(prefix, _STATE, parts)

    def _of_frozen(self, shard: Shard, leaves: Mapping[int, Any]) -> ShardParts:
        (live,) = shard.tensors().values()
        parameters = (p for chunk in self._chunks for p in chunk.parameters())
        parameter = next(p for p in parameters if p.data_ptr() == live.data_ptr() and p.shape == live.shape)
        return ShardParts("", _STATE, tuple(_parts(self._leaf(parameter, leaves), live, 0, 0)))

    def _of_weights(self, leaves: Mapping[int, Any]) -> Iterator[tuple[str, ShardParts]]:
        """The weights in the flat buffers, by the beginnings of their shards' names."""
        for number, chunk in enumerate(self._chunks):
            for kind, buffers in (("dense", chunk.buffers), ("expert", chunk.expert_parallel_buffers)):
                for index, buffer in enumerate(buffers):
                    parts: list[LogicalPart] = []
                    for parameter, (start, _, _) in buffer.param_index_map.items():
                        leaf = self._leaf(parameter, leaves)
                        parts += _parts(leaf, parameter.detach().reshape(-1), 0, start)
                    name = weights_name(number, kind, index, buffer.data_parallel_world_size)
                    yield name, ShardParts("", _STATE, tuple(parts))


def _dense_layers(config: Any) -> int:
    """How many layers have no experts, as the configuration says it."""
    if not config.num_moe_experts:
        return int(config.num_layers)
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return sum(number % frequency != 0 for number in range(config.num_layers))
    return sum(not one for one in frequency)


def _of_sizes(config: Any) -> Iterator[str]:
    """What of the configuration is made of a size that another layout has otherwise, by name."""
    from megatron.core import parallel_state as state

    several = state.get_tensor_model_parallel_world_size() > 1
    if several and getattr(config, "num_moe_experts", None) and not config.sequence_parallel:
        yield (
            "MoE layers and tensor_model_parallel_size above 1 without sequence_parallel, which megatron-core does not "
            "train (allowed: sequence_parallel = tensor_model_parallel_size > 1)"
        )
    if getattr(config, "moe_router_topk_limited_devices", None):
        yield (
            "moe_router_topk_limited_devices, with which tokens are routed to as many groups of experts as there are "
            "expert-parallel ranks (allowed: moe_router_num_groups and moe_router_group_topk)"
        )
    if "a2a+p2p" in _context_ways(config):
        yield "cp_comm_type = a2a+p2p, whose sizes belong to one context-parallel size (allowed: the other ones)"


def _context_ways(config: Any) -> list[str]:
    """How context-parallel ranks exchange what attention needs, in some layer."""
    said = getattr(config, "cp_comm_type", None) or []
    return [said] if isinstance(said, str) else list(said)


def _experts(config: Any, dense: int) -> dict[str, int]:
    """The facts about the MoE layers."""
    return {
        "experts": config.num_moe_experts,
        "chosen": config.moe_router_topk,
        "expert_inner": config.moe_ffn_hidden_size,
        "dense_layers": dense,
        "shared_inner": getattr(config, "moe_shared_expert_intermediate_size", None) or 0,
    }


def _inner(chunk: Any) -> Any:
    """The model in its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _device_bytes() -> int:
    """Memory of a GPU, 0 without one."""
    if not torch.cuda.is_available() or stand_ins.wanted():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _parts(leaf: Any, tensor: torch.Tensor, start: int, begin: int) -> Iterator[LogicalPart]:
    """The logical parts of ``tensor``, which is in the local tensor ``leaf`` from its element ``start`` on, and in the
    shard's tensor from ``begin`` on."""
    for piece in cut(leaf, "", tensor, start):
        high = tuple(o + s for o, s in zip(piece.offset, piece.shape, strict=True))
        box = Box(piece.offset, high)
        yield LogicalPart(piece.key, piece.whole, box, begin + piece.begin, piece.flexible)


def _spec(shard: Shard, kinds: Mapping[str, tuple[str, str, bool]], places: dict[str, int]) -> ShardSpec:
    """What a shard of this rank consists of, with the optimizer state that the others' have. ``places``: how many
    entries each optimizer has so far."""
    own = shard.spec()
    if not isinstance(shard, ParamShard) or not shard.optimizers:
        return own
    like = own.tensors[PARAM]
    tensors, layout, at = {PARAM: like}, {}, {}
    ((prefix, _),) = shard.optimizers
    for key, (dtype, kept, number) in kinds.items():
        mine = prefix + key.partition("/")[2]
        tensors[mine] = TensorSpec(() if number else like.shape, getattr(torch, dtype))
        layout[mine] = kept
    if kinds:
        at[prefix] = places.get(prefix, 0)
        places[prefix] = at[prefix] + 1
    values = {"layout": layout, "places": at} if kinds else {}
    return ShardSpec(tensors, values)
