"""Settings of modules that are made by calls and assignments, and that no tensor shows: ``train()``, ``eval()``,
``requires_grad_()``, and numbers among their attributes (``dropout.p = 0.2``, ``self.calls += 1``).

A step that was interrupted in an evaluation leaves the model in the wrong mode, and doing it again would leave dropout
out. A replacement that does not know that a part of the model has been frozen meanwhile trains it, and its gradients
are not those that its peers wait for.

What is captured is how things differ from the start: the set-up of a replacement makes the same start.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from flashrecovery.errors import RestoreError
from flashrecovery.worker.local_state.fingerprints import KEPT_NUMBERS
from flashrecovery.worker.local_state.version_counters import ItemTable, ParameterTable
from flashrecovery.worker.preimport.own_files import FRAMEWORKS
from flashrecovery.worker.script_text.script_frames import is_own

_TRAINING = operator.attrgetter("training")  # twice as fast as an expression
_OTHER = object()
"""Stands for what is not plain, or not there."""
_LEFT = [["left"]]
"""In what is captured: what is not plain, and is left as it is."""
_SHORT = 16
_OWN = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""


class ModeTracker:
    """Captures and restores the mode of every module below ``root``, as they are when it is made.

    Args:
        parameters: those whose ``requires_grad`` is kept.
    """

    def __init__(self, root: nn.Module, parameters: ParameterTable | None = None) -> None:
        self._modules: Sequence[nn.Module] = list(root.modules())
        self._parameters = ParameterTable([]) if parameters is None else parameters
        self._trained = self._parameters.trained()
        self._root = root
        self._tables = [t for m in self._modules for t in (m._parameters, m._buffers, m._modules)]
        self._children = [m._modules for m in self._modules if m._modules]
        self._parts = _parts(root)
        self._shape = self._shape_now()
        self._watch = self._watched()
        self._asked = [m for m in self._modules if "training" not in vars(m) or hasattr(type(m), "training")]
        self._answers: list[bool] = []  # of those that do not keep their mode in an attribute (torch.compile's)
        self._looks = 0
        self._again = False
        self._marked: tuple[int, int] = (-1, 0)  # at which look, and what it showed
        self._captured: tuple[int, int, dict[str, Any]] = (-1, 0, {})

    def capture(self) -> dict[str, Any]:
        """``{"modules": how many, "eval": indices of those in evaluation mode, "turned": indices of the parameters
        whose requires_grad is not what it was at the start, "changed": which modules and parameters there were not,
        "removed": which there are no more, where there are any}``."""
        look, mark = self._look(), self._parameters.trained_mark()
        if self._captured[:2] == (look, mark):
            return self._captured[2]
        trained = self._parameters.trained()
        turned = [i for i, (now, then) in enumerate(zip(trained, self._trained, strict=True)) if now != then]
        evaluating = [i for i, m in enumerate(self._modules) if not m.training]
        state = {"modules": len(self._modules), "eval": evaluating, "turned": turned}
        state |= self._changes()
        self._captured = (look, mark, state)
        return state

    @contextmanager
    def again(self) -> Iterator[None]:
        """The looks within are later ones of a step: one without comes before the step's end. They may be at parameters
        that have been exchanged since."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def mark(self) -> int:
        """Another number when a module's mode, or whether a parameter is trained, has changed."""
        look = self._look()
        if self._marked[0] != look:
            self._marked = look, hash((tuple(map(_TRAINING, self._modules)), tuple(map(len, self._tables))))
        return hash((self._marked[1], self._parameters.trained_mark(again=self._again)))

    def _watched(self) -> ItemTable | None:
        """The modes, the parts of each module, and which modules there are. None: there are modules that keep their
        parts in another way (TorchScript's), and all are asked each time."""
        if not all(isinstance(table, dict) for table in self._tables):
            return None
        modes = [(vars(module), "training") for module in self._modules]
        return ItemTable([*modes, *((table, name) for table in self._children for name in table)], self._tables)

    def _look(self) -> int:
        """Another number when anything but ``requires_grad`` may have changed."""
        asked = [*map(_TRAINING, self._asked)]
        if self._watch is None or self._watch.changed() or asked != self._answers:
            self._answers = asked
            self._looks += 1
        return self._looks

    def restore(self, state: dict[str, Any]) -> None:
        """Set every module's mode. Raises RestoreError if the model has another number of modules, lacks some that the
        script has put into it since its set-up, or has some that the script has taken out."""
        own = self._changes()
        lacking = sorted({*state.get("changed", ())} - {*own.get("changed", ())})
        if lacking:
            raise RestoreError(
                f"the script has put into the model what it did not have when it was registered: {', '.join(lacking)}; "
                "a replacement has not: make it in the set-up (for pruning, with a mask of ones)"
            )
        still = sorted({*state.get("removed", ())} - {*own.get("removed", ())})
        if still:
            raise RestoreError(
                f"the script has taken out of the model what it had when it was registered: {', '.join(still)}; a "
                "replacement has it: leave it in the model, unused"
            )
        if state["modules"] != len(self._modules):
            raise RestoreError(
                f"the model has {len(self._modules)} modules, that of the failed process had {state['modules']}: "
                "build the same model in every process"
            )
        evaluating = frozenset(state["eval"])
        for index, module in enumerate(self._modules):
            module.training = index not in evaluating
        turned = frozenset(state["turned"])
        for index, (parameter, then) in enumerate(zip(self._parameters.parameters(), self._trained, strict=True)):
            wanted = bool(then) != (index in turned)
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

    def _shape_now(self) -> tuple[Any, Any]:
        return tuple(map(len, self._tables)), [tuple(table.values()) for table in self._children]

    def _changes(self) -> dict[str, list[str]]:
        """Modules and parameters that were not there when this was made ("changed"), and that were there and are not
        any more ("removed"); without what is empty."""
        if self._shape_now() == self._shape:
            return {}
        now = _parts(self._root)
        changed = sorted(name for name, part in now.items() if self._parts.get(name, _OTHER) is not part)
        removed = sorted(self._parts.keys() - now.keys())
        return {key: names for key, names in (("changed", changed), ("removed", removed)) if names}


