"""A small training job on a few ranks, interrupted at will: what the tests of the torch_native adapters run.

Every rank keeps copies of its state at the last versions, and plays the part of the core: on a fault it
abandons all collectives, resets its adapter, attaches the groups anew and restores. A *fresh* victim throws
its model away and builds a new one, as a replacement does.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashrecovery import groups
from flashrecovery.adapter import TorchAdapter
from flashrecovery.errors import StepInterrupted
from flashrecovery.state import codec
from flashrecovery.state.spec import ShardSpec
from flashrecovery.torch_native import adapter_for
from flashrecovery.worker.local_state.rng import RngState, restore_rng


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


class Net(nn.Module):
    """Uneven sizes, pieces that are empty on some ranks, tied weights, BatchNorm statistics, a frozen
    parameter."""

    def __init__(self, width: int = 13, classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(classes, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.batch_norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.head = nn.Linear(width, classes)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype))
        return self.head(self.batch_norm(x.float()) * self.scale) * self.frozen.sum()


@dataclass(frozen=True)
class Fault:
    """``victim`` fails at ``phase`` of ``step``; ``fresh``: it comes back with a new model."""

    step: int
    phase: str
    victim: int
    fresh: bool = False


@dataclass(frozen=True)
class Job:
    layout: str
    steps: int = 8
    faults: tuple[Fault, ...] = ()
    watched: bool = True
    accumulate: int = 1
    zero_in_place: bool = False
    ddp: tuple[tuple[str, Any], ...] = ()
    compressed: bool = False
    optimizer: str = "adamw"
    mixed_types: bool = False
    skip_first: bool = False
    """The first optimizer step does not take place, as with a GradScaler that has found infinities."""

    @property
    def ddp_options(self) -> dict[str, Any]:
        return {"bucket_cap_mb": 0.002, **dict(self.ddp)}


class Trainer:
    """Model, optimizer and adapter of one rank."""

    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        self.job = job
        torch.manual_seed(1234)
        net = Net()
        if job.mixed_types:
            net.blocks[0].double()
            net.blocks[2].double()
        self.model: nn.Module
        if job.layout == "ddp":
            self.model = DistributedDataParallel(net, **job.ddp_options)
            if job.compressed:
                self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            assert mesh is not None
            for block in net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
            self.model = net
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if job.optimizer == "adamw":
            # amsgrad and a tensor learning rate: more kinds of state
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=torch.tensor(0.01), amsgrad=True)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.adapter: TorchAdapter | None = None
        self.hooks = CountingHooks()
        if job.watched:
            self.adapter = adapter_for(self.model, [self.optimizer])
            self.adapter.watch(self.hooks)

    def step(self, step: int, rank: int) -> float:
        """One training step; returns this rank's loss."""
        total = 0.0
        for micro in range(self.job.accumulate):
            generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
            inputs = torch.randn(6, 3, generator=generator)
            last = micro == self.job.accumulate - 1
            with self.model.no_sync() if self.job.layout == "ddp" and not last else contextlib.nullcontext():
                if self.job.layout != "ddp":
                    self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
                loss = self.model(inputs).square().mean()
                loss.backward()
            total += float(loss.detach())
        if step or not self.job.skip_first:
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=not self.job.zero_in_place)
        return total

    def digest(self) -> dict[str, str]:
        """Digests of everything of this rank that training depends on."""
        parts: dict[str, str] = {}
        for name, parameter in self.model.named_parameters():
            parts[name] = _sha(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                parts[f"{name} {key}"] = _sha(value) if isinstance(value, torch.Tensor) else repr(value)
        parts |= {f"buffer {name}": _sha(buffer) for name, buffer in self.model.named_buffers()}
        for number, group in enumerate(self.optimizer.param_groups):
            parts[f"group {number}"] = repr({k: v for k, v in group.items() if k != "params"})
        parts["rng"] = _sha(torch.get_rng_state())
        parts["scheduler"] = repr(self.scheduler.state_dict())
        return parts


def _sha(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    content = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr(tuple(local.shape)).encode() + content).hexdigest()[:16]


class CountingHooks:
    """StepHooks that write down what came in which order; ``interrupt`` makes ``mutating`` raise."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def sealed(self, *, recheck: bool = False) -> None:
        self.moments.append("sealed")

    def evaluated(self) -> None:
        self.moments.append("evaluated")

    def synchronising(self) -> None:
        self.moments.append("synchronising")

    def mutating(self, by: torch.optim.Optimizer | None = None) -> None:
        self.moments.append("mutating")

    def launched(self) -> None:
        """It has been."""

    def mutated(self) -> None:
        self.moments.append("mutated")


@dataclass
class Saved:
    """A rank's whole state at one version."""

    shards: dict[str, tuple[ShardSpec, dict[str, torch.Tensor]]]
    plain: bytes
    scheduler: dict[str, Any]

    @staticmethod
    def of(trainer: Trainer) -> Saved:
        adapter = trainer.adapter
        assert adapter is not None
        return Saved(
            {s.name: (s.spec(), {k: t.clone() for k, t in s.tensors().items()}) for s in adapter.shards()},
            codec.dumps([adapter.capture_common(), adapter.capture_rank(), RngState.now().plain()]),
            copy.deepcopy(trainer.scheduler.state_dict()),
        )

    def restore(self, trainer: Trainer) -> None:
        adapter = trainer.adapter
        assert adapter is not None
        for shard in adapter.shards():
            spec, tensors = self.shards[shard.name]
            live = shard.allocate(spec)
            assert list(live) == list(tensors), (shard.name, list(live), list(tensors))
            with torch.no_grad():
                for key, tensor in tensors.items():
                    live[key].copy_(tensor)
            assert shard.spec() == spec
        common, own, rng = codec.loads(self.plain)
        adapter.restore_common(common)
        adapter.restore_rank(own)
        trainer.scheduler.load_state_dict(copy.deepcopy(self.scheduler))
        restore_rng(rng)


def run(rank: int, world: int, folder: Path, job: Job) -> tuple[list[float], dict[str, str]]:
    """Train; returns the losses and the digest of the end state. Without faults and watching: the plain
    reference."""
    groups.install()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    trainer = Trainer(job, mesh := _mesh(job, world))
    if trainer.adapter is not None:
        _check_shards(trainer.adapter, job.layout, rank, world)
    torch.manual_seed(77 + rank)
    losses: list[float] = []
    saved: dict[int, Saved] = {}
    left = list(job.faults)
    generation = 0
    step = 0
    while step < job.steps or left:
        if job.watched:
            saved[step] = Saved.of(trainer)
        fault = left[0] if left else None
        assert fault is None or step <= fault.step + 1, f"{fault} did not fire"
        signal = folder / f"fault-{generation}"
        watcher = _Watcher(signal) if fault else None
        try:
            if fault is not None and fault.victim == rank and fault.step == step:
                assert watcher is not None
                _arm(trainer, fault, watcher)
            if step >= job.steps:
                dist.barrier()  # a fault in the last step meets those that are done here
            loss = trainer.step(step, rank)
            losses = [*losses[:step], loss]
            step += 1
        except (StepInterrupted, RuntimeError) as e:
            assert fault is not None and watcher is not None, e
            watcher.join()
            generation += 1
            left.pop(0)
            trainer = _recover(trainer, job, mesh, fault, rank, saved, folder / f"store-{generation}", generation)
            step = fault.step
            losses = losses[:step]
        else:
            if watcher is not None:
                watcher.cancel()
    digest = trainer.digest()
    moments = trainer.hooks.moments
    dist.barrier()
    dist.destroy_process_group()
    if job.watched and not job.faults:
        assert moments == _moments(job), moments
    return losses, digest


def _moments(job: Job) -> list[str]:
    """What the adapter tells of a launch without a fault: the last micro-batch alone synchronises gradients."""
    forward, backward = "sealed", "sealed"
    ahead = [forward, backward] * (job.accumulate - 1)
    last = [forward, "synchronising", backward] if job.layout == "ddp" else [forward, backward, "synchronising"]
    return [*ahead, *last, "mutating", "mutated"] * job.steps


def _check_shards(adapter: TorchAdapter, layout: str, rank: int, world: int) -> None:
    """Names and holders say which rank has which piece."""
    everyone = tuple(range(world))
    name, holders = {
        "ddp": ("param/head.weight", everyone),
        "fsdp2": (f"param/head.weight#dp={rank}/{world}", (rank,)),
        "hsdp": (f"param/head.weight#shard={rank % 2}/2", (rank % 2, rank % 2 + 2)),
    }[layout]
    shard = next(s for s in adapter.shards() if "head.weight" in s.name)
    assert (shard.name, shard.holders) == (name, holders)
    assert len({s.name for s in adapter.shards()}) == len(adapter.shards()) == 24
    assert adapter.sync_spans_world()


def _recover(
    trainer: Trainer,
    job: Job,
    mesh: DeviceMesh | None,
    fault: Fault,
    rank: int,
    saved: dict[int, Saved],
    store: Path,
    generation: int,
) -> Trainer:
    groups.drain(5.0)
    groups.detach_all()
    if fault.fresh and fault.victim == rank:
        torch.manual_seed(5)  # the start values do not matter
        trainer = Trainer(job, mesh)
    else:
        assert trainer.adapter is not None
        trainer.adapter.reset()
        trainer.adapter.reset()  # idempotent
        trainer.hooks.moments.clear()
    groups.attach(dist.FileStore(str(store), dist.get_world_size()), generation, 20.0)
    dist.barrier()  # the next fault may come before a collective, and abandons groups that a peer is connecting
    saved[fault.step].restore(trainer)
    return trainer


def _mesh(job: Job, world: int) -> DeviceMesh | None:
    if job.layout == "fsdp2":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if job.layout == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return None


def _arm(trainer: Trainer, fault: Fault, watcher: _Watcher) -> None:
    def strike() -> None:
        time.sleep(0.02)  # the others run into their collectives
        watcher.signal.touch()
        raise StepInterrupted

    if fault.phase == "grad-sync":
        counted = [0]

        def at_operation(_group: str, operation: str) -> None:
            counted[0] += "reduce" in operation
            if counted[0] == (2 if fault.step else 1):
                groups.set_operation_hook(None)
                watcher.signal.touch()
                watcher.join()  # this rank is about to start the operation, the others are in it

        groups.set_operation_hook(at_operation)
        return
    assert trainer.adapter is not None
    trainer.adapter.fault_points()[fault.phase](strike)


class _Watcher:
    """The control thread of a worker: waits for the word, then lets go of everything."""

    def __init__(self, signal: Path) -> None:
        self.signal = signal
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._cancelled.wait(0.002):
            if self.signal.exists():
                groups.abandon("test fault")
                return

    def join(self) -> None:
        """Wait until it has acted."""
        self._thread.join(20)
        assert not self._thread.is_alive()

    def cancel(self) -> None:
        self._cancelled.set()
        self._thread.join()
