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

from fr_megatron.layout import is_expert
from fr_megatron.optimizers import inner_optimizers, pairs

NOTED = "cp_global_ranks"
"""In which Transformer Engine's attention notes its context-parallel peers."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Whole = dict[str, dict[str, Tensor]]
_LISTS = sorted(name for name in vars(parallel_state) if "_RANKS" in name and name.isupper())


class State:
    """What a script trains: all of it, whatever part of it this rank has."""

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.inners = inner_optimizers(optimizer)  # of experts one of their own
        # Ranks of one replica have other weights by the same names.
        tensor = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        whole = (
            parallel_state.get_tensor_model_parallel_world_size()
            * parallel_state.get_pipeline_model_parallel_world_size()
        )
        self.prefix = f"stage {stage} slice {tensor} " if whole > 1 else ""
        experts = f"experts {parallel_state.get_expert_model_parallel_rank()} "
        of_chunk = [f"chunk {number} " if len(chunks) > 1 else "" for number in range(len(chunks))]
        named = [
            (self.prefix + at + (experts if is_expert(p) else "") + name, p)
            for at, chunk in zip(of_chunk, chunks, strict=True)
            for name, p in chunk.named_parameters()
        ]
        self.replicas = {  # ranks that have the same
            name: chunks[0].expt_dp_group if is_expert(p) else chunks[0].dp_cp_group for name, p in named
        }
        self.names = {id(p): name for name, p in named}
        self.weights = dict(named)

    def _parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """(weight, where in it a part begins, the part) of what this rank steps on."""
        for inner in self.inners:
            of = getattr(inner, "_get_model_param_range_map", None)
            for model, main in pairs(inner):
                yield self.names[id(model)], of(model)["param"].start if of else 0, main

    def _state_of(self, main: Tensor) -> dict[str, Any]:
        return next((s for inner in self.inners if (s := inner.optimizer.state.get(main))), {})

    def whole(self) -> Whole:
        """A collective. All replicas have equal weights."""
        mine: list[tuple[str, str, int, Tensor]] = []
        for name, start, main in self._parts():
            mine.append((name, "main", start, main.detach().reshape(-1).clone()))
            state = self._state_of(main)
            mine += [(name, key, start, state[key].reshape(-1).clone()) for key in MOMENTS if key in state]
        found: Whole = {}
        for weights in _gathered({name: w.detach().clone() for name, w in self.weights.items()}):
            for name, weight in weights.items():
                known = found.setdefault(name, {"weight": weight})["weight"]
                assert torch.equal(known.contiguous().view(torch.uint8), weight.contiguous().view(torch.uint8)), name
        seen: dict[tuple[str, str], int] = {}
        for name, key, start, part in (item for items in _gathered(mine) for item in items):
            shape = found[name]["weight"].shape
            flat = found[name].setdefault(key, torch.full(shape, torch.nan)).view(-1)
            flat[start : start + part.numel()] = part
            seen[name, key] = seen.get((name, key), 0) + part.numel()
        distributed = self.chunks[0].ddp_config.use_distributed_optimizer
        holders = {name: number for of_rank in _gathered(self._holders()) for name, number in of_rank.items()}
        for (name, _), number in seen.items():
            replicas = 1 if distributed else holders[name]
            assert number == found[name]["weight"].numel() * replicas, (name, number)
        return found

    def _holders(self) -> dict[str, int]:
        return {name: group.size() for name, group in self.replicas.items()}

    def plain(self) -> dict[str, Any]:
        """What is no tensor."""
        numbers = (int, float, bool)
        scalers = [scaler for inner in self.inners if (scaler := getattr(inner, "grad_scaler", None)) is not None]
        steps = {float(s["step"]) for inner in self.inners for s in inner.optimizer.state.values() if "step" in s}
        return {
            "groups": [
                {k: v for k, v in group.items() if isinstance(v, numbers)}
                for inner in self.inners
                for group in inner.optimizer.param_groups
            ],
            "scheduler": self.scheduler.num_steps,
            "scalers": [{k: float(v) for k, v in scaler.state_dict().items()} for scaler in scalers],
            "steps": sorted({step for steps in _gathered(steps) for step in steps}),
        }

    def sizes(self) -> list[Any]:
        """What has to be as in a job that was started in this size, of all ranks."""
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self.check_place()
        mine = [
            parallel_state.get_data_parallel_world_size(),
            [(name, value) for name in _LISTS if (value := getattr(parallel_state, name))],
            [(b.data_parallel_world_size, b.numel, [k.gradient_scaling_factor for k in b.buckets]) for b in buffers],
            calculator.get() if (calculator := _calculator()) else 0,
        ]
        return _gathered(mine)

    def check_place(self) -> None:
        """What is noted of groups is as the groups themselves are, and these are as the numbers of ranks say."""
        state, rank = parallel_state, dist.get_rank()
        tensor, stages = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
        context, places = state.get_context_parallel_world_size(), state.get_data_parallel_world_size()
        assert tensor * context * places * stages == dist.get_world_size()
        groups = {
            "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": state.get_tensor_model_parallel_group(),
            "_PIPELINE_GLOBAL_RANKS": state.get_pipeline_model_parallel_group(),
            "_MODEL_PARALLEL_GLOBAL_RANKS": state.get_model_parallel_group(),
            "_DATA_PARALLEL_GLOBAL_RANKS": state.get_data_parallel_group(),
            "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": state.get_data_parallel_group(with_context_parallel=True),
            "_CONTEXT_PARALLEL_GLOBAL_RANKS": state.get_context_parallel_group(),
            "_EXPERT_MODEL_PARALLEL_RANKS": state.get_expert_model_parallel_group(),
        }
        for name, group in groups.items():
            ranks = dist.get_process_group_ranks(group)
            assert getattr(state, name) == ranks and group.size() == len(ranks), (name, getattr(state, name), ranks)
            assert ranks[group.rank()] == rank
        for module in (module for chunk in self.chunks for module in chunk.modules() if hasattr(module, NOTED)):
            ranks = dist.get_process_group_ranks(state.get_context_parallel_group())
            assert getattr(module, NOTED) == ranks, (getattr(module, NOTED), ranks)
        run, experts = tensor * context, state.get_expert_model_parallel_world_size()
        place, first = rank // run % places, rank // (run * places) * (run * places)
        assert dist.get_process_group_ranks(state.get_data_parallel_group()) == [
            first + rank % run + other * run for other in range(places)
        ]
        assert state.get_data_parallel_rank() == place
        assert state.get_tensor_model_parallel_src_rank() == rank // tensor * tensor
        apart = tensor * experts
        assert dist.get_process_group_ranks(state.get_expert_data_parallel_group()) == [
            first + rank % apart + other * apart for other in range(run * places // apart)
        ]
        if self.chunks[0].ddp_config.use_distributed_optimizer:
            for inner in self.inners:
                self._check_groups(inner)

    def _check_groups(self, inner: Any) -> None:
        """Its two sets of groups of buckets are of its group."""
        chunk = self.chunks[0]
        expert = any(group["is_expert_parallel"] for group in inner.param_groups)
        whole = chunk.expt_dp_group if expert else chunk.dp_cp_group
        assert dist.get_process_group_ranks(inner.data_parallel_group) == dist.get_process_group_ranks(whole)
        of_chunks = [c.expert_parallel_bucket_groups if expert else c.bucket_groups for c in self.chunks]
        assert len(inner.per_model_bucket_groups) == len(self.chunks)
        for group in (group for groups in (*of_chunks, *inner.per_model_bucket_groups.values()) for group in groups):
            assert group.intra_distributed_optimizer_instance_rank == whole.rank()
            assert group.intra_distributed_optimizer_instance_size == whole.size()
            assert group.intra_distributed_optimizer_instance_group is inner.data_parallel_group

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
                    inner = next(i for i in self.inners if any(main is other for _, other in pairs(i)))
                    inner.optimizer.state[main] = {
                        "step": torch.tensor(plain["steps"][0]),
                        **{key: flat[key].view(main.shape) for key in MOMENTS},
                    }
        groups = [group for inner in self.inners for group in inner.optimizer.param_groups]
        for group, numbers in zip(groups, plain["groups"], strict=True):
            group.update(numbers)
        self.scheduler.num_steps = plain["scheduler"]
        scalers = [scaler for inner in self.inners if (scaler := getattr(inner, "grad_scaler", None)) is not None]
        for scaler, values in zip(scalers, plain["scalers"], strict=True):
            scaler.load_state_dict(
                {
                    "scale": torch.tensor([values["scale"]]),
                    "growth_tracker": int(values["growth_tracker"]),
                    "hysteresis_tracker": int(values["hysteresis_tracker"]),
                }
            )
        return int(saved["version"])


def _gathered(mine: Any) -> list[Any]:
    """Of all ranks, in their order."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _calculator() -> Any:
    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
