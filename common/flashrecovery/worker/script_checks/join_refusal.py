"""``torch.distributed.algorithms.join``: ranks whose data has ended shadow the collectives of the others.

They do so outside of all steps, while the others take theirs: a step would have fewer members than the job has ranks,
and which ones is unknown. So ``Join`` and ``DistributedDataParallel.join()`` are refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.algorithms.join import Joinable

from flashrecovery.capabilities.of_torch import JOIN
from flashrecovery.errors import UnsupportedError


def check(things: Iterable[Joinable]) -> None:
    """Raises UnsupportedError if a context of ``Join`` has one of ``things``."""
    for thing in things if JOIN.way is not None else ():
        if thing._join_config.enable:
            raise UnsupportedError(
                f"{type(thing).__name__} is in a join() context (torch.distributed.algorithms.Join): a rank whose data "
                "has ended would shadow the collectives of the others outside of their steps, and none of them could "
                "be done again; let all ranks take the same number of steps: give recovery.data() a loader, which "
                "begins its next epoch by itself, or all_reduce a flag in the block and leave the loop together"
            )
