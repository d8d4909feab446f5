"""Which device plugins there are, and which of them a job uses.

A plugin is an entry point in the group ``flashrecovery.health``: its name, and the factory that makes it. The plugins
of this package are registered in the same way as anyone's own (docs/health.md).
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from flashrecovery.errors import ConfigError, PluginError
from flashrecovery.health.findings import HealthContext, HealthPlugin

ENTRY_POINTS = "flashrecovery.health"
AUTO, NONE = "auto", "none"


def installed() -> dict[str, EntryPoint]:
    """Every plugin by its name, sorted. Of two with one name the first on the import path counts."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def select(choice: str) -> list[EntryPoint]:
    """The plugins that ``choice`` names: ``auto`` (all), ``none``, or names with commas. Raises ConfigError."""
    if choice.strip() == NONE:
        return []
    known = installed()
    if choice.strip() == AUTO:
        return list(known.values())
    names = list(dict.fromkeys(name.strip() for name in choice.split(",")))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, AUTO, NONE], 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            allowed = ", ".join([AUTO, NONE, *known])
            raise ConfigError(f"health: unknown device plugin {name!r}; {hint}allowed: {allowed}")
    return [known[name] for name in names]


def open_plugin(entry: EntryPoint, context: HealthContext) -> HealthPlugin | None:
    """The plugin at work, or None if it has nothing to watch here.

    Raises:
        PluginError: it cannot be imported, or what its factory gives is no plugin.
        Exception: whatever its factory raises.
    """
    try:
        factory = entry.load()
    except (ImportError, AttributeError) as e:
        raise PluginError(f"{entry.value} cannot be imported: {type(e).__name__}: {e}") from e
    plugin = factory(context)
    if plugin is not None and not isinstance(plugin, HealthPlugin):
        raise PluginError(f"{entry.value} gives a {type(plugin).__name__}, which lacks name, health() or close()")
    return plugin
