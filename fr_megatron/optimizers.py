"""What Megatron's optimizers step on: per inner optimizer, pairs of a model parameter and the tensor stepped on for it.

=========================================  ===============================================================
``FP32Optimizer``                          the parameter itself
``Float16OptimizerWithFloat16Params``      an fp32 copy of the whole parameter (or itself, if it is fp32)
``DistributedOptimizer``                   this rank's part of an fp32 copy; of an fp32 parameter, of itself
the same, around Megatron-FSDP             the parameter itself, which is this rank's part
=========================================  ===============================================================

``LayerWiseDistributedOptimizer`` is a chain of the first two, in which each data-parallel rank has whole parameters of
its own (:func:`dealt`), and sends them to the others at the end of its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from flashrecovery.adapter import FixedShard, ParamRecord, constant, of_group, replicated, world_size
from fr_megatron.layout import Holders, ShardedParameters, holders, is_expert

SteppedPair = tuple[torch.nn.Parameter, torch.nn.Parameter]


def members(optimizer: Any) -> Sequence[Any]:
    """Megatron's optimizers below a ChainedOptimizer. With Megatron-FSDP, one need not be chained."""
    found: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return found


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The :func:`members` that step on anything (a rank without parameters has stubs)."""
    return [o for o in members(optimizer) if not o.is_stub_optimizer]


def trains_experts(inner: Any) -> bool:
    """Whether one of Megatron's optimizers is of experts; there is one of all other parameters, too."""
    return any(group.get("is_expert_parallel", False) for group in inner.param_groups)


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """The basic optimizers, in Megatron's order."""
    return [o.optimizer for o in inner_optimizers(optimizer)]


def is_distributed(inner: Any) -> bool:
    return hasattr(inner, "shard_fp32_groups")


def pairs(inner: Any) -> Iterator[SteppedPair]:
    """(model parameter, what is stepped on) of one of Megatron's optimizers."""
    if is_distributed(inner):
        yield from _zipped(inner.model_fp32_groups, inner.shard_fp32_groups)
        yield from _zipped(inner.model_float16_groups, inner.shard_fp32_from_float16_groups)
    elif hasattr(inner, "fp32_from_float16_groups"):
        yield from _zipped(inner.fp32_from_fp32_groups, inner.fp32_from_fp32_groups)
        yield from _zipped(inner.float16_groups, inner.fp32_from_float16_groups)
    else:
        for parameter in chain.from_iterable(group["params"] for group in inner.optimizer.param_groups):
            yield parameter, parameter


def _zipped(models: Sequence[Any], mains: Sequence[Any]) -> Iterator[SteppedPair]:
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(model_group, main_group, strict=True)


class Names:
    """The fully qualified names of all parameters of the chunks (``0.module.decoder...``), and their places."""

    def __init__(self, chunks: Sequence[Any], sharded: Mapping[bool, ShardedParameters] | None = None) -> None:
        """``sharded``: by whether it is of the experts; none: all is as the groups are."""
        self._known: dict[int, tuple[str, Holders]] = {}
        for index, chunk in enumerate(chunks):
            known = sharded or {}
            places = {expert: holders(chunk, expert=expert, sharded=known.get(expert)) for expert in (False, True)}
            for name, parameter in chunk.named_parameters():
                self._known.setdefault(id(parameter), (f"{index}.{name}", places[is_expert(parameter)]))

    def __getitem__(self, parameter: torch.Tensor) -> tuple[str, Holders]:
        return self._known[id(parameter)]


def dealt(optimizer: Any) -> list[torch.nn.Parameter]:
    """The parameters that are dealt out to the data-parallel ranks, whole: one of these alone has their optimizer state
    (and their fp32 copy), and all have them once the step is over. Equal order on all of those ranks."""
    lists = (getattr(optimizer, name, None) or () for name in ("dp_cp_params_list", "expt_dp_params_list"))
    return [parameter for of_ranks in lists for parameters in of_ranks for parameter in parameters]


def owned(pair: SteppedPair, names: Names, rank: int) -> ParamRecord:
    """What this rank alone steps on, of a parameter that is :func:`dealt`: ``param/<name>#owner=1``."""
    model, main = pair
    whole = of_all(model, main, names)
    name = f"{whole.name}{',' if '#' in whole.name else '#'}owner={rank}"
    return ParamRecord(whole.fqn, name, (rank,), constant(main))


def record(pair: SteppedPair, names: Names) -> ParamRecord:
    """What is stepped on, with its name and holders. A part is ``param/<name>#part=1/4``, or with ``,group=2`` where
    the ranks that share the parameter are not the world (and 2 is the lowest)."""
    model, main = pair
    fqn, where = names[model]
    if where.parts == 1:
        return of_all(model, main, names)
    return ParamRecord(fqn, part_name(fqn, where.part, where.parts, group_text(where)), where.owners, constant(main))


def of_all(model: torch.Tensor, tensor: torch.nn.Parameter, names: Names) -> ParamRecord:
    """What all replicas of a parameter have alike, with its name and holders."""
    fqn, where = names[model]
    if where.group is None:
        return ParamRecord(fqn, *replicated(fqn, where.replicas), constant(tensor))
    return ParamRecord(fqn, part_name(fqn, 0, 1, where.group), where.replicas, constant(tensor))


def part_beginning(fqn: str) -> str:
    """With which the names begin of what is stepped on for parts of a parameter."""
    return f"param/{fqn}#part="


def weights_beginning(chunk: int, kind: str, buffer: int) -> str:
    """The beginning of the names of a buffer's flat weights, whose paddings depend on the number of parts."""
    return f"weights/{chunk}.{kind}.{buffer}#dp="


def part_name(fqn: str, part: int, parts: int, group: str = "") -> str:
    """``group``: of those that share the parameter, see :func:`group_text`."""
    says = [*([f"part={part}/{parts}"] if parts > 1 else []), *([group] if group else [])]
    return f"param/{fqn}" + ("#" + ",".join(says) if says else "")


def weights_name(chunk: int, kind: str, buffer: int, parts: int, group: str = "") -> str:
    return ",".join([f"{weights_beginning(chunk, kind, buffer)}{parts}", *([group] if group else [])])


def weights(chunks: Sequence[Any], sharded: Mapping[bool, ShardedParameters]) -> Iterator[FixedShard]:
    """With the distributed optimizer: the flat parameters, equal on all replicas once they have been all-gathered.

    With ``overlap_param_gather`` a step ends before that, and the next forward pass gathers: they are no state then.
    """
    for index, chunk in enumerate(chunks):
        config = chunk.ddp_config
        if not config.use_distributed_optimizer or config.overlap_param_gather:
            continue
        for kind, buffers in (("dense", chunk.buffers), ("expert", chunk.expert_parallel_buffers)):
            expert = kind == "expert"
            where = holders(chunk, expert=expert, sharded=sharded.get(expert))
            for number, buffer in enumerate(buffers):
                name = weights_name(index, kind, number, where.parts, group_text(where))
                yield FixedShard(name, where.replicas, buffer.param_data)


def group_text(where: Holders) -> str:
    """The part of a name that tells the groups of replicas apart; "" if there is only one."""
    return of_group(where.replicas, world_size()) if where.group is None else where.group


def scalers(optimizer: Any) -> Mapping[str, Any]:
    """The loss scalers by the number of their optimizer; none for bf16 and fp32."""
    found = {str(i): getattr(o, "grad_scaler", None) for i, o in enumerate(members(optimizer))}
    return {i: scaler for i, scaler in found.items() if scaler is not None}
