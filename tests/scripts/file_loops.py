"""A loop that writes files as people do, without a line of ours: ``file_loops.py DIR``, by ``--auto``.

Each rank writes files of its own, in each way, at the beginning of a step, between its backward pass and its optimizer,
and after it. With ``--shared`` all ranks append to one.
"""

from __future__ import annotations

import argparse
import contextvars
import csv
import hashlib
import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("dir", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--shared", action="store_true")
args = parser.parse_args()
seen: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


def digest(module: nn.Module) -> str:
    parts = [p.detach().numpy().tobytes() for p in module.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    folder = args.dir / f"rank{rank}"
    folder.mkdir(exist_ok=True)

    appended, history = folder / "appended.txt", folder / "history.json"
    with open(appended, "a") as file:
        file.write("a header that is appended\n")
    with open(folder / "log.txt", "w"):  # cleared, as nanoGPT's successors do
        pass
    history.write_text("[]")
    kept = open(folder / "kept.txt", "w")  # noqa: SIM115 - kept open, with a buffer
    kept.write("kept open\n")
    table = open(folder / "table.csv", "w", newline="")  # noqa: SIM115
    rows = csv.writer(table)
    rows.writerow(["step", "loss"])
    binary = open(folder / "binary", "ab", buffering=0)  # noqa: SIM115
    log = logging.getLogger("file_loops")
    log.setLevel("INFO")
    log.addHandler(logging.FileHandler(folder / "logger.txt"))
    log.info("begins")

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        of_epoch = open(folder / f"epoch{epoch}.txt", "w")  # noqa: SIM115
        of_epoch.write(f"epoch {epoch}\n")
        kept.write(f"epoch {epoch}\n")
        for inputs, targets in loader:
            with open(appended, "a") as file:
                file.write(f"step {step} begins\n")
            binary.write(step.to_bytes(2, "big"))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            kept.write(f"step {step} loss {loss.item().hex()}\n")
            of_epoch.write(f"{step}\n")
            optimizer.step()
            with open(folder / "log.txt", "a") as file:
                file.write(f"{step} train {loss.item():.6f}\n")
            rows.writerow([step, loss.item().hex()])
            log.info("step %d", step)
            with open(history) as file:
                lines = json.load(file)
            with open(history, "w") as file:
                json.dump([*lines, loss.item()], file)
            (folder / "last.json").write_text(json.dumps({"step": step}))
            with (folder / f"sample{step}.txt").open("x") as file:
                file.write("a new file for each step")
            if args.shared:
                with open(args.dir / "shared.txt", "a") as file:
                    file.write(f"rank {rank} step {step}\n")
            os.environ["STEPS_TAKEN"] = str(int(os.environ.get("STEPS_TAKEN", "0")) + 1)
            seen.set(seen.get() + len(inputs))
            step += 1
        of_epoch.close()
        log.info("epoch %d ends", epoch)
        print(f"rank={rank} epoch {epoch} {os.environ['STEPS_TAKEN']} {seen.get()}", flush=True)
    kept.close()
    table.close()
    print(f"digest rank={rank} {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
