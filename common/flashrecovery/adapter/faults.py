"""Places inside a step where fault injection can strike, each a one-shot callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from flashrecovery import groups
from flashrecovery.worker.local_state.own_hook import OwnHook, not_traced

Callback = Callable[[], None]


def middle_module(root: nn.Module, outer: nn.Module | None = None) -> nn.Module:
    """A leaf module with trainable parameters about half-way through ``root``, whose hooks are called although they
    come late: torch.compile does not look for those within what it has compiled. ``outer`` (around ``root``) if there
    is none."""
    called = list(_called(root))
    candidates = [m for m in called if any(p.requires_grad for p in m.parameters(recurse=False))]
    if candidates:
        return candidates[len(candidates) // 2]
    return root if called or outer is None else outer


def _called(root: nn.Module) -> Iterator[nn.Module]:
    """Modules that are not a part of a compiled one."""
    if getattr(root, "_compiled_call_impl", None) is not None:
        return
    yield root
    if not hasattr(root, "_orig_mod"):  # of torch.compile(module)
        for child in root.children():
            yield from _called(child)


def in_forward(root: nn.Module, callback: Callback, outer: nn.Module | None = None) -> None:
    """Call ``callback`` once, when the middle module's forward begins."""
    handles: list[RemovableHandle] = []

    def strike(_module: nn.Module, _inputs: Any) -> None:
        _remove(handles)
        callback()

    handles.append(middle_module(root, outer).register_forward_pre_hook(OwnHook(strike)))


def before_gather(module: nn.Module, callback: Callback) -> None:
    """Call ``callback`` once before ``module`` gathers its parameters, while the peers enter the all-gather."""
    handles: list[RemovableHandle] = []

    def strike(_module: nn.Module, _inputs: Any) -> None:
        _remove(handles)
        callback()

    handles.append(module.register_forward_pre_hook(OwnHook(strike), prepend=True))


def before_gather_operation(optimizer: Optimizer, callback: Callback) -> None:
    """Call ``callback`` once, when the first all-gather after the next step of ``optimizer`` begins."""

    def at_operation(_group: str, operation: str) -> None:
        if "gather" in operation:
            groups.set_operation_hook(None)
            callback()

    def stepped(*_: Any) -> None:
        handle.remove()
        groups.set_operation_hook(at_operation)

    handle = optimizer.register_step_post_hook(stepped)


def in_backward(root: nn.Module, callback: Callback, outer: nn.Module | None = None) -> None:
    """Call ``callback`` once, when backward reaches the output of the middle module.

    A tensor hook, not a parameter hook: FSDP2's unsharded parameters do not exist before the first forward.
    """
    handles: list[RemovableHandle] = []

    def strike(_grad: torch.Tensor) -> None:
        if handles:
            _remove(handles)
            callback()

    def watch_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                handles.append(leaf.register_hook(strike))
                return

    handles.append(middle_module(root, outer).register_forward_hook(OwnHook(watch_output)))


class OptimizerFault:
    """Strikes inside ``optimizer.step``, when the middle parameter is about to be written: some parameters and states
    have been changed by then, others have not."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._handles: list[RemovableHandle] = []
        self._mode: _WriteWatch | None = None

    def arm(self, callback: Callback, target: torch.Tensor) -> None:
        self.disarm()
        mode = _WriteWatch(target, callback)
        optimizer = self._optimizers[0]
        self._handles.append(optimizer.register_step_pre_hook(not_traced(lambda *_: self._enter(mode))))
        self._handles.append(optimizer.register_step_post_hook(not_traced(lambda *_: self._leave())))

    def _enter(self, mode: _WriteWatch) -> None:
        if mode.armed and self._mode is None:
            self._mode = mode
            mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Remove everything; also after the callback has raised out of the optimizer."""
        _remove(self._handles)
        self._leave()


class _WriteWatch(TorchDispatchMode):
    """Calls back before the first in-place operation on ``target``."""

    def __init__(self, target: torch.Tensor, callback: Callback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {_storage(target)}
        self._callback: Callback | None = callback

    @property
    def armed(self) -> bool:
        return self._callback is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._callback is not None and func._schema.is_mutable and self._writes_target(func, args, kwargs):
            callback, self._callback = self._callback, None
            callback()
        return func(*args, **kwargs)

    def _writes_target(self, func: Any, args: Any, kwargs: Any) -> bool:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if any(isinstance(t, torch.Tensor) and _storage(t) in self._storages for t in tree_leaves(value)):
                return True
        return False


def _storage(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
