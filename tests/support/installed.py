"""Modules of tests that need a package which may not be installed.

``pytest.importorskip`` imports it: DeepSpeed and Megatron take seconds each, in a process that only starts others.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_module_without(*packages: str) -> None:
    """Called at the top of a module of tests."""
    for package in packages:
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
