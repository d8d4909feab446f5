"""What the scripts of the loop tests share: they die where a flag says, and they print everything by which two
launches are compared.

``--kill RANK:STEP:MOMENT:GENERATION`` is a real SIGKILL that the process sends to itself. It fires only in the named
generation (the number of recoveries so far), so a replacement that repeats the step does not die of it again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import flashrecovery

MOMENTS = ("data", "backward", "optimizer", "below", "end")
"""``data``: before the step's first batch. ``backward``: in the middle of it. ``optimizer``: right after its step,
before what the block has below that. ``below``: between the block and the code below it. ``end``: after that code,
before the next step is yielded."""
BROADCAST = "broadcast"
"""In an optimizer that communicates, of the loops that have one: it has changed a part of the state, and sent some of
that."""


@dataclass(frozen=True)
class Kill:
    """Where one process ends."""

    rank: int
    step: int
    moment: str
    generation: int = 0

    @staticmethod
    def parse(text: str) -> Kill:
        rank, step, moment, generation = text.split(":")
        if moment not in (*MOMENTS, BROADCAST):
            raise argparse.ArgumentTypeError(f"moment {moment!r}: one of {', '.join(MOMENTS)} is needed")
        return Kill(int(rank), int(step), moment, int(generation))

    def __str__(self) -> str:
        return f"{self.rank}:{self.step}:{self.moment}:{self.generation}"


class Kills:
    """The kills of this process. ``step`` is the step that is being run. ``pause_s``: so long before each of them it
    does nothing, and its peers come as far as they can without it."""

    def __init__(self, kills: Iterable[Kill], recovery: flashrecovery.Recovery, pause_s: float = 0) -> None:
        self._pause_s = pause_s
        self._left = {kill for kill in kills if kill.rank == dist.get_rank()}
        self._recovery = recovery
        self.step = -1

    def at(self, moment: str) -> None:
        """This process is at ``moment`` of its step; it may not return from here."""
        for kill in self._left:
            if (kill.step, kill.moment, kill.generation) == (self.step, moment, self._recovery.generation):
                time.sleep(self._pause_s)
                print(f"killed {kill}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    def in_backward_of(self, module: nn.Module) -> None:
        """The gradient of what ``module`` returns is the middle of the backward pass."""

        def after_forward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _gradient: self.at("backward"))

        module.register_forward_hook(after_forward)


def flags(description: str | None) -> argparse.ArgumentParser:
    """The flags that all these scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=17)
    parser.add_argument("--kill", type=Kill.parse, action="append", default=[], metavar="RANK:STEP:MOMENT:GENERATION")
    parser.add_argument("--pause", type=float, default=0, help="seconds before each kill")
    return parser


def say_step(step: int, batch: Tensor, loss: Tensor, rate: float) -> None:
    """What step ``step`` of this rank has worked on, and with which result; said again if the step is repeated."""
    line = f"batch={sha(batch)[:16]} rate={float(rate).hex()} loss_hex={float(loss.detach()).hex()}"
    print(f"rank={dist.get_rank()} step={step} {line}", flush=True)


def say_end(model: nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, object]) -> None:
    """The SHA-256 of each part of this rank's state at the end, and of all of them. ``more``: what the script has
    besides model, optimizer and the global random streams."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts: dict[str, object] = {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "optimizer": {
            names.get(parameter, f"part {number}"): state  # a part of flattened parameters, in a sharded optimizer
            for number, (parameter, state) in enumerate(optimizer.state.items())
        },
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        **more,
    }
    rank = dist.get_rank()
    for name, value in parts.items():
        print(f"end rank={rank} part={name} {sha(value)}", flush=True)
    print(f"digest rank={rank} {sha(parts)}", flush=True)


def sha(value: object) -> str:
    """SHA-256 of tensors (a sharded one: its local part), plain values, and containers of them."""
    result = hashlib.sha256()
    _add(result, value)
    return result.hexdigest()


def _add(result: hashlib._Hash, value: object) -> None:
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        names, about = value.__tensor_flatten__()
        result.update(f"{type(value).__qualname__}{value.dtype}{about}".encode())
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous()
        result.update(f"{raw.dtype}{tuple(raw.shape)}".encode())
        result.update(raw.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        result.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            result.update(repr(key).encode())
            _add(result, value[key])
    elif isinstance(value, (list, tuple)):
        result.update(f"{len(value)}".encode())
        for item in value:
            _add(result, item)
    else:
        result.update(value.hex().encode() if isinstance(value, float) else repr(value).encode())
