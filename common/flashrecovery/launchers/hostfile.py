"""DeepSpeed's hostfile and its filters (DeepSpeed 0.19, deepspeed/launcher/runner.py), without importing DeepSpeed.

Pure functions. A unit test compares them with DeepSpeed's own, where it is installed, on random files and filters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.errors import ConfigError

Resources = dict[str, tuple[int, ...]]
"""Numbers of the slots (GPUs) that are used, by host, in the hostfile's order."""
_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class Filters:
    """Which hosts and slots of the hostfile are used: all of them without any."""

    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        if self.include and self.exclude:
            raise ConfigError(f"--include {self.include!r} and --exclude {self.exclude!r}: only one of them is allowed")
        for option, number in (("--num-nodes", self.num_nodes), ("--num-gpus", self.num_gpus)):
            if number is not None and (self.include or self.exclude):
                raise ConfigError(f"{option} {number}: not allowed with --include or --exclude")
            if number is not None and number < 1:
                raise ConfigError(f"{option} {number}: allowed: a number >= 1")


def read(file: Path) -> dict[str, int]:
    """The number of slots of each host. Raises ConfigError."""
    try:
        text = file.read_text()
    except OSError as e:
        raise ConfigError(f"--hostfile {file}: {e.strerror}") from e
    return parse(text, str(file))


def parse(text: str, where: str) -> dict[str, int]:
    """The number of slots of each host: lines ``HOST slots=N``. Raises ConfigError that names the file and the line."""
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"--hostfile {where}, line {number}: {line!r} is not HOST slots=NUMBER, NUMBER >= 1")
        if match[1] in slots:
            raise ConfigError(f"--hostfile {where}, line {number}: host {match[1]} stands there twice")
        slots[match[1]] = int(match[2])
    if not slots:
        raise ConfigError(f"--hostfile {where}: no host stands there; one line each: HOST slots=NUMBER")
    return slots


def chosen(slots: Mapping[str, int], filters: Filters) -> Resources:
    """The hosts and slots that the filters leave, in the hostfile's order. ``slots``: slots of each host.

    Raises:
        ConfigError: a filter names a host or a slot that is not there, or leaves none.
    """
    all_of = {host: tuple(range(number)) for host, number in slots.items()}
    left = all_of
    if filters.include:
        named = _named(filters.include, "--include", all_of)
        left = {host: named[host] or all_of[host] for host in all_of if host in named}
    elif filters.exclude:
        named = _named(filters.exclude, "--exclude", all_of)
        left = {
            host: tuple(s for s in numbers if named[host] and s not in named[host]) if host in named else numbers
            for host, numbers in all_of.items()
        }
    left = {host: numbers for host, numbers in left.items() if numbers}
    left = dict(list(left.items())[: filters.num_nodes])
    if filters.num_gpus is not None:
        left = dict.fromkeys(left, tuple(range(filters.num_gpus)))
    if not left:
        raise ConfigError(f"no slot is left of {', '.join(slots)} with {filters}")
    return left


def _named(text: str, option: str, there: Resources) -> Resources:
    """The slots that ``HOST[:SLOT,SLOT...]@HOST...`` names; none: all of the host."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in there:
            raise ConfigError(f"{option} {text!r}: host {host!r} is not in the hostfile; there are {', '.join(there)}")
        try:
            wanted = {int(n) for n in numbers.split(",")} if colon else set()
        except ValueError as e:
            raise ConfigError(f"{option} {text!r}: {part!r} is not HOST or HOST:SLOT,SLOT...") from e
        if not wanted <= set(there[host]):
            raise ConfigError(
                f"{option} {text!r}: host {host} has no slot {', '.join(map(str, sorted(wanted - set(there[host]))))}; "
                f"there are {len(there[host])}"
            )
        named.setdefault(host, set()).update(wanted)
    return {host: tuple(sorted(numbers)) for host, numbers in named.items()}
