"""What ``--auto`` says at the first step: what is protected, what is not, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from flashrecovery.worker.auto.found import Found, Tensors

_PEERS = "from the ranks that have the same, or a neighbour's copy"
_OBJECT = "its state_dict(), with each step"
_WIDTHS = (34, 44)


def table(found: Found, place: str, loops: Mapping[str, str]) -> str:
    """Lines of text. ``loops``: what of the loops comes back, and how."""
    rows: list[tuple[str, str, str]] = []
    for model in found.models:
        rows.append((model.path, _kind(model.module), _PEERS))
        rows += ((path, type(one).__name__, "with its model") for path, one in model.optimizers.items())
    for path, one in found.objects.items():
        if isinstance(one, Tensors):
            rows.append((path, "tensors", "as they are, with each step"))
        else:
            rows.append((path, type(one).__name__, _PEERS if hasattr(one, "parameters") else _OBJECT))
    rows += ((name, what, "led back") for name, what in loops.items())
    lines = [f"--auto: the loop of steps is at {place}. Protected:", *_lines(rows)]
    if found.unsaved:
        lines.append("Not protected:")
        lines += _lines([(path, kind, "too large to be kept with each step") for path, kind in found.unsaved.items()])
    lines.append("What else changes from step to step, and is not brought back, is named by not_registered.")
    return "\n".join(lines)


def _kind(module: Any) -> str:
    name = type(module).__name__
    return f"{name}({type(module.module).__name__})" if isinstance(module, DistributedDataParallel) else name


def _lines(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return [f"  {path:<{_WIDTHS[0]}} {what:<{_WIDTHS[1]}} {how}" for path, what, how in rows]
