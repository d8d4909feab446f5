"""What an adapter for a framework is made of: the declared API.

An adapter outside of this repository needs nothing but what is exported here, ``flashrecovery`` itself, its ``errors``,
and, where torch must not be imported (hooks, ``flashrecovery doctor``), the light modules ``import_hooks``,
``finding``, ``versions``, ``patches`` and ``config``. The adapters in this repository keep to that, too.
docs/adapters.md explains how one is written, and what each name is for. In short:

* every adapter: :class:`Adapter` with its :class:`StepHooks` and :class:`Shard`. :class:`TorchAdapter` is a base for
  frameworks whose state is tensors and a ``torch.optim`` optimizer, and there is a kit for its shards.
  :class:`InspectableAdapter` lets the core look into the framework.
* jobs that are resized: :mod:`flashrecovery.adapter.elastic`
* jobs that change their parallelism: :mod:`flashrecovery.adapter.relayout`
* frameworks whose steps are their own calls: :mod:`flashrecovery.adapter.loop`
* where injected faults strike, and FSDP2's unsharded state: :mod:`.faults`, :mod:`.fsdp2_state`
"""

from flashrecovery.adapter.base import TorchAdapter
from flashrecovery.adapter.beside import OptimizerAttributes
from flashrecovery.adapter.gradients import GradientWatch
from flashrecovery.adapter.modes import plain_fields
from flashrecovery.adapter.optimizer_state import layout_of, new_state_tensor, plain
from flashrecovery.adapter.placement import (
    backed_by_pages,
    global_rank,
    local_tensor,
    mesh_spans_world,
    placed_on_mesh,
    replicated,
    unsynchronised,
    world_size,
    zeros_backed_by_pages,
)
from flashrecovery.adapter.setters import Method, Setters
from flashrecovery.adapter.shards import FixedShard, ParamRecord, ParamShard, attribute_of, constant, owners_of
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
from flashrecovery.groups import backward_waits_for_futures, is_communication_error, named_group, numbers_now
from flashrecovery.groups import groups as own_groups
from flashrecovery.redundancy.checkpoint.dcp import read_into, write_part
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.runtime.channel import CHANNEL_ENV
from flashrecovery.runtime.durable import write_durably
from flashrecovery.runtime.naming import of_group

__all__ = [
    "CHANNEL_ENV",
    "Adapter",
    "CheckpointFormat",
    "FixedShard",
    "GradientWatch",
    "InspectableAdapter",
    "Method",
    "OptimizerAttributes",
    "ParamRecord",
    "ParamShard",
    "Setters",
    "Shard",
    "ShardSpec",
    "StepHooks",
    "TensorSpec",
    "TorchAdapter",
    "attribute_of",
    "backed_by_pages",
    "backward_waits_for_futures",
    "constant",
    "give_up_state",
    "global_rank",
    "hand_over_state",
    "is_communication_error",
    "layout_of",
    "local_tensor",
    "mesh_spans_world",
    "named_group",
    "new_state_tensor",
    "numbers_now",
    "of_group",
    "own_groups",
    "owners_of",
    "placed_on_mesh",
    "plain",
    "plain_fields",
    "read_into",
    "replicated",
    "settle_state",
    "unsynchronised",
    "world_size",
    "write_durably",
    "write_part",
    "writer_of",
    "zeros_backed_by_pages",
]
