"""FSDP2 with 1 GB of parameters, never whole anywhere: their copies need twice that."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashrecovery

WIDTH, LAYERS = 4096, 16


def main() -> None:
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recovery.register(model=model, optimizer=optimizer)
    for step in recovery.steps(2):
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).mean().backward()
            optimizer.step()
    print("trained", flush=True)


if __name__ == "__main__":
    main()
