"""What every rank must have alike, compared when a job starts: a difference is said with its name, values and ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import ConfigError

_SHOWN = 5
"""Differences that are named; others often follow from these."""


def check_equal(what: str, values: Mapping[str, Any], *, among: str = "") -> None:
    """Compare ``values`` between the ranks; a collective (a replacement gets the recorded answers).

    Args:
        what: what they are, for the message.
        values: by name. Those that have no stable text (functions, objects) are not compared.
        among: only ranks that give the same are compared with each other.

    Raises:
        ConfigError: on all ranks, if something differs.
    """
    group = groups.control_group()
    if group is None:
        return
    mine = {name: text for name, value in values.items() if (text := _text(value)) is not None}
    digest = hashlib.sha256(json.dumps([among, mine], sort_keys=True).encode()).digest()
    row = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row, group=group)
    if all(torch.equal(row, other) for other in rows):
        return
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (among, mine), group=group)
    found = differences(everybody)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(f"{what} differ between the ranks: " + "; ".join(found[:_SHOWN]) + more)


def differences(everybody: list[tuple[str, dict[str, str]]]) -> list[str]:
    """In words, one a name. ``everybody``: each rank's ``among`` and texts by name."""
    found = []
    for among in dict.fromkeys(among for among, _ in everybody):
        members = {rank: texts for rank, (theirs, texts) in enumerate(everybody) if theirs == among}
        for name in dict.fromkeys(name for texts in members.values() for name in texts):
            ranks: dict[str, list[int]] = {}
            for rank, texts in members.items():
                ranks.setdefault(texts.get(name, "not there"), []).append(rank)
            if len(ranks) > 1:
                sides = (f"{text} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on))}" for text, on in ranks.items())
                found.append(f"{name} is " + " and ".join(sides))
    return found


def _text(value: Any) -> str | None:
    """Equal for equal values in all processes; None for what has no such text."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, Mapping):
        value = [item for pair in sorted(value.items(), key=repr) for item in pair]
    if isinstance(value, (list, tuple)):
        texts = [_text(item) for item in value]
        return None if None in texts else f"[{', '.join(filter(None, texts))}]"
    return None
