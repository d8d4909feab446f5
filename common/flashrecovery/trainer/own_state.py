"""State kept by a Trainer's subclass, its callbacks and its functions: found, saved, and restored.

This is the state that nothing else protects: attributes of the trainer that transformers' own class does not set,
containers among the attributes of its classes, the attributes of callbacks that are not transformers', and the
variables that the loss and metric functions share with others. It is rank-local. The modules among it are protected as
modules (:mod:`.held_modules`); objects without state that can be saved are left as they are.
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec
from flashrecovery.trainer.own_values import MISSING, ValueReader, ValueWriter, of_transformers
from flashrecovery.worker.script_text.script_frames import is_own

_FUNCTIONS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
_START = "the start"
"""Beside the paths: the kinds of objects with which the process began."""
_PLAIN = (int, float, bool, str, type(None))
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.Counter)


class OwnState:
    """The own state of ``trainer``.

    Attributes:
        modules: that it holds, by path, as far as :meth:`capture` has come across them.
        odd: values that cannot be restored, by path: the type.
        newest: the newest capture.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._base = attributes_of_base(_base_of(type(trainer)))
        self._known: dict[int, object] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.odd: dict[str, str] = {}
        self.newest: dict[str, Any] = {}
        self._objects: dict[int, object] = {}  # by number: what the newest capture has seen
        self._at_start: AtStart | None = None
        self._first = 1  # number of what has not been seen

    def passes_over(self, *things: object) -> None:
        """What others protect, or what is no state."""
        for thing in things:
            if thing is not None:
                self._known[id(thing)] = thing

    def holders(self) -> list[object]:
        """The trainer and its callbacks."""
        return [self._trainer, *self._callbacks()]

    def holds_module(self, callback: object) -> bool:
        """Whether a callback has its own modules."""
        names = [_name_of(c, number) for number, c in enumerate(self._callbacks()) if c is callback]
        return any(path.startswith(f"{name}.") for name in names for path in self.modules)

    # -- what there is ----------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[str, Any]]:
        """(path, the dictionary or object whose item it is)."""
        trainer = self._trainer
        for name in vars(trainer):
            if name not in self._base:
                yield f"trainer.{name}", vars(trainer)
        for kind in (type(trainer), *(type(c) for c in self._callbacks())):
            for cls in kind.__mro__:
                if is_own(cls):
                    for name, value in vars(cls).items():
                        if isinstance(value, (*_CONTAINERS, torch.Tensor, torch.Generator)) and name[:2] != "__":
                            yield f"{cls.__qualname__}.{name}", cls
        for number, callback in enumerate(self._callbacks()):
            for name in getattr(callback, "__dict__", {}):
                yield f"{_name_of(callback, number)}.{name}", vars(callback)
        for name in _FUNCTIONS:
            if getattr(trainer, name, None) is not None:
                yield f"trainer.{name}", vars(trainer)

    def _callbacks(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if not of_transformers(type(c))]

    def values(self) -> Iterator[tuple[str, Any]]:
        """(path, value) of everything."""
        for path, place in self._places():
            name = path.rpartition(".")[2]
            value = place[name] if isinstance(place, dict) else vars(place)[name]
            if id(value) not in self._known:
                yield path, value

    # -- written down -----------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """By path, numbers and strings as they are, everything else as bytes; what has no state has no entry."""
        writer = ValueWriter(self._known, self._objects, self._first)
        found = self._written(writer)
        self._objects, self._first = writer.objects, writer.first
        if self._at_start is None:
            self._at_start = AtStart(writer.objects)
        self.newest = {**found, _START: self._at_start.kinds}
        return self.newest

    def mark(self) -> dict[str, Any]:
        """Other than before when something has changed."""
        return self._written(ValueWriter(self._known, None))

    def _written(self, writer: ValueWriter) -> dict[str, Any]:
        found = {}
        for path, value in self.values():
            if type(value) in _PLAIN:
                found[path] = value
                continue
            try:
                data = writer.write(value)
            except UnsupportedError as e:
                self.odd.setdefault(path, str(e))
                continue
            for number, module in enumerate(writer.modules):
                self.modules.setdefault(f"{path}[{number}]" if number else path, module)
            for kind in writer.odd:
                self.odd.setdefault(path, kind)
            if writer.has_state:
                found[path] = data
        return found

    # -- put back ---------------------------------------------------------------------------------

    def restore(self, saved: Mapping[str, Any], *, same_process: bool) -> None:
        """Bring back what :meth:`capture` gave, in this process or in the one that it replaces."""
        values = {path: codec.loads(data) if isinstance(data, bytes) else data for path, data in saved.items()}
        kinds = values.pop(_START, None)
        objects = self._objects if same_process else self._at_start.objects(kinds) if self._at_start is not None else {}
        reader = ValueReader(objects, values.values())
        now = self.mark()
        places = dict(self._places())
        for path in now.keys() - saved.keys():
            place = places[path]
            if isinstance(place, dict):
                del place[path.rpartition(".")[2]]
        for path, saved_value in values.items():
            place, name = places.get(path), path.rpartition(".")[2]
            if place is None and path.startswith("trainer."):
                place = vars(self._trainer)
            elif place is None:
                place = self._attributes_at(path)
            if isinstance(place, dict):
                value = reader.read(saved_value, place.get(name, MISSING))
                if value is not MISSING:
                    place[name] = value
            elif place is not None:
                current = vars(place)[name]
                value = reader.read(saved_value, current)
                if value is not current:
                    setattr(place, name, value)

    def _attributes_at(self, path: str) -> dict[str, Any] | None:
        """The attributes of the callback that ``path`` begins with."""
        owner = path.rpartition(".")[0]
        for number, callback in enumerate(self._callbacks()):
            if owner == _name_of(callback, number):
                return callback.__dict__  # type: ignore[no-any-return]
        return None


