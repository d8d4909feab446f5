"""A small elastic training script with a DeepSpeed engine: losses and digests of each step as exact numbers, by the
rank's number in its group. The digests are of the whole fp32 weights and optimizer state, gathered from all ranks.

Dropout draws random numbers, there are three parameter groups of odd sizes and a frozen parameter, gradients are
clipped, and the learning rate warms up. fp16 as in ``deepspeed_fp16.py``: a first scale that overflows, and a short
window.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.accelerator import get_accelerator
from elastic import own_device
from pacing import take_time

import fr_deepspeed  # noqa: F401 - gives the engine its `recovery` under every launcher

MOMENTS = ("exp_avg", "exp_avg_sq")


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """97 samples, each of its own numbers."""

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        return x, x.roll(1).cumsum(0)


class Gain(torch.nn.Module):
    """Three weights, their own group: some ranks have nothing but padding of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain.sum()


def build(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 61),
        torch.nn.LayerNorm(61),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(61, 47),
        torch.nn.Tanh(),
        torch.nn.Linear(47, 16),
        Gain(),
    )
    model[4].bias.requires_grad_(False)
    return model


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": args.global_batch,
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "steps_per_print": 1000000,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 12, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": args.zero, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000},
        "flash_recovery": {"enabled": True},
    }
    if args.zero == 3:  # the three smallest parameters persist, the others are gathered, and some are fetched ahead
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 50,
            "stage3_prefetch_bucket_size": 1500,
            "stage3_max_live_parameters": 4000,
        }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    if args.precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}
    for text in args.set:
        path_text, _, value = text.partition("=")
        *path, last = path_text.split(".")
        where = config
        for key in path:
            where = where.setdefault(key, {})
        where[last] = json.loads(value)
    return config


def groups_of(model: torch.nn.Module, *, reverse: bool) -> list[dict[str, Any]]:
    gain = model[7].gain
    parameters = [p for p in model.parameters() if p is not gain]
    if reverse:
        parameters.reverse()
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        {"params": [gain], "lr": 1e-3},
    ]


# -- the whole state -------------------------------------------------------------------------------