def _parts(root: nn.Module) -> dict[str, nn.Module | None]:
    """The modules, and the names of the parameters: a framework may exchange those, as FSDP2 does."""
    found: dict[str, nn.Module | None] = {f"module {name!r}": module for name, module in root.named_modules()}
    return {**found, **{f"parameter {name!r}": None for name, _ in root.named_parameters()}}


class AttributeTracker:
    """Captures and restores the plain attributes of the modules below ``root``: numbers, texts and None, also such that
    a module gets later.

    Of the script's own modules and of torch's, those whose names begin with an underscore are left alone, and so is
    what is something else at the time. Of other libraries' modules (peft's adapters), which no notice names, short
    lists, tuples and dictionaries of numbers and texts are kept, too, and names with an underscore, if the class has
    them or the module has them from the start.

    Args:
        packages: modules from these are left out.
        prefixes: attributes whose names begin like that are left out, too.
    """

    def __init__(self, root: nn.Module, packages: Container[str] = (), prefixes: tuple[str, ...] = ()) -> None:
        self._prefixes = prefixes
        self._modules = {
            name: module
            for name, module in root.named_modules()
            if type(module).__module__.partition(".")[0] not in packages
        }
        self._attributes = [vars(module) for module in self._modules.values()]
        self._of_libraries = {name for name, module in self._modules.items() if _is_of_library(type(module))}
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._homes: list[dict[str, Any]] = []  # by place: the attributes and
        self._keys: list[str] = []  # the key in them
        self._known: set[str] = set()
        self._containers: list[bool] = []  # by place: whether they are kept
        self._start: list[Any] = []
        self._sizes: list[int] = []
        self._types: tuple[type, ...] = ()
        self._odd: list[int] = []  # places of what has one of these types and is no number
        self._mutable: list[int] = []  # ... and may be changed in place
        self._gone = 0
        self._watch: ItemTable | None = None
        self._last: list[Any] = []
        self._captured: tuple[list[Any], dict[str, Any]] | None = None
        self._find(at_start=True)
        self._start = list(self.mark())

    def capture(self) -> dict[str, Any]:
        """``module.attribute`` -> value of those that are not equal to what they were at the start; something
        else for what is not plain any more."""
        now = self.mark()
        if self._captured is not None and self._captured[0] is now:
            return self._captured[1]
        changed: dict[str, Any] = {}
        for (place, attributes, key), value, then in zip(self._places, now, self._start, strict=True):
            if value is _OTHER:
                if key in attributes:
                    changed[place] = _LEFT
            elif value != then or type(value) is not type(then):
                changed[place] = attributes[key]
        self._captured = None if self._mutable else (now, changed)
        return changed

    def mark(self) -> list[Any]:
        """Something that does not equal its earlier self when an attribute has changed. The same object if nothing may
        have; not to be changed."""
        if self._watch is None or self._watch.changed():
            self._last = self._look()
            if self._watch is None:
                self._watch = ItemTable([*zip(self._homes, self._keys, strict=True)], self._attributes, numbers=True)
                self._watch.changed()
        elif self._mutable:
            shown = {number: _shown(self._homes[number].get(self._keys[number], _OTHER)) for number in self._mutable}
            if any(self._last[number] != one for number, one in shown.items()):
                self._last = [shown.get(number, one) for number, one in enumerate(self._last)]
        return self._last

    def _look(self) -> list[Any]:
        now = self._now()
        types = tuple(map(type, now))
        if types != self._types:
            gone = sum(key not in attributes for _place, attributes, key in self._places)
            if gone != self._gone:  # another one may have come in its place, and a module has as many as before
                self._gone = gone
                self._find()
                now = self._values()
                types = tuple(map(type, now))
            self._types = types
            self._odd = [number for number, kind in enumerate(types) if kind not in KEPT_NUMBERS]
            self._mutable = [number for number in self._odd if self._containers[number] and now[number] is not _OTHER]
        for number in self._odd:  # tensors must not be compared: it may take long, or be refused
            now[number] = _shown(now[number]) if self._containers[number] else _OTHER
        return now

    def restore(self, state: dict[str, Any]) -> None:
        """Attributes that were not there then are removed. Raises RestoreError if the model has no such module."""
        self._now()
        for place in sorted(state.keys() - self._known):
            name, _, key = place.rpartition(".")
            if name not in self._modules:
                raise RestoreError(
                    f"the model has no module {name!r}, that of the failed process had: build the same model in "
                    "every process"
                )
            self._add(name, key)
        for (place, attributes, key), now, then in zip(self._places, self.mark(), self._start, strict=True):
            if place in state:
                if state[place] != _LEFT:
                    attributes[key] = copy.deepcopy(state[place])
            elif then is _OTHER:
                if now is not _OTHER:
                    del attributes[key]
            elif now is not _OTHER or key not in attributes:
                attributes[key] = then.value() if isinstance(then, _Shown) else then

    def _now(self) -> list[Any]:
        if [*map(len, self._attributes)] != self._sizes:
            self._find()
        return self._values()

    def _values(self) -> list[Any]:
        return [*map(dict.get, self._homes, self._keys, itertools.repeat(_OTHER))]

    def _find(self, at_start: bool = False) -> None:
        """What has come since it was looked last was not there at the start."""
        self._sizes = [*map(len, self._attributes)]
        for name, module in self._modules.items():
            for key, value in vars(module).items():
                if f"{name}.{key}" in self._known or key in _OWN or key.startswith(self._prefixes):
                    continue
                library = name in self._of_libraries
                hidden = key.startswith("_") and not (library and (at_start or hasattr(type(module), key)))
                kept = type(value) in KEPT_NUMBERS or (library and _shown(value) is not _OTHER)
                if kept and not hidden:
                    self._add(name, key)

    def _add(self, name: str, key: str) -> None:
        self._known.add(f"{name}.{key}")
        self._watch = None  # is created again
        self._places.append((f"{name}.{key}", vars(self._modules[name]), key))
        self._homes.append(vars(self._modules[name]))
        self._keys.append(key)
        self._containers.append(name in self._of_libraries)
        self._start.append(_OTHER)


