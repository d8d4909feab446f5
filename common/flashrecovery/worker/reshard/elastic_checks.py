"""What an elastic job must be like, so that it can go on in another size; everything else is refused by name.

All of its state is equal on all ranks that have the same model rank, or sharded among these in a way that is known:
then those that stay have it, or copies of it, whichever ranks leave. And nothing of a step may depend on how many there
are, but which replica computes which micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from flashrecovery import groups
from flashrecovery.config import ElasticSettings, Settings
from flashrecovery.contract import roles
from flashrecovery.errors import ConfigError, UnsupportedError
from flashrecovery.plan.elastic.new_ranks import tells_apart
from flashrecovery.runtime.environment import in_changed_layout
from flashrecovery.worker.consistency import all_equal
from flashrecovery.worker.data.global_batches import GlobalBatches
from flashrecovery.worker.registry import Registry

_TAKE = (
    "take them from recovery.elastic_batches(dataset, global_batch=..., micro_batch=...), and in each step `for batch "
    "in batches.of(step):` (docs/elastic.md)"
)


def refuse_streams(settings: Settings) -> None:
    """Raises UnsupportedError if the job is elastic."""
    if settings.elastic is not None:
        raise UnsupportedError(
            "recovery.data() in an elastic job: a loader with batches of each rank's own is not defined in another "
            f"size; {_TAKE}"
        )


def check_start(
    registry: Registry, settings: Settings, elastic: ElasticSettings, own: Sequence[str], *, single_calls: bool
) -> None:
    """Whether the job can change its size; a collective, when everything is registered.

    Raises:
        UnsupportedError: not, and why.
        ConfigError: the ranks' batches differ.
    """
    if single_calls and (registry.batches is None or not registry.batches.of_calls):
        names = ", ".join(adapter.name for adapter in registry.adapters)
        raise UnsupportedError(
            f"an elastic job of {names} whose steps are a framework's own calls: they take batches of each rank's own; "
            "loops over recovery.steps() with DistributedDataParallel, plain replicated modules, a DeepSpeed engine or "
            "megatron-core are allowed, and Megatron-LM's loop"
        )
    _refuse_tied(registry)
    if registry.batches is None:
        raise UnsupportedError(f"an elastic job whose script has not said where its batches come from: {_TAKE}")
    if (
        registry.batches.of_calls
        and settings.checkpoint.dir is not None
        and not roles.make_any_call_again(registry.adapters)
    ):
        raise UnsupportedError(
            "an elastic job with fallback checkpoints (checkpoint.dir) whose steps are a framework's own calls: those "
            "that lie far back would be made again with other samples; without checkpoint.dir it is allowed, and the "
            "script may save checkpoints itself; Megatron-LM's loop is allowed"
        )
    _check_replicas(registry, registry.batches, settings, elastic)
    _refuse_collectives_of_micro_batches(registry)
    refuse_unequal([*registry.habits.own, *own])
    sharded = registry.sharded()
    if sharded:
        _check_sharded(settings)
    for shard in registry.tensor_shards():
        if shard.name not in sharded and not registry.shape.everywhere(shard.holders, range(registry.world_size)):
            where = (
                f"not on all {registry.world_size} ranks"
                if registry.shape.each == 1
                else f"not at the same places of all replicas (of {registry.shape.text}), but on ranks "
                f"{', '.join(map(str, shard.holders))}"
            )
            raise UnsupportedError(
                f"an elastic job in which {shard.name!r} is {where} (tensor "
                "parallelism, experts, parameters that nothing keeps equal): it is not known how that is sharded in "
                "another size; replicated modules (DistributedDataParallel), FSDP2, ZeRO-1 to 3 and Megatron's "
                "distributed optimizer are allowed"
            )
    all_equal.check_equal("the arguments of elastic_batches()", registry.batches.settings)


def _check_replicas(registry: Registry, batches: GlobalBatches, settings: Settings, elastic: ElasticSettings) -> None:
    """Which ranks make up replicas is known, the same on all ranks, and the job was launched for as many replicas;
    and all groups follow from that."""
    registry.find_replicas()
    shape = registry.shape
    all_equal.check_equal(
        "which ranks make up the replicas of an elastic job", {"replicas": shape.replicas, "inner": shape.inner}
    )
    if not in_changed_layout():  # a changed layout has its own numbers
        if not elastic.min <= shape.replicas <= elastic.max:
            raise ConfigError(
                f"elastic = {elastic.text}: the job is launched with {registry.world_size} ranks, which are "
                f"{shape.text}; a launch with MIN to MAX replicas is allowed"
            )
        if elastic.max > shape.replicas:
            _check_beyond(registry, batches, elastic.max, settings)
    groups.refuse_partial(shape)
    model_rank = shape.model_rank(registry.rank)
    all_equal.check_equal(
        "the process groups of ranks at the same place in their replicas",
        {"groups": groups.described(shape)},
        among="" if shape.each == 1 else f"place {model_rank}",
    )
    shard_layouts = roles.shard_layouts(registry.adapters)
    sharers = registry.sharers(range(registry.world_size), registry.rank)
    for number, layout in shard_layouts.items():
        shared, name = layout.sharers(), registry.adapters[number].name
        if layout.size != len(sharers) or (shared is not None and list(shared) != sharers):
            # of another model the replicas have other ranks
            raise UnsupportedError(
                f"an elastic job of {shape.text} in which the state of {name} is sharded among {layout.size} ranks: "
                "state that is sharded among the replicas is allowed, each place in them its own (Megatron's "
                "distributed optimizer), and FSDP2 and ZeRO where all models have replicas of one rank each"
            )
    what = "how many models have state that is sharded among the replicas"
    all_equal.check_equal(what, {"models": len(shard_layouts)})


def _check_beyond(registry: Registry, batches: GlobalBatches, most: int, settings: Settings) -> None:
    """Check whether the job can have ``most`` replicas, more than it is launched with."""
    shape = registry.shape
    fixed = [reason for adapter in roles.elastic(registry.adapters) if (reason := adapter.only_as_launched(most))]
    if settings.parallelism is not None:
        fixed.append("a parallel layout that may change (parallelism)")
    if shape.each > 1 and not tells_apart(shape):
        fixed.append(
            f"one replica of {shape.each} ranks at the launch, where process groups of all ranks and those of a "
            "replica are the same"
        )
    if fixed:
        allowed = (
            f"elastic.max = {shape.replicas} is allowed"
            if shape.replicas > 1
            else "a launch with two replicas is allowed, and one that is not elastic"
        )
        raise UnsupportedError(
            f"an elastic job with elastic.max = {most} that is launched with {shape.text}, and has "
            f"{'; '.join(fixed)}: how that goes on with more than the launch's is not known; {allowed}"
        )
    needed = most * max(batches.ranks // shape.replicas, 1)
    if batches.micro_batches < needed:
        each = "replica" if needed == most else f"rank that computes its own micro-batches ({needed} then)"
        raise ConfigError(
            f"elastic.max = {most}: a step has {batches.micro_batches} micro-batches, and at least one for each "
            f"{each} is needed; at most {batches.micro_batches * most // needed} is allowed"
        )


def _refuse_tied(registry: Registry) -> None:
    """Raises UnsupportedError if an adapter's framework has what cannot change its size."""
    tied = roles.tied_to_size(registry.adapters)
    if tied:
        raise UnsupportedError(
            f"an elastic job with {'; '.join(tied)}: depends on the number of ranks; loops over recovery.steps() with "
            "DistributedDataParallel, plain replicated modules, a DeepSpeed engine or megatron-core, and "
            "Megatron-LM's loop, are allowed (docs/elastic.md)"
        )


