"""What an adapter says besides, so that its jobs can change the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from flashrecovery.contract.adapter import Adapter
from flashrecovery.contract.shard_layout import ShardLayout

__all__ = ["ElasticAdapter"]


class ElasticAdapter(Adapter):
    """An adapter of a job that may be resized: that goes on with fewer replicas, or with more.

    An elastic job refuses, by name, adapters that are none. The defaults are right where all ranks hold all of the
    state, each rank is a replica, and nothing depends on how many there are.
    """

    def replicas(self) -> dist.ProcessGroup | None:
        """The data-parallel group: of the ranks that have this rank's model rank in every replica of the model, in the
        order of the launch. Its rank and size are the number of this rank's replica, and how many there are. None:
        each rank is a replica by itself, or this adapter cannot tell (another one may).

        Replicas leave an elastic job, and come into it, as a whole. Which ranks are together in one follows from this
        group where the numbers of any two of its ranks that follow on each other are equally far apart: then replicas
        are counted like the dimension of a mesh (:mod:`flashrecovery.plan.elastic.replicas`). Other numberings are
        refused by name, and so are ranks that do not say the same. Asked when the script asks for its first step, in
        the size of the launch. The group itself is resized by the core."""
        return None

    def shard_layout(self) -> ShardLayout | None:
        """How the state is sharded among the ranks, so that the job can change its size; None: all of it is on all
        ranks. Always the same object. Raises UnsupportedError, by name, if it is sharded in a way that cannot be
        changed."""
        return None

    def resized(self) -> None:
        """The process groups have other members now (some have left): bring everything that depends on their number, or
        on this rank's number in them, to what it would be in a job that was started so. Called after :meth:`reset`,
        while the groups are detached; plain state follows with :meth:`restore_common`, and may be of before."""

    def tied_to_size(self) -> Sequence[str]:
        """What of this rank depends on the number of ranks, and cannot follow when that changes: by name, and what is
        allowed instead. Asked in an elastic job, before the first step and at the end of each one."""
        return ()

    def only_as_launched(self, most: int) -> str:
        """What of this rank can follow when replicas leave and come back, but not when there are more of them than at
        the launch, up to ``most``, or has never been tried so: by name; "" if there is nothing. Asked in a job that may
        grow so far, before the first step."""
        return ""