def whole(engine: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(parameter, what, fp32 tensor) of all parameters. With ZeRO a collective: weights by DeepSpeed's public function,
    optimizer state by hand, because DeepSpeed's function finds only that of the first parameter group."""
    from deepspeed.utils import safe_get_full_fp32_param

    names = {id(p): name for name, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 0:
        for weight, master in _pairs(engine):
            yield names[id(weight)], "weight", master.detach()
            for key in MOMENTS:
                if key in engine.basic_optimizer.state[master]:
                    yield names[id(weight)], key, engine.basic_optimizer.state[master][key]
        return
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        yield from _whole_slices(engine, names)
        return
    for group, partition in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            yield names[id(parameter)], "weight", safe_get_full_fp32_param(parameter)
        for key in MOMENTS:
            if key not in zero.optimizer.state[partition]:
                continue
            pieces = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, zero.optimizer.state[partition][key])
            flat, at = torch.cat(pieces).detach(), 0
            for parameter in group:
                yield names[id(parameter)], key, flat[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()


def _whole_slices(engine: Any, names: dict[int, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """ZeRO-3: by hand, as each rank's slices lie one after another in its partition, with padding behind each."""
    zero, size = engine.optimizer, dist.get_world_size()

    def joined(mine: torch.Tensor, parameter: Any) -> torch.Tensor:
        slices = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(slices, mine.detach().contiguous())
        return torch.cat(slices)[: parameter.ds_numel].view(parameter.ds_shape)

    for group, partition in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        state = zero.optimizer.state.get(partition, {})
        at = 0
        for parameter in group:
            name, length = names[id(parameter)], -(-parameter.ds_numel // size)
            yield name, "weight", joined(partition[at : at + length], parameter)
            for key in MOMENTS:
                if key in state:
                    yield name, key, joined(state[key][at : at + length], parameter)
            at += length
        assert at == partition.numel()
    for name, parameter in engine.module.named_parameters():
        yield name, "slices", joined(parameter.ds_tensor, parameter).view(-1).view(torch.uint8)


def _pairs(engine: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each weight with the tensor that the optimizer steps on (ZeRO-0)."""
    if hasattr(engine.optimizer, "fp32_groups"):
        lows = [p for group in engine.optimizer.fp16_groups for p in group]
        return list(zip(lows, [p for group in engine.optimizer.fp32_groups for p in group], strict=True))
    return [(p, p) for p in engine.module.parameters() if p.requires_grad]


def plain(engine: Any) -> dict[str, Any]:
    """What is no tensor."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
    numbers = (int, float, bool)
    inner = getattr(optimizer, "optimizer", optimizer)
    return {
        "counters": {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")},
        "groups": [
            {k: v for k, v in group.items() if isinstance(v, numbers)} for group in engine.basic_optimizer.param_groups
        ],
        "scheduler": engine.lr_scheduler.state_dict(),
        "scaler": {k: v for k, v in vars(scaler).items() if type(v) in numbers} if scaler is not None else {},
        "steps": sorted({float(state["step"]) for state in inner.state.values() if "step" in state}),
    }


def digest_of(engine: Any) -> str:
    found = hashlib.sha256()
    for name, what, tensor in whole(engine):
        found.update(f"{name} {what} {tensor.dtype}".encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    for name, parameter in engine.module.named_parameters():
        found.update(name.encode() + parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    sizes = (engine.world_size, engine.dp_world_size, engine.gradient_accumulation_steps(), engine.train_batch_size())
    found.update(json.dumps([plain(engine), sizes], sort_keys=True).encode())
    return found.hexdigest()


def inside(engine: Any) -> str:
    """A digest of what ZeRO-3 keeps inside, as numbers and shapes: of its optimizer, of each parameter, and of what has
    cut it. In a job that has changed its size it must be as in one that was started in that size."""
    if engine.zero_optimization_stage() != 3:
        return ""
    found: list[Any] = [_outline(vars(engine.optimizer), 4)]
    for name, parameter in engine.module.named_parameters():
        maker = inspect.getclosurevars(parameter.partition_numel).nonlocals["self"]
        of_parameter = {key: value for key, value in vars(parameter).items() if key.startswith("ds_")}
        sizes = (parameter.partition_numel(), parameter.aligned_size(), parameter.padding_size())
        slices = vars(parameter.ds_tensor)
        found.append([name, sizes, *(_outline(thing, 2) for thing in (of_parameter, slices, vars(maker)))])
    shown = json.dumps(found, sort_keys=True)
    if "SHOW_INSIDE" in os.environ:
        print(f"inside rank={dist.get_rank()} {shown}", flush=True)
    return shown


def _outline(thing: Any, depth: int) -> Any:
    """Numbers, words and shapes of what is no object of a class."""
    if isinstance(thing, int | float | str | None):
        return thing
    if isinstance(thing, torch.Tensor):
        return [list(thing.shape), str(thing.dtype)]
    if depth and dataclasses.is_dataclass(thing):
        return _outline(vars(thing), depth - 1)
    if depth and isinstance(thing, dict):
        named = [(key if isinstance(key, str) else f"#{n}", value) for n, (key, value) in enumerate(thing.items())]
        return {key: _outline(value, depth - 1) for key, value in named}
    if depth and isinstance(thing, list | tuple | deque):
        return [_outline(value, depth - 1) for value in thing]
    return sorted(thing) if isinstance(thing, set) and all(isinstance(n, int) for n in thing) else type(thing).__name__


def save(engine: Any, version: int, path: str) -> None:
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, what, tensor in whole(engine):
        if what != "slices":
            tensors.setdefault(name, {})[what] = tensor.detach().clone()
    if dist.get_rank() == 0:
        torch.save({"version": version, "tensors": tensors, "plain": plain(engine)}, path)


def load(engine: Any, path: str) -> int:
    """Begin with a saved state, in any size: cut here, by hand, as DeepSpeed lays its partitions out."""
    saved = torch.load(path)
    state, tensors = saved["plain"], saved["tensors"]
    names = {id(p): name for name, p in engine.module.named_parameters()}
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)

    def moments(pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {key: pieces[key].clone() for key in MOMENTS if key in pieces}
        return {"step": torch.tensor(state["steps"][0]), **found} if found else {}

    with torch.no_grad():
        if engine.zero_optimization_stage() == 3:
            rank, size = dist.get_rank(), dist.get_world_size()
            for number, group in enumerate(optimizer.fp16_groups):
                partition, flat = optimizer.fp32_partitioned_groups_flat[number], {}
                for what in ("weight", *MOMENTS):
                    if all(what in tensors[names[id(p)]] for p in group):
                        parts = [tensors[names[id(p)]][what].reshape(-1) for p in group]
                        parts = [torch.cat([part, torch.zeros(-part.numel() % size)]) for part in parts]
                        flat[what] = torch.cat([part.chunk(size)[rank] for part in parts])
                partition.copy_(flat["weight"])
                if moments(flat):
                    inner.state[partition] = moments(flat)
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        elif engine.zero_optimization_stage() > 0:
            rank, size = dist.get_rank(), dist.get_world_size()
            for number, group in enumerate(optimizer.bit16_groups):
                flat = {}
                for what in ("weight", *MOMENTS):
                    if all(what in tensors[names[id(p)]] for p in group):
                        joined = torch.cat([tensors[names[id(p)]][what].reshape(-1) for p in group])
                        padding = -joined.numel() % (2 * size)
                        part = torch.cat([joined, torch.zeros(padding)]).chunk(size)[rank]
                        flat[what] = part
                partition = optimizer.single_partition_of_fp32_groups[number]
                partition.copy_(flat["weight"])
                if moments(flat):
                    inner.state[partition] = moments(flat)
            optimizer.update_lp_params()
        else:
            for weight, master in _pairs(engine):
                pieces = tensors[names[id(weight)]]
                master.copy_(pieces["weight"])
                weight.copy_(master)
                if moments(pieces):
                    inner.state[master] = moments(pieces)
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    for group, numbers in zip(engine.basic_optimizer.param_groups, state["groups"], strict=True):
        group.update(numbers)
    engine.lr_scheduler.load_state_dict(state["scheduler"])
    engine.lr_scheduler._last_lr = [group["lr"] for group in engine.basic_optimizer.param_groups]
    scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
    if scaler is not None:
        vars(scaler).update(state["scaler"])
    return int(saved["version"])


# -- the loop --------------------------------------------------------------------------------------


def misbehave(mode: str, engine: Any, step: int) -> None:
    """What an elastic job cannot have, before step 0 (-1) or in a step."""
    if mode == "loader" and step < 0:
        engine.recovery.data(torch.utils.data.DataLoader(Numbers()))
    elif mode == "boundary" and step == 2:
        engine.set_gradient_accumulation_boundary(True)
    elif mode == "other-batch" and step == 2:
        engine.set_train_batch_size(2 * engine.train_batch_size())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY.KEY=JSON")
    parser.add_argument("--mode", default="")
    parser.add_argument("--seed", type=int, default=5, help="of the weights at the start")
    parser.add_argument("--evaluate", action="store_true", help="before the first step")
    parser.add_argument("--reverse", action="store_true", help="the order of parameters in their groups")
    parser.add_argument("--save-to", help="a directory for the state of each version")
    parser.add_argument("--start-from", help="such a state")
    parser.add_argument("--checkpoint-to", help="a directory for a checkpoint of DeepSpeed's own, at the end")
    args, _ = parser.parse_known_args()
    if args.precision == "fp16":
        get_accelerator().is_fp16_supported = lambda: True
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    model = build(args.seed)
    given = {"training_data": Numbers()} if args.mode == "training-data" else {}
    trained = groups_of(model, reverse=args.reverse)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config_of(args), **given)
    recovery = engine.recovery
    first = load(engine, args.start_from) if args.start_from else 0
    misbehave(args.mode, engine, -1)
    sizes = {"global_batch": 2 * args.global_batch} if args.mode == "other-sizes" else {}
    batches = recovery.elastic_batches(Numbers(), seed=3, first_step=first, **sizes)
    if args.evaluate:
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(2, 16, dtype=next(model.parameters()).dtype))
        engine.train()
    torch.manual_seed(1000 + dist.get_rank())  # of no meaning in an elastic job
    dtype = next(model.parameters()).dtype
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            total = torch.zeros((), device=device)
            misbehave(args.mode, engine, number)
            turns = batches.of(step)
            for batch in list(turns) if args.mode == "in-a-list" else turns:
                x, y = (part.to(device) for part in batch.data)
                loss = torch.nn.functional.mse_loss(engine(x.to(dtype)).float(), y) * batch.weight
                engine.backward(loss)
                engine.step()
                total += loss.detach()
            take_time(args.step_time, number)
            size = dist.get_world_size()
            found = f"loss_hex={total.item().hex()} skipped={engine.skipped_steps}"
            print(f"step={number} rank={dist.get_rank()} size={size} {found}", flush=True)
            digest = digest_of(engine)  # in the block: with ZeRO it communicates
            if args.save_to:
                save(engine, number + 1, f"{args.save_to}/{number + 1}.pt")
        if not recovery.void:
            print(f"state={number + 1} size={size} {digest}", flush=True)
    if args.checkpoint_to:
        engine.save_checkpoint(args.checkpoint_to)
    end = hashlib.sha256((digest_of(engine) + inside(engine)).encode()).hexdigest()
    print(f"digest rank={dist.get_rank()} {end}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
