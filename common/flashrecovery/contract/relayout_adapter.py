"""What an adapter says besides, so that its jobs can change their tensor and pipeline parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashrecovery.contract.adapter import Adapter

if TYPE_CHECKING:
    from flashrecovery.contract.logical_state import LogicalState

__all__ = ["RelayoutAdapter"]


class RelayoutAdapter(Adapter):
    """An adapter of a job whose parallelism may change: it goes on with other TP, PP and DP sizes.

    One adapter of the job says what its state is (:meth:`logical`). All others say that their shared plain state is
    enough (:meth:`in_any_layout`). A job with another adapter besides these refuses to change its parallelism, by name.
    """

    def logical(self) -> LogicalState | None:
        """A description of the state that does not depend on the parallel layout, so that the job can go on in another
        way; None: that is not known."""
        return None

    def in_any_layout(self) -> bool:
        """Whether this adapter has no shards, and what :meth:`capture_common` gives is all that a process of another
        parallel layout needs of it."""
        return False
