"""What modules are told by calls and assignments, and no tensor shows: ``train()``, ``eval()``, ``requires_grad_()``,
and numbers among their attributes (``dropout.p = 0.2``, ``self.calls += 1``).

A step that was interrupted in an evaluation leaves the model in the wrong mode, and doing it again would leave dropout
out. A replacement that does not know that a part of the model has been frozen meanwhile trains it, and its gradients
are not those that its peers wait for.

What is captured is how things differ from the start: the set-up of a replacement makes the same start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from flashrecovery.errors import RestoreError

_PLAIN = (int, float, bool, str, type(None))
_OWN = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""


class ModeTracker:
    """Captures and restores the mode of every module below ``root``, as they are when it is made.

    Args:
        parameters: gives the parameters whose ``requires_grad`` is kept, always as many, in the same order.
    """

    def __init__(self, root: nn.Module, parameters: Callable[[], Sequence[nn.Parameter]] = tuple) -> None:
        self._modules: Sequence[nn.Module] = list(root.modules())
        self._parameters = parameters
        self._trained = self._flags()

    def capture(self) -> dict[str, Any]:
        """``{"modules": how many, "eval": indices of those in evaluation mode, "turned": indices of the parameters
        whose requires_grad is not what it was at the start}``."""
        turned = [i for i, (now, then) in enumerate(zip(self._flags(), self._trained, strict=True)) if now != then]
        evaluating = [i for i, m in enumerate(self._modules) if not m.training]
        return {"modules": len(self._modules), "eval": evaluating, "turned": turned}

    def mark(self) -> int:
        """Another number when a module's mode, or whether a parameter is trained, has changed."""
        return hash((tuple([m.training for m in self._modules]), self._flags()))

    def restore(self, state: dict[str, Any]) -> None:
        """Set every module's mode. Raises RestoreError if the model has another number of modules."""
        if state["modules"] != len(self._modules):
            raise RestoreError(
                f"the model has {len(self._modules)} modules, that of the failed process had {state['modules']}"
            )
        evaluating = frozenset(state["eval"])
        for index, module in enumerate(self._modules):
            module.training = index not in evaluating
        turned = frozenset(state["turned"])
        for index, (parameter, then) in enumerate(zip(self._parameters(), self._trained, strict=True)):
            wanted = then != (index in turned)
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

    def _flags(self) -> tuple[bool, ...]:
        return tuple([p.requires_grad for p in self._parameters()])


class AttributeTracker:
    """Captures and restores the plain attributes of modules: numbers, texts and None.

    Those whose names begin with an underscore are left alone, and so are those that a module gets later.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._of: list[tuple[str, dict[str, Any], tuple[str, ...], Callable[[dict[str, Any]], Any]]] = []
        for name, module in modules:
            keys = tuple(k for k, v in vars(module).items() if k not in _OWN and k[0] != "_" and type(v) in _PLAIN)
            if keys:
                self._of.append((name, vars(module), keys, itemgetter(*keys)))
        self._start = dict(self._values())

    def capture(self) -> dict[str, Any]:
        """``module.attribute`` -> value of those that are not what they were at the start."""
        return {
            place: value
            for place, value in self._values()
            if type(value) in _PLAIN and (value != self._start[place] or type(value) is not type(self._start[place]))
        }

    def mark(self) -> Any:
        """Something that does not equal its earlier self when an attribute has changed."""
        try:
            return [get(attributes) for _name, attributes, _keys, get in self._of]
        except KeyError:  # one was deleted
            return self.capture()

    def restore(self, state: dict[str, Any]) -> None:
        """Raises RestoreError if the model has no such attribute."""
        unknown = sorted(state.keys() - self._start.keys())
        if unknown:
            raise RestoreError(f"the model has no attribute {unknown[0]!r}, that of the failed process had")
        for name, attributes, keys, _get in self._of:
            for key in keys:
                place = f"{name}.{key}"
                attributes[key] = state.get(place, self._start[place])

    def _values(self) -> Iterable[tuple[str, Any]]:
        for name, attributes, keys, _get in self._of:
            for key in keys:
                if key in attributes:
                    yield f"{name}.{key}", attributes[key]
