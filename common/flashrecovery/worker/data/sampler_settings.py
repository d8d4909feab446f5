"""What a script's own samplers are set to, from which the order of samples may follow: numbers, texts, small containers
and tensors among the attributes of the samplers, and of objects of the script's that these hold (a curriculum)."""

from __future__ import annotations

import collections
import enum
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec
from flashrecovery.worker.local_state.fingerprints import PLAIN, plain_mark
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.preimport.own_files import FRAMEWORKS
from flashrecovery.worker.script_text.script_frames import is_own

SamplerValues = dict[tuple[int, str], Any]
"""(which of the script's own samplers, name of an attribute) -> its value; what is not plain, encoded, as a tuple."""

LIMIT_BYTES = 64 << 10
"""Larger containers and tensors do not come back."""
LIMIT_LENGTH = 4096
_LOOKED_AT = 512
"""Elements of a longer list."""
_LOOP = -1
"""The place of the loop's own numbers."""
_LOOP_NUMBERS = ("global_step", "epoch")
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_NO_STATE = (Dataset, DataLoader, Sampler, torch.nn.Module, type)


SamplerRows = list[tuple[int, str, Any]]
"""The same as plain values, as rank-local state has it."""


def rows_of(values: SamplerValues) -> SamplerRows:
    return [(place, name, value) for (place, name), value in values.items()]


def values_of(rows: Iterable[tuple[int, str, Any]]) -> SamplerValues:
    """The inverse of :func:`rows_of`."""
    return {(place, name): value for place, name, value in rows}


class SetSamplers:
    """Args:
    samplers: all of a loader's; the script's own among them count.
    loop_state: what gives the object that has the numbers of the script's loop, if samplers may look at them.
    """

    def __init__(self, samplers: Iterable[Any], loop_state: Callable[[], Any] | None = None) -> None:
        self._own = [s for s in samplers if has_own_values(s, installed=loop_state is not None)]
        self.read_on = any(_is_lazy(type(s)) for s in self._own)
        """They may look at what they are set to when an epoch has begun."""
        for sampler in [*self._own]:
            held = [value for value in vars(sampler).values() if _is_held(value)]
            self._own += [value for value in held if not any(value is known for known in self._own)]
        self._loop_state = loop_state if self._own else None
        self._large: set[tuple[int, str]] = set()

    @property
    def any(self) -> bool:
        """Whether there are samplers of the script's."""
        return bool(self._own)

    def leave(self) -> None:
        """No values from now on."""
        self._own, self._loop_state, self.read_on = [], None, False

    def values(self) -> SamplerValues:
        """As they are now."""
        found: SamplerValues = {}
        for place, thing in enumerate(self._own):
            for name, value in vars(thing).items():
                if type(value) in PLAIN:
                    found[place, name] = value
                elif (place, name) not in self._large and (written := _written(value)) is not None:
                    if len(written[-1]) > 2 * LIMIT_BYTES:
                        self._large.add((place, name))  # not tried again
                    else:
                        found[place, name] = written
        return found

    def of_loop(self) -> SamplerValues:
        """The numbers of the loop at which samplers may look."""
        if self._loop_state is None:
            return {}
        state = self._loop_state()
        return {(_LOOP, name): getattr(state, name) for name in _LOOP_NUMBERS}

    def at_start(self) -> SamplerValues:
        """What the order of an epoch that begins now may follow from."""
        return {**self.values(), **self.of_loop()}

    def within_epoch(self) -> SamplerValues:
        """What the order of the samples that are fetched next may follow from."""
        return self.at_start() if self.read_on and self._look_at_loop() else self.values()

    def _look_at_loop(self) -> bool:
        state = self._loop_state() if self._loop_state is not None else None
        held = [value for thing in self._own for value in vars(thing).values()] if state is not None else []
        return any(value is state or getattr(value, "__dict__", {}).get("state") is state for value in held)

    def others(self, kept: SamplerValues) -> dict[tuple[int, str], Any]:
        """What does not come back, since it is none of the values ``kept``, with a mark that changes with it."""
        return {
            (place, name): _mark(value)
            for place, thing in enumerate(self._own)
            for name, value in vars(thing).items()
            if (place, name) not in kept and not isinstance(value, _NO_STATE)
        }

    def name_of(self, key: tuple[int, str]) -> str:
        place, name = key
        return f"{type(self._own[place]).__name__}.{name}"

    def put(self, values: SamplerValues) -> None:
        """Give them these values; those of others stay as they are."""
        for (place, name), value in values.items():
            if place == _LOOP:
                if self._loop_state is not None:
                    setattr(self._loop_state(), name, value)
                continue
            thing = self._own[place]
            if not isinstance(value, tuple):
                setattr(thing, name, value)
                continue
            current = vars(thing).get(name)
            if _written(current) != value:
                new = _read(value, current)
                if new is not current:
                    setattr(thing, name, new)


