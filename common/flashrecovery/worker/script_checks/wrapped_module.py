"""The wrapper that trains a module, where a script registers the module inside of it (nanoGPT's ``raw_model``,
accelerate's ``unwrap_model``, an engine's ``module``).

A wrapper has its own state: without it the first recovery would leave DistributedDataParallel's reducer half-way.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from flashrecovery.errors import RegistrationError


def wrapper_of(model: torch.nn.Module) -> torch.nn.Module:
    """The DistributedDataParallel around ``model``, if there is one; else ``model``. Takes a moment: all objects are
    looked at.

    Raises:
        RegistrationError: there are several; it wraps a larger module; or a DeepSpeed engine has the module.
    """
    inside = _without_compiling(model)
    if isinstance(inside, DistributedDataParallel):
        return inside
    if isinstance(model, FSDPModule) or not _around(model):
        return model
    gc.collect()  # one of them may be gone
    around = _around(model)
    engines = [w for w in around if not isinstance(w, DistributedDataParallel)]
    if engines:
        raise RegistrationError(
            f"the registered {type(model).__name__} is trained by a {type(engines[0]).__name__}, which protects it "
            'itself: set "flash_recovery": {"enabled": true} in its config, and register only further objects, with '
            "engine.recovery.register(name=object)"
        )
    inner = [w for w in around if _without_compiling(w.module) is _without_compiling(model)]
    if len(around) == 1 and inner:
        return inner[0]
    if not around:
        return model
    kinds = ", ".join(f"DistributedDataParallel({type(w.module).__name__})" for w in around)
    raise RegistrationError(
        f"the registered {type(model).__name__} lies inside of {kinds}: register what synchronises its gradients, "
        "recovery.register(model=<the DistributedDataParallel>, optimizer=optimizer)"
    )


def _around(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The wrappers that have parameters of ``model``, without those that lie inside of others."""
    parameters = {id(p) for p in model.parameters()}
    found = [w for w in _wrappers() if w is not model and any(id(p) in parameters for p in w.parameters())]
    return [w for w in found if not any(w is part for other in found if other is not w for part in other.modules())]


def _without_compiling(module: object) -> object:
    return getattr(module, "_orig_mod", module)


def _wrappers() -> Iterator[torch.nn.Module]:
    """All DistributedDataParallels and DeepSpeed engines of this process."""
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    kinds = (DistributedDataParallel, engine) if isinstance(engine, type) else (DistributedDataParallel,)
    return (thing for thing in gc.get_objects() if issubclass(type(thing), kinds))
