"""Makes Inductor's compiler output appear in its cache complete, or not at all.

torch renames the sources that it writes. But the compiler writes libraries and precompiled headers to their final path,
and an existing file is assumed to be complete (torch/_inductor/codecache.py, cpu_vec_isa.py; torch 2.13). A process
that is killed with its compiler leaves a partial file: a kernel or a probe that cannot be loaded. From an unusable
probe Inductor concludes that the processor lacks a feature, and builds other kernels for a replacement than the other
ranks use.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import ModuleType
from typing import Any

from flashrecovery.util import import_hooks

_BUILDER = "torch._inductor.cpp_builder"


def write_whole() -> None:
    """From now on, in this process and in those that it has compile."""
    import_hooks.install({_BUILDER: _renames})


def _renames(module: ModuleType) -> None:
    kind: Any = getattr(module, "CppBuilder", None)
    if kind is None or hasattr(kind.build, "__wrapped__"):
        return
    kind.build = _then_renamed(kind.build)
    kind.__reduce__ = lambda self: (_in_another_process, (dict(self.__dict__),))


def _then_renamed(build: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(build)
    def renamed(self: Any) -> None:
        target, output = getattr(self, "_target_file", ""), getattr(self, "_output", "")
        if not target or not output.endswith(f" {target}"):
            build(self)  # it is written elsewhere first
            return
        part = f"{target}.{uuid.uuid4().hex}.part"
        self._output = f"{output.removesuffix(target)}{part}"
        try:
            build(self)
            os.rename(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        finally:
            self._output = output

    return renamed


def _in_another_process(values: dict[str, Any]) -> Any:
    """Inductor's compile workers are separate processes, to which the builders are sent."""
    from torch._inductor import cpp_builder

    _renames(cpp_builder)
    builder = cpp_builder.CppBuilder.__new__(cpp_builder.CppBuilder)
    builder.__dict__.update(values)
    return builder
