"""A loop whose model is wrapped, and which of the two is registered: ``--what``. ``fabric-*``: by Lightning Fabric."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import flashrecovery


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))


def _loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(70, 16, generator=generator), torch.randint(0, 4, (70,), generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True)


def by_fabric(what: str, recovery: Any) -> tuple[Any, Any, Any, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy  # type: ignore[attr-defined]

    strategy: Any = "ddp"
    if what == "fabric-fsdp2":
        from torch.distributed.fsdp import fully_shard

        def shard(model: Any, mesh: Any) -> Any:
            for layer in model:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh["data_parallel"])
            return fully_shard(model, mesh=mesh["data_parallel"])

        strategy = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    plain = _model()
    if what == "fabric-fsdp2":
        model = fabric.setup(plain)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    fabric.seed_everything(fabric.global_rank, verbose=False)
    registered = {"fabric": model, "fabric-inner": model._forward_module, "fabric-module": model.module}
    recovery.register(model=registered.get(what, model), optimizer=optimizer)
    return model, optimizer, recovery.data(fabric.setup_dataloaders(_loader())), fabric.backward


def by_torch(what: str, recovery: Any) -> tuple[Any, Any, Any, Any]:
    dist.init_process_group("gloo")
    plain = _model()
    wraps = torch.compile(plain, backend="eager") if what == "compiled" else plain
    if what == "late":
        recovery.register(model=plain, optimizer=torch.optim.AdamW(plain.parameters()))
    model = DistributedDataParallel(wraps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    registered = {"raw": plain, "compiled": plain, "part": plain[2], "wrapper": model}  # type: ignore[index]
    if what != "late":
        recovery.register(model=registered[what], optimizer=optimizer)
    return model, optimizer, recovery.data(_loader()), torch.Tensor.backward


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--what", default="raw")
    flags.add_argument("--steps", type=int, default=14)
    args = flags.parse_args()
    recovery = flashrecovery.init()
    make = by_fabric if args.what.startswith("fabric") else by_torch
    model, optimizer, batches, backward = make(args.what, recovery)
    for step in recovery.steps(args.steps):
        with step:
            x, y = next(batches)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank={dist.get_rank()} step={step.index} loss_hex={float(loss.detach()).hex()}", flush=True)
    digest = hashlib.sha256()
    for tensor in model.parameters():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    print(f"digest rank={dist.get_rank()} {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
