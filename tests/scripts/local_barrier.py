"""The ranks of a node share memory, a file that one of them makes, and wait for it before the first step: by files of
their own, or (``--by barrier``) in a collective, which a replacement is answered."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import flashrecovery


def wait_for_local_peers(directory: Path) -> None:
    """Until as many have come as there are ranks on this node; the last one takes the files away."""
    mine = directory / f"{os.environ['LOCAL_RANK']}.here"
    mine.touch()
    while mine.exists():
        here = list(directory.glob("*.here"))
        if len(here) == int(os.environ["LOCAL_WORLD_SIZE"]):
            for file in here:
                file.unlink(missing_ok=True)
        time.sleep(0.01)


def local_cache(directory: Path, by: str) -> Tensor:
    """Made by the first rank of the node."""
    path = directory / "cache"
    if int(os.environ["LOCAL_RANK"]) == 0 and not (by == "barrier" and path.exists()):
        new = path.with_suffix(".new")
        new.touch(exist_ok=False)
        torch.from_file(str(new), shared=True, size=1024).copy_(torch.arange(1024.0))
        new.replace(path)
    if by == "barrier":
        dist.barrier()
    else:
        wait_for_local_peers(directory)
    return torch.from_file(str(path), shared=True, size=1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--by", choices=("files", "barrier"), default="files")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    cache = local_cache(args.directory, args.by)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    recovery.register(model=model, optimizer=optimizer)
    torch.manual_seed(100 + dist.get_rank())
    for step in recovery.steps(8):
        with step:
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 8)) - cache[step.index + dist.get_rank()]).square().mean()
            loss.backward()
            optimizer.step()
        if step.committed:
            print(f"step={step.index} loss_hex={loss.item().hex()}", flush=True)
    content = b"".join(p.detach().numpy().tobytes() for p in (*model.parameters(), cache))
    print(f"digest rank={dist.get_rank()} {hashlib.sha256(content).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
