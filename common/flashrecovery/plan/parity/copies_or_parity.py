"""Neighbour copies or parity, where ``redundancy`` is ``auto``: by memory, traffic and failure domains. Pure.

Parity of one loss sends as many bytes a step as neighbour copies, so the network does not decide. Neighbour copies are
quicker to restore (one source, nothing is decoded), they survive any losses of which none holds another one's copies,
and need no arithmetic. So they are chosen, unless they do not fit into the nodes' memory and parity does.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrecovery.plan.parity.groups import Groups

ROOM = 0.8
"""The part of the free memory that copies may take: data loaders and the script take theirs later."""
_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes. ``own``: of a rank's shards, ``copied``: of those that a neighbour would hold, ``in_parity``: of those
    that parity would be of, each of the rank that has most; ``free``: of the node that has least, before anything is
    kept; ``ranks``: on a node."""

    own: int
    copied: int
    in_parity: int
    free: int
    ranks: int


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """``reason``: as text. ``fits``: whether there is room for what was chosen."""

    parity: bool
    fits: bool
    reason: str


def neighbour_memory(sizes: Sizes) -> int:
    """Host memory of a node for own and neighbour copies, bytes."""
    return sizes.ranks * _VERSIONS * (sizes.own + sizes.copied)


def parity_memory(sizes: Sizes, groups: Groups, losses: int) -> int:
    """Host memory of a node for own copies and parity, bytes."""
    members = min(map(len, groups))
    return sizes.ranks * _VERSIONS * (sizes.own + -(-sizes.in_parity * losses // (members - losses)))


def own_memory(sizes: Sizes) -> int:
    """Host memory of a node for own copies alone, bytes: of ranks of one node the neighbours' are the same memory."""
    return sizes.ranks * _VERSIONS * sizes.own


def refusal(sizes: Sizes, need: int) -> str:
    """Why the copies cannot be kept: they need more than there is. Empty if they do not."""
    if need <= sizes.free:
        return ""
    return (
        f"the copies need {_gb(need)} GB of host memory on a node ({sizes.ranks} ranks, {_VERSIONS} versions each), "
        f"and {_gb(sizes.free)} GB are free on the node with least; allowed: fewer ranks on a node, or redundancy "
        "'none', with which only a checkpoint helps"
    )


def choose(sizes: Sizes, groups: Groups | str, losses: int) -> CopyChoice:
    """``groups``: those of parity, or why there are none."""
    room, copies = ROOM * sizes.free, neighbour_memory(sizes)
    have = f"{_gb(room)} GB, {ROOM:.0%} of what is free on the node with least"
    if copies <= room:
        return CopyChoice(False, True, f"chosen because neighbour copies fit: {_gb(copies)} of {have}")
    if isinstance(groups, str):
        return CopyChoice(False, False, f"neighbour copies need {_gb(copies)} of {have}; and no parity: {groups}")
    need, parity = f"{_gb(copies)} GB a node", parity_memory(sizes, groups, losses)
    if parity <= room:
        reason = f"chosen because neighbour copies need {need}, and parity {_gb(parity)} of {have}"
        return CopyChoice(True, True, reason)
    return CopyChoice(False, False, f"neighbour copies need {need}, and parity would need {_gb(parity)}, of {have}")


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"
