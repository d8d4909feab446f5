"""What the expert layers have summed up for the log, and the groups over which the log reduces it.

Megatron makes an entry when a layer first computes. A replacement that begins with a log has computed nothing: it gets
the entries with their groups, by name, or the other ranks would reduce without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.errors import RestoreError
from flashrecovery.groups import named_group

_GROUPS = ("reduce_group", "avg_group")


def save() -> dict[str, dict[str, Any]]:
    """All entries as plain values."""
    return {name: {key: _plain(value) for key, value in entry.items()} for name, entry in _entries().items()}


def load(saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the entries those that were saved; others are set to zero.

    Raises RestoreError if a group of this rank has other ranks than where it was saved.
    """
    entries = _entries()
    for name, entry in entries.items():
        if name not in saved:
            entry["values"].zero_()
    for name, fields in saved.items():
        known = entries[name] if name in entries else _new(name, fields["values"])
        known["values"].copy_(fields["values"])
        for key, value in fields.items():
            if key in _GROUPS:
                known[key] = None if value is None else _group(*value)
            elif key != "values":
                known[key] = value


def _entries() -> dict[str, dict[str, Any]]:
    """Megatron's own, to be changed in place."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # core 0.20
        return {name: vars(entry) for name, entry in moe_utils.get_moe_metrics_tracker().metrics.items()}
    return {name: entry for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items() if entry}


def _new(name: str, values: torch.Tensor) -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    zeros = torch.zeros_like(values, device=device)
    fields: dict[str, Any]
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # core 0.20
        from megatron.core.transformer.moe.moe_logging import MetricEntry

        entry = MetricEntry(values=zeros)
        moe_utils.get_moe_metrics_tracker()._metrics[name] = entry
        fields = vars(entry)
    else:
        fields = moe_utils.get_moe_layer_wise_logging_tracker().setdefault(name, {})
        fields["values"] = zeros
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, dist.ProcessGroup):
        return value.group_name, dist.get_process_group_ranks(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _group(name: str, ranks: list[int]) -> dist.ProcessGroup:
    group = named_group(name)
    found = dist.get_process_group_ranks(group)
    if list(found) != list(ranks):
        raise RestoreError(f"process group {name} has the ranks {found}, not {ranks}")
    return group
