"""Copies of a framework's sources with one of our upstream patches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def apply_patch(patch: Path, place: Path) -> None:
    """As a user would with git; what does not fit is an error, and changes nothing."""
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=place, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=place, check=True)


def run_script(
    script: Path, flags: tuple[str, ...], place: Path, timeout_s: float, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """``python script flags`` in ``place``, to its end. ``env``: beside this process's own."""
    return subprocess.run(
        [sys.executable, str(script), *flags],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=place,
        env={**os.environ, **env},
    )
