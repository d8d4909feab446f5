"""Other members for the groups that there are: a job that loses ranks for good, or gets some back, goes on in them.

Handles stay valid, as over any recovery: the stock ``ProcessGroup`` and our backend in it are given another rank and
size while they are detached, and what is connected afterwards is of that size. A group that each rank has for itself
(of tensor parallelism where there is none, and the like) stays as it is; only this rank's global number is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashrecovery.errors import UnsupportedError
from flashrecovery.groups import native_build, torch_private
from flashrecovery.groups.registry import ManagedGroup, groups


def refuse_partial(world: int) -> None:
    """Raises UnsupportedError, by name, if there is a group of some of the ``world`` ranks only. One of this rank alone
    is allowed: the others have to have one, too (:func:`alone`)."""
    partial = [group for group in groups() if group.size != world and not group.alone]
    if partial:
        raise UnsupportedError(
            f"an elastic job with a process group of {partial[0].size} of its {world} ranks ({partial[0].name!r}): who "
            "belongs to it in another size is not known; groups of all ranks are allowed, and of each rank alone"
        )


def alone() -> int:
    """How many groups this rank has for itself alone."""
    return sum(group.alone for group in groups())


def resize(members: Sequence[int], me: int) -> None:
    """Have every group consist of ``members`` (ranks as the job was launched, in order), among which ``me`` is this
    process. To be called while the groups are detached, on all members, before they are attached again.

    Raises UnsupportedError if one of the groups was not of all ranks before.
    """
    living = groups()
    refuse_partial(max((group.size for group in living), default=len(members)))
    for group in living:
        _resize(group, members, me)


def _resize(group: ManagedGroup, members: Sequence[int], me: int) -> None:
    pg, outer = group.process_group(), group.outer()
    if pg is None or outer is None:
        return
    rank, size = members.index(me), len(members)
    if group.alone:
        torch_private.renumber_alone(pg, rank)
        return
    if group.size == 1:  # no stop has detached it, because nobody else was in it
        native_build.native().exchange(outer, [], [])
    native_build.native().renumber(pg, outer, rank, size)
    torch_private.renumber(pg, size)
    group.became(replace(group.request, ranks=tuple(members), rank=rank, size=size))
