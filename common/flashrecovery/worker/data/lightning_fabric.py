"""Objects that Lightning Fabric has set up: what of them is protected, and how its loaders are read.

``fabric.setup`` wraps the module that is trained (in a DistributedDataParallel, say) and its optimizer again. Its
loader sets the sampler's epoch by counting how often it has been iterated, which a replacement and a rank that reads an
epoch again have done another number of times; so the loader inside of it is read, whose epochs :mod:`.stream` sets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from flashrecovery.capabilities.of_lightning import FABRIC


def _kind(name: str) -> Any:
    """A class of Fabric's; None if the script has not imported it."""
    return getattr(sys.modules.get("lightning.fabric.wrappers"), name, None)


def _is_a(thing: object, name: str) -> bool:
    """Raises UnsupportedError if it is, and the installed version's have another inside."""
    kind = _kind(name)
    if not isinstance(kind, type) or not isinstance(thing, kind):
        return False
    FABRIC.require()
    return True


def trained_module(model: Any) -> Any:
    """What Fabric calls in the forward pass; ``model`` itself if Fabric has not set it up."""
    return model._forward_module if _is_a(model, "_FabricModule") else model


def optimizer_inside(optimizer: Any) -> Any:
    """Likewise."""
    return optimizer.optimizer if _is_a(optimizer, "_FabricOptimizer") else optimizer


def inside(thing: Any) -> Any:
    """What Fabric has set up, without its wrapper; other things as they are."""
    return optimizer_inside(trained_module(thing))


def scaler_of(model: Any) -> Any:
    """The gradient scaler of Fabric's precision plugin; None if it has none, and for models of others."""
    return getattr(model._strategy.precision, "scaler", None) if _is_a(model, "_FabricModule") else None


def loader_inside(loader: Any) -> Any:
    """A loader of Fabric's, without its count of epochs."""
    if not _is_a(loader, "_FabricDataLoader"):
        return loader
    device = loader.device
    return loader._dataloader if device is None or device.type == "cpu" else _Moved(loader._dataloader, device)


class _Moved:
    """Batches on the device, as Fabric's loader gives them."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[Any]:
        if getattr(self._loader, "persistent_workers", False):
            self._loader._iterator = None  # type: ignore[attr-defined]  # their random state cannot be restored
        move = sys.modules["lightning.fabric.utilities"].move_data_to_device
        return (move(batch, self._device) for batch in self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
