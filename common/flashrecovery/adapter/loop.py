"""What an adapter needs besides for a framework whose steps are its own calls: the declared API.

:class:`LoopAdapter` is the contract, :class:`LoopState` what the framework's loop keeps. docs/adapters.md has the table
of all names.
"""

from flashrecovery.contract.loop_adapter import LoopAdapter, LoopState, PlacedLoop
from flashrecovery.worker.consistency.all_equal import check_equal, union
from flashrecovery.worker.data.framework_batches import CallBatches
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.recovery import Recovery

__all__ = [
    "CallBatches",
    "DataStream",
    "LoopAdapter",
    "LoopState",
    "PlacedLoop",
    "Recovery",
    "RngState",
    "check_equal",
    "restore_rng",
    "union",
]
