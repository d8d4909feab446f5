"""A device plugin that warns of its node as soon as a file appears in the node's run directory."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "about-to-break"
_PLUGIN = f"""
from flashrecovery.health import HealthFinding, Severity

class Warner:
    name = "warner"
    def __init__(self, path):
        self.path = path
    def health(self):
        found = HealthFinding(Severity.WARNING, self.name, "node", None, "drill", "about to break", str(self.path))
        return [found] if self.path.exists() else []
    def close(self):
        pass

def create(context):
    return Warner(context.run_dir / "{FILE}")
"""


def installed(site: Path) -> dict[str, str]:
    """Install it there; returns the environment that finds it, for ``--health warner``."""
    (site / "warner-1.0.dist-info").mkdir(parents=True)
    (site / "warner.py").write_text(_PLUGIN)
    (site / "warner-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: warner\nVersion: 1.0\n")
    entry = "[flashrecovery.health]\nwarner = warner:create\n"
    (site / "warner-1.0.dist-info" / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))}