def _check_sharded(settings: Settings) -> None:
    """What a rank has alone must be on another one, too, so that it can leave."""
    if settings.redundancy != "auto":
        raise UnsupportedError(
            f"an elastic job whose state is sharded among the ranks, with redundancy = {settings.redundancy!r}: when a "
            "rank leaves, the others need copies of what it alone has; allowed here: auto"
        )


def _refuse_collectives_of_micro_batches(registry: Registry) -> None:
    """Replicas may have different numbers of micro-batches: what communicates in each of them would wait for ever."""
    models = [thing for thing in registry.known() if isinstance(thing, torch.nn.Module)]
    if any(isinstance(module, torch.nn.SyncBatchNorm) for model in models for module in model.modules()):
        raise UnsupportedError(
            "an elastic job with SyncBatchNorm: it communicates in every micro-batch, of which replicas may have "
            "different numbers; use LayerNorm or GroupNorm"
        )


def refuse_unequal(names: Sequence[str]) -> None:
    if names:
        raise UnsupportedError(
            f"an elastic job in which {sorted({*names})} differ between the ranks, or are random generators: which "
            "rank gets them in another size is not defined; registered objects that are equal on all ranks are "
            "allowed, and the global random streams, which are seeded for each micro-batch"
        )


class StepRules(Protocol):
    """What each step must keep to. A job of another size and one of another layout have their own."""

    def check_step(self, step: int) -> None:
        """``step`` is about to be committed. Raises what the rules say."""


class ElasticRules:
    """What each step of an elastic job must keep to."""

    def __init__(self, registry: Registry, batches: GlobalBatches) -> None:
        self._registry, self._batches = registry, batches
        self._described = False  # the optimizers have made their state, and it can be divided otherwise

    def check_step(self, step: int) -> None:
        """``step`` is about to be committed.

        Raises:
            RegistrationError: it has not gone through its micro-batches.
            UnsupportedError: it has changed state that is each rank's own, or is tied to the number of ranks now, or
                has made some that cannot be sharded otherwise.
            ConfigError: the framework has another batch now.
        """
        registry = self._registry
        _refuse_tied(registry)
        self._batches.refuse_unread(step)
        self._batches.check_framework()
        if not self._described:
            self._described = True
            for shard_layout in roles.shard_layouts(registry.adapters).values():
                shard_layout.describe()
        refuse_unequal(registry.habits.own)
        refuse_tied_buffers(registry)


def refuse_tied_buffers(registry: Registry) -> None:
    """Raises UnsupportedError if steps change buffers, which are each rank's own."""
    adapters = roles.inspectable(registry.adapters).values()
    buffers = sorted(f"buffer {name!r}" for adapter in adapters for name in adapter.moved_buffers())
    if buffers:
        raise UnsupportedError(
            f"an elastic job in which steps change {', '.join(buffers[:5])}: each rank has its own values "
            "(running statistics of BatchNorm), which depend on the number of ranks; use layers without them "
            "(LayerNorm, GroupNorm), or track_running_stats=False"
        )
