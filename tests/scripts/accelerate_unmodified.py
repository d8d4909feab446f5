"""accelerate's loop without a line of ours, by a DeepSpeed engine: ``accelerate_unmodified.py --zero 2 --output DIR``.

Each rank prints the loss of each micro-batch and of each evaluation, and at the end the digest of all there is.
``--off``: with the key switched off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCHES = 2


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--zero", type=int, default=2)
    flags.add_argument("--off", action="store_true")
    flags.add_argument("--output", type=Path, required=True)
    args = flags.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"ds_config{os.environ['RANK']}.json"
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": args.zero},
        "flash_recovery": {"enabled": not args.off},
    }
    file.write_text(json.dumps(config))
    if not torch.cuda.is_available():
        PartialState(cpu=True)  # with a GPU accelerate finds the ranks by itself
    plugin = DeepSpeedPlugin(hf_ds_config=str(file))
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, deepspeed_plugin=plugin)
    rank = accelerator.process_index
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :2] * x[:, 2:4]), batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    total = 0.0
    for epoch in range(3):
        model.train()
        for i, (inputs, wanted) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += loss.item()
            print(f"rank={rank} epoch={epoch} micro-batch={i} {loss.item().hex()}", flush=True)
        model.eval()
        with torch.no_grad():
            losses = torch.stack([nn.functional.mse_loss(model(inputs), wanted) for inputs, wanted in loader])
        mean = accelerator.reduce(losses.mean().reshape(1), "mean").item()
        print(f"rank={rank} epoch={epoch} evaluation {mean.hex()}", flush=True)
    parameters = {
        name: getattr(p, "ds_tensor", p).float().tolist()
        for name, p in accelerator.unwrap_model(model).named_parameters()
    }
    ended = [parameters, total, schedule.scheduler.state_dict(), torch.rand(3).tolist()]
    text = json.dumps(ended, default=str, sort_keys=True)
    (args.output / f"state{rank}.json").write_text(text)
    print(f"digest rank={rank} {hashlib.sha256(text.encode()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
