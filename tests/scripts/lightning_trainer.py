"""Lightning's Trainer without a line of ours: ``lightning_trainer.py SHAPE --output DIR``.

Each rank prints what its hooks see, and at the end the digest of all that the Trainer has and of all that it wrote.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

SHAPES = (
    "plain",
    "whole",
    "workers",
    "callbacks",
    "metrics",
    "fsdp2",
    "folders",
    "sharded-whole",
    "sharded-callbacks",
    "sharded-workers",
    "sharded-shadow",
    "parts",
    "manual",
    "two",
    "lbfgs",
    "averaging",
)
parser = argparse.ArgumentParser()
parser.add_argument("shape", choices=SHAPES)
parser.add_argument("--output", type=Path, required=True)
args = parser.parse_args()
WIDTH, EPOCHS, RANK = 16, 3, int(os.environ["RANK"])
SHARDED = args.shape in ("fsdp2", "folders", "parts") or args.shape.startswith("sharded")
WORKERS = int(args.shape.endswith("workers"))
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def say(*words: object) -> None:
    print(f"rank={RANK}", *words, flush=True)


def dataset(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


class Plain(LightningModule):
    """As in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.seen += loss.item()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        say(self.current_epoch, batch_idx, self.global_step, loss.item().hex(), self.seen.hex())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            say("validated", float(self.trainer.callback_metrics["val_loss"]).hex())

    def on_train_epoch_end(self) -> None:
        say("epoch", self.current_epoch, float(self.trainer.callback_metrics["loss"]).hex())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Whole(Plain):
    """With what hooks see in between, and a schedule that waits for the validation."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("norm", norm, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Normed(Plain):
    """With buffers that differ between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(32))


class Metrics(Plain):
    """With metrics of torchmetrics, outputs of its step, and hooks that draw and change batches."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.history = MeanMetric(), [0.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return {"loss": loss, "share": loss.detach() * 2, "number": batch_idx}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(float(outputs["share"]))
        self.log("last", outputs["share"], on_step=True, on_epoch=False)
        say("end", outputs["number"], float(outputs["share"]).hex(), float(batch[0].sum()).hex())


class Average(Callback):
    """An average of the weights."""

    def __init__(self) -> None:
        self.model: Any = None
        self.updates = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.model is None:
            self.model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
            self.model.load_state_dict(pl_module.net.state_dict())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), pl_module.net.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        self.updates += 1


class FullAverage(Average):
    """The same of a model in shards: each rank has all of it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), pl_module.net.parameters(), strict=True):
                mine.lerp_(other.full_tensor(), 0.1)
        self.updates += 1


class Shadow(Callback):
    """An average of the weights in the shards of the model."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.of = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.of[name].lerp_(p.detach(), 0.1)


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(dataset(80, 1), batch_size=4, shuffle=True, num_workers=WORKERS)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(24, 2), batch_size=4, num_workers=WORKERS)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Sharded(Plain):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class ShardedWhole(Whole, Sharded):
    """With the hooks and the schedule of Whole."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.full_tensor().norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("norm", norm, sync_dist=True)


class Parts(Plain):
    """Each layer by itself."""

    def configure_model(self) -> None:
        for layer in self.net:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


KINDS = {"whole": Whole, "workers": Normed, "metrics": Metrics, "manual": Manual, "lbfgs": Two}
KINDS |= {"sharded-whole": ShardedWhole, "parts": Parts}
torch.manual_seed(0)
model = KINDS.get(args.shape, Sharded if SHARDED else Plain)()
seed_everything(100 + RANK, verbose=False)
checkpoints = ModelCheckpoint(
    dirpath=args.output / "checkpoints",
    monitor="val_loss",
    save_top_k=2,
    save_last=True,
    **({"every_n_train_steps": 4} if args.shape.endswith("callbacks") else {}),
)
callbacks: list[Any] = [checkpoints]
if args.shape.endswith(("whole", "callbacks")):
    callbacks += [LearningRateMonitor(), EarlyStopping("val_loss", patience=5)]
average = FullAverage() if SHARDED else Average()
if args.shape.endswith("callbacks"):
    callbacks.append(average)
shadow = Shadow()
if args.shape.endswith("shadow"):
    callbacks.append(shadow)
if args.shape == "averaging":
    from lightning.pytorch.callbacks import WeightAveraging

    callbacks.append(WeightAveraging())
options: dict[str, Any] = {}
if args.shape.endswith(("whole", "callbacks")):
    options |= {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "val_check_interval": 0.5}
if WORKERS:
    options |= {"limit_train_batches": 7, "accumulate_grad_batches": 2, "check_val_every_n_epoch": 2}
    options |= {"precision": "bf16-true" if SHARDED else "bf16-mixed"}
strategy: Any = "ddp"
if SHARDED:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=args.shape == "folders"
    )
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=EPOCHS,
    logger=CSVLogger(args.output, name="logs"),
    callbacks=callbacks,
    log_every_n_steps=2,
    enable_progress_bar=False,
    enable_model_summary=False,
    **options,
)
if args.shape.endswith("whole") or args.shape == "metrics":
    trainer.fit(model, datamodule=Data())
elif args.shape == "two":
    loaders = {"one": DataLoader(dataset(80, 1), batch_size=4), "other": DataLoader(dataset(80, 3), batch_size=4)}
    trainer.fit(model, loaders)
else:
    trainer.fit(model, Data().train_dataloader(), Data().val_dataloader())


def digest_of(*tensors: Any, **more: object) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(getattr(tensor, "_local_tensor", tensor).detach().float().contiguous().numpy().tobytes())
    found.update(repr(sorted(more.items())).encode())
    return found.hexdigest()


def of_checkpoint(path: str) -> str:
    """All of it but its paths and times."""
    saved = torch.load(path, weights_only=False)
    (mine,) = (state for key, state in saved["callbacks"].items() if key.startswith("ModelCheckpoint"))
    names = sorted(Path(one).name for one in mine["best_k_models"])
    tensors = [*saved["state_dict"].values()]
    for state in saved["optimizer_states"]:
        tensors += [v for one in state["state"].values() for v in one.values() if isinstance(v, Tensor)]
    kept = {key: saved[key] for key in ("epoch", "global_step", "loops", "lr_schedulers")}
    return digest_of(*tensors, names=names, **kept)


def written() -> str:
    """What rank 0 has written: rows of metrics, and checkpoints."""
    if RANK or args.shape == "folders":
        return ""
    (folder,) = sorted((args.output / "logs").iterdir())
    saved = {path.name: of_checkpoint(str(path)) for path in sorted((args.output / "checkpoints").iterdir())}
    say("written", folder.name, *saved)
    return digest_of(rows=(folder / "metrics.csv").read_text(), saved=sorted(saved.items()))


(optimizer,) = trainer.optimizers
tensors = [*model.parameters()]
tensors += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items()) if isinstance(v, Tensor)]
if average.model is not None:
    tensors += [*average.model.parameters()]
tensors += shadow.of.values()
counters = {"fit": trainer.fit_loop.state_dict(), "seen": model.seen, "updates": average.updates}
counters["schedule"] = trainer.lr_scheduler_configs[0].scheduler.state_dict()
counters["metrics"] = sorted((name, float(value)) for name, value in trainer.callback_metrics.items())
counters["rest"] = [getattr(model, "history", None), torch.rand(2).tolist(), checkpoints.best_model_path[-40:]]
say("counters", trainer.global_step, trainer.current_epoch, Path(checkpoints.best_model_path).name)
counters["rest"].pop()
print(f"digest rank={RANK} {digest_of(*tensors, written=written(), **counters)}", flush=True)
