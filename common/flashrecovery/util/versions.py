"""Which version of a package is installed. Imports nothing of the package."""

from __future__ import annotations

import importlib.metadata


def version_of(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
