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
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

ENTRY_POINTS = "flashrecovery.import_hooks"
Hook = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Runs the hook after the real loader."""

    def __init__(self, inner: importlib.abc.Loader, take_hook: Callable[[], Hook | None]) -> None:
        self._inner = inner
        self._take_hook = take_hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        hook = self._take_hook()
        if hook is not None:
            hook(module)


class ImportHooks(importlib.abc.MetaPathFinder):
    """A meta-path finder that lets others find, and adds the hook.

    A hook is spent when its module is executed, not when somebody merely asks whether the module exists.
    """

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._hooks or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = importlib.util.find_spec(name) if path is None else self._find(name, path, target)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda: self._hooks.pop(name, None))
        return spec

    def _find(self, name: str, path: Sequence[str], target: ModuleType | None) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def install_adapter_hooks() -> None:
    """Those of the framework adapters. In a standby before it imports anything: a module that has taken a function by
    its name from a framework keeps the one that was there."""
    _install({entry.name: entry.load() for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)})


def install_group_hook(detached: bool, setup_log: bytes | None) -> None:
    """Exchangeable process groups, ``detached`` in a replacement, with what its predecessor's set-up had received."""

    def with_groups(_: ModuleType) -> None:
        from flashrecovery import groups

        groups.install()
        groups.set_detached(detached)
        if setup_log is not None:
            groups.replay_setup_log(setup_log)
        elif not detached:
            groups.start_setup_log()

    _install({"torch.distributed.distributed_c10d": with_groups})


def install_spawn_hook() -> None:
    """``torch.multiprocessing.spawn`` starts ranks of its own, which would wait for one another in the ranks' store."""

    def refused(function: object, *_args: object, **_options: object) -> None:
        from flashrecovery.errors import UnsupportedError

        name = getattr(function, "__qualname__", repr(function))
        raise UnsupportedError(
            f"torch.multiprocessing.spawn({name}) under `flashrecovery run`, which starts one process for each rank "
            f"itself, as torchrun does: call {name} directly, with int(os.environ['LOCAL_RANK']), and start as many "
            "ranks with --nproc-per-node; for processes that are no ranks: multiprocessing.get_context('spawn').Process"
        )

    def replace(module: ModuleType) -> None:
        for owner in (module, sys.modules.get("torch.multiprocessing")):
            for name in ("spawn", "start_processes"):
                if callable(getattr(owner, name, None)):
                    setattr(owner, name, refused)

    _install({"torch.multiprocessing.spawn": replace})


def _install(hooks: dict[str, Hook]) -> None:
    """Hook modules that come later; call the hook at once for those that are there already."""
    for name in [n for n in hooks if n in sys.modules]:
        hooks.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, ImportHooks(hooks))
