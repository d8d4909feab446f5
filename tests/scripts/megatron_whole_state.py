"""All that a script with megatron-core trains, gathered from all ranks, whatever part of it a rank has: digests, and a
state that is saved and loaded in any size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from torch import Tensor

from fr_megatron.optimizers import inner_optimizers, pairs

MOMENTS = ("exp_avg", "exp_avg_sq")
Whole = dict[str, dict[str, Tensor]]


class State:
    """What a script trains: all of it, whatever part of it this rank has."""

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        (self.inner,) = inner_optimizers(optimizer)
        self.names = {id(p): name for chunk in chunks for name, p in chunk.named_parameters()}
        self.weights = {name: p for chunk in chunks for name, p in chunk.named_parameters()}

    def _parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """(weight, where in it a part begins, the part) of what this rank steps on."""
        for model, main in pairs(self.inner):
            of = getattr(self.inner, "_get_model_param_range_map", None)
            yield self.names[id(model)], of(model)["param"].start if of else 0, main

    def whole(self) -> Whole:
        """A collective."""
        mine: list[tuple[str, str, int, Tensor]] = []
        for name, start, main in self._parts():
            mine.append((name, "main", start, main.detach().reshape(-1).clone()))
            state = self.inner.optimizer.state.get(main, {})
            mine += [(name, key, start, state[key].reshape(-1).clone()) for key in MOMENTS if key in state]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        found: Whole = {name: {"weight": w.detach().clone()} for name, w in self.weights.items()}
        seen: dict[tuple[str, str], int] = {}
        for name, key, start, part in (item for items in everybody for item in items):
            flat = found[name].setdefault(key, torch.full(self.weights[name].shape, torch.nan)).view(-1)
            flat[start : start + part.numel()] = part
            seen[name, key] = seen.get((name, key), 0) + part.numel()
        distributed = self.chunks[0].ddp_config.use_distributed_optimizer
        replicas = 1 if distributed else dist.get_world_size()
        for (name, _), number in seen.items():
            assert number == self.weights[name].numel() * replicas, (name, number)
        return found

    def plain(self) -> dict[str, Any]:
        """What is no tensor."""
        numbers = (int, float, bool)
        scaler = getattr(self.inner, "grad_scaler", None)
        steps = {float(s["step"]) for s in self.inner.optimizer.state.values() if "step" in s}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, steps)
        return {
            "groups": [
                {k: v for k, v in group.items() if isinstance(v, numbers)}
                for group in self.inner.optimizer.param_groups
            ],
            "scheduler": self.scheduler.num_steps,
            "scaler": {} if scaler is None else {k: float(v) for k, v in scaler.state_dict().items()},
            "steps": sorted({step for steps in everybody for step in steps}),
        }

    def sizes(self) -> list[Any]:
        """What has to be as in a job that was started in this size."""
        names = sorted(name for name in vars(parallel_state) if "_RANKS" in name and name.isupper())
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers]
        self._check_place(dist.get_rank(), dist.get_world_size())
        return [
            parallel_state.get_data_parallel_world_size(),
            [(name, value) for name in names if (value := getattr(parallel_state, name)) and "DATA" in name],
            [(b.data_parallel_world_size, b.numel, [k.gradient_scaling_factor for k in b.buckets]) for b in buffers],
            calculator.get() if (calculator := _calculator()) else 0,
        ]

    def _check_place(self, rank: int, size: int) -> None:
        """What is of this rank alone."""
        alone = [name for name in vars(parallel_state) if name.endswith("_RANKS") and "DATA" not in name]
        values = {name: value for name in alone if (value := getattr(parallel_state, name))}
        assert values and all(value == [rank] for value in values.values()), values
        for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_model_parallel_group()):
            assert dist.get_process_group_ranks(group) == [rank] and group.size() == 1
        assert dist.get_process_group_ranks(parallel_state.get_data_parallel_group()) == list(range(size))
        assert parallel_state.get_data_parallel_rank() == rank
        assert parallel_state.get_tensor_model_parallel_src_rank() == rank
        if self.chunks[0].ddp_config.use_distributed_optimizer:
            sets = [self.chunks[0].bucket_groups, *self.inner.per_model_bucket_groups.values()]
            for group in (group for groups in sets for group in groups):
                assert group.intra_distributed_optimizer_instance_rank == rank
                assert group.intra_distributed_optimizer_instance_size == size
                assert group.intra_distributed_optimizer_instance_group is self.inner.data_parallel_group

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensors in self.whole().items():
            for what, tensor in tensors.items():
                found.update(f"{name} {what} {tensor.dtype}".encode())
                found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found.update(json.dumps([self.plain(), self.sizes()], sort_keys=True).encode())
        return found.hexdigest()

    def save(self, version: int, path: str) -> None:
        state = {"version": version, "tensors": self.whole(), "plain": self.plain()}
        if dist.get_rank() == 0:
            torch.save(state, path)

    def load(self, path: str) -> int:
        """Begin with a saved state, in any size."""
        saved = torch.load(path)
        tensors, plain = saved["tensors"], saved["plain"]
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[name]["weight"])
            for name, start, main in self._parts():
                flat = {key: t.reshape(-1)[start : start + main.numel()].clone() for key, t in tensors[name].items()}
                main.view(-1).copy_(flat["main"])
                if plain["steps"]:
                    self.inner.optimizer.state[main] = {
                        "step": torch.tensor(plain["steps"][0]),
                        **{key: flat[key].view(main.shape) for key in MOMENTS},
                    }
        for group, numbers in zip(self.inner.optimizer.param_groups, plain["groups"], strict=True):
            group.update(numbers)
        self.scheduler.num_steps = plain["scheduler"]
        if plain["scaler"]:
            scaler = self.inner.grad_scaler
            scaler.load_state_dict(
                {
                    "scale": torch.tensor([plain["scaler"]["scale"]]),
                    "growth_tracker": int(plain["scaler"]["growth_tracker"]),
                    "hysteresis_tracker": int(plain["scaler"]["hysteresis_tracker"]),
                }
            )
        return int(saved["version"])


def _calculator() -> Any:
    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
