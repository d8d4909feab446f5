"""Hooks that must be in place when a module is imported, without importing it ourselves.

``torch.distributed`` gets the exchangeable process groups before the script can make the first one. A framework adapter
registers an entry point in the group ``flashrecovery.import_hooks``: its name is the module to wait for, its value a
function that is called with the module once it has been imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

ENTRY_POINTS = "flashrecovery.import_hooks"
Hook = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Runs the hook after the real loader."""

    def __init__(self, inner: importlib.abc.Loader, hook: Hook) -> None:
        self._inner = inner
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._hook(module)


class ImportHooks(importlib.abc.MetaPathFinder):
    """A meta-path finder that lets others find, and adds the hook."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name) if path is None else self._find(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, hook)
        return spec

    def _find(self, name: str, path: Sequence[str], target: ModuleType | None) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def install_import_hooks(detached: bool, setup_log: bytes | None) -> None:
    """Hook modules that come later; call the hook at once for those that are there already (in a standby)."""

    def with_groups(_: ModuleType) -> None:
        from flashrecovery import groups

        groups.install()
        groups.set_detached(detached)
        if setup_log is not None:
            groups.replay_setup_log(setup_log)
        elif not detached:
            groups.start_setup_log()

    hooks: dict[str, Hook] = {"torch.distributed.distributed_c10d": with_groups}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        hooks[entry.name] = entry.load()
    for name in [n for n in hooks if n in sys.modules]:
        hooks.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, ImportHooks(hooks))
