"""The random number streams of this process: torch (CPU and CUDA), Python's ``random``, numpy's global generator.

They are looked at several times in every step, so a look has to be cheap: as long as a glance at their memory shows no
change, the state is the one that was taken last. Generators that a script makes for itself are its own objects;
register them with ``state_dict``/``load_state_dict``.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any, NamedTuple

import torch

from flashrecovery.worker.local_state.version_counters import glance_at_random

_WORDS = 624
"""Words of a Mersenne Twister; its position comes with them."""


class RngState(NamedTuple):
    """All streams at one moment; two moments are equal if nothing has been drawn in between."""

    torch: bytes
    python: bytes
    gauss: float | None
    numpy: NumpyState | None
    cuda: tuple[bytes, ...]

    @staticmethod
    def now() -> RngState:
        """The same object as before if nothing has been drawn."""
        return _LAST.state()

    def plain(self) -> dict[str, Any]:
        """As plain values, for :func:`restore_rng`."""
        return self._asdict()

    def streams_changed_in(self, other: RngState) -> dict[str, Any]:
        """As :meth:`plain`, without the streams that are the same in ``other``."""
        python = (self.python, self.gauss) != (other.python, other.gauss)
        same = {name for name, value in self.plain().items() if value == getattr(other, name)}
        same -= {"python", "gauss"} if python else set()
        return {name: value for name, value in self.plain().items() if name not in same}

    def drawn_until(self, other: RngState) -> tuple[int, ...]:
        """How many numbers each stream has given between this moment and ``other``, modulo the length of its state:
        torch, Python, numpy. None of CUDA's."""
        return tuple((end - start) % _WORDS for start, end in zip(self._positions(), other._positions(), strict=True))

    def _positions(self) -> tuple[int, int, int]:
        left = int.from_bytes(self.torch[8:12], sys.byteorder)  # of ATen's mt19937: how many are left of this state
        python = int.from_bytes(self.python[-4:], sys.byteorder)
        return -left, python, 0 if self.numpy is None else self.numpy[2]


def restore_rng(state: dict[str, Any]) -> None:
    """Bring every stream back to ``state``. Streams that it does not name stay as they are."""
    _LAST.forget()
    torch.default_generator.set_state(_tensor(state["torch"]))
    random.setstate((3, tuple(array.array("I", state["python"])), state["gauss"]))
    numpy = _numpy_random()
    if numpy is not None and state["numpy"] is not None:
        import numpy as np

        kind, key, position, has_gauss, cached = state["numpy"]
        numpy.set_state((kind, np.frombuffer(key, dtype=np.uint32).copy(), position, has_gauss, cached))
    if state["cuda"]:
        if not torch.cuda.is_initialized():
            torch.cuda.init()
        for generator, saved in zip(torch.cuda.default_generators, state["cuda"], strict=True):
            generator.set_state(_tensor(saved))


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _PythonGlobal:
    """Python's global stream. ``random.getstate()`` makes 625 numbers; CPython has them as 2,500 bytes in one place.

    Attributes:
        address: of ``int index; uint32_t state[624]``; 0 if this Python has another layout.
    """

    def __init__(self) -> None:
        generator: Any = getattr(random, "_inst", None)
        self._generator = generator
        self.address = 0
        if sys.implementation.name == "cpython" and type(generator) is random.Random:
            header = object.__basicsize__
            if generator.__sizeof__() >= header + 4 * (_WORDS + 1):
                self.address = id(generator) + header
        if self.address and self.state() != self._asked():
            self.address = 0

    @property
    def gauss(self) -> float | None:
        """The second of two gaussians, if it has not been drawn yet."""
        value: float | None = self._generator.gauss_next
        return value

    def state(self) -> tuple[bytes, float | None]:
        """624 words and the position, and ``gauss``."""
        if not self.address:
            return self._asked()
        memory = ctypes.string_at(self.address, 4 * (_WORDS + 1))
        return memory[4:] + memory[:4], self.gauss

    @staticmethod
    def _asked() -> tuple[bytes, float | None]:
        _version, words, gauss = random.getstate()
        return array.array("I", words).tobytes(), gauss


NumpyState = tuple[str, bytes, int, int, float]
"""As ``numpy.random.get_state()``, with the key as bytes."""


class _NumpyGlobal:
    """numpy's global stream."""

    def __init__(self) -> None:
        self._generator: object = None
        self._address = 0

    @property
    def address(self) -> int:
        """The address of ``uint32_t key[624]; int pos``; 0 if numpy.random is not loaded or has another kind of
        generator."""
        numpy = _numpy_random()
        generator: Any = None if numpy is None else getattr(numpy.mtrand._rand, "_bit_generator", None)
        if generator is not self._generator:
            self._generator = generator
            known = type(generator).__name__ == "MT19937"
            self._address = generator.ctypes.state_address if known else 0
        return self._address

    def state(self) -> NumpyState | None:
        """None if nothing has imported numpy.random."""
        numpy = _numpy_random()
        if numpy is None:
            return None
        kind, key, position, has_gauss, cached = numpy.get_state()
        return kind, key.tobytes(), int(position), int(has_gauss), float(cached)


class _Last:
    """The state that was taken last, and what a glance at the streams showed then."""

    def __init__(self) -> None:
        self._glance: _Glance | None = None
        self._state: RngState | None = None

    def state(self) -> RngState:
        now, then, old = self._look(), self._glance, self._state
        if now is None or then is None or old is None:
            cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
            new = RngState(_bytes(torch.default_generator), *_PYTHON.state(), _NUMPY.state(), tuple(map(_bytes, cuda)))
        else:
            # numpy's second gaussian is drawn without a change of the memory that is looked at
            same_numpy = now.numpy == then.numpy and (old.numpy is None or not old.numpy[3])
            if same_numpy and now == then:
                return old
            python, gauss = (old.python, old.gauss) if now.python == then.python else _PYTHON.state()
            new = RngState(
                old.torch if now.torch == then.torch else _bytes(torch.default_generator),
                python,
                gauss,
                old.numpy if same_numpy else _NUMPY.state(),
                now.cuda,
            )
        self._glance, self._state = now, new
        return new

    @staticmethod
    def _look() -> _Glance | None:
        """Equal to an earlier look if nothing has been drawn in between; None if that is unknown."""
        numpy = _NUMPY.address
        if not _PYTHON.address or (not numpy and _numpy_random() is not None):
            return None
        words = glance_at_random(_PYTHON.address, numpy)
        if words is None:
            return None
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return _Glance(words[0], (words[1], _PYTHON.gauss), words[2], tuple(map(_bytes, cuda)))

    def forget(self) -> None:
        """The streams have been set."""
        self._state = None


class _Glance(NamedTuple):
    """What shows for each stream whether it has been drawn from."""

    torch: bytes
    python: tuple[bytes, float | None]
    numpy: bytes
    cuda: tuple[bytes, ...]


def _numpy_random() -> Any:
    """``numpy.random`` if something has imported it already."""
    return sys.modules.get("numpy.random")


_PYTHON = _PythonGlobal()
_NUMPY = _NumpyGlobal()
_LAST = _Last()
