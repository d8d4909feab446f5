"""What a rank writes of a checkpoint when its job ends before the last step: its own part, and the parts of lost ranks
whose state it also has. The process is stopped meanwhile, so nothing is copied first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flashrecovery.config import Settings
from flashrecovery.contract import roles
from flashrecovery.errors import RestoreError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback, LastPart, Published
from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.object_shard import ObjectShard
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.worker.registry import Registry

ContentOf = Callable[[str], ShardSource]
"""Gives a shard of the version that is written, by its name. Raises RestoreError if it is not held."""


def save_last(
    registry: Registry,
    settings: Settings,
    form: CheckpointFormat | None,
    order: pb.KeepLast,
    generation: int,
    sources: tuple[ContentOf, ContentOf],
    on_published: Callable[[Published], None],
) -> None:
    """Carry out ``order``. ``sources``: of this rank's own shards, and of copies that it keeps for others.
    ``on_published``: called on the one rank whose part was the last. Raises RestoreError."""
    elastic = settings.elastic is not None
    if elastic and registry.members != tuple(order.members):
        raise RestoreError("the job was about to change its size")
    if (
        elastic
        and registry.batches is not None
        and registry.batches.of_calls
        and not roles.make_any_call_again(registry.adapters)
    ):
        raise RestoreError(
            "steps are a framework's own calls, and an elastic job cannot go on from a checkpoint of such ones"
        )
    number = {rank: place for place, rank in enumerate(order.members)}
    mine = [one for one in order.lost if number.get(one.writer, one.writer) == registry.rank]
    if mine and form is not None:
        raise RestoreError(f"in the format {form.name!r} no other rank can write the part of a lost rank")
    parts = [_own_part(registry, order.version, sources[0], form)]
    parts += [_part_of(registry, order.version, number.get(one.rank, one.rank), one, sources, elastic) for one in mine]
    rules = registry.rules() if elastic else None
    try:
        writer = CheckpointFallback(
            settings.checkpoint.dir or Path(order.directory),
            rank=registry.rank,
            world=registry.world_size,
            keep=settings.checkpoint.keep if settings.checkpoint.dir is not None else 1,
            form=form,
            on_published=on_published,
            shape=registry.shape.now(registry.members) if elastic else None,
            model_ranks=registry.model_ranks() if elastic else (),
        )
        writer.write_now(parts, order.version, f"{generation}-{order.launch}-last", rules)
    except (OSError, RuntimeError) as e:
        raise RestoreError(f"its part of the checkpoint cannot be written: {e}") from e


def _own_part(registry: Registry, version: int, source: ContentOf, form: CheckpointFormat | None) -> LastPart:
    local_state, common = registry.local_state.at(version), registry.common.at(version)
    if local_state is None or common is None:
        raise RestoreError(f"rank {registry.rank} does not hold its own state of version {version}")
    shards = _written_by(registry.rank, registry.tensor_shards())
    content = [(source(shard.name), len(shard.holders) > 1) for shard in shards]
    return LastPart(registry.rank, content, local_state, common)


def _part_of(
    registry: Registry, version: int, place: int, lost: pb.LostPart, sources: tuple[ContentOf, ContentOf], elastic: bool
) -> LastPart:
    """The part of a rank that is gone; ``place``: its number among the ranks that write."""
    common = registry.common.at(version)
    local_state = lost.local_state or (registry.local_state.at(version) if elastic else None)
    if local_state is None or common is None:
        raise RestoreError(f"what rank {lost.rank} alone had of version {version} is gone")
    known, own, copied = registry.shards, *sources
    named = [name for name in lost.shards if not isinstance(known.get(name), ObjectShard)]
    alike = _written_by(place, [known[name] for name in named if name in known])
    content = [(own(shard.name), True) for shard in alike]
    content += [(copied(name), False) for name in named if name not in known]
    return LastPart(place, content, local_state, common)


def _written_by(place: int, shards: Sequence[Shard | ObjectShard]) -> Iterator[Shard]:
    return (s for s in shards if not isinstance(s, ObjectShard) and writer_of(s) == place)
