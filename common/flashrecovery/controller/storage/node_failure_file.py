"""The file in which nodes' failures are remembered, over generations and jobs. Several jobs may use one at a time.

One JSON object a line (:class:`~flashrecovery.plan.membership.node_failures.NodeMark`). A job that adds a mark locks a
file beside it, reads everything, and replaces the file by a complete new one: a reader sees the old content or the new
one, and no mark of another job is lost. Lines that cannot be read (a disk error, a manual edit) are recognised: the
file is set aside under another name, the readable lines are kept, and a notice is given. Nothing here stops a job.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from flashrecovery.plan.membership.node_failures import NodeMark
from flashrecovery.util.atomic_file import replace_file

FILE_NAME = "node_marks.jsonl"
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "time": (int, float),
    "node": str,
    "kind": str,
    "job": str,
    "generation": int,
    "detail": str,
}
_KEPT_MARKS = 10_000
"""The newest; a file of a megabyte or two."""


@dataclass(frozen=True)
class Marks:
    """What the file says. ``damage``: what was wrong with it; "" if nothing was."""

    marks: tuple[NodeMark, ...]
    damage: str = ""


def marks_path(given: Path | None, run_dir: Path) -> Path | None:
    """The file that a job uses: the given one, or the one beside its run directory, if it exists."""
    beside = run_dir.absolute().parent / FILE_NAME
    return given if given is not None else beside if beside.is_file() else None


def read_marks(path: Path) -> Marks:
    """Everything in the file that can be read; nothing if there is none. Raises OSError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return Marks(())
    found: list[NodeMark] = []
    wrong: list[int] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            mark = _parsed(line)
            if mark is None:
                wrong.append(number)
            else:
                found.append(mark)
    damage = f"{path}: {len(wrong)} lines are no marks of nodes, the first is line {wrong[0]}" if wrong else ""
    return Marks(tuple(found), damage)


def _parsed(line: bytes) -> NodeMark | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    if not {"time", "node", "kind", "job"} <= values.keys():
        return None
    known = {key: values[key] for key in _TYPES if key in values}  # a newer version may have added keys
    right = all(isinstance(value, _TYPES[key]) and not isinstance(value, bool) for key, value in known.items())
    return NodeMark(**known) if right and known["node"] and math.isfinite(known["time"]) else None


def add_marks(path: Path, marks: Sequence[NodeMark]) -> Marks:
    """Add marks; returns everything that the file says now. Raises OSError."""
    with _locked(path):
        before = read_marks(path)
        kept = (*before.marks, *marks)[-_KEPT_MARKS:]  # by no clock: another host's may be years ahead
        damage = before.damage
        if damage:
            aside = _set_aside(path)
            damage = f"{damage}; it is kept as {aside.name}, and the readable lines go on"
        _replace(path, kept)
        return Marks(kept, damage)


def forget_marks(path: Path, nodes: Collection[str]) -> int:
    """Drop all marks of these nodes; returns how many there were. Raises OSError."""
    with _locked(path):
        before = read_marks(path)
        kept = [mark for mark in before.marks if mark.node not in nodes]
        if before.damage:
            _set_aside(path)
        _replace(path, kept)
        return len(before.marks) - len(kept)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released with the file, also if the process dies
        yield


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    os.replace(path, aside)
    return aside


def _replace(path: Path, marks: Sequence[NodeMark]) -> None:
    replace_file(path, "".join(json.dumps(asdict(mark)) + "\n" for mark in marks))