@dataclass(frozen=True)
class _Shown:
    """A container as it was."""

    kind: type
    content: tuple[Any, ...]

    def value(self) -> Any:
        return self.kind(self.content)


def _shown(value: object) -> Any:
    """A short container of numbers and texts as it is now."""
    kind = type(value)
    if kind not in (list, tuple, dict) or len(value) > _SHORT:  # type: ignore[arg-type]
        return _OTHER
    parts = itertools.chain(*value.items()) if isinstance(value, dict) else value
    plain = all(type(part) in KEPT_NUMBERS for part in parts)  # type: ignore[attr-defined]
    content = value.items() if isinstance(value, dict) else value
    return _Shown(kind, tuple(content)) if plain else _OTHER  # type: ignore[arg-type]


def _is_of_library(kind: type) -> bool:
    """Whether a module's class is neither the script's own nor torch's, nor one that a framework has derived from
    these (FSDP2's)."""
    classes = [one for one in kind.__mro__ if one is not object]
    return not any(map(is_own, classes)) and any(one.__module__.partition(".")[0] not in FRAMEWORKS for one in classes)


def plain_fields(thing: Any) -> dict[str, Any]:
    """The attributes of ``thing``, an object of a framework, that are plain values: counters, flags, scales.
    ``vars(thing).update(...)`` restores them."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(thing).items() if isinstance(value, plain)}
