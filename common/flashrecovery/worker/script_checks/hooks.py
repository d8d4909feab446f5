"""Hooks that a script puts on its model, or takes off it, while training goes on: named, since a replacement differs.

Libraries put theirs on when they wrap the model, or in the first step. So counting begins after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashrecovery.worker.local_state.own_hook import OwnHook

_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The hook tables of a module."""


class HookWatch:
    """The hooks of these models. To be asked between two steps, the first time after the first step."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._counts: Mapping[str, int] | None = None

    def changed(self) -> list[str]:
        """The modules that have more or fewer hooks than when this was asked last, by name."""
        before, self._counts = self._counts, _counts(self._models)
        if before is None:
            return []
        return [name for name, count in self._counts.items() if before.get(name, count) != count]

    def text(self, modules: Sequence[str]) -> str:
        """What to say of them."""
        more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
        return (
            f"hooks of modules have changed since the first step: {', '.join(modules[:_NAMED])}{more}. A replacement "
            "has those of the script's set-up only: put them on before the first step, and let a flag switch them"
        )


_NAMED = 3


def _counts(models: Sequence[torch.nn.Module]) -> dict[str, int]:
    return {
        f"{name} ({type(module).__name__})": _count(module)
        for model in models
        for name, module in model.named_modules(prefix="model")
    }


def _count(module: torch.nn.Module) -> int:
    """The number of the hooks that are not ours; ours come and go with the faults that are injected."""
    tables = [getattr(module, table) for table in _TABLES]
    of_module = sum(not isinstance(hook, OwnHook) for table in tables for hook in table.values())
    return of_module + len(getattr(module, "_comm_hooks", ()))  # of DistributedDataParallel
