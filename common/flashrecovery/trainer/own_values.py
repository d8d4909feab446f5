"""Values of scripts as bytes and back, whatever they are: containers, tensors, generators, objects, shared variables.

A value is restored *in place* if the saved object still exists (each object has a number for this), so everything that
shares it sees the restored value. In another process, the objects that its script has made are used.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from flashrecovery.state import codec
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_text.script_frames import is_own

GLANCED_BYTES = 64 << 10
"""Up to this size the content of a tensor says whether it has changed; of larger ones the version counter."""
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, type, DataLoader, Dataset, Sampler)
_FRAMEWORKS = frozenset({"torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "flashrecovery"})
_FACTORIES: dict[str, Any] = {
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "set": set,
    "deque": collections.deque,
}
_OPAQUE = codec.StandIn("opaque", None)


class Missing:
    """There is no value."""


MISSING = Missing()


class ValueWriter:
    """Writes values, each object once.

    Args:
        known: of these, by ``id()``, nothing is written.
        objects: what has been written before, by number, and has these numbers again; None: what is written is only
            compared, and nothing has a number.
        first: the number of what has not been written before.

    Attributes:
        objects: what was written, by number.
        first: that of the next writer.
        modules, odd: what the newest value contains of modules, and of what cannot be brought back: the types.
    """

    def __init__(self, known: Mapping[int, object], objects: Mapping[int, object] | None, first: int = 1) -> None:
        self._known, self._marking = known, objects is None
        self._before = {id(thing): number for number, thing in (objects or {}).items()}
        self.first = first
        self._numbers: dict[int, int] = {}  # by id()
        self.objects: dict[int, object] = {}
        self.modules: list[torch.nn.Module] = []
        self.odd: list[str] = []

    def write(self, value: Any) -> bytes:
        """Raises UnsupportedError for what contains itself."""
        self.modules, self.odd = [], []
        return codec.dumps(self._boxed(value), self._stand_in)

    def _boxed(self, value: Any) -> Any:
        """The pickler does not ask for these."""
        return self._container(value) if type(value) in (list, dict, set) else value

    def _number(self, thing: object) -> int:
        number = self._before.get(id(thing), 0)
        if not number:
            number, self.first = self.first, self.first + 1
        self._numbers[id(thing)] = number
        self.objects[number] = thing  # and so no other object gets its id()
        return 0 if self._marking else number

    def _same(self, thing: object) -> codec.StandIn:
        return codec.StandIn("same", 0 if self._marking else self._numbers[id(thing)])

    def _container(self, thing: Any) -> codec.StandIn:
        if id(thing) in self._numbers:
            return self._same(thing)
        number = self._number(thing)
        kind = type(thing).__name__
        if isinstance(thing, collections.defaultdict):
            factory = getattr(thing.default_factory, "__name__", "")
            return codec.StandIn("container", (number, "defaultdict", factory, list(thing.items())))
        if isinstance(thing, collections.deque):
            return codec.StandIn("container", (number, kind, thing.maxlen, list(thing)))
        content = list(thing.items()) if isinstance(thing, dict) else list(thing)
        return codec.StandIn("container", (number, kind, None, content))

    def _stand_in(self, thing: Any) -> codec.StandIn | None:
        kind = type(thing)
        if kind in (set, frozenset, range, complex, bytearray, torch.dtype, torch.device, torch.Size):
            return None
        if id(thing) in self._known or isinstance(thing, _NO_STATE):
            return _OPAQUE
        if isinstance(thing, torch.nn.Module):
            self.modules.append(thing)
            return _OPAQUE
        if isinstance(thing, enum.Enum):
            return codec.StandIn("enum", (kind.__module__, kind.__qualname__, thing.name))
        if kind in (collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return self._container(thing)
        if id(thing) in self._numbers:
            return self._same(thing)
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if kind.__module__ == "numpy":
            return None if _is_plain_array(thing) else _OPAQUE
        generator = as_stateful(thing)
        if generator is not None:
            return codec.StandIn("generator", (self._number(thing), _kind_of(thing), generator.state_dict()))
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            if id(thing.__self__) in self._known or _of_a_framework(type(thing.__self__).__module__):
                return _OPAQUE
            return codec.StandIn("through", [thing.__self__])
        if isinstance(thing, functools.partial):
            return codec.StandIn("through", [thing.func, list(thing.args), dict(thing.keywords)])
        if isinstance(thing, LRScheduler) and not isinstance(thing, Optimizer):
            return codec.StandIn("stateful", (self._number(thing), thing.state_dict()))
        return self._object(thing)

    def _tensor(self, tensor: torch.Tensor) -> codec.StandIn:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.device.type == "meta":
            self.odd.append(f"a {type(tensor).__name__} of layout {tensor.layout}")
            return _OPAQUE
        if self._marking and tensor.nbytes > GLANCED_BYTES:
            return codec.StandIn("mark", (id(tensor), 0 if tensor.is_inference() else tensor._version))
        data = codec.dumps(tensor.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf))
        return codec.StandIn("tensor", (self._number(tensor), data))

    def _function(self, function: types.FunctionType) -> codec.StandIn:
        """The variables that a function of the script's shares with others."""
        if not function.__closure__ or not _is_of_script(function):
            return _OPAQUE
        number = self._number(function)
        cells = []
        for cell in function.__closure__:
            try:
                cells.append(self._boxed(cell.cell_contents))
            except ValueError:  # empty
                cells.append(_OPAQUE)
        return codec.StandIn("function", (number, cells))

    def _object(self, thing: Any) -> codec.StandIn:
        kind = type(thing)
        attributes = getattr(thing, "__dict__", None)
        walks = (is_own(kind) or dataclasses.is_dataclass(kind)) and not _of_a_framework(kind.__module__)
        if isinstance(thing, Optimizer) or not walks or not isinstance(attributes, dict) or _is_arguments(thing):
            if isinstance(thing, Optimizer):
                self.odd.append(f"the optimizer {kind.__name__}")
            elif _is_odd(thing):
                self.odd.append(kind.__name__)
            return _OPAQUE
        number = self._number(thing)
        content = {name: self._boxed(value) for name, value in attributes.items()}
        items: Any = None
        if isinstance(thing, (list, collections.deque, set)):
            items = list(thing)
        elif isinstance(thing, dict):
            items = list(thing.items())
        if hasattr(kind, "__next__"):
            self.odd.append(kind.__name__)
        return codec.StandIn("object", (number, kind.__module__, kind.__qualname__, content, items))


