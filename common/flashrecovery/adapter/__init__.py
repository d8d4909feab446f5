"""What an adapter for a framework is made of: the declared API.

An adapter outside of this repository needs nothing but what is exported here, ``flashrecovery`` itself, its ``errors``,
and, where torch must not be imported (hooks, ``flashrecovery doctor``), the light modules ``import_hooks``,
``finding``, ``versions``, ``patches`` and ``config``. The adapters in this repository keep to that, too.
docs/adapters.md explains how one is written; in short:

* the contract: :class:`Adapter` and what it is given, :class:`StepHooks`
* the kit for frameworks whose state is tensors and a ``torch.optim`` optimizer: :class:`TorchAdapter`, with records of
  parameters that become shards, names by placement, and optimizer state
* state that is divided among the ranks, in a job that changes its size: :class:`Division`, with the boxes and layouts
  of :mod:`flashrecovery.plan`
* a loop of the framework's own: :class:`LoopAdapter`, and what such a loop has to agree on and to restore
* checkpoints in the framework's own format: :class:`CheckpointFormat`, and torch's DCP
"""

from flashrecovery import groups
from flashrecovery.adapter import faults, fsdp2_state
from flashrecovery.adapter.base import TorchAdapter
from flashrecovery.adapter.beside import OptimizerAttributes
from flashrecovery.adapter.fields import plain_fields
from flashrecovery.adapter.fsdp2_division import Divided, FSDP2Division, replicates
from flashrecovery.adapter.fsdp2_replicas import FSDP2Replicas
from flashrecovery.adapter.gradients import GradientWatch
from flashrecovery.adapter.optimizer_state import layout_of, new_state_tensor, plain
from flashrecovery.adapter.placement import (
    global_rank,
    local_tensor,
    mesh_spans_world,
    placed_on_mesh,
    replicated,
    unsynchronised,
    world_size,
)
from flashrecovery.adapter.setters import Method, Setters
from flashrecovery.adapter.shards import FixedShard, ParamRecord, ParamShard, constant, owners_of
from flashrecovery.adapter.state_order import give_up_state, hand_over_state, settle_state
from flashrecovery.contract.adapter import (
    Adapter,
    CheckpointFormat,
    DividedTensor,
    Division,
    DivisionPlace,
    LocalBox,
    LogicalState,
    Prepared,
    ReadyTensors,
    RuledDivision,
    Shard,
    ShardSpec,
    StepHooks,
    TensorSpec,
)
from flashrecovery.groups import named_group
from flashrecovery.plan.reshard import boxes, layouts, logical, rules
from flashrecovery.plan.reshard import placements as patterns
from flashrecovery.redundancy.checkpoint.dcp import read_into, write_part
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.memory.stash import Stash, Wanted, forms
from flashrecovery.runtime.channel import CHANNEL_ENV
from flashrecovery.runtime.durable import write_durably
from flashrecovery.runtime.environment import STASH_ENV
from flashrecovery.runtime.naming import of_group
from flashrecovery.runtime.parallel_layout import take_sizes
from flashrecovery.state import codec
from flashrecovery.worker.consistency.all_equal import check_equal, union
from flashrecovery.worker.data.data_parallel import group_of
from flashrecovery.worker.data.forwards import Forwards
from flashrecovery.worker.data.framework_batches import CallBatches
from flashrecovery.worker.data.global_batches import FrameworkBatch
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.framework_calls import LoopAdapter, PlacedLoop
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.recovery import Recovery

__all__ = [
    "CHANNEL_ENV",
    "STASH_ENV",
    "Adapter",
    "CallBatches",
    "CheckpointFormat",
    "DataStream",
    "Divided",
    "DividedTensor",
    "Division",
    "DivisionPlace",
    "FSDP2Division",
    "FSDP2Replicas",
    "FixedShard",
    "Forwards",
    "FrameworkBatch",
    "GradientWatch",
    "LocalBox",
    "LogicalState",
    "LoopAdapter",
    "Method",
    "OptimizerAttributes",
    "ParamRecord",
    "ParamShard",
    "PlacedLoop",
    "Prepared",
    "ReadyTensors",
    "Recovery",
    "RngState",
    "RuledDivision",
    "Setters",
    "Shard",
    "ShardSpec",
    "Stash",
    "StepHooks",
    "TensorSpec",
    "TorchAdapter",
    "Wanted",
    "boxes",
    "check_equal",
    "codec",
    "constant",
    "faults",
    "forms",
    "fsdp2_state",
    "give_up_state",
    "global_rank",
    "group_of",
    "groups",
    "hand_over_state",
    "layout_of",
    "layouts",
    "local_tensor",
    "logical",
    "mesh_spans_world",
    "named_group",
    "new_state_tensor",
    "of_group",
    "owners_of",
    "patterns",
    "placed_on_mesh",
    "plain",
    "plain_fields",
    "read_into",
    "replicated",
    "replicates",
    "restore_rng",
    "rules",
    "settle_state",
    "take_sizes",
    "union",
    "unsynchronised",
    "world_size",
    "write_durably",
    "write_part",
    "writer_of",
]
