"""How to tell apart shards of one name of which several groups of ranks each have their own: tensor slices, stages.

By the lowest rank of the group; in an elastic job by the model rank of its ranks, which is the same in any size of the
job: what a smaller or a larger job has written to a checkpoint is found by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashrecovery.plan.elastic.replicas import shape_of


@dataclass
class _Naming:
    by_model_rank: bool = False


_NAMING = _Naming()


def by_model_rank(on: bool) -> None:
    """Names that are made in this process from now on say the model rank of ranks. They say it as ``stand=``, as
    checkpoints do from the first one on."""
    _NAMING.by_model_rank = on


def of_group(ranks: Sequence[int], world: int) -> str:
    """What the name of something says that these ``ranks`` have alike, of a job of ``world`` ranks; "" if all have it.
    An elastic job asks for it as it was launched."""
    if len(ranks) == world:
        return ""
    peers = sorted(ranks)
    shape = shape_of(peers, world) if _NAMING.by_model_rank else None
    return f"group={peers[0]}" if shape is None else f"stand={shape.model_rank(peers[0])}"
