"""The random number streams of this process: torch (CPU and CUDA), Python's ``random``, numpy's global generator.

They are looked at several times in every step, so a look has to be cheap: each stream's memory as bytes, which are
compared as they are. Generators that a script makes for itself are its own objects; register them with
``state_dict``/``load_state_dict``.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any, NamedTuple

import torch

_WORDS = 624
"""Words of a Mersenne Twister; its position comes with them."""


class RngState(NamedTuple):
    """All streams at one moment; two moments are equal if nothing has been drawn in between."""

    torch: bytes
    python: bytes
    gauss: float | None
    numpy: tuple[str, bytes, int, int, float] | None
    cuda: tuple[bytes, ...]

    @staticmethod
    def now() -> RngState:
        """Takes about 10 us."""
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return RngState(
            _bytes(torch.default_generator),
            *_PYTHON.state(),
            _NUMPY.state(),
            tuple(map(_bytes, cuda)),
        )

    def plain(self) -> dict[str, Any]:
        """As plain values, for :func:`restore_rng`."""
        return self._asdict()


def restore_rng(state: dict[str, Any]) -> None:
    """Bring every stream back to ``state``. Streams that it does not name stay as they are."""
    torch.default_generator.set_state(_tensor(state["torch"]))
    random.setstate((3, tuple(array.array("I", state["python"])), state["gauss"]))
    numpy = _numpy_random()
    if numpy is not None and state["numpy"] is not None:
        import numpy as np

        kind, key, position, has_gauss, cached = state["numpy"]
        _NUMPY.forget()
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
    """Python's global stream. ``random.getstate()`` makes 625 numbers; CPython has them as 2,500 bytes in one place."""

    def __init__(self) -> None:
        generator: Any = getattr(random, "_inst", None)
        self._generator = generator
        self._address = 0
        if sys.implementation.name == "cpython" and type(generator) is random.Random:
            header = object.__basicsize__
            if generator.__sizeof__() >= header + 4 * (_WORDS + 1):
                self._address = id(generator) + header
        if self._address and self.state() != self._asked():  # another layout than `int index; uint32_t state[624]`
            self._address = 0

    def state(self) -> tuple[bytes, float | None]:
        """624 words and the position, and the second of two gaussians if it has not been drawn yet."""
        if not self._address:
            return self._asked()
        memory = ctypes.string_at(self._address, 4 * (_WORDS + 1))
        return memory[4:] + memory[:4], self._generator.gauss_next

    @staticmethod
    def _asked() -> tuple[bytes, float | None]:
        _version, words, gauss = random.getstate()
        return array.array("I", words).tobytes(), gauss


class _NumpyGlobal:
    """numpy's global stream. ``get_state`` takes 30 us; a look at the generator's memory takes 1 us and tells, in all
    but one case, that nothing has been drawn: a cached gaussian can be drawn without a change there."""

    def __init__(self) -> None:
        self._memory = b""
        self._state: tuple[str, bytes, int, int, float] | None = None

    def state(self) -> tuple[str, bytes, int, int, float] | None:
        """As ``numpy.random.get_state()``, with the key as bytes; None if nothing has imported numpy.random."""
        numpy = _numpy_random()
        if numpy is None:
            return None
        memory = self._look(numpy)
        if self._state is None or not memory or memory != self._memory or self._state[3]:
            kind, key, position, has_gauss, cached = numpy.get_state()
            self._state = (kind, key.tobytes(), int(position), int(has_gauss), float(cached))
            self._memory = memory
        return self._state

    def forget(self) -> None:
        """The stream has been set."""
        self._state = None

    @staticmethod
    def _look(numpy: Any) -> bytes:
        """The memory of a Mersenne Twister (624 words and the position); empty for any other generator."""
        generator: Any = getattr(numpy.mtrand._rand, "_bit_generator", None)
        if type(generator).__name__ != "MT19937":
            return b""
        return ctypes.string_at(generator.ctypes.state_address, 4 * (_WORDS + 1))


def _numpy_random() -> Any:
    """``numpy.random`` if something has imported it already."""
    return sys.modules.get("numpy.random")


_PYTHON = _PythonGlobal()
_NUMPY = _NumpyGlobal()
