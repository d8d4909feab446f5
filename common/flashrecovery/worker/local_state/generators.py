"""Random generators of the script's own: each rank's own state.

They are registered like other objects, or found among the attributes of a data source.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """What can be registered by name."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class _TorchGenerator:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    def load_state_dict(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _PythonGenerator:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        return self._generator.getstate()

    def load_state_dict(self, state: Any) -> None:
        self._generator.setstate(state)


class _NumpyGenerator:
    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def state_dict(self) -> Any:
        return self._bits.state

    def load_state_dict(self, state: Any) -> None:
        self._bits.state = state


def as_stateful(thing: object) -> Stateful | None:
    """``thing`` with ``state_dict`` and ``load_state_dict`` if it is a generator of torch, Python or numpy."""
    if isinstance(thing, torch.Generator):
        return _TorchGenerator(thing)
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):  # which has no state
        return _PythonGenerator(thing)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        if isinstance(thing, numpy.Generator):
            return _NumpyGenerator(thing.bit_generator)
        if isinstance(thing, numpy.RandomState):
            return _NumpyGenerator(thing._bit_generator)
        if isinstance(thing, numpy.BitGenerator):
            return _NumpyGenerator(thing)
    return None


def is_generator(kind: type) -> bool:
    """Whether objects of this class are generators of torch, Python or numpy."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    return issubclass(kind, (torch.Generator, random.Random, *of_numpy)) and not issubclass(kind, random.SystemRandom)


def made_of(generator: object) -> tuple[str, str] | None:
    """What a generator of the same kind can be made of by :func:`make`: the library, and its device or algorithm. None
    if it cannot, or if it is no generator."""
    kind = type(generator)
    if isinstance(generator, torch.Generator):
        return ("torch", str(generator.device)) if kind is torch.Generator else None
    if kind is random.Random:
        return ("random", "")
    numpy = sys.modules.get("numpy.random")
    if numpy is None or not is_generator(kind):
        return None
    bits = getattr(generator, "bit_generator", getattr(generator, "_bit_generator", generator))
    known = getattr(numpy, type(bits).__name__, None) is type(bits)
    return (f"numpy.{kind.__name__}", type(bits).__name__) if known and hasattr(numpy, kind.__name__) else None


def make(library: str, of: str) -> Any:
    """A generator in any state. Arguments as :func:`made_of` gives them."""
    if library == "torch":
        return torch.Generator(of)
    if library == "random":
        return random.Random()
    numpy = sys.modules["numpy.random"]
    bits, name = getattr(numpy, of)(), library.removeprefix("numpy.")
    return bits if name == of else getattr(numpy, name)(bits)


def generators_of(things: Iterable[Any]) -> list[Stateful]:
    """The generators among the attributes of ``things``, each once, in a fixed order."""
    seen: list[Any] = []
    found: list[Stateful] = []
    for thing in things:
        # ``generator`` may be a property; other attributes are looked at without running any code.
        for value in (getattr(thing, "generator", None), *getattr(thing, "__dict__", {}).values()):
            generator = as_stateful(value)
            if generator is not None and not any(value is s for s in seen):
                seen.append(value)
                found.append(generator)
    return found
