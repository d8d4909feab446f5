"""``train_fsdp.py --replicate R`` with the replicas of a shard on ranks that follow each other, and so on one node."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from torch.distributed import device_mesh

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt"


def together(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> device_mesh.DeviceMesh:
    """With ranks counted along the first dimension first."""
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape[::-1])
    return device_mesh.DeviceMesh(device, ranks.permute(*reversed(range(len(shape)))), mesh_dim_names=mesh_dim_names)


if __name__ == "__main__":
    device_mesh.init_device_mesh = together  # type: ignore[assignment]
    sys.path.insert(0, str(GPT))
    runpy.run_path(str(GPT / "train_fsdp.py"), run_name="__main__")
