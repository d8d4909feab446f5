"""Values of scripts as bytes and back, whatever they are: containers, tensors, generators, objects, shared variables.

A value is restored *in place* if the saved object still exists (each object has a number for this), so everything that
shares it sees the restored value. Another process has numbered what its script has made before the first step, in the
same order. Everything else is re-created there, because the object in its place may be a part of the data. Tensors and
arrays that share elements do so afterwards, too.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec
from flashrecovery.worker.local_state import generators
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_text.extents import (
    ALIGNED,
    bytes_around,
    extent_of,
    in_memory,
    is_array,
    strides_of,
    together,
)
from flashrecovery.worker.script_text.plain_values import BY_PARTS, is_global, made_of_parts, slots_of, state_of
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
_FLAT = frozenset((int, float, bool, str, bytes, type(None)))
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)


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
        has_state: whether there is anything in the newest value that could be written.
    """

    def __init__(self, known: Mapping[int, object], objects: Mapping[int, object] | None, first: int = 1) -> None:
        self._known, self._marking = known, objects is None
        self._before = {id(thing): number for number, thing in (objects or {}).items()}
        self._at_start = first == 1
        self.first = first
        self._numbers: dict[int, int] = {}  # by id()
        self.objects: dict[int, object] = {}
        self.modules: list[torch.nn.Module] = []
        self.odd: list[str] = []
        self.has_state = True
        self._whole: Any = MISSING

    def write(self, value: Any) -> bytes:
        """Raises UnsupportedError for what contains itself."""
        self.modules, self.odd, self.has_state, self._whole = [], [], True, value
        return codec.dumps(self._boxed(value), self._stand_in)

    def _boxed(self, value: Any) -> Any:
        """The pickler does not ask for these."""
        kind = type(value)
        if kind is tuple and not _FLAT.issuperset(map(type, value)):
            return tuple(map(self._boxed, value))
        return self._container(value) if kind in (list, dict, set) else value

    def _all_boxed(self, values: Iterable[Any]) -> list[Any]:
        listed = list(values)
        return listed if _FLAT.issuperset(map(type, listed)) else list(map(self._boxed, listed))

    def _pairs(self, values: dict[Any, Any]) -> list[tuple[Any, Any]]:
        return list(zip(values, self._all_boxed(values.values()), strict=True))

    def _number(self, thing: object) -> int:
        number = self._numbers.get(id(thing)) or self._before.get(id(thing), 0)
        if not number:
            number, self.first = self.first, self.first + 1
        self._numbers[id(thing)] = number
        self.objects[number] = thing  # and so no other object gets its id()
        return 0 if self._marking else number

    def _same(self, thing: object) -> codec.StandIn:
        return codec.StandIn("same", 0 if self._marking else self._numbers[id(thing)])

    def _opaque(self, thing: Any) -> codec.StandIn:
        """It is only known which one it is: by its number, if it was there at the start, or by its type."""
        if thing is self._whole:
            self.has_state = False
        if self._marking or not (self._at_start or id(thing) in self._before):
            return codec.StandIn("opaque", (0, type(thing).__name__))
        return codec.StandIn("opaque", (self._number(thing), type(thing).__name__))

    def _container(self, thing: Any) -> codec.StandIn:
        if id(thing) in self._numbers:
            return self._same(thing)
        number = self._number(thing)
        kind = type(thing).__name__
        if isinstance(thing, collections.defaultdict):
            factory = getattr(thing.default_factory, "__name__", "")
            return codec.StandIn("container", (number, "defaultdict", factory, self._pairs(thing)))
        if isinstance(thing, collections.deque):
            return codec.StandIn("container", (number, kind, thing.maxlen, self._all_boxed(thing)))
        content: Any = self._pairs(thing) if isinstance(thing, dict) else self._all_boxed(thing)
        return codec.StandIn("container", (number, kind, None, content))

    def _stand_in(self, thing: Any) -> codec.StandIn | None:
        kind = type(thing)
        if kind in (set, frozenset, range, complex, bytearray, torch.dtype, torch.device, torch.Size):
            return None
        if id(thing) in self._known:
            return self._opaque(thing)
        if isinstance(thing, torch.nn.Module):
            self.modules.append(thing)
            return self._opaque(thing)
        if isinstance(thing, enum.Enum):
            return codec.StandIn("enum", (kind.__module__, kind.__qualname__, thing.name))
        if kind in (collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return self._container(thing)
        if kind in BY_PARTS:
            return codec.StandIn("value", (kind.__name__, BY_PARTS[kind][0](thing)))
        if id(thing) in self._numbers:
            return self._same(thing)
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if is_array(thing):
            if not _is_plain_array(thing):
                return self._opaque(thing)
            return self._elements(thing, codec.dumps(thing)) if thing.shape else None
        generator = as_stateful(thing)
        if generator is not None:
            return codec.StandIn("generator", (self._number(thing), _made_of(thing), generator.state_dict()))
        if isinstance(thing, _CODE) and not getattr(thing, "__closure__", None) and is_global(thing):
            return self._named(thing)
        if isinstance(thing, _NO_STATE):
            return self._opaque(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            if id(thing.__self__) in self._known or _of_a_framework(type(thing.__self__).__module__):
                return self._opaque(thing)
            return codec.StandIn("through", [thing.__self__])
        if isinstance(thing, functools.partial):
            return codec.StandIn("through", [thing.func, list(thing.args), dict(thing.keywords)])
        if isinstance(thing, LRScheduler) and not isinstance(thing, Optimizer):
            return codec.StandIn("stateful", (self._number(thing), thing.state_dict()))
        return self._object(thing)

    def _named(self, thing: Any) -> codec.StandIn:
        """A function or class that its name leads to."""
        if thing is self._whole:
            self.has_state = False
        return codec.StandIn("named", (thing.__module__, thing.__qualname__))

    def _tensor(self, tensor: torch.Tensor) -> codec.StandIn:
        if isinstance(tensor, DTensor):
            return codec.StandIn("sharded", (self._number(tensor), tensor._local_tensor))
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.device.type == "meta":
            self.odd.append(f"a {type(tensor).__name__} of layout {tensor.layout}")
            return self._opaque(tensor)
        if self._marking and tensor.nbytes > GLANCED_BYTES:
            return codec.StandIn("mark", (id(tensor), 0 if tensor.is_inference() else tensor._version))
        return self._elements(tensor, codec.dumps(tensor.detach().requires_grad_(_needs_gradient(tensor))))

    def _elements(self, thing: Any, data: bytes) -> codec.StandIn:
        """The elements of a tensor or array, and their place in memory."""
        extent = None if self._marking else extent_of(thing)
        return codec.StandIn("elements", (self._number(thing), extent, strides_of(thing), data))

    def _function(self, function: types.FunctionType) -> codec.StandIn:
        """The variables that a function of the script's shares with others."""
        if not function.__closure__ or not _is_of_script(function):
            return self._opaque(function)
        number = self._number(function)
        cells = []
        for cell in function.__closure__:
            try:
                cells.append(self._boxed(cell.cell_contents))
            except ValueError:  # empty
                cells.append(codec.StandIn("opaque", (0, "")))
        return codec.StandIn("function", (number, cells))

    def _object(self, thing: Any) -> codec.StandIn:
        kind = type(thing)
        if isinstance(thing, tuple) and hasattr(kind, "_fields") and is_global(kind):
            return codec.StandIn("tuple", (kind.__module__, kind.__qualname__, self._all_boxed(thing)))
        attributes = state_of(thing) if hasattr(thing, "__dict__") or slots_of(kind) else None  # type: ignore[arg-type] # a class is hashable
        walks = (is_own(kind) or dataclasses.is_dataclass(kind)) and not _of_a_framework(kind.__module__)
        if isinstance(thing, Optimizer) or not walks or not isinstance(attributes, dict) or _is_arguments(thing):
            if isinstance(thing, Optimizer):
                self.odd.append(f"the optimizer {kind.__name__}")
            elif _is_odd(thing):
                self.odd.append(kind.__name__)
            return self._opaque(thing)
        number = self._number(thing)
        content = {name: self._boxed(value) for name, value in attributes.items()}
        items: Any = None
        if isinstance(thing, (list, collections.deque, set)):
            items = self._all_boxed(thing)
        elif isinstance(thing, dict):
            items = self._pairs(thing)
        if hasattr(kind, "__next__"):
            self.odd.append(kind.__name__)
        return codec.StandIn("object", (number, kind.__module__, kind.__qualname__, content, items))


@dataclasses.dataclass
class _Memory:
    """In which several tensors or arrays lie. ``low``, ``high``: its addresses in the process that has written;
    ``content``: its bytes here, once it is there."""

    low: int
    high: int
    content: torch.Tensor | None = None


class ValueReader:
    """Makes values of what was written.

    Args:
        objects: by number, those that may be written to: of the process that has written, or what another one has
            numbered at its start.
        saved: all values that are to be read.

    Its methods take what stands in the value's place now, too; it has what cannot be made.
    """

    def __init__(self, objects: Mapping[int, object], saved: Iterable[Any] = ()) -> None:
        self._objects = objects
        self._made: dict[int, Any] = {}
        self._memory_of = self._shared_memories(saved)

    def read(self, saved: Any, current: Any) -> Any:
        """The value that takes the place of ``current``, which may be the same.

        Raises:
            UnsupportedError: a part of it is missing, which could not be written and was not there at the start.
        """
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

    def _target(self, number: int, fits: Callable[[Any], bool]) -> Any:
        """The object to write to; missing if there is none."""
        found = self._objects.get(number, MISSING)
        return found if found is not MISSING and fits(found) else MISSING

    def _part(self, saved: Any, current: Any) -> Any:
        """A part of a container."""
        made = self.read(saved, current)
        if made is MISSING:
            kind = saved.value[-1] if isinstance(saved, codec.StandIn) and saved.kind == "opaque" else "value"
            raise UnsupportedError(
                f"a container has got a {kind} while the job was training, which another process cannot make again"
            )
        return made

    def _opaque(self, value: tuple[int, str], current: Any) -> Any:
        number, kind = value
        return self._target(number, lambda found: type(found).__name__ == kind) if number in self._objects else current

    def _named(self, value: tuple[str, str], current: Any) -> Any:
        module, name = value
        found = _at(module, name)
        return current if found is None else found

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
        target = self._target(number, lambda found: type(found).__name__ == kind)
        now = current if target is MISSING else target
        if target is MISSING:
            target = _new_container(kind, extra)
        self._made[number] = target
        if isinstance(target, dict):
            there = now if isinstance(now, dict) else {}
            pairs = [(key, self._part(part, there.get(key, MISSING))) for key, part in content]
            target.clear()
            target.update(pairs)
            return target
        parts = self._parts(content, now)
        target.clear()
        target.update(parts) if isinstance(target, set) else target.extend(parts)
        return target

    def _parts(self, content: list[Any], now: Any) -> list[Any]:
        """The parts of a list or the like, or of a set, whose order means nothing."""
        listed = list(now) if isinstance(now, (list, collections.deque)) else []
        listed += [MISSING] * (len(content) - len(listed))
        return [self._part(part, place) for part, place in zip(content, listed, strict=False)]

    def _enum(self, value: tuple[str, str, str], current: Any) -> Any:
        kind = _at(value[0], value[1])
        return current if kind is None else kind[value[2]]

    def _value(self, value: tuple[str, tuple[Any, ...]], current: Any) -> Any:
        return made_of_parts(*value)

    def _tuple(self, value: tuple[str, str, list[Any]], current: Any) -> Any:
        module, name, content = value
        parts = self._parts(content, list(current) if isinstance(current, tuple) else [])
        return tuple.__new__(_at(module, name), parts)

    # -- tensors and arrays -----------------------------------------------------------------------

    def _elements(self, value: tuple[Any, ...], current: Any) -> Any:
        number, extent, strides, data = value
        saved = codec.loads(data)
        target = self._target(number, lambda found: _alike(found, saved))
        if target is MISSING:
            target = saved
            if number in self._memory_of:
                target = self._in_memory(self._memory_of[number], extent[2], strides, saved)
        else:
            _write(target, saved)
        self._made[number] = target
        return target

    def _in_memory(self, memory: _Memory, first: int, strides: tuple[int, ...], saved: Any) -> Any:
        """One that shares elements with others."""
        if memory.content is None:
            device = saved.device if isinstance(saved, torch.Tensor) else "cpu"
            memory.content = torch.empty(memory.high - memory.low, dtype=torch.uint8, device=device)
        there = in_memory(memory.content, first - memory.low, strides, saved)
        if there is None:
            return saved
        _write(there, saved)
        return there.requires_grad_(saved.requires_grad) if isinstance(saved, torch.Tensor) else there

    def _shared_memories(self, saved: Iterable[Any]) -> dict[int, _Memory]:
        """Where those lie that share elements with others, by number."""
        values = {value[0]: value for one in saved for value in _elements_in(one)}
        extents: list[tuple[int, int, int, int]]
        extents = [(*extent, number) for number, extent, _, _ in values.values() if extent is not None]
        found: dict[int, _Memory] = {}
        for low, high, parts in together(extents):
            if len(parts) > 1:
                there = (self._memory_around(number, first, values[number][2]) for number, first in parts)
                memory = next(filter(None, there), None) or _Memory(low // ALIGNED * ALIGNED, high)
                found |= {number: memory for number, _ in parts}
        return found

    def _memory_around(self, number: int, first: int, strides: tuple[int, ...]) -> _Memory | None:
        """That of an object that is there, whose first element had this address."""
        target = self._objects.get(number)
        if not (isinstance(target, torch.Tensor) or is_array(target)) or strides_of(target) != tuple(strides):
            return None
        around = bytes_around(target)
        if around is None:
            return None
        content, begin = around
        return _Memory(first - begin, first - begin + content.numel(), content)

    def _sharded(self, value: tuple[int, Any], current: Any) -> Any:
        """A DTensor: one that is there, or one like that which stands in its place."""
        number, local = value
        target = self._target(number, lambda found: isinstance(found, DTensor))
        there = current if target is MISSING else target
        if not isinstance(there, DTensor):
            raise UnsupportedError("a DTensor that has come about while the job was training, in another process")
        part = self.read(local, there._local_tensor)
        if target is MISSING or part is not target._local_tensor:
            target = DTensor(part, there._spec, requires_grad=there.requires_grad)
        self._made[number] = target
        return target

    # -- what has attributes ----------------------------------------------------------------------

    def _generator(self, value: tuple[int, tuple[str, str], Any], current: Any) -> Any:
        number, (library, of), state = value
        target = self._target(number, lambda found: as_stateful(found) is not None and _made_of(found) == (library, of))
        if target is MISSING:
            target = generators.make(library, of) if library else current
        generator = None if target is MISSING else as_stateful(target)
        if generator is not None:
            generator.load_state_dict(state)
            self._made[number] = target
        return target

    def _stateful(self, value: tuple[int, Any], current: Any) -> Any:
        number, state = value
        target = self._target(number, lambda found: hasattr(found, "load_state_dict"))
        target = current if target is MISSING else target
        if hasattr(target, "load_state_dict"):
            target.load_state_dict({k: v for k, v in state.items() if not isinstance(v, codec.StandIn)})
            self._made[number] = target
        return target

    def _function(self, value: tuple[int, list[Any]], current: Any) -> Any:
        number, cells = value
        target = self._target(number, lambda found: isinstance(found, types.FunctionType))
        if target is MISSING and isinstance(current, types.FunctionType):
            target = current
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
        target = self._target(number, lambda found: type(found).__qualname__ == name)
        kind = _at(module, name)
        if target is MISSING and not isinstance(kind, type):
            return current
        now = current if target is MISSING and type(current) is kind else target
        before = {} if now is MISSING else dict(state_of(now))
        if target is MISSING:
            target = kind.__new__(kind)
        self._made[number] = target
        for gone in state_of(target).keys() - content.keys():
            object.__delattr__(target, gone)
        for attribute, saved in content.items():
            then = self.read(saved, before.get(attribute, MISSING))
            if then is not MISSING:
                object.__setattr__(target, attribute, then)
        if items is not None:
            there = now if isinstance(now, dict) else {}
            parts: list[Any]
            if isinstance(target, dict):
                parts = [(key, self._part(part, there.get(key, MISSING))) for key, part in items]
            else:
                parts = self._parts(items, now)
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


def _new_container(kind: str, extra: Any) -> Any:
    if kind == "deque":
        return collections.deque(maxlen=extra)
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(extra))
    return {"list": list, "dict": dict, "set": set}.get(kind, getattr(collections, kind, dict))()


def _made_of(generator: object) -> tuple[str, str]:
    return generators.made_of(generator) or ("", "")


def _at(module: str, name: str) -> Any:
    """A class or function of a module that has been imported; None if there is no such."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _elements_in(saved: Any) -> Iterator[tuple[Any, ...]]:
    """What was written of tensors and arrays, in a value."""
    if isinstance(saved, codec.StandIn):
        if saved.kind == "elements":
            yield saved.value
        else:
            yield from _elements_in(saved.value)
    elif isinstance(saved, (list, tuple, set, frozenset)):
        for part in saved:
            yield from _elements_in(part)
    elif isinstance(saved, dict):
        for part in saved.values():
            yield from _elements_in(part)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _alike(one: Any, other: Any) -> bool:
    """Whether ``one`` can be written to, and has the form of ``other``."""
    if isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor) or one.is_inference():
            return False
        return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return is_array(one) and one.shape == other.shape and one.dtype == other.dtype and bool(one.flags.writeable)


def _write(there: Any, saved: Any) -> None:
    """Only if something has changed, which a version counter would say."""
    if not isinstance(there, torch.Tensor):
        there[...] = saved
    elif not torch.equal(there.detach(), saved.detach()):
        with torch.no_grad():
            there.detach().copy_(saved)


def _is(one: object, other: object) -> bool:
    return one is other