def has_own_values(sampler: object, *, installed: bool = False) -> bool:
    """Whether a sampler is the script's, and has attributes. ``installed``: or that of any package but a framework."""
    kind = type(sampler)
    own = is_own(kind) or (installed and kind.__module__.partition(".")[0] not in FRAMEWORKS | {"torchdata"})
    return own and hasattr(sampler, "__dict__") and not isinstance(sampler, DataLoader)


def _is_lazy(kind: type) -> bool:
    """Whether a sampler may look at what it is set to when the epoch has begun."""
    method = getattr(kind, "__iter__", None)
    code = getattr(method, "__code__", None)
    if code is None or inspect.isgeneratorfunction(method):
        return True
    return any(inspect.iscode(constant) for constant in code.co_consts)


def _is_held(value: object) -> bool:
    """An object of the script's, which derives from nothing of a framework."""
    if isinstance(value, (*_NO_STATE, *PLAIN, *_CONTAINERS)) or not hasattr(value, "__dict__"):
        return False
    bases = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return is_own(type(value)) and bases.isdisjoint(FRAMEWORKS)


def _written(value: Any) -> tuple[str, ...] | tuple[str, bytes] | None:
    """None for what is large, and for what is nothing of the kind."""
    if isinstance(value, enum.Enum):
        return "enum", type(value).__module__, type(value).__qualname__, value.name
    generator = as_stateful(value)
    if generator is not None:
        return "generator", codec.dumps(generator.state_dict())
    numpy = sys.modules.get("numpy")
    arrays = (numpy.ndarray, numpy.generic) if numpy is not None else ()
    if not isinstance(value, (*_CONTAINERS, torch.Tensor, *arrays)):
        return None
    if getattr(value, "nbytes", 0) > LIMIT_BYTES or (isinstance(value, _CONTAINERS) and len(value) > LIMIT_LENGTH):
        return None
    try:
        return "data", codec.dumps(value.detach() if isinstance(value, torch.Tensor) else value)
    except UnsupportedError:
        return None


def _mark(value: Any) -> Any:
    """A mark of the value: for an array its content, for a long list every n-th element."""
    if isinstance(value, (list, tuple)):
        some = value[:: max(1, len(value) // _LOOKED_AT)]
        return len(value), [repr(part) if type(part) in PLAIN else id(part) for part in some]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return value.shape, zlib.crc32(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data)
    return plain_mark(value)


def _read(written: tuple[Any, ...], current: Any) -> Any:
    """The value that takes the place of ``current``, which may be the same."""
    kind = written[0]
    if kind == "enum":
        found: Any = sys.modules.get(written[1])
        for part in written[2].split("."):
            found = getattr(found, part, None)
        return current if found is None else found[written[3]]
    value = codec.loads(written[1])
    if kind == "data":
        return _in_place(current, value)
    generator = as_stateful(current)
    if generator is not None:
        generator.load_state_dict(value)
    return current


def _in_place(current: Any, value: Any) -> Any:
    """``value``, in the object that others may hold, too, where that is possible."""
    if type(current) is not type(value):
        return value
    if isinstance(value, torch.Tensor):
        if current.shape != value.shape or current.dtype != value.dtype or current.is_inference():
            return value
        with torch.no_grad():
            current.detach().copy_(value)
    elif isinstance(value, (list, collections.deque)):
        current.clear()
        current.extend(value)
    elif isinstance(value, (dict, set)):
        current.clear()
        current.update(value)
    elif hasattr(value, "nbytes"):
        if current.shape != value.shape or current.dtype != value.dtype or not current.flags.writeable:
            return value
        current[...] = value
    else:
        return value
    return current
