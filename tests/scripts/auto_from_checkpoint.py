"""FSDP2 without a line of ours, which goes on from a checkpoint of torch's if there is one: ``auto_from_checkpoint.py
FOLDER``. With ``--save`` it writes one at its end."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
for part in (model[0], model[3]):
    fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
folder, saves = sys.argv[1], "--save" in sys.argv
start = 0
if Path(folder).exists():
    parameters, state = get_state_dict(model, optimizer)
    found = {"model": parameters, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    start = int(found["step"])
torch.manual_seed(100 + dist.get_rank())
for step in range(start, start + 6):
    x = torch.randn(8, 16)
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank={dist.get_rank()} step={step} loss_hex={loss.item().hex()}", flush=True)
if saves:
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state, "step": start + 6}, checkpoint_id=folder)
digest = hashlib.sha256()
for value in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()), torch.rand(3)):
    digest.update(getattr(value, "_local_tensor", value).detach().numpy().tobytes())
print(f"digest rank={dist.get_rank()} {digest.hexdigest()}", flush=True)
dist.destroy_process_group()
