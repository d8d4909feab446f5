"""What modules are told by calls and assignments, and no tensor shows: ``train()``, ``eval()``, ``requires_grad_()``,
and numbers among their attributes (``dropout.p = 0.2``, ``self.calls += 1``).

A step that was interrupted in an evaluation leaves the model in the wrong mode, and doing it again would leave dropout
out. A replacement that does not know that a part of the model has been frozen meanwhile trains it, and its gradients
are not those that its peers wait for.

What is captured is how things differ from the start: the set-up of a replacement makes the same start.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import nn

from flashrecovery.errors import RestoreError

# Asked of all modules and parameters several times a step: twice as fast as an expression.
_TRAINING, _TRAINED = operator.attrgetter("training"), operator.attrgetter("requires_grad")
_PLAIN = (int, float, bool, str, type(None))
_OTHER = object()
"""Stands for what is not plain, or not there."""
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
        return hash((tuple(map(_TRAINING, self._modules)), self._flags()))

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
        return tuple(map(_TRAINED, self._parameters()))


class AttributeTracker:
    """Captures and restores the plain attributes of the modules below ``root``: numbers, texts and None.

    Those whose names begin with an underscore are left alone, and so are those that a module gets later, and those that
    become something else.

    Args:
        packages: modules from these are left out.
        prefixes: attributes whose names begin like that are left out, too.
    """

    def __init__(self, root: nn.Module, packages: Container[str] = (), prefixes: tuple[str, ...] = ()) -> None:
        self._places: list[tuple[str, dict[str, Any], str]] = []
        for name, module in root.named_modules():
            if type(module).__module__.partition(".")[0] in packages:
                continue
            for key, value in vars(module).items():
                if key not in _OWN and type(value) in _PLAIN and not key.startswith(("_", *prefixes)):
                    self._places.append((f"{name}.{key}", vars(module), key))
        self._start = self._now()
        self._types = tuple(map(type, self._start))

    def capture(self) -> dict[str, Any]:
        """``module.attribute`` -> value of those that are not equal to what they were at the start."""
        now = self.mark()
        if now == self._start:
            return {}
        places = (place for place, _attributes, _key in self._places)
        return {p: v for p, v, then in zip(places, now, self._start, strict=True) if v is not _OTHER and v != then}

    def mark(self) -> list[Any]:
        """Something that does not equal its earlier self when an attribute has changed."""
        now = self._now()
        types = tuple(map(type, now))
        if types != self._types:
            if not all(
                kind in _PLAIN for kind in types
            ):  # tensors must not be compared: it may take long, or be refused
                return [value if type(value) in _PLAIN else _OTHER for value in now]
            self._types = types
        return now

    def restore(self, state: dict[str, Any]) -> None:
        """Raises RestoreError if the model has no such attribute."""
        unknown = sorted(state.keys() - {place for place, _attributes, _key in self._places})
        if unknown:
            raise RestoreError(f"the model has no attribute {unknown[0]!r}, that of the failed process had")
        for (place, attributes, key), then in zip(self._places, self._start, strict=True):
            if place in state or type(attributes.get(key, then)) in _PLAIN:
                attributes[key] = state.get(place, then)

    def _now(self) -> list[Any]:
        return [attributes.get(key, _OTHER) for _place, attributes, key in self._places]
