"""What layers have summed up for the log, and the groups over which the log reduces it: losses and counts of experts,
of multi-token prediction, of sparse attention's indexer.

Megatron makes an entry when a layer first computes. A replacement that begins with a log has computed nothing: it gets
the entries with their groups, or the other ranks would reduce without it. A group is known by its name; a process that
comes into an elastic job gets the entries of one at the same place in another replica, whose groups have other names,
and were made in the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import named_group, own_groups
from flashrecovery.errors import RestoreError
from fr_megatron.capabilities import METRICS

_HELPERS = {
    "multi-token prediction": ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    "indexer": ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
}
"""Classes with one entry each, their ``tracker``."""

_GROUPS = ("reduce_group", "avg_group")

Entry = dict[str, Any]


def save() -> dict[str, Entry]:
    """All entries as plain values."""
    return {name: {key: _plain(value) for key, value in entry.items()} for name, entry in _entries().items()}


def load(saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the entries those that were saved; others are set to zero.

    Raises RestoreError if a group of this rank has other ranks, as the job was launched, than where it was saved.
    """
    entries = _entries()
    for name, entry in entries.items():
        if name not in saved:
            for value in entry.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    for name, fields in saved.items():
        entry = entries[name] if name in entries else _new(name, fields)
        for key, value in fields.items():
            if isinstance(value, torch.Tensor):
                _copy(entry, key, value)
            elif key in _GROUPS:
                entry[key] = None if value is None else _group(*value)
            else:
                entry[key] = value


def settle() -> dict[str, Entry]:
    """Replace the sums of this rank's experts by the values for the log: on all ranks those of the last rank, which
    logs. Then any rank that has them can log them, once, in any size or layout (:func:`of_one_stage`). A collective of
    all ranks. Returns all entries, as plain values.

    As ``track_moe_metrics`` of megatron-core 0.16: missing entries are made, sums reduced over stages, and then over
    the groups that an entry names."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.moe import moe_utils

    entries = moe_utils.get_moe_layer_wise_logging_tracker()
    layers = [{name: len(entry["values"]) for name, entry in entries.items()}]
    if state.get_pipeline_model_parallel_world_size() > 1:  # a stage may have no experts; all others have what this has
        group = state.get_pipeline_model_parallel_group()
        mine, layers = layers[0], [{} for _ in range(group.size())]
        dist.all_gather_object(layers, mine, group=group)
    known = dict(sorted({name: length for some in layers for name, length in some.items()}.items()))
    if not known:
        return {}
    for name, length in known.items():
        if name not in entries:
            entries[name] = _of_no_group(_zeros(torch.zeros(length)))
    moe_utils.reduce_aux_losses_tracker_across_ranks(list(known))
    values = torch.stack([entries[name]["values"] for name in known])
    dist.broadcast(values, dist.get_world_size() - 1)
    for name, settled in zip(known, values, strict=True):
        entries[name] = _of_no_group(settled.clone())
    return {name: _of_no_group(settled.clone()) for name, settled in zip(known, values, strict=True)}


def of_one_stage() -> None:
    """The log is about to sum up what all stages have: of what was settled, the first one keeps it."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.moe import moe_utils

    if state.get_pipeline_model_parallel_rank():
        moe_utils.clear_aux_losses_tracker()


def _of_no_group(values: torch.Tensor) -> Entry:
    return {"values": values, "reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}


def _entries() -> dict[str, Entry]:
    """Megatron's own entries that are not empty, to be changed in place."""
    from megatron.core.transformer.moe import moe_utils

    if METRICS.takes("entries"):
        experts = {name: vars(entry) for name, entry in moe_utils.get_moe_metrics_tracker().metrics.items()}
    else:
        experts = moe_utils.get_moe_layer_wise_logging_tracker()
    helpers = {name: _helper(name) for name in _HELPERS}
    return {name: entry for name, entry in (*experts.items(), *helpers.items()) if entry}


def _helper(name: str) -> Entry:
    """The entry of one of the :data:`_HELPERS`, empty if this version of Megatron does not have it."""
    module, kind = _HELPERS[name]
    try:
        found = getattr(importlib.import_module(module), kind, None)
    except ModuleNotFoundError:
        return {}
    entry: Entry = {} if found is None else found.tracker
    return entry


def _new(name: str, fields: Mapping[str, Any]) -> Entry:
    from megatron.core.transformer.moe import moe_utils

    if name in _HELPERS:
        return _helper(name)
    if METRICS.takes("entries"):
        from megatron.core.transformer.moe.moe_logging import MetricEntry

        entry = MetricEntry(values=_zeros(fields["values"]))
        moe_utils.get_moe_metrics_tracker()._metrics[name] = entry
        fields_of_entry: Entry = vars(entry)
        return fields_of_entry
    made: Entry = moe_utils.get_moe_layer_wise_logging_tracker().setdefault(name, {})
    return made


def _copy(entry: Entry, key: str, value: torch.Tensor) -> None:
    if key not in entry:
        entry[key] = _zeros(value)
    entry[key].copy_(value)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.zeros_like(like, device=device)


def _plain(value: Any) -> Any:
    """For a group: its name, its number among this rank's groups (-1: not known), and its ranks, as the job was
    launched."""
    if not isinstance(value, dist.ProcessGroup):
        return value.clone() if isinstance(value, torch.Tensor) else value
    for number, group in enumerate(own_groups()):
        if group.name == value.group_name:
            return group.name, number, list(group.launched)
    return value.group_name, -1, dist.get_process_group_ranks(value)


def _group(name: str, number: int, ranks: list[int]) -> dist.ProcessGroup:
    mine = own_groups()
    known = [group for group in mine if group.name == name]
    if not known and 0 <= number < len(mine) and len(mine[number].launched) == len(ranks):
        found: dist.ProcessGroup | None = mine[number].process_group()
        if found is not None:
            return found  # of the same place in another replica
    named = named_group(name)
    there = list(known[0].launched) if known else dist.get_process_group_ranks(named)
    if there != list(ranks):
        raise RestoreError(f"process group {name} has the ranks {there}, not {ranks}")
    return named
