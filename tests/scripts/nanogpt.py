"""The training loop of nanoGPT's ``train.py``, in its shape: random memmap batches, gradient accumulation by
``require_backward_grad_sync``, a ``GradScaler``, evaluation and checkpoint in the loop. What recovery needs is marked.
"""

from __future__ import annotations

import math
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import flashrecovery  # added

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts import proof

batch_size, block_size, gradient_accumulation_steps = 4, 16, 2
eval_interval, eval_iters = 4, 2
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 3, 1.0
vocab_size = 32


class Tiny(torch.nn.Module):
    """In the place of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 16)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, vocab_size)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.dropout(self.embedding(idx)))
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def main() -> None:
    args = proof.flags(__doc__).parse_args()
    max_iters, out_dir = args.steps - 1, Path.cwd() / "out"
    random.seed(1)
    np.random.seed(2)
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()  # added
    rank = dist.get_rank()
    master_process = rank == 0
    torch.manual_seed(1337 + rank)
    data_dir = Path(os.environ["NANOGPT_DATA"])

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(data_dir / f"{split}.bin", dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
        return x, y

    raw_model = Tiny()
    with torch.no_grad():
        for p in raw_model.parameters():
            p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate)
    model = DDP(raw_model)
    ctx = nullcontext()
    recovery.register(model=model, optimizer=optimizer, scaler=scaler)  # added
    kills = proof.Kills(args.kill, recovery)  # of the test
    raw_model.head.register_forward_hook(lambda _module, _inputs, logits: in_backward(logits))

    def in_backward(logits: torch.Tensor) -> None:
        if logits.requires_grad:
            logits.register_hook(lambda _: kills.at("backward"))

    @torch.no_grad()
    def estimate_loss() -> dict[str, torch.Tensor]:
        out = {}
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                x, y = get_batch(split)
                with ctx:
                    _, loss = raw_model(x, y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def get_lr(it: int) -> float:
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
        return min_lr + coeff * (learning_rate - min_lr)

    for step in recovery.steps(max_iters + 1):  # was: while True
        iter_num = kills.step = step.index  # was: iter_num += 1 at the end
        kills.at("data")
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0 and master_process:
            losses = estimate_loss()
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            out_dir.mkdir(exist_ok=True)
            checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save(checkpoint, out_dir / f"ckpt{os.getpid()}.pt")
        with step:  # added; what follows is moved one level in
            for micro_step in range(gradient_accumulation_steps):
                X, Y = get_batch("train")  # was: fetched ahead, after the forward pass
                model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
                with ctx:
                    _, loss = model(X, Y)
                    loss = loss / gradient_accumulation_steps
                scaler.scale(loss).backward()
            if grad_clip != 0.0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            proof.say_step(iter_num, X, loss, lr)
            kills.at("optimizer")
        kills.at("below")

    proof.say_end(model, optimizer, {"scaler": scaler.state_dict()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