class AtStart:
    """What a process has found at its first look, by number; what is gone meanwhile is not kept for this.

    Attributes:
        kinds: a digest of the types.
    """

    def __init__(self, objects: Mapping[int, object]) -> None:
        names = [(number, type(thing).__qualname__) for number, thing in sorted(objects.items())]
        self.kinds = hashlib.sha256(repr(names).encode()).hexdigest()
        self._references: dict[int, Callable[[], object]] = {}
        for number, thing in objects.items():
            try:
                self._references[number] = weakref.ref(thing)
            except TypeError:  # lists, dictionaries
                self._references[number] = functools.partial(_itself, thing)

    def objects(self, kinds: str | None) -> dict[int, object]:
        """Those that are there. ``kinds``: of the process that has written; if it began with others, the numbers say
        nothing."""
        if kinds != self.kinds:
            return {}
        found = {number: reference() for number, reference in self._references.items()}
        return {number: thing for number, thing in found.items() if thing is not None}


def _itself(thing: object) -> object:
    return thing


def _name_of(callback: object, number: int) -> str:
    return f"{type(callback).__name__}[{number}]"


def attributes_of_base(base: type) -> frozenset[str]:
    """The names that methods of ``base`` assign to attributes of ``self``."""
    file = inspect.getsourcefile(base)
    if file is None:
        raise UnsupportedError(
            f"{base.__module__}.{base.__qualname__} has no source file: which of its attributes the library sets "
            "is not known"
        )
    return _assigned(file, base.__name__)


@functools.cache
def _assigned(file: str, name: str) -> frozenset[str]:
    tree = ast.parse(Path(file).read_bytes())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return frozenset(
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _base_of(kind: type) -> type:
    """transformers' ``Trainer``, of which ``kind`` is one."""
    return next(cls for cls in kind.__mro__ if of_transformers(cls) and cls.__name__ == "Trainer")
