"""What an adapter needs besides, so that its jobs may be resized: the declared API.

:class:`ElasticAdapter` is the contract. State that is sharded among the ranks is a :class:`ShardLayout`, and where
rules say how it is sharded, a :class:`RuledShardLayout`. docs/adapters.md has the table of all names.
"""

from flashrecovery.contract.elastic_adapter import ElasticAdapter
from flashrecovery.contract.shard_layout import (
    LocalBox,
    Prepared,
    ReadyTensors,
    RuledShardLayout,
    ShardedTensor,
    ShardLayout,
    ShardPlace,
)
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.layouts import padded
from flashrecovery.plan.reshard.placements import (
    BufferRange,
    EqualRanges,
    EveryNth,
    FlatBuffer,
    InBuffer,
    Pattern,
    Slices,
    Whole,
    WithRange,
)
from flashrecovery.plan.reshard.rules import Naming, TensorRule
from flashrecovery.worker.data.data_parallel import group_of
from flashrecovery.worker.data.forwards import Forwards
from flashrecovery.worker.data.global_batches import FrameworkBatch

__all__ = [
    "Box",
    "BufferRange",
    "ElasticAdapter",
    "EqualRanges",
    "EveryNth",
    "FlatBuffer",
    "Forwards",
    "FrameworkBatch",
    "InBuffer",
    "LocalBox",
    "Naming",
    "Pattern",
    "Prepared",
    "ReadyTensors",
    "RuledShardLayout",
    "ShardLayout",
    "ShardPlace",
    "ShardedTensor",
    "Slices",
    "TensorRule",
    "Whole",
    "WithRange",
    "group_of",
    "padded",
]
