"""What an adapter for a framework is made of: the declared API.

An adapter outside of this repository needs nothing but what is exported here, ``flashrecovery`` itself, its ``errors``,
and, where torch must not be imported (hooks, ``flashrecovery doctor``), the light modules ``import_hooks``,
``finding``, ``versions``, ``patches`` and ``config``. The adapters in this repository keep to that, too.
docs/adapters.md explains how one is written, and what each name is for. In short:

* every adapter: :class:`Adapter` with its :class:`StepHooks` and :class:`Shard`. :class:`TorchAdapter` is a base for
  frameworks whose state is tensors and a ``torch.optim`` optimizer, and there is a kit for its shards.
  :class:`InspectableAdapter` lets the core look into the framework.
* jobs that are resized: :class:`ElasticAdapter`, and :class:`Division` for state that is sharded among the ranks
* jobs that change their parallelism: :class:`RelayoutAdapter` and :class:`LogicalState`
* frameworks whose steps are their own calls: :class:`LoopAdapter`, and what such a loop has to agree on and to restore
"""

from flashrecovery import groups
from flashrecovery.adapter import faults, fsdp2_state
from flashrecovery.adapter.base import TorchAdapter
from flashrecovery.adapter.beside import OptimizerAttributes
from flashrecovery.adapter.fields import plain_fields
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
    InspectableAdapter,
    Shard,
    ShardSpec,
    StepHooks,
    TensorSpec,
)
from flashrecovery.contract.division import (
    DividedTensor,
    Division,
    DivisionPlace,
    LocalBox,
    Prepared,
    ReadyTensors,
    RuledDivision,
)
from flashrecovery.contract.elastic_adapter import ElasticAdapter
from flashrecovery.contract.logical_state import LogicalState
from flashrecovery.contract.loop_adapter import LoopAdapter, LoopState, PlacedLoop
from flashrecovery.contract.relayout_adapter import RelayoutAdapter
from flashrecovery.groups import named_group
from flashrecovery.plan.reshard import logical, placements
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.layouts import padded
from flashrecovery.plan.reshard.rules import Naming, TensorRule
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
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.recovery import Recovery

__all__ = [
    "CHANNEL_ENV",
    "STASH_ENV",
    "Adapter",
    "Box",
    "CallBatches",
    "CheckpointFormat",
    "DataStream",
    "DividedTensor",
    "Division",
    "DivisionPlace",
    "ElasticAdapter",
    "FixedShard",
    "Forwards",
    "FrameworkBatch",
    "GradientWatch",
    "InspectableAdapter",
    "LocalBox",
    "LogicalState",
    "LoopAdapter",
    "LoopState",
    "Method",
    "Naming",
    "OptimizerAttributes",
    "ParamRecord",
    "ParamShard",
    "PlacedLoop",
    "Prepared",
    "ReadyTensors",
    "Recovery",
    "RelayoutAdapter",
    "RngState",
    "RuledDivision",
    "Setters",
    "Shard",
    "ShardSpec",
    "Stash",
    "StepHooks",
    "TensorRule",
    "TensorSpec",
    "TorchAdapter",
    "Wanted",
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
    "local_tensor",
    "logical",
    "mesh_spans_world",
    "named_group",
    "new_state_tensor",
    "of_group",
    "owners_of",
    "padded",
    "placed_on_mesh",
    "placements",
    "plain",
    "plain_fields",
    "read_into",
    "replicated",
    "restore_rng",
    "settle_state",
    "take_sizes",
    "union",
    "unsynchronised",
    "world_size",
    "write_durably",
    "write_part",
    "writer_of",
]
