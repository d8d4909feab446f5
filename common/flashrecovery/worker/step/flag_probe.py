"""Does an optimizer's step do nothing when its flag is set? Tried with a parameter made for it, not the script's.

A scratch optimizer of the same class and options gets one small parameter of the same dtype and device, and a known
gradient. With the flag set, parameter, state (the ``step`` counter, too) and options must stay as they are, bit for
bit, also with a gradient of NaN, as an abort leaves it. With the flag unset they must become what they become without
any flag.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_NUMBERS = 37  # more than one vector of any kernel, and not a multiple
_RATE = 0.125


def plain_step(optimizer: Optimizer) -> Callable[[], None]:
    """The step of its class without any hook, of the optimizer's own or of the process."""
    step = inspect.unwrap(type(optimizer).step)

    def call() -> None:
        with torch.no_grad():
            step(optimizer)

    return call


def refusal(optimizer: Optimizer) -> str:
    """Why the flag of ``optimizer`` cannot be trusted; "" if it can. ``found_inf`` as torch's fused kernels read it: a
    float32 tensor of no dimension, 1 for nothing. Waits for the device. Draws no random numbers."""
    tried = set()
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            key = (parameter.dtype, parameter.device, repr(sorted(_flags(options).items())))
            if key in tried:
                continue
            tried.add(key)
            if reason := _refusal(type(optimizer), optimizer.defaults, options, parameter):
                return f"{reason} ({parameter.dtype}, {parameter.device})"
    return ""


def _flags(options: dict[str, Any]) -> dict[str, bool]:
    """What decides which kernel runs. Numbers that a scheduler changes do not, beyond being zero or not."""
    return {name: bool(value) for name, value in options.items() if isinstance(value, (bool, int, float, type(None)))}


def signature(optimizer: Optimizer) -> tuple[object, ...]:
    """Changes with what a probe depends on."""
    groups = optimizer.param_groups
    return tuple((len(group["params"]), *sorted(_flags({**group, "lr": None}).items())) for group in groups)


def _refusal(kind: type[Optimizer], defaults: dict[str, Any], options: dict[str, Any], like: torch.Tensor) -> str:
    try:
        with torch.no_grad():
            guarded, twin = (_Scratch(kind, defaults, options, like) for _ in range(2))
            for scratch in (guarded, twin):
                scratch.step(None)  # makes the state
            before = guarded.content()
            for factor in (1.0, float("nan")):
                guarded.step(1.0, factor)
                if not _same(guarded.content(), before):
                    return "a step with the flag set has changed something"
            guarded.step(0.0)
            twin.step(None)
            if _same(guarded.content(), before):
                return "a step with the flag unset has changed nothing"
            if not _same(guarded.content(), twin.content()):
                return "a step with the flag unset differs from one without a flag"
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
        return f"the probe failed: {type(error).__name__}: {error}"
    return ""


class _Scratch:
    """An optimizer of one small parameter, made as one is read from a file: without its constructor's options."""

    def __init__(
        self, kind: type[Optimizer], defaults: dict[str, Any], options: dict[str, Any], like: torch.Tensor
    ) -> None:
        numbers = torch.arange(1, _NUMBERS + 1, dtype=torch.float32, device=like.device) / _NUMBERS
        self._parameter = torch.nn.Parameter(numbers.to(like.dtype))
        self._gradient = numbers.flip(0).to(like.dtype)
        rate = options["lr"]
        options = {name: _copied(value) for name, value in options.items()}
        options["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
        self._optimizer: Any = object.__new__(kind)
        groups = [{**options, "params": [self._parameter]}]
        state = {"defaults": dict(defaults), "state": defaultdict(dict), "param_groups": groups}
        self._optimizer.__setstate__(state)

    def step(self, flag: float | None, factor: float = 1.0) -> None:
        """One step, with the flag, with the known gradient times ``factor``."""
        self._parameter.grad = self._gradient * factor
        if flag is not None:
            self._optimizer.found_inf = torch.full((), flag, device=self._parameter.device)
        try:
            plain_step(self._optimizer)()
        finally:
            if flag is not None:
                del self._optimizer.found_inf

    def content(self) -> list[tuple[str, object]]:
        """All that a step may change, as bytes."""
        (group,) = self._optimizer.param_groups
        parts = [("parameter", self._parameter), *self._optimizer.state[self._parameter].items(), *group.items()]
        return [(name, _bytes(value)) for name, value in parts if name != "params"]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _bytes(value: object) -> object:
    if isinstance(value, torch.Tensor):
        data = value.detach().reshape(-1).view(torch.uint8).cpu()
        return str(value.dtype), tuple(value.shape), tuple(data.tolist())
    return repr(value)


def _same(one: list[tuple[str, object]], other: list[tuple[str, object]]) -> bool:
    return one == other
