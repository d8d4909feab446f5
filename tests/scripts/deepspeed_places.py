"""An engine, alone in its groups, takes on shardings among more ranks than there are, as a replacement does whose peers
still have another sharding than the one that the groups are for. Fails if a partition is not what it is to be."""

from __future__ import annotations

import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from fr_deepspeed.adapter import adapter_for


def build(stage: int) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 61), nn.Linear(61, 5))
    model[1].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:1]}, {"params": trained[1:], "weight_decay": 0.0}]
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def main(stage: int) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    engine = build(stage)
    adapter = adapter_for(engine)
    assert adapter.tied_to_size() == ()
    engine.optimizer.offloaded_states.add("hp_params")
    assert any("offload_states" in name for name in adapter.tied_to_size())
    engine.optimizer.offloaded_states.clear()
    shard_layout = adapter.shard_layout()
    assert shard_layout is not None and shard_layout.size == 1
    described = shard_layout.describe()
    for number, size in ((1, 3), (3, 4), (0, 2), (0, 1)):
        ready = shard_layout.prepare(described, number, size)
        for count, tensor in enumerate(ready.tensors.values(), 1):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 100 + count)
        ready.install()
        assert shard_layout.size == size and engine.dp_world_size == 1
        found = {shard.name: shard for shard in adapter.shards()}
        holders = 0
        for tensor in shard_layout.tensors(described, size):
            shard = found[tensor.shards[number]]
            held = tuple(place for place in range(size) if tensor.shards[place] == shard.name)
            assert shard.holders == held, (shard.name, shard.holders, held)
            assert torch.equal(shard.tensors()[tensor.key].detach(), ready.tensors[tensor.name]), tensor.name
            holders += 1
        assert holders == len(ready.tensors) > 0
        adapter.reset()
    assert dist.get_world_size() == 1
    print("DONE")


if __name__ == "__main__":
    main(int(sys.argv[1]))