class ValueReader:
    """Makes values of what was written. ``objects``: those of this process by number, if it has written it."""

    def __init__(self, objects: Mapping[int, object] | None) -> None:
        self._objects = objects
        self._made: dict[int, Any] = {}

    def read(self, saved: Any, current: Any) -> Any:
        """The value that takes the place of ``current``, which may be the same."""
        if isinstance(saved, codec.StandIn):
            return getattr(self, f"_{saved.kind}")(saved.value, current)
        if isinstance(saved, dict):
            now = current if isinstance(current, dict) else {}
            return {key: self.read(value, now.get(key, MISSING)) for key, value in saved.items()}
        if isinstance(saved, (list, tuple)):
            listed = list(current) if isinstance(current, (list, tuple)) else []
            listed += [MISSING] * (len(saved) - len(listed))
            made = [self.read(value, now) for value, now in zip(saved, listed, strict=False)]
            if isinstance(saved, list):
                return made
            return current if all(map(_is, made, listed)) and len(made) == len(listed) else tuple(made)
        return saved

    def _target(self, number: int, current: Any, fits: Callable[[Any], bool]) -> Any:
        """The object to write to; missing if there is none."""
        found = current if self._objects is None else self._objects.get(number, MISSING)
        return found if found is not MISSING and fits(found) else MISSING

    def _opaque(self, value: object, current: Any) -> Any:
        return current

    def _through(self, value: list[Any], current: Any) -> Any:
        now = current.__self__ if isinstance(current, types.MethodType) else None
        parts = [now] if now is not None else [current.func, list(current.args), dict(current.keywords)]
        for part, place in zip(value, parts, strict=True):
            self.read(part, place)
        return current

    def _same(self, number: int, current: Any) -> Any:
        return self._made.get(number, current)

    def _container(self, value: tuple[Any, ...], current: Any) -> Any:
        number, kind, extra, content = value
        target = self._target(number, current, lambda found: type(found).__name__ == kind)
        if target is MISSING:
            target = _new_container(kind, extra)
        self._made[number] = target
        if isinstance(target, dict):
            pairs = [(key, self.read(part, target.get(key, MISSING))) for key, part in content]
            target.clear()
            target.update(pairs)
        elif isinstance(target, set):
            target.clear()
            target.update(self.read(content, []))
        else:
            parts = self.read(content, list(target))
            target.clear()
            target.extend(parts)
        return target

    def _enum(self, value: tuple[str, str, str], current: Any) -> Any:
        kind = _class_at(value[0], value[1])
        return current if kind is None else kind[value[2]]

    def _tensor(self, value: tuple[int, bytes], current: Any) -> Any:
        number, data = value
        saved = codec.loads(data)
        target = self._target(number, current, lambda found: isinstance(found, torch.Tensor) and _alike(found, saved))
        if target is MISSING or target.is_inference() or not (target.is_leaf or self._objects is not None):
            target = saved
        elif not torch.equal(target.detach(), saved.detach()):
            with torch.no_grad():
                target.detach().copy_(saved)
        self._made[number] = target
        return target

    def _generator(self, value: tuple[int, str, Any], current: Any) -> Any:
        number, kind, state = value
        target = self._target(number, current, lambda found: as_stateful(found) is not None)
        if target is MISSING:
            name, _, device = kind.partition("@")
            target = torch.Generator(device) if name == "torch" else random.Random() if name == "random" else MISSING
        generator = None if target is MISSING else as_stateful(target)
        if generator is not None:
            generator.load_state_dict(state)
            self._made[number] = target
        return target

    def _stateful(self, value: tuple[int, Any], current: Any) -> Any:
        target = self._target(value[0], current, lambda found: hasattr(found, "load_state_dict"))
        if target is not MISSING:
            target.load_state_dict({k: v for k, v in value[1].items() if v != _OPAQUE})
        return target

    def _function(self, value: tuple[int, list[Any]], current: Any) -> Any:
        number, cells = value
        target = self._target(number, current, lambda found: isinstance(found, types.FunctionType))
        if target is MISSING:
            return current
        self._made[number] = target
        for saved, cell in zip(cells, target.__closure__ or (), strict=True):
            try:
                now = cell.cell_contents
            except ValueError:
                now = MISSING
            then = self.read(saved, now)
            if then is not now and then is not MISSING:
                cell.cell_contents = then
        return target

    def _object(self, value: tuple[Any, ...], current: Any) -> Any:
        number, module, name, content, items = value
        target = self._target(number, current, lambda found: type(found).__qualname__ == name)
        if target is MISSING:
            kind = _class_at(module, name)
            if kind is None:
                return current
            target = kind.__new__(kind)
        self._made[number] = target
        attributes = vars(target)
        for gone in attributes.keys() - content.keys():
            del attributes[gone]
        for attribute, saved in content.items():
            then = self.read(saved, attributes.get(attribute, MISSING))
            if then is not MISSING:
                attributes[attribute] = then
        if items is not None:
            parts = self.read(items, list(target.items()) if isinstance(target, dict) else list(target))
            target.clear()
            target.update(parts) if isinstance(target, (dict, set)) else target.extend(parts)
        return target


