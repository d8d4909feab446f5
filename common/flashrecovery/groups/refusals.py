"""What communicates past the process groups, or keeps what a recovery frees: refused by name when it is first used.

An adapter refuses the settings of its framework before the first step. A script of plain PyTorch has no settings, so
here the calls themselves end with :class:`~flashrecovery.errors.UnsupportedError`:

* symmetric memory is mapped by all ranks together, and a replacement could not come in;
* a CUDA graph with a collective in it keeps the communicator that a recovery frees;
* DeepEP's buffers and Transformer Engine's userbuffers have their own communicators;
* Transformer Engine's delayed scaling keeps a history of largest values outside of parameters and buffers.

Nothing is imported for that, and what is never used costs nothing. The names were looked up in torch 2.13 and 2.14,
DeepEP 1.2 and Transformer Engine 2.8; the latter two have not been run here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flashrecovery.errors import UnsupportedError
from flashrecovery.util import import_hooks

_SWITCH = "Switch it off, or recovery."


def refuse(operations: Callable[[], int]) -> None:
    """Refuse unsupported communication in this process from now on; to be called once. ``operations``: how many the
    script has made so far."""
    if dist.is_available():
        _symmetric_memory(torch._C._distributed_c10d._SymmetricMemory)
    import_hooks.install(
        {
            "torch.cuda.graphs": lambda module: _graphs(module.CUDAGraph, operations),
            "deep_ep.buffer": lambda module: _own_communicators(module, "Buffer", "DeepEP"),
            "deep_ep.hybrid_ep_buffer": lambda module: _own_communicators(module, "HybridEPBuffer", "HybridEP"),
            "transformer_engine.pytorch.module.base": _userbuffers,
            "transformer_engine.pytorch.fp8": _delayed_scaling,
            "transformer_engine.pytorch.quantization": _delayed_scaling,  # where newer versions have it
        }
    )


def _never(what: str) -> Callable[..., NoReturn]:
    def refused(*_arguments: object, **_more: object) -> NoReturn:
        raise UnsupportedError(f"{what}. {_SWITCH}")

    return refused


def _always() -> bool:
    return True


def _symmetric_memory(kind: Any) -> None:
    refused = _never(
        "symmetric memory (torch.distributed._symmetric_memory, asynchronous tensor parallelism) is not supported: it "
        "is mapped by all ranks together, and a replacement could not come in"
    )
    for name in ("rendezvous", "set_group_info"):
        setattr(kind, name, staticmethod(refused))


def _graphs(kind: Any, operations: Callable[[], int]) -> None:
    """Operations of the script between the beginning of a capture and its end are in the graph. ``kind``: CUDAGraph."""
    begin, end = kind.capture_begin, kind.capture_end

    @wraps(begin)
    def capture_begin(self: Any, *arguments: Any, **more: Any) -> Any:
        self._flashrecovery_operations = operations()
        return begin(self, *arguments, **more)

    @wraps(end)
    def capture_end(self: Any, *arguments: Any, **more: Any) -> Any:
        result = end(self, *arguments, **more)
        captured = operations() - self._flashrecovery_operations
        if captured:
            raise UnsupportedError(
                f"a CUDA graph with {captured} collectives in it is not supported: it keeps the communicator that a "
                "recovery frees. Capture what lies between the collectives."
            )
        return result

    kind.capture_begin, kind.capture_end = capture_begin, capture_end


def _own_communicators(module: ModuleType, name: str, product: str) -> None:
    kind = getattr(module, name)
    kind.__init__ = _never(f"{product} ({kind.__module__}.{name}) is not supported: it has its own communicators")


def _userbuffers(module: Any) -> None:
    module.initialize_ub = _never(
        "Transformer Engine's userbuffers (initialize_ub) are not supported: they have their own communicators"
    )


def _delayed_scaling(module: Any) -> None:
    manager = getattr(module, "FP8GlobalStateManager", None)
    if manager is None:
        return
    add = manager.add_fp8_tensors_to_global_buffer  # a class method; each module that uses fp8 comes here

    @wraps(add)
    def checked(fp8_meta: Any, *arguments: Any, **more: Any) -> Any:
        if getattr(fp8_meta["recipe"], "delayed", _always)():  # before 2.0 there was no other recipe
            raise UnsupportedError(
                "Transformer Engine's delayed scaling (fp8 with the recipe DelayedScaling) is not supported: its "
                "history of largest values would not come back. Use another recipe."
            )
        return add(fp8_meta, *arguments, **more)

    manager.add_fp8_tensors_to_global_buffer = staticmethod(checked)
