"""torch's TCPStore in a process that has no other use for torch.

``import torch`` executes a thousand modules for the one class in C++ that a store needs: with torch 2.13 it takes five
times the processor time, and 90 MB more. Here torch's extension is loaded below an empty package of that name. torch
promises nothing of the kind, so it is done with releases only with which it has been seen, and never in a process that
is started in place of one that has died.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from flashrecovery.util.versions import version_of

SEEN = ("2.13",)
"""Releases of torch whose extension can be loaded alone."""


def tcp_store(whole: bool) -> Any:
    """The class ``torch.distributed.TCPStore``. ``whole``: all of torch is imported for it. Otherwise, with a release
    of :data:`SEEN`, nothing else of torch can be imported in this process any more."""
    if whole or not _seen():
        return importlib.import_module("torch.distributed").TCPStore
    return _bare()


def _seen() -> bool:
    version = version_of("torch") or ""
    return any(version.startswith(f"{release}.") for release in SEEN)


def _bare() -> Any:
    found = importlib.util.find_spec("torch")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("no package torch", name="torch")
    package = types.ModuleType("torch")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["torch"] = package
    # torch's C++ asks for this one, and uses nothing of it.
    sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
    extension = importlib.import_module("torch._C")
    extension._c10d_init()
    return importlib.import_module("torch._C._distributed_c10d").TCPStore
