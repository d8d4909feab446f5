"""What the GPT examples share: flags, process-group start, the step log and the digest of the final state."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import pickle
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import corpus
from data import BlockDataset, make_loader
from model import GPT, GPTConfig


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The module docstring as it stands, and defaults."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that all GPT examples have."""
    p = argparse.ArgumentParser(description=description, formatter_class=_Help)
    p.add_argument("--steps", type=int, default=100, help="optimizer steps")
    p.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--batch-size", type=int, default=4, help="blocks per rank and step")

    model = p.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--width", type=int, default=128)
    model.add_argument("--context", type=int, default=128, help="tokens a block")
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--tie-head", action="store_true", help="share the weights of embedding and head")

    data = p.add_argument_group("data")
    data.add_argument("--data", type=Path, help="a file, or the prefix of a .bin/.idx pair; None: Python's own library")
    data.add_argument("--data-dir", type=Path, default=corpus.default_data_dir(), help="where data sets are made")
    data.add_argument("--corpus-mib", type=float, default=8.0, help="take at most so much text")
    data.add_argument("--stateful-loader", action="store_true", help="use torchdata's StatefulDataLoader")
    data.add_argument("--num-workers", type=int, default=0, help="loader processes a rank")

    out = p.add_argument_group("output")
    out.add_argument("--log-all", action="store_true", help="every rank prints its losses, with all their bits")
    out.add_argument("--digest", action="store_true", help="print the SHA-256 of each rank's final state")
    out.add_argument("--step-time", type=float, default=0.0, metavar="MS", help="sleep so long in each step")
    return p


def start_process_group() -> torch.device:
    """Join the default process group (also alone, under plain ``python``) and return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # before NCCL asks which one
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def model_config(args: argparse.Namespace) -> GPTConfig:
    """The sizes that the flags say."""
    return GPTConfig(
        vocabulary=corpus.VOCABULARY,
        context=args.context,
        layers=args.layers,
        heads=args.heads,
        width=args.width,
        dropout=args.dropout,
        tie_head=args.tie_head,
    )


def build_model(args: argparse.Namespace, device: torch.device) -> GPT:
    """The same initial weights on every rank."""
    torch.manual_seed(args.seed)
    return GPT(model_config(args)).to(device)


def build_dataset(args: argparse.Namespace) -> BlockDataset:
    """All blocks, the same on every rank; makes the data set on first use."""
    return BlockDataset(corpus.prepare(args.data, args.data_dir, int(args.corpus_mib * 2**20)), args.context)


def build_loader(
    args: argparse.Namespace, rank: int | None = None, world: int | None = None
) -> DataLoader[tuple[Tensor, Tensor]]:
    """This rank's batches, or those of part ``rank`` of ``world``."""
    return make_loader(
        build_dataset(args),
        rank=dist.get_rank() if rank is None else rank,
        world=dist.get_world_size() if world is None else world,
        batch_size=args.batch_size,
        seed=args.seed,
        stateful=args.stateful_loader,
        workers=args.num_workers,
    )


def build_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Linear warm-up over the first tenth (at most 100 steps), then a cosine down to a tenth."""
    warmup = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def seed_rank(seed: int) -> None:
    """From here on each rank draws random numbers of its own (dropout masks)."""
    own = seed + 1 + dist.get_rank()
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)


def emit(line: str) -> None:
    """Print one line in one write, so that the lines of several ranks on one terminal do not run together."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class StepLog:
    """Prints ``step=<i> loss=<x> tokens/s=<n>`` on rank 0, or on every rank with the loss's exact bits."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank = dist.get_rank()
        self.all_ranks: bool = args.log_all
        self.tokens = args.batch_size * args.context * dist.get_world_size()
        self.last = time.perf_counter()

    def step(self, index: int, loss: Tensor) -> None:
        """Report one step. ``loss`` is this rank's own: a step's log must not be one more collective."""
        if self.rank != 0 and not self.all_ranks:
            return
        now = time.perf_counter()
        rate, self.last = self.tokens / max(now - self.last, 1e-9), now
        value = float(loss.item())
        line = f"step={index} loss={value:.6f} tokens/s={rate:.0f}"
        if self.all_ranks:
            line = f"rank={self.rank} {line} loss_hex={value.hex()}"
        emit(line)


def digest(items: Iterable[tuple[str, object]]) -> str:
    """SHA-256 over named values (tensors by dtype, shape and bytes) and this rank's random streams."""
    result = hashlib.sha256()

    def add(name: str, value: object) -> None:
        result.update(name.encode())
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous()
            result.update(f"{raw.dtype}{tuple(raw.shape)}".encode())
            result.update(raw.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, float):
            result.update(value.hex().encode())
        else:
            result.update(repr(value).encode())

    for name, value in items:
        add(name, value)
    add("rng:torch", torch.get_rng_state())
    if torch.cuda.is_available():
        add("rng:cuda", torch.cuda.get_rng_state())
    add("rng:python", random.getstate())
    add("rng:numpy", hashlib.sha256(pickle.dumps(np.random.get_state())).hexdigest())
    return result.hexdigest()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    """This rank's parameters, buffers and optimizer state. Sharded tensors contribute their local part."""
    named = sorted(model.named_parameters())
    for name, parameter in named:
        yield f"param:{name}", parameter
    for name, buffer in sorted(model.named_buffers()):
        yield f"buffer:{name}", buffer
    for name, parameter in named:
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"optimizer:{name}:{key}", value
    for i, group in enumerate(optimizer.param_groups):
        yield f"group:{i}:lr", group["lr"]


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over this rank's parameters, buffers, optimizer state and random streams. Equal: every bit is."""
    return digest(state(model, optimizer))


def print_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """``digest rank=<r> <hex>``, one line a rank."""
    emit(f"digest rank={dist.get_rank()} {state_digest(model, optimizer)}")
