"""The published checkpoints of a directory: how they are called, and which is the newest one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LATEST = "latest"
"""The file that names the newest one."""
REPLACED = ".replaced"
"""Ends the name of one that another of its version replaces, where the file system cannot exchange names."""


def published(directory: Path) -> list[tuple[int, Path]]:
    """Version and path of the newest published checkpoint and those before it, the oldest first."""
    last = newest(directory)
    older = sorted(versions_in(directory)) if last is not None else []
    return [(v, Path(directory) / step_name(v)) for v in older if last is not None and v <= last[0]]


def newest(directory: Path) -> tuple[int, Path] | None:
    """Version and path of the newest published checkpoint, or None."""
    directory = Path(directory)
    bring_back(directory)
    versions = versions_in(directory) if directory.is_dir() else []
    try:
        named = _version_of((directory / LATEST).read_text())
    except OSError:
        named = None
    version = named if named in versions else max(versions, default=None)
    return None if version is None else (version, directory / step_name(version))


def bring_back(directory: Path) -> None:
    """If a writer was killed between the two renames that replace a checkpoint, finish what it has begun."""
    for replaced in directory.glob(f".pending-*{REPLACED}"):
        new = replaced.with_suffix("")  # which was whole before the first of them
        number = new.name.removeprefix(".pending-").split(".")[0]
        if number.isdigit() and not (final := directory / step_name(int(number))).exists():
            with suppress(OSError):  # others do the same; or the directory cannot be written
                os.rename(new if new.exists() else replaced, final)


def oldest(directory: Path | None) -> int:
    """The version of the oldest published checkpoint; 0 if there is none."""
    return min(versions_in(Path(directory)), default=0) if directory is not None else 0


def step_name(version: int) -> str:
    """The name of the directory of a version."""
    return f"step-{version:010d}"


def versions_in(directory: Path) -> list[int]:
    """All that are there, in no order."""
    return [v for p in directory.glob("step-*") if (v := _version_of(p.name)) is not None and p.is_dir()]


def _version_of(name: str) -> int | None:
    kind, _, number = name.strip().partition("-")
    return int(number) if kind == "step" and number.isdigit() else None
