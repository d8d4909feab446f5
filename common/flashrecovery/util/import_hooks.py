"""Hooks that are called when a module is imported, without importing it ourselves."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Runs the hook after the real loader. The module has that one as its own: what asks it for a file of the package,
    or for the source, gets it."""

    def __init__(self, inner: importlib.abc.Loader, take_hook: Callable[[], Hook | None]) -> None:
        self._inner = inner
        self._take_hook = take_hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)  # for code that asks for the module's spec only, as runpy does

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        hook = self._take_hook()
        if hook is not None:
            hook(module)


class ImportHooks(importlib.abc.MetaPathFinder):
    """A meta-path finder that lets others find, and adds the hook.

    A hook is used up when its module is executed, not when a caller merely asks whether the module exists.
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


def install(hooks: dict[str, Hook]) -> None:
    """Hook modules that come later; call the hook at once for those that are there already."""
    for name in [n for n in hooks if n in sys.modules]:
        hooks.pop(name)(sys.modules[name])
    if hooks:
        sys.meta_path.insert(0, ImportHooks(hooks))
