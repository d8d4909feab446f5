"""Which ranks take their own samples, by the model that they train: all of FSDP2's, also of one replica; with
DistributedDataParallel over a part of the ranks, those. In a world without other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.data.global_batches import ElasticBatches
from flashrecovery.worker.recovery import Recovery

RANK, WORLD = 2, 4


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Of four ranks, of which this process is the third."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


def mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def batches_of(model: torch.nn.Module) -> ElasticBatches:
    recovery = Recovery(None)
    recovery.register(model=model)
    return recovery.elastic_batches(TensorDataset(torch.arange(24)), global_batch=8, micro_batch=1, shuffle=False)


def numbers(batches: ElasticBatches) -> list[int]:
    batches.begin(0)
    return [turn.number for turn in batches.schedule(0)]


def test_each_rank_of_hsdp_takes_samples_of_its_own() -> None:
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh("replicate", "shard"))
    assert numbers(batches_of(model)) == [4, 5]


def test_also_while_its_parameters_are_put_together() -> None:
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh("replicate", "shard"), reshard_after_forward=False)
    batches = batches_of(model)
    model.unshard()
    assert numbers(batches) == [4, 5]


def test_ranks_of_one_replica_take_the_same_with_ddp_over_the_others() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=mesh("replicate", "inside").get_group(0))
    assert numbers(batches_of(model)) == [4, 5, 6, 7]


def test_the_group_is_looked_for_when_all_models_are_known() -> None:
    recovery = Recovery(None)
    batches = recovery.elastic_batches(TensorDataset(torch.arange(24)), global_batch=8, micro_batch=1)
    group = mesh("replicate", "inside").get_group(0)
    recovery.register(model=DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group))
    assert numbers(batches) == [4, 5, 6, 7]


def test_tensor_parallelism_beside_fsdp2_is_refused() -> None:
    both = mesh("dp", "tp")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelize_module(model, both["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=both["dp"])
    with pytest.raises(UnsupportedError, match="not with tensor parallelism"):
        batches_of(model)


def test_fsdp2_over_some_of_the_ranks_is_refused() -> None:
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh("replicate", "shard")["shard"])
    with pytest.raises(UnsupportedError, match="of all ranks"):
        batches_of(model)
