"""What every rank must have alike, compared when a job starts, from time to time, and after a recovery: a difference is
said with its name, values and ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import ConfigError
from flashrecovery.plan.words import ranks_text

_T = TypeVar("_T")
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
    """What differs, a line for each name. ``everybody``: each rank's ``among`` and texts by name."""
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


def unequal(values: Mapping[str, str]) -> list[str]:
    """The names under which the ranks have different values; a collective (a replacement gets the recorded answers).

    Raises:
        ConfigError: on all ranks, if they do not have the same names.
    """
    group = groups.control_group()
    if group is None:
        return []
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(values), group=group)
    names = set(values)
    for rank, other in enumerate(everybody):
        if set(other) != names:
            raise ConfigError(
                f"register() needs the same names on every rank; {sorted(names ^ set(other))} are registered on "
                f"rank {dist.get_rank()} or on rank {rank}, not on both"
            )
    return sorted(n for n in names if any(other[n] != values[n] for other in everybody))


def gather(row: bytes) -> list[bytes]:
    """Every rank's ``row``, which are equally long; a collective of the recovery's own group."""
    group = groups.control_group()
    if group is None:
        return [row]
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine, group=group)
    return [other.numpy().tobytes() for other in rows]


def gather_objects(mine: _T) -> list[_T]:
    """Every rank's ``mine``, pickled on the way; a collective of the recovery's own group."""
    group = groups.control_group()
    if group is None:
        return [mine]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def union(names: Sequence[str]) -> list[str]:
    """Every name of any rank; a collective of the recovery's own group."""
    return sorted({name for others in gather_objects(list(names)) for name in others})


def disagreement(mine: Mapping[str, str], details: Callable[[], Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """What the ranks do not have alike, as :func:`split` gives it; a collective of the recovery's own group.

    Args:
        mine: digests by name. Ranks that give the same name must give the same digest.
        details: finer ones, asked for on all ranks if there is a difference.
    """
    if groups.control_group() is None:
        return {}
    everybody = gather_objects(dict(mine))
    if not split(everybody):
        return {}
    return split(gather_objects(dict(details()))) or split(everybody)


def in_camps(found: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """What differs: ``'param/weight' (ranks 0 and 2 | rank 1)``."""
    texts = [f"{name!r} ({' | '.join(ranks_text(ranks) for ranks in camps)})" for name, camps in found.items()]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def split(everybody: Sequence[Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """The names with more than one value: the ranks that have the same one, for each of these."""
    camps: dict[str, dict[str, list[int]]] = {}
    for rank, values in enumerate(everybody):
        for name, value in values.items():
            camps.setdefault(name, {}).setdefault(value, []).append(rank)
    return {name: list(by_value.values()) for name, by_value in sorted(camps.items()) if len(by_value) > 1}
