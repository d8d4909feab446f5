"""Ranks show each other that they agree: from time to time, what they have learned and their registered objects; after
a recovery, once the step has been redone, everything that they hold in common.

A replacement runs the script from its first line, so whatever the script keeps in plain variables is what it was at the
start. If such a variable decides anything (a learning rate, whether there is an evaluation in this step), the
replacement goes another way than its peers. That shows in the first step that they take together, at the latest in its
state or in the number of its collectives.
"""

from __future__ import annotations

import struct

import xxhash

from flashrecovery import groups
from flashrecovery.errors import DivergedError
from flashrecovery.state.digest import shard_digest
from flashrecovery.worker.agreement import disagreement, gather, union
from flashrecovery.worker.registry import Registry

_AT_LEAST_EVERY = 64
_HEAD = struct.Struct("<???16s")
_DIGEST = 16


def is_due(version: int) -> bool:
    """Whether the ranks compare in the step that begins with ``version``: at 1, 2, 4, ... 64, then every so often."""
    return version > 0 and (
        version % _AT_LEAST_EVERY == 0 or (version < _AT_LEAST_EVERY and version & (version - 1) == 0)
    )


def compare_habits(registry: Registry) -> list[str]:
    """All ranks adopt what any of them has learned; a collective of the recovery's own group.

    Returns:
        The registered objects that have turned out to differ between the ranks. They are each rank's own from now on.
    """
    habits = registry.habits
    shared = dict(sorted(registry.shared_states().items()))
    silent = xxhash.xxh3_128_digest("\n".join(registry.silent()).encode())
    row = _HEAD.pack(habits.undo, habits.changed, habits.late, silent) + b"".join(
        xxhash.xxh3_128_digest(s) for s in shared.values()
    )
    rows = gather(row)
    differing = [
        name
        for i, name in enumerate(shared)
        if len({r[_HEAD.size + i * _DIGEST : _HEAD.size + (i + 1) * _DIGEST] for r in rows}) > 1
    ]
    heads = [_HEAD.unpack_from(r) for r in rows]
    habits.undo = any(head[0] for head in heads)
    habits.changed = habits.reseal = any(head[1] for head in heads)
    habits.late = any(head[2] for head in heads)
    habits.own = sorted({*habits.own, *differing})
    different = len({head[3] for head in heads}) > 1
    registry.adopt_silent(union(registry.silent()) if different else registry.silent())
    return differing


def show_equal(registry: Registry, version: int, *, tensors: bool = True) -> None:
    """All ranks hold equal pieces of ``version``, have equal common state, and have made equally many collectives since
    the recovery; a collective of the recovery's own group.

    Args:
        tensors: of the pieces that consist of tensors, too.

    Raises:
        DivergedError: on all ranks, if not.
    """
    found = disagreement(_summary(registry, tensors), lambda: _details(registry, tensors))
    if found:
        raise DivergedError(
            f"after the recovery the ranks have redone step {version - 1}, and do not agree: {found}. Something that "
            "is not registered decides what the step does: a plain variable of the script (a counter, a best result, a "
            "learning rate) is at its start in a replacement. Register it (docs/limits.md). A registered object in "
            'which the ranks are meant to differ has to be declared: register(..., per_rank=["NAME"])'
        )


def _details(registry: Registry, tensors: bool) -> dict[str, str]:
    found = {
        shard.name: shard_digest(list(shard.tensors().values()), shard.spec())
        for shard in registry.tensor_shards()
        if tensors and len(shard.holders) > 1
    }
    for name, state in registry.shared_states().items():
        found[f"registered object {name}"] = xxhash.xxh3_128_hexdigest(state)
    for number, state in enumerate(registry.adapter_states()):
        found[f"hyper-parameters and other settings of model {number}"] = xxhash.xxh3_128_hexdigest(state)
    return found | _collectives()


def _summary(registry: Registry, tensors: bool) -> dict[str, str]:
    """One digest for all pieces that the same ranks hold."""
    together: dict[str, xxhash.xxh3_128] = {}
    holders = {shard.name: shard.holders for shard in registry.tensor_shards()}
    for name, digest in sorted(_details(registry, tensors).items()):
        key = name if name.startswith("number of") else f"held by {holders.get(name, 'all')}"
        together.setdefault(key, xxhash.xxh3_128()).update(f"{name}={digest};".encode())
    return {key: hasher.hexdigest() for key, hasher in together.items()}


def _collectives() -> dict[str, str]:
    return {
        f"number of collectives in group {group.name} of {group.members:x}": str(group.progress.collectives)
        for group in groups.groups()
        if group.size > 1 and not group.request.sparse
    }
