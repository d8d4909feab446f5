"""Megatron-LM's training loop without a GPU: what it asserts and compiles at start."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
import typing
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from flashrecovery.errors import ConfigError
from flashrecovery.util import import_hooks
from flashrecovery.util.import_hooks import Hook

_HELPERS = "megatron.core.datasets.helpers_cpp"


def install(variable: str) -> None:
    """Change the modules concerned as soon as they are imported, if ever. ``variable``: for what is refused."""
    if not hasattr(typing, "override"):
        typing.override = override  # type: ignore[attr-defined,unused-ignore] # 0.20 is written for Python 3.12
    hooks: dict[str, Hook] = {
        "megatron.training.arguments": functools.partial(_arguments, variable=variable),
        "megatron.training.initialize": _initialize,
        "megatron.legacy.fused_kernels": _fused_kernels,
        "megatron.core.datasets.utils": _dataset_helpers,
    }
    import_hooks.install(hooks)


def _arguments(module: ModuleType, variable: str) -> None:
    """The absence of one flag that a CPU needs would go unnoticed: without it, weights come from the device's
    generator, which is the host's here, and are others than on a GPU."""
    patched: Any = module
    original = patched.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if not args.use_cpu_initialization:
            raise ConfigError(f"{variable}=1, which stands in for a GPU, needs the flag --use-cpu-initialization")
        return original(args, *rest, **kwargs)

    patched.validate_args = validate_args


def _initialize(module: ModuleType) -> None:
    """``initialize_megatron`` asserts CUDA unless an argument says otherwise, and ``pretrain`` does not pass it."""
    patched: Any = module
    original = patched.initialize_megatron

    @functools.wraps(original)
    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    patched.initialize_megatron = without_cuda


def _fused_kernels(module: ModuleType) -> None:
    """They are built with nvcc."""
    patched: Any = module
    patched.load = lambda args: None


def _dataset_helpers(module: ModuleType) -> None:
    """A checkout compiles its index builder with make and pybind11; the wheel of megatron-core has it, if installed."""
    compiled = _compiled_helpers()
    if compiled is None or _HELPERS in sys.modules:
        return
    loader = ExtensionFileLoader(_HELPERS, str(compiled))
    helpers = importlib.util.module_from_spec(ModuleSpec(_HELPERS, loader, origin=str(compiled)))
    loader.exec_module(helpers)
    sys.modules[_HELPERS] = helpers
    patched: Any = module
    patched.compile_helpers = lambda: None


def _compiled_helpers() -> str | None:
    try:
        files = importlib.metadata.files("megatron-core") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [f for f in files if f.name.startswith("helpers_cpp") and f.suffix == ".so"]
    return str(found[0].locate()) if found else None
