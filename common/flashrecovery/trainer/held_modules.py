"""Modules that a Trainer holds beside its model: a reference model, a mean teacher, a reward model.

They are shards like the model's parameters. Where every rank has all of them (DistributedDataParallel, DeepSpeed's
ZeRO-0 to 2) a replacement gets its peers', and nothing is copied in a healthy step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flashrecovery import Recovery
from flashrecovery.adapter import local_tensor
from flashrecovery.torch_native.plain import ModuleAdapter
from flashrecovery.trainer.own_state import OwnState
from flashrecovery.trainer.state import refused

_TENSORS, _ELEMENTS = 16, 64
"""The most parameters of a module that are compared, and the most elements of each."""


class HeldModule(ModuleAdapter):
    """One such module. Its parameters are often written through ``.data``, which moves no version counter (an average
    of the weights, for example, changes all of them): so a few elements are compared by content, too."""

    name = "held-module"

    def touch_mark(self) -> Any:
        return super().touch_mark(), self._sample()

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers."""
        return [*self.root.parameters(), *self.root.buffers()]

    def _sample(self) -> bytes:
        records = self._records[:: max(len(self._records) // _TENSORS, 1)]
        parts = [local_tensor(record.get()) for record in records]
        with torch.no_grad():
            parts = [p.reshape(-1)[:: max(p.numel() // _ELEMENTS, 1)][:_ELEMENTS].float() for p in parts if p.numel()]
            return torch.cat(parts).cpu().numpy().tobytes() if parts else b""


class HeldModules:
    """All of them. ``own``: what has found them."""

    def __init__(self, own: OwnState) -> None:
        self._own = own
        self._adapters: dict[str, HeldModule] = {}
        self._found = 0  # modules and other things, when it was looked at last
        self._kept: list[torch.Tensor] | None = None
        self._told: dict[str, str] = {}
        self._recovery: Recovery | None = None
        self._model: torch.nn.Module

    def register(self, recovery: Recovery, model: torch.nn.Module) -> None:
        """Register the modules; before the first call. ``model``: the trained model.

        Raises:
            UnsupportedError: an optimizer that is not registered; a DeepSpeed engine.
        """
        self._recovery = recovery
        self._own.capture()
        self._refuse_optimizers()
        self._model = model
        for path, module in beside(model, self._own.modules).items():
            self._adapters[path] = HeldModule(module)
            recovery.register_adapter(self._adapters[path])
        self._tell()

    def belongs_to(self, callback: object) -> bool:
        """Whether ``callback`` has one of them."""
        return self._own.holds_module(callback)

    def check(self) -> None:
        """After a call: what has come about in it?

        Raises:
            UnsupportedError: a module, of which no other rank would know.
        """
        if len(self._own.modules) + len(self._own.odd) == self._found:
            return
        known = {path for path in self._own.modules if path not in beside(self._model, self._own.modules)}
        held = {id(t) for adapter in self._adapters.values() for t in adapter.tensors()}
        for path in self._own.modules.keys() - known:
            module = self._own.modules[path]
            if any(id(t) not in held for t in (*module.parameters(), *module.buffers())):
                raise refused(
                    f"the module {path} ({type(module).__name__}), which has come about while the Trainer was "
                    "training; make it before train()"
                )
        self._refuse_optimizers()
        self._tell()

    def _refuse_optimizers(self) -> None:
        for path, kind in self._own.odd.items():
            if kind.startswith("the optimizer "):
                raise refused(f"{path}, {kind}, beside the one that the Trainer makes")

    def _tell(self) -> None:
        """Name what cannot be brought back, once."""
        self._found = len(self._own.modules) + len(self._own.odd)
        new = {path: kind for path, kind in self._own.odd.items() if path not in self._told}
        self._told.update(new)
        if new and self._recovery is not None:
            names = ", ".join(f"{path} ({kind})" for path, kind in new.items())
            self._recovery.tell_not_registered(
                f"the Trainer keeps state that a recovery cannot restore: {names} (docs/trainer.md)"
            )

    def keep(self) -> None:
        """In a replacement that has the job's state, and skips calls: as it is now."""
        if self._kept is None:
            self._kept = [tensor.detach().clone() for tensor in self._tensors()]

    def put_back(self) -> None:
        """What :meth:`keep` has seen: callbacks that were called meanwhile may have changed it."""
        for tensor, kept in zip(self._tensors(), self._kept or (), strict=False):
            with torch.no_grad():
                tensor.detach().copy_(kept)
        self._kept = None

    def _tensors(self) -> list[torch.Tensor]:
        return [local_tensor(tensor) for adapter in self._adapters.values() for tensor in adapter.tensors()]


def beside(model: torch.nn.Module, found: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Those of ``found``, by path, that are no part of ``model``, or of each other, and have tensors."""
    taken = _parts((model,))
    chosen: dict[str, torch.nn.Module] = {}
    for path, module in sorted(found.items(), key=lambda item: -sum(1 for _ in item[1].modules())):
        tensors = {id(t) for t in (*module.parameters(), *module.buffers())}
        if tensors - taken:
            chosen[path] = module
            taken |= tensors
    return dict(sorted(chosen.items()))


def _parts(modules: Iterable[torch.nn.Module]) -> set[int]:
    return {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}
