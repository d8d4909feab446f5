"""The whole state of a script with megatron-core, in words that hold for every layout: digests, and values that
megatron-core's own ``dist_checkpointing`` writes and reads, with nothing of flash-recovery."""

from __future__ import annotations

import hashlib
import json
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from fr_megatron.adapter import adapter_for
from fr_megatron.optimizers import inner_optimizers

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""As Megatron-LM calls it with ``--dist-ckpt-optim-fully-reshardable``."""


def state(chunks: list[Any], optimizer: Any, scheduler: Any, *, loading: bool) -> dict[str, Any]:
    """A sharded state dict, as in Megatron-LM's ``generate_state_dict``."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    result = {
        name: chunk.module.sharded_state_dict(metadata=dict(METADATA))
        for name, chunk in zip(names, chunks, strict=True)
    }
    result["optimizer"] = optimizer.sharded_state_dict(dict(result), is_loading=loading, metadata=dict(METADATA))
    result["opt_param_scheduler"] = scheduler.state_dict()
    return result


def save(chunks: list[Any], optimizer: Any, scheduler: Any, directory: Path) -> None:
    """Everything, with Megatron's own format. It writes at once, in this very process, and yet would have another
    interpreter import all of this script, for a queue that processes could share (megatron-core 0.16.1)."""
    if getattr(filesystem_async, "_results_queue", queue) is None:
        filesystem_async._results_queue = queue.Queue()
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    dist_checkpointing.save(state(chunks, optimizer, scheduler, loading=False), str(directory))


def load(chunks: list[Any], optimizer: Any, scheduler: Any, directory: Path) -> None:
    """As Megatron-LM's ``load_checkpoint``."""
    for inner in optimizer.chained_optimizers:
        for (
            group
        ) in inner.optimizer.param_groups:  # unlike Transformer Engine's, torch's Adam has no state before a step
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.optimizer.step()
        inner.optimizer.zero_grad()
        if hasattr(inner, "_set_main_param_and_optimizer_states"):
            _with_step(inner)
    directory = _of_as_many(directory, optimizer)
    loaded = dist_checkpointing.load(state(chunks, optimizer, scheduler, loading=True), str(directory))
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{i}"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if dist.get_rank() == 0:
        print(f"loaded num_steps={scheduler.num_steps}", flush=True)


def _of_as_many(directory: Path, optimizer: Any) -> Path:
    """The same checkpoint with plain values of as many optimizers as there are here. With expert parallelism experts
    have one of their own; megatron-core 0.16.1 finds their tensors in either case, but counts the optimizers."""
    common = torch.load(directory / "common.pt", weights_only=False)
    saved = common["optimizer"]
    several = all(isinstance(key, int) for key in saved)  # by number; else the one optimizer's own words
    parts = [saved[number] for number in sorted(saved)] if several else [saved]
    if len(parts) == len(optimizer.chained_optimizers):
        return directory
    dense, mine = parts[0], optimizer.chained_optimizers
    if len(mine) == 1:
        common["optimizer"] = dense
    else:
        common["optimizer"] = {number: _with_groups_of(inner, dense) for number, inner in enumerate(mine)}
    other = directory.with_name(f"{directory.name}.{dist.get_world_size()}") / directory.name
    if dist.get_rank() == 0 and not other.exists():
        other.mkdir(parents=True)
        for path in directory.iterdir():
            if path.name != "common.pt":
                (other / path.name).symlink_to(path)
        torch.save(common, other / "common.pt")
    dist.barrier()
    return other


def _with_groups_of(inner: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """One optimizer's plain values with those groups of them that ``inner`` has."""
    kinds = {group["wd_mult"]: group for group in plain["optimizer"]["param_groups"]}
    groups = [
        {**kinds[group["wd_mult"]], "is_expert_parallel": group["is_expert_parallel"]}
        for group in inner.optimizer.param_groups
    ]
    return {**plain, "optimizer": {**plain["optimizer"], "param_groups": groups}}


def _with_step(inner: Any) -> None:
    """megatron-core 0.16.1 cannot load what it has saved so itself with torch's Adam: it looks for each parameter's
    number of steps, which it keeps once (KeyError: 'step'). With Transformer Engine's there is none."""
    original = inner._set_main_param_and_optimizer_states

    def with_step(model: Any, tensors: dict[str, Any]) -> None:
        group, order = inner.model_param_group_index_map[model]
        state = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
        original(model, {**tensors, "step": state["step"]})

    inner._set_main_param_and_optimizer_states = with_step


def whole(chunks: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """All logical tensors, put together from the boxes of all ranks; what several have must be equal. A collective."""
    adapter = adapter_for(chunks, optimizer)
    state = adapter.logical()
    assert state is not None
    described = state.describe()
    mine = []
    for shard in adapter.shards():
        tensors = shard.tensors()
        like = tuple(next(iter(tensors.values())).shape)
        for key, tensor in tensors.items():
            flat = tensor.detach().reshape(-1)
            for part in described[shard.name].of(key, tuple(tensor.shape), like):
                box = flat[part.begin : part.begin + part.box.size].view(part.box.shape).clone()
                mine.append((part.name, part.whole, part.box.low, part.box.high, box))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    found: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, shape, low, high, box in (one for some in everybody for one in some):
        tensor = found.setdefault(name, torch.zeros(shape, dtype=box.dtype))
        known = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        index = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        both = known[index]
        assert torch.equal(tensor[index][both], box[both]), f"{name} {index} differs between ranks"
        tensor[index], known[index] = box, True
    lacking = [name for name, known in seen.items() if not bool(known.all())]
    assert not lacking, f"parts of {lacking} are on nobody"
    return found


def digest(chunks: list[Any], optimizer: Any, scheduler: Any) -> str:
    found = hashlib.sha256(json.dumps(scheduler.num_steps).encode())
    for name, tensor in sorted(whole(chunks, optimizer).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def begin_with(chunks: list[Any], optimizer: Any, scheduler: Any, path: Path) -> int:
    """Megatron's own load. Torch's Adam has a number of steps for each parameter; Megatron gives all of them one
    tensor, which each of them then counts on."""
    load(chunks, optimizer, scheduler, path)
    version = int(path.name)
    for inner in inner_optimizers(optimizer):
        for state in inner.optimizer.state.values():
            state["step"] = torch.tensor(float(version))
    return version
