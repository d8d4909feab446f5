"""Which settings of Megatron's sharded wrappers are refused, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fr_megatron.megatron_fsdp import STRATEGIES
from fr_megatron.support import _unsupported_megatron_fsdp


def config(**changes: Any) -> SimpleNamespace:
    """What is looked at of a DistributedDataParallelConfig that is supported."""
    settings = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "num_distributed_optimizer_instances": 1,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
    }
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_that_shard(strategy: str) -> None:
    assert list(_unsupported_megatron_fsdp(config(data_parallel_sharding_strategy=strategy))) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_parallel_sharding_strategy": "no_shard"}, "no_shard"),
        ({"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances"),
        ({"nccl_ub": True}, "nccl_ub"),
        ({"fsdp_double_buffer": True}, "fsdp_double_buffer"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], named: str) -> None:
    (reason,) = _unsupported_megatron_fsdp(config(**changes))
    assert named in reason
