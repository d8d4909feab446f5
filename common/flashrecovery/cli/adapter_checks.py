"""The findings of the adapters in ``flashrecovery doctor``, each about its framework.

An adapter registers a function without arguments that returns findings, as an entry point in the group
``flashrecovery.doctor``. It must neither import its framework nor change anything.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from flashrecovery.capabilities.finding import Finding, Level
from flashrecovery.capabilities.patches import only_looking

ENTRY_POINTS = "flashrecovery.doctor"


def adapters() -> list[Finding]:
    """The findings of all adapters, in the order of their names."""
    findings = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        try:
            with only_looking():
                look: Callable[[], list[Finding]] = entry.load()
        except (ImportError, AttributeError) as e:
            found, advice = f"{entry.value}: {type(e).__name__}: {e}", "reinstall flashrecovery"
            findings.append(Finding(entry.name, Level.WARN, found, "the adapter's checks failed", advice))
            continue
        findings += look()
    return findings
