"""Callbacks between two calls that change what is protected: an average of the weights, a reference model that follows,
a learning rate.

The Trainer calls them when a step is over. What a call leaves is a version, so such a change is made in a call of its
own. Callbacks that only look at the arguments, the state and what they keep themselves need none: a replacement's are
called as the dead process's were.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import glob
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from flashrecovery.trainer.own_values import of_transformers

BETWEEN = (
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_epoch_end",
)
"""Events that come between two calls."""
_STOPS = frozenset({"should_training_stop", "should_epoch_stop"})
"""Names by which a callback ends the training, or an epoch."""
_PROTECTED = frozenset({"model", "optimizer", "lr_scheduler", "kwargs", "param_groups", "parameters"})
"""Names by which a callback gets at what is protected."""


def may_change_state(callback: Any, event: str, *, holds_module: bool) -> bool:
    """Whether ``callback`` does something at ``event`` that may change registered state: it has a module, or its class
    mentions what is trained."""
    kind: Any = type(callback)
    if of_transformers(kind) or not _overrides(kind, event):
        return False
    return holds_module or mentions(kind, _PROTECTED, of_transformers)


def may_stop(trainer: Any) -> bool:
    """Whether a class of a callback, or the trainer's own, says that it may end the training before its last step."""
    kinds = [type(trainer), *(type(one) for one in trainer.callback_handler.callbacks)]
    return any(not _STOPS.isdisjoint(_named(m.__code__)) for kind in kinds for m in _methods(kind, _goes_by_steps))


def _goes_by_steps(kind: type) -> bool:
    """Whether it is one of transformers' classes that end the training when all steps are made."""
    return of_transformers(kind) and kind.__name__ in ("Trainer", "DefaultFlowCallback")


@contextlib.contextmanager
def without_reports(handler: Any) -> Iterator[None]:
    """Those of transformers' callbacks that report to a tracker or on the screen are not called meanwhile."""
    all_ = handler.callbacks
    handler.callbacks = [one for one in all_ if not of_transformers(type(one)) or hasattr(one, "state")]
    try:
        yield
    finally:
        handler.callbacks = all_


def writes_texts_once(handler: Any) -> None:
    """In a replacement: what transformers' callbacks write into TensorBoard when the training begins (its arguments,
    the model's sizes) stands there already, if a process before this one has made a file of events."""
    for callback in handler.callbacks:
        if of_transformers(type(callback)) and hasattr(callback, "tb_writer"):
            callback.on_train_begin = functools.partial(_begun_without_texts, callback.on_train_begin)


def _begun_without_texts(begun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    modules = [sys.modules.get(name) for name in ("torch.utils.tensorboard", "tensorboardX")]
    kinds: list[Any] = [module.SummaryWriter for module in modules if module is not None]
    before = [kind.add_text for kind in kinds]

    def add_text(self: Any, *texts: Any, **more: Any) -> None:
        if len(glob.glob(os.path.join(glob.escape(self.file_writer.get_logdir()), "events.*"))) < 2:  # its own
            add = next(add for kind, add in zip(kinds, before, strict=True) if isinstance(self, kind))
            add(self, *texts, **more)

    for kind in kinds:
        kind.add_text = add_text
    try:
        return begun(*args, **kwargs)
    finally:
        for kind, add in zip(kinds, before, strict=True):
            kind.add_text = add


def _overrides(kind: type, event: str) -> bool:
    owner = next((cls for cls in kind.__mro__ if event in vars(cls)), object)
    return owner is not object and not of_transformers(owner)


@functools.cache
def mentions(kind: Any, names: frozenset[str], of_framework: Callable[[type], bool]) -> bool:
    """Whether the class, or one that it comes from and that is not the framework's, reads one of these names."""
    return any(not names.isdisjoint(_read(function.__code__)) for function in _methods(kind, of_framework))


def _methods(kind: Any, of_framework: Callable[[type], bool]) -> list[types.FunctionType]:
    """The methods of the class and of those that it comes from and that are not the framework's."""
    return [
        function
        for cls in kind.__mro__
        if cls is not object and not of_framework(cls)
        for value in vars(cls).values()
        if isinstance(function := getattr(value, "__func__", value), types.FunctionType)
    ]


def names_from(kind: Any, method: str) -> set[str]:
    """All names that a method of the class reads, and other methods of it that it names, and so on."""
    found: set[str] = set()
    waiting = [method]
    while waiting:
        function = inspect.unwrap(getattr(kind, waiting.pop(), None) or _nothing)
        names = {*_read(function.__code__)} if isinstance(function, types.FunctionType) else set()
        waiting += (name for name in names - found if isinstance(getattr(kind, name, None), types.FunctionType))
        found |= names
    return found


def _nothing() -> None:
    """No method."""


def _read(code: types.CodeType) -> Iterator[str]:
    """Names that are read, and strings."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD"):
            values = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            yield from (value for value in values if isinstance(value, str))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _read(constant)


def _named(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes that are read or set, and strings."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)
        else:
            values = constant if isinstance(constant, tuple) else (constant,)
            yield from (value for value in values if isinstance(value, str))
