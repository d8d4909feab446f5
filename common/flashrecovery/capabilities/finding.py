"""One line of ``flashrecovery doctor``: what a check of ours, of an adapter or of a plugin has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """OK: helps. WARN: works, but slower or less safe. FAIL: recovery cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check has found, what it means, and what to do about it ("" if nothing)."""

    check: str
    level: Level
    found: str
    meaning: str
    advice: str = ""