def of_transformers(kind: type) -> bool:
    """Whether a class is transformers' own."""
    return kind.__module__.partition(".")[0] == "transformers"


def _is_of_script(function: types.FunctionType) -> bool:
    return is_own_file(function.__code__.co_filename) and not _of_a_framework(function.__module__)


def _of_a_framework(module: str) -> bool:
    return module.partition(".")[0] in _FRAMEWORKS


def _is_arguments(thing: object) -> bool:
    """Training arguments, of transformers or derived from them."""
    return any(of_transformers(cls) for cls in type(thing).__mro__)


def _is_odd(thing: object) -> bool:
    """Something with a state that nothing can bring back: an iterator, an open file, a thread."""
    kinds = {cls.__module__.partition(".")[0] for cls in type(thing).__mro__}
    return hasattr(type(thing), "__next__") or bool(kinds & {"_io", "io", "threading", "subprocess", "socket"})


def _is_plain_array(thing: Any) -> bool:
    return bool(getattr(thing, "dtype", None) is not None and thing.dtype.kind in "biufcSUMm")


def _kind_of(generator: object) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch@{generator.device}"
    return "random" if isinstance(generator, random.Random) else "numpy"


def _new_container(kind: str, extra: Any) -> Any:
    if kind == "deque":
        return collections.deque(maxlen=extra)
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(extra))
    return {"list": list, "dict": dict, "set": set}.get(kind, getattr(collections, kind, dict))()


def _class_at(module: str, name: str) -> Any:
    """A class that has been imported; None if there is no such."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _is(one: object, other: object) -> bool:
    return one is other


NOTHING = codec.dumps(_OPAQUE)
