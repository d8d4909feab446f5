"""Device plugins: what the hardware says before a process notices. See :mod:`.findings` for the idea."""

from flashrecovery.health.findings import HealthContext, HealthFinding, HealthPlugin, Severity

__all__ = ["HealthContext", "HealthFinding", "HealthPlugin", "Severity"]
