"""A small elastic training script with megatron-core: losses and digests of each step as exact numbers, by the rank's
number in its group. The digests are of the whole state, gathered from all ranks: weights, what is stepped on, Adam's
state.

Dropout draws from torch's random stream and from those that Megatron tracks, gradients are clipped, and the learning
rate warms up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

import megatron_model
import pretrain_gpt
import training
from fr_megatron.optimizers import inner_optimizers, pairs

VOCABULARY, MOMENTS = 256, ("exp_avg", "exp_avg_sq")
Whole = dict[str, dict[str, Tensor]]


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """97 samples, each of its own tokens."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (self._length + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


# -- the whole state -------------------------------------------------------------------------------


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


# -- the loop --------------------------------------------------------------------------------------


def start_calculator(args: argparse.Namespace) -> None:
    """As the mode says."""
    ramp = [12, 12, 1000] if args.mode == "ramp-up" else None
    if args.mode in ("calculator", "ramp-up", "decreased"):
        num_microbatches_calculator.init_num_microbatches_calculator(
            dist.get_rank(),
            ramp,
            args.global_batch + (args.mode == "decreased"),
            args.batch_size,
            dist.get_world_size(),
            args.mode == "decreased",
        )


def train_step(args: argparse.Namespace, state: State, turns: Any) -> Tensor:
    """One optimizer step; returns the sum of the losses of this replica's micro-batches."""
    (chunk,) = state.chunks
    chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    number = num_microbatches_calculator.get_num_microbatches() if args.mode == "calculator" else len(turns)
    results = get_forward_backward_func()(
        forward_step_func=partial(pretrain_gpt.forward_step, device=torch.device("cpu"), pause_s=0.0),
        data_iterator=(batch.data for batch in turns),
        model=chunk,
        num_microbatches=number - (args.mode == "left-over"),
        seq_length=args.context,
        micro_batch_size=args.batch_size,
        forward_only=False,
    )
    updated, _, _ = state.optimizer.step()
    if updated:
        state.scheduler.step(increment=1)
    return torch.stack([result["loss"] for result in results]).sum()


def main() -> None:
    parser = megatron_model.parser(__doc__)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--mode", default="")
    parser.add_argument("--save-to", help="a directory for the state of each version")
    parser.add_argument("--start-from", help="such a state")
    small = {"steps": 12, "layers": 1, "heads": 2, "width": 16, "context": 8, "batch_size": 2, "lr": 1e-2}
    parser.set_defaults(**small)
    args = parser.parse_args()
    training.start_process_group()
    if args.mode == "some":  # a group of the first ones
        dist.new_group([0, 1])
    if args.mode == "first":  # only one rank has a group for itself
        dist.new_group([0])
    megatron_model.start_groups(args)
    start_calculator(args)
    config = megatron_model.model_config(args)
    chunks = megatron_model.build_chunks(args, config)
    optimizer, scheduler = megatron_model.build_optimizer(args, config, chunks)
    state = State(chunks, optimizer, scheduler) if not args.num_experts else None
    recovery = fr_megatron.attach(chunks, optimizer, scheduler)
    first = state.load(args.start_from) if args.start_from and state is not None else 0
    if args.mode == "loader":
        recovery.data(torch.utils.data.DataLoader(Tokens(args.context)))
    sizes = {"global_batch": args.global_batch, "micro_batch": args.batch_size}
    batches = recovery.elastic_batches(
        Tokens(args.context), seed=3, first_step=first, **({} if args.mode == "calculator" else sizes)
    )
    torch.manual_seed(1000 + dist.get_rank())  # of no meaning in an elastic job
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            assert state is not None
            total = train_step(args, state, batches.of(step))
            time.sleep(args.step_time / 1e3)
            size = dist.get_world_size()
            print(f"step={number} rank={dist.get_rank()} size={size} loss_hex={total.item().hex()}", flush=True)
            digest = state.digest()  # in the block: it communicates
            if args.save_to:
                state.save(number + 1, f"{args.save_to}/{number + 1}.pt")
        if not recovery.void:
            print(f"state={number + 1} size={size} {digest}", flush=True)
    assert state is not None
    print(f"digest rank={dist.get_rank()} {state.digest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
