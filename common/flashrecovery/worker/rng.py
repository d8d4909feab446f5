"""The random number streams of this process: torch (CPU and CUDA), Python's ``random``, numpy's global generator.

Generators that a script makes for itself are its own objects; register them with ``state_dict``/``load_state_dict``.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any

import torch
import xxhash


def capture_rng() -> dict[str, Any]:
    """The state of every global stream, as plain values and CPU tensors. Restored by :func:`restore_rng`."""
    return _plain(*_raw())


def restore_rng(state: dict[str, Any]) -> None:
    """Bring every stream back to ``state``. Streams that it does not name stay as they are."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    numpy = _numpy_random()
    if numpy is not None and "numpy" in state:
        import numpy as np

        kind, key, position, has_gauss, cached = state["numpy"]
        _NUMPY.forget()
        numpy.set_state((kind, np.frombuffer(key, dtype=np.uint32).copy(), position, has_gauss, cached))
    if "cuda" in state:
        if not torch.cuda.is_initialized():
            torch.cuda.init()
        for generator, saved in zip(torch.cuda.default_generators, state["cuda"], strict=True):
            generator.set_state(saved)


def rng_fingerprint() -> int:
    """A number that changes when any of the streams has been drawn from. Takes about 20 us."""
    digest = xxhash.xxh3_64(torch.get_rng_state().numpy().data)
    numpy = _numpy_random()
    if numpy is not None:
        _kind, key, position, has_gauss, cached = _NUMPY.state(numpy)
        digest.update(key)
        digest.update(f"{position}{has_gauss}{cached}".encode())
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            digest.update(generator.get_state().numpy().data)
    return digest.intdigest() ^ (hash(random.getstate()) & 0xFFFFFFFFFFFFFFFF)


class RngWatch:
    """Tells whether the streams have been drawn from since it was made; cheaper than :func:`capture_rng`."""

    def __init__(self) -> None:
        self._raw = _raw()

    def changed(self) -> bool:
        torch_state, python, numpy, cuda = _raw()
        old_torch, old_python, old_numpy, old_cuda = self._raw
        return not (
            torch.equal(torch_state, old_torch)
            and python == old_python
            and _equal_numpy(numpy, old_numpy)
            and len(cuda) == len(old_cuda)
            and all(map(torch.equal, cuda, old_cuda))
        )

    def before(self) -> dict[str, Any]:
        """The state at the time this was made, as :func:`capture_rng` gives it."""
        return _plain(*self._raw)


def _raw() -> tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...] | None, list[torch.Tensor]]:
    numpy = _numpy_random()
    return (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else _NUMPY.state(numpy),
        [g.get_state() for g in torch.cuda.default_generators] if torch.cuda.is_initialized() else [],
    )


def _plain(
    torch_state: torch.Tensor,
    python: tuple[Any, ...],
    numpy: tuple[Any, ...] | None,
    cuda: list[torch.Tensor],
) -> dict[str, Any]:
    version, words, gauss = python
    state: dict[str, Any] = {
        "torch": torch_state,
        "python": (version, array.array("I", words).tobytes(), gauss),
    }
    if numpy is not None:
        kind, key, position, has_gauss, cached = numpy
        state["numpy"] = (kind, key.tobytes(), int(position), int(has_gauss), float(cached))
    if cuda:
        state["cuda"] = cuda
    return state


def _equal_numpy(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a[2] == b[2] and a[3:] == b[3:] and (a[1] == b[1]).all())


class _NumpyGlobal:
    """numpy's global stream. ``get_state`` takes 30 us; a look at the generator's memory takes 1 us and tells, in all
    but one case, that nothing has been drawn: a cached gaussian can be drawn without a change there."""

    def __init__(self) -> None:
        self._memory = b""
        self._state: tuple[Any, ...] = ()

    def state(self, numpy: Any) -> tuple[Any, ...]:
        """As ``numpy.random.get_state()``; not to be changed."""
        memory = self._look(numpy)
        if not self._state or not memory or memory != self._memory or self._state[3]:
            self._state = numpy.get_state()
            self._memory = memory
        return self._state

    def forget(self) -> None:
        """The stream has been set."""
        self._state = ()

    @staticmethod
    def _look(numpy: Any) -> bytes:
        """The memory of a Mersenne Twister (624 words and the position); empty for any other generator."""
        generator: Any = getattr(numpy.mtrand._rand, "_bit_generator", None)
        if type(generator).__name__ != "MT19937":
            return b""
        return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


_NUMPY = _NumpyGlobal()


def _numpy_random() -> Any:
    """``numpy.random`` if something has imported it already."""
    return sys.modules.get("numpy.random")
