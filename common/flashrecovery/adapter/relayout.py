"""What an adapter needs besides, so that its jobs may change their parallelism: the declared API.

:class:`RelayoutAdapter` is the contract, :class:`LogicalState` says of which whole tensors a rank's shards are.
docs/adapters.md has the table of all names. Only adapters of such jobs import this.
"""

from flashrecovery.contract.logical_state import LogicalState
from flashrecovery.contract.relayout_adapter import RelayoutAdapter
from flashrecovery.plan.reshard.logical import PARAM, Description, LogicalPart, ShardParts
from flashrecovery.redundancy.memory.staged_files import StagedFiles, Wanted, forms
from flashrecovery.runtime.environment import STAGING_ENV
from flashrecovery.runtime.parallel_layout import take_sizes

__all__ = [
    "PARAM",
    "STAGING_ENV",
    "Description",
    "LogicalPart",
    "LogicalState",
    "RelayoutAdapter",
    "ShardParts",
    "StagedFiles",
    "Wanted",
    "forms",
    "take_sizes",
]
