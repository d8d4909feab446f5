"""All that a rank holds, by name, and its SHA-256: equal digests mean that every bit is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashrecovery.adapter import local_tensor
from fr_megatron.megatron_fsdp import whole_state
from fr_megatron.optimizers import members
from fr_megatron.random import capture_tracker


def state(chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> Iterator[tuple[str, object]]:
    """All that this rank holds: parameters, what is stepped on and its state, scaler, tracked random streams."""
    for i, chunk in enumerate(chunks):
        for name, parameter in _parameters(chunk):
            yield f"param:{i}:{name}", local_tensor(parameter)
        for name, buffer in chunk.named_buffers():
            yield f"buffer:{i}:{name}", buffer
    for i, inner in enumerate(members(optimizer)):
        if inner.is_stub_optimizer:
            continue
        for j, group in enumerate(inner.optimizer.param_groups):
            yield f"group:{i}:{j}:lr", group["lr"]
            for k, weight in enumerate(group["params"]):
                yield f"weight:{i}:{j}:{k}", local_tensor(weight)
                for key, value in sorted(inner.optimizer.state.get(weight, {}).items()):
                    yield f"optimizer:{i}:{j}:{k}:{key}", local_tensor(value) if torch.is_tensor(value) else value
        if getattr(inner, "grad_scaler", None) is not None:
            for key, value in sorted(inner.grad_scaler.state_dict().items()):
                yield f"scaler:{i}:{key}", value
    yield "scheduler", scheduler.num_steps
    for name, stream in sorted(capture_tracker().items()):
        yield f"rng:{name}", stream


def _parameters(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if getattr(chunk.ddp_config, "use_megatron_fsdp", False):
        yield from whole_state(chunk)
    else:
        yield from chunk.named_parameters()


def state_digest(chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> str:
    """SHA-256 of :func:`state` and of this rank's default random stream."""
    result = hashlib.sha256()
    items = [*state(chunks, optimizer, scheduler), ("rng", torch.get_rng_state())]
    for name, value in items:
        result.update(name.encode())
        if isinstance(value, torch.Tensor):
            raw = value.detach().cpu().contiguous()
            result.update(f"{raw.dtype}{tuple(raw.shape)}".encode())
            result.update(raw.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            result.update((value.hex() if isinstance(value, float) else repr(value)).encode())
    return result.hexdigest()
