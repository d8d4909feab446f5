"""The user's script as ``__main__``, as ``python script.py`` and ``python -m module`` run it.

:func:`runpy.run_path` removes the module again once its last line has run. Code that runs after that (a thread that
saves a checkpoint, an exit handler) could no longer pickle an object of one of the script's classes. And classes of
objects from a ``spawn`` process of :mod:`multiprocessing` are looked up in ``__mp_main__``, which would be the program
that ran the script. Here the module stays until the process ends, under both names.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import runpy
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import cast

from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.startup.own_text import compiled_text


def run_file(path: str) -> None:
    """A script, or a folder or an archive with a ``__main__.py``. Raises what the script raises."""
    if pkgutil.get_importer(path) is not None:
        runpy.run_path(path, run_name="__main__")
        return
    file = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", file)
        _run(cast(CodeType, compiled.get_code("__main__")), file, None, compiled, None, None)
    else:
        source = SourceFileLoader("__main__", file)
        # as python does, without a compiled copy beside it
        _run(compiled_text(source.get_data(file), file), file, None, source, None, None)


def run_module(name: str) -> None:
    """A module, or a package with a ``__main__``. Raises ImportError if there is none, and what it raises itself."""
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    loader = None if spec is None else spec.loader
    get_code = getattr(loader, "get_code", None)
    code: CodeType | None = None if spec is None or get_code is None else get_code(spec.name)
    if isinstance(loader, SourceFileLoader) and is_own_file(loader.path):
        code = compiled_text(loader.get_data(loader.path), loader.path)
    if spec is None or code is None:
        raise ImportError(f"there is no module {name} that can be run")
    sys.argv[0] = spec.origin or name
    _run(code, spec.origin, spec.cached, spec.loader, spec.parent, spec)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            return None
        raise


def _run(
    code: CodeType,
    file: str | None,
    cached: str | None,
    loader: object,
    package: str | None,
    spec: ModuleSpec | None,
) -> None:
    module = ModuleType("__main__")
    vars(module).update(
        __file__=file,
        __cached__=cached,
        __loader__=loader,
        __package__=package,
        __spec__=spec,
        __builtins__=builtins,
    )
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # made when multiprocessing was imported
        sys.modules["__mp_main__"] = module
    exec(code, vars(module))
