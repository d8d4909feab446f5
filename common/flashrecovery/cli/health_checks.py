"""Which device plugins are at work on this node, and what they find now, for ``flashrecovery doctor``."""

from __future__ import annotations

import os
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

from flashrecovery.capabilities.finding import Finding, Level
from flashrecovery.config import Timeouts
from flashrecovery.health.findings import HealthContext, HealthFinding, Severity
from flashrecovery.health.plugins import installed, open_plugin

_EVERY_DEVICE = 1 << 16
_LEVELS = {Severity.WARNING: Level.WARN, Severity.FATAL: Level.FAIL}
_ADVICE = {
    Severity.WARNING: "fix this before a long run: a job here marks this node for replacement",
    Severity.FATAL: "exclude this node: a job here replaces the device's worker at once",
}


def plugins(limit_s: float = Timeouts().health_stuck_s) -> list[Finding]:
    """One look by each installed plugin, of at most ``limit_s`` seconds."""
    findings = []
    for name, entry in installed().items():
        findings += _look(f"health: {name}", entry, limit_s)
    return findings


def _look(check: str, entry: EntryPoint, limit_s: float) -> list[Finding]:
    found: list[HealthFinding] | None = None
    failed = f"no answer within {limit_s:g} s"
    context = HealthContext(Path.cwd(), _EVERY_DEVICE, os.environ)

    def ask() -> None:
        nonlocal found, failed
        try:
            plugin = open_plugin(entry, context)
            failed = ""
            if plugin is not None:
                found = list(plugin.health())
                plugin.close()
        except Exception as e:  # noqa: BLE001 - a plugin is anyone's code; what it raises is the finding
            failed = f"{type(e).__name__}: {e}"

    thread = threading.Thread(target=ask, name="flashrecovery-health-check", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed or thread.is_alive():
        meaning, advice = "this device plugin does not work", f"repair {entry.value}, or name the others: --health"
        return [Finding(check, Level.WARN, failed or f"no answer within {limit_s:g} s", meaning, advice)]
    if found is None:
        return [Finding(check, Level.OK, "not active", "finds nothing to watch on this node")]
    if not found:
        return [Finding(check, Level.OK, "active", "finds nothing wrong")]
    return [
        Finding(check, _LEVELS[f.severity], f"{f.subject}: {f.text} [{f.code}]", f.evidence or "-", _ADVICE[f.severity])
        for f in found
    ]
