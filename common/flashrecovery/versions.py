"""Which version of a package is installed, and whether it lies in a range. Imports nothing of the package."""

from __future__ import annotations

import importlib.metadata

Bound = tuple[int, ...]


def version_of(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_range(version: str, low: Bound, high: Bound) -> bool:
    """``low <= version < high``, by the leading numbers of ``version``."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return low <= tuple(numbers) < high


def range_text(low: Bound, high: Bound) -> str:
    """As pip writes it: ``>=0.19.8,<0.19.9``."""
    return f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
