"""The barrier before the optimizer, kept by the device: the host launches the optimizer's kernels while the gradients
are still being reduced, and only then waits for them.

The stream is held back before these kernels (:class:`~flashrecovery.groups.accelerator.StreamHold`), and they have a
flag. When everything before them has happened, the training thread does what it does without all this before an
optimizer: it looks whether the step still counts, and tells the gate that its state changes. Then it lets go. If the
step does not count, it lets go with the flag set: the kernels do nothing, and the state is that of the version before.
So nothing but when the kernels are launched is different for the other ranks and for the controller, and nothing of the
script runs in between.

:mod:`flashrecovery.plan.device_barrier` decides where this may be, :mod:`.flag_probe` tries whether the flag is
honoured. Everywhere else the host waits first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from flashrecovery.errors import UnsupportedError
from flashrecovery.groups.accelerator import PATIENCE_S, StreamHold, accelerator
from flashrecovery.plan.device_barrier import OptimizerFacts, why_host
from flashrecovery.worker.step import flag_probe

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_SET = object()
_DYNAMO, _LEFT_OUT = "torch._dynamo.eval_frame", "DisableContext"


def facts_of(optimizer: Optimizer) -> OptimizerFacts:
    """What one optimizer is like now."""
    kind = type(optimizer)
    parameters = _parameters(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return OptimizerFacts(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        fused=all(group.get("fused") is True for group in optimizer.param_groups),
        differentiable=any(group.get("differentiable", False) for group in optimizer.param_groups),
        plain=all(map(_plain, (*parameters, *gradients))),
        devices=len({parameter.device for parameter in parameters}),
        other_hooks=_other_hooks(optimizer),
        complete=is_complete(optimizer),
        compiled=is_compiled(),
    )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _other_hooks(optimizer: Optimizer) -> int:
    """One before and one after the step are ours. Those of the process are called before the first and after the
    last."""
    return sum(len(vars(optimizer)[name]) for name in HOOKS) - 2


def is_complete(optimizer: Optimizer) -> bool:
    """Whether it has the state of all its parameters."""
    stateless = all(group.get("momentum") == 0 for group in optimizer.param_groups)  # SGD
    return stateless or all(map(optimizer.state.get, _parameters(optimizer)))


def is_compiled() -> bool:
    """Whether code that torch.compile has made is calling. What it leaves out, as our hooks, does not count."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == _DYNAMO and type(frame.f_locals.get("self")).__name__ != _LEFT_OUT:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class _Held:
    """A step that is held back. ``scripts_flag``: the ``found_inf`` that the script had given its optimizer."""

    hold: StreamHold
    optimizer: Optimizer
    scripts_flag: Any


class DeviceBarrier:
    """Of the training thread.

    Args:
        on: whether it is to be used at all.
        tell: called once for each optimizer, with what is done and why.
    """

    def __init__(self, tell: Callable[[str], None], *, on: bool) -> None:
        self._on = on
        self._tell = tell
        self._hold: StreamHold | None = None
        self._judged: weakref.WeakKeyDictionary[Optimizer, dict[object, str]] = weakref.WeakKeyDictionary()
        self._held: _Held | None = None

    @property
    def holding(self) -> bool:
        """An optimizer's step is held back, or about to be launched so."""
        return self._held is not None

    def guards(self, optimizer: Optimizer) -> bool:
        """Whether the step of ``optimizer`` that is about to begin may be held back. Asks the device once for each."""
        if not self._on or not accelerator().in_use() or not is_complete(optimizer):
            return False
        signature = is_compiled(), _other_hooks(optimizer), *flag_probe.signature(optimizer)
        judged = self._judged.setdefault(optimizer, {})
        if signature not in judged:
            judged[signature] = why_host(facts_of(optimizer)) or self._try_hold() or flag_probe.refusal(optimizer)
            if len(judged) == 1:
                self._tell_of(optimizer, judged[signature])
        return not judged[signature]

    def _tell_of(self, optimizer: Optimizer, reason: str) -> None:
        name = type(optimizer).__name__
        self._tell(f"the host waits before each step of {name}: {reason}" if reason else f"{name} {_HIDDEN}")

    def _try_hold(self) -> str:
        """Hold the stream back twice, to no effect. Returns what is wrong."""
        device = accelerator().current()
        if device is None:
            return "the calling thread has no device"
        try:
            self._hold = hold = self._hold or accelerator().stream_hold(device)
            for void in (True, False):
                hold.hold()
                early = hold.mark().done()
                if not hold.let_go(void=void) or early:
                    return "the stream does not wait"
                if bool(hold.flag.item()) is not void:
                    return "the flag does not come to the device"
        except UnsupportedError as error:
            return str(error)
        return ""

    # -- a step -----------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """Its kernels, which are launched next, wait for :meth:`end`, and do nothing if that says so."""
        hold = self._hold
        if hold is None:
            raise UnsupportedError(f"the step of {type(optimizer).__name__} cannot be held back: guards() comes before")
        flag: torch.Tensor = hold.flag
        scripts = vars(optimizer).get("found_inf", _NOT_SET)
        both: tuple[torch.Tensor, torch.Tensor] | None = None
        if isinstance(scripts, torch.Tensor):  # torch.amp.GradScaler's: a step that overflows is none, either
            # Made before the stream is held: an allocation may wait for the device.
            both = scripts.to(flag.dtype).reshape(()), torch.empty_like(flag)
        self._held = _Held(hold, optimizer, scripts)
        hold.hold()
        optimizer.found_inf = flag if both is None else torch.maximum(flag, both[0], out=both[1])  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Until everything before these kernels has happened."""
        if self._held is not None:
            self._held.hold.wait()

    def end(self, *, void: bool) -> None:
        """The kernels run; ``void``: they do nothing."""
        held, self._held = self._held, None
        if held is None:
            return
        optimizer = held.optimizer
        in_time = held.hold.let_go(void=void)
        self._take_flag_away(held)
        if not in_time and not void:
            # The hold has ended by itself, and they have done nothing. Nothing else has been launched since.
            flag_probe.plain_step(optimizer)()
            self._on = False
            self._tell_of(optimizer, _TOO_LATE)

    @staticmethod
    def _take_flag_away(held: _Held) -> None:
        if held.scripts_flag is _NOT_SET:
            vars(held.optimizer).pop("found_inf", None)
        else:
            held.optimizer.found_inf = held.scripts_flag  # type: ignore[attr-defined]


_HIDDEN = "is launched while the gradients are reduced, and the device keeps its step back until they are whole"
_TOO_LATE = f"once the host did not come to the end of the launches, or the gradients took more than {PATIENCE_S:g} s"
