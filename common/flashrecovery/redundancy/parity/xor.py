"""XOR of plain buffers: native code compiled once by the system's compiler, or numpy with the same bytes.

Nothing here knows torch. The library (``native/parity.cpp``) needs nothing but the C library; it is compiled on the
machine where it runs and kept in the cache directory (``$FLASHRECOVERY_CACHE``, else ``~/.cache/flashrecovery``) under
a name that contains all it depends on. The instruction set is chosen when it is loaded, so a cache may be shared by
machines with different processors. Calls go through ctypes: no copies, and the interpreter lock is free meanwhile.

Buffers are whatever has the buffer protocol and is contiguous: bytes, bytearray, mmap, memoryview, arrays.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from flashrecovery.errors import BuildError
from flashrecovery.terminal import say

ROW = 64
"""Bytes; the unit by which the second parity shifts its columns."""
Buffer = Any
"""Anything contiguous with the buffer protocol (``collections.abc.Buffer`` of Python 3.12)."""

_SOURCE = Path(__file__).parent / "native" / "parity.cpp"
_FLAGS = ("-shared", "-fPIC", "-std=c++17", "-O3", "-fvisibility=hidden")
_COMPILE_SECONDS = 300
_NUMPY_PIECE = 1 << 18  # of temporaries, which then stay in the cache


class Xor(Protocol):
    """The arithmetic of parity. All buffers of a call have the same length unless something else is said; a buffer of
    another length is a ValueError, one that may not be written to a BufferError."""

    name: str

    def into(self, a: Buffer, b: Buffer) -> None:
        """``a ^= b``."""

    def delta(self, out: Buffer, a: Buffer, b: Buffer) -> bool:
        """``out = a ^ b``; whether they differ. ``out`` may be one of them."""

    def stream(self, out: Buffer, a: Buffer, b: Buffer) -> None:
        """``out = a ^ b``, where ``out`` is neither of them and is not read soon."""

    def many(self, total: Buffer, sources: Sequence[Buffer]) -> None:
        """``total ^= sources[0] ^ sources[1] ^ ...``."""

    def unzip(self, p: Buffer, q: Buffer, distance: int) -> None:
        """Two columns a and b from ``p[r] = a[r] ^ b[r]`` and ``q[r] = a[r] ^ b[r - distance]``, r a row of 64 bytes.
        Afterwards b lies in ``p`` and a in ``q``. ``distance`` > 0 rows; whole rows only."""


class _View(ctypes.Structure):
    """CPython's Py_buffer, part of its stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_View),)
_release.restype = None


class _Held:
    """A buffer's memory, held until the block ends. ``writable``: raises BufferError if it is not."""

    def __init__(self, buffer: Buffer, writable: bool = False) -> None:
        self._buffer, self._flags, self._view = buffer, int(writable), _View()

    def __enter__(self) -> _View:
        _get(self._buffer, ctypes.byref(self._view), self._flags)  # raises by itself: pythonapi looks for errors
        return self._view

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _release(ctypes.byref(self._view))


class NativeXor:
    """By the compiled library."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._into = library.flashrecovery_xor_into
        self._into.argtypes, self._into.restype = (pointer, pointer, size), None
        self._delta = library.flashrecovery_xor
        self._delta.argtypes, self._delta.restype = (pointer, pointer, pointer, size), ctypes.c_int
        self._stream = library.flashrecovery_xor_stream
        self._stream.argtypes, self._stream.restype = (pointer, pointer, pointer, size), None
        self._many = library.flashrecovery_xor_many
        self._many.argtypes, self._many.restype = (pointer, ctypes.POINTER(pointer), size, size), None
        self._unzip = library.flashrecovery_unzip
        self._unzip.argtypes, self._unzip.restype = (pointer, pointer, size, size), None

    def into(self, a: Buffer, b: Buffer) -> None:
        with _Held(a, True) as to, _Held(b) as source:
            self._into(to.buf, source.buf, _length(to, source))

    def delta(self, out: Buffer, a: Buffer, b: Buffer) -> bool:
        with _Held(out, True) as to, _Held(a) as left, _Held(b) as right:
            return bool(self._delta(to.buf, left.buf, right.buf, _length(to, left, right)))

    def stream(self, out: Buffer, a: Buffer, b: Buffer) -> None:
        with _Held(out, True) as to, _Held(a) as left, _Held(b) as right:
            self._stream(to.buf, left.buf, right.buf, _length(to, left, right))

    def many(self, total: Buffer, sources: Sequence[Buffer]) -> None:
        with ExitStack() as held:
            to = held.enter_context(_Held(total, True))
            views = [held.enter_context(_Held(source)) for source in sources]
            addresses = (ctypes.c_void_p * len(views))(*[view.buf for view in views])
            self._many(to.buf, addresses, len(views), _length(to, *views))

    def unzip(self, p: Buffer, q: Buffer, distance: int) -> None:
        with _Held(p, True) as first, _Held(q, True) as second:
            self._unzip(first.buf, second.buf, distance, _rows(_length(first, second), distance))


class NumpyXor:
    """By numpy, where there is no compiler: slower, the same bytes."""

    name = "numpy"

    @cached_property
    def _np(self) -> Any:
        import numpy  # seldom needed, and slow to import

        return numpy

    def into(self, a: Buffer, b: Buffer) -> None:
        to, source = self._arrays(a, b)
        self._np.bitwise_xor(to, source, out=to)

    def delta(self, out: Buffer, a: Buffer, b: Buffer) -> bool:
        to, left, right = self._arrays(out, a, b)
        differ = False
        for start in range(0, len(to), _NUMPY_PIECE):
            piece = slice(start, start + _NUMPY_PIECE)
            self._np.bitwise_xor(left[piece], right[piece], out=to[piece])
            differ = differ or bool(to[piece].any())
        return differ

    def stream(self, out: Buffer, a: Buffer, b: Buffer) -> None:
        to, left, right = self._arrays(out, a, b)
        self._np.bitwise_xor(left, right, out=to)

    def many(self, total: Buffer, sources: Sequence[Buffer]) -> None:
        to, *arrays = self._arrays(total, *sources)
        for start in range(0, len(to), _NUMPY_PIECE):
            piece = to[start : start + _NUMPY_PIECE]
            for source in arrays:
                self._np.bitwise_xor(piece, source[start : start + _NUMPY_PIECE], out=piece)

    def unzip(self, p: Buffer, q: Buffer, distance: int) -> None:
        flat_b, flat_a = self._arrays(p, q, writable=2)
        rows = _rows(len(flat_a), distance)
        a, b = flat_a.reshape(rows, ROW), flat_b.reshape(rows, ROW)
        b[:distance] ^= a[:distance]
        for start in range(distance, rows, distance):  # a run of `distance` rows depends on the one before only
            run = slice(start, min(start + distance, rows))
            a[run] ^= b[start - distance : run.stop - distance]
            b[run] ^= a[run]

    def _arrays(self, *buffers: Buffer, writable: int = 1) -> list[Any]:
        """As bytes; the first ``writable`` must be."""
        arrays = [self._np.frombuffer(b, self._np.uint8) if memoryview(b).nbytes else self._empty for b in buffers]
        if any(memoryview(b).readonly for b in buffers[:writable]):
            raise BufferError("this buffer may not be written to")
        _same([len(array) for array in arrays])
        return arrays

    @cached_property
    def _empty(self) -> Any:
        return self._np.empty(0, self._np.uint8)


_lock = threading.Lock()
_chosen: Xor | None = None


def xor(notice: Callable[[str], None] | None = None) -> Xor:
    """The arithmetic for this machine: native, and numpy's if it cannot be compiled, which ``notice`` (standard error)
    is reported once. Compiles at most once (takes a second)."""
    global _chosen
    with _lock:
        if _chosen is None:
            try:
                _chosen = NativeXor(ctypes.CDLL(str(build())))
            except (BuildError, OSError) as error:
                (notice or say)(f"parity is computed by numpy, which is slower: {error}")
                _chosen = NumpyXor()
        return _chosen


def build() -> Path:
    """Compile the library if it is not in the cache yet; its path. Many processes may ask at once.

    Raises BuildError without a compiler or a writable cache."""
    target = _target()
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # released with the file, also if the process dies
            if not target.exists():
                _compile(target)
    except OSError as error:
        raise BuildError(f"cannot write the build cache {target.parent}: {error}; set FLASHRECOVERY_CACHE") from error
    return target


def _target() -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes())
    for part in (*_FLAGS, platform.machine(), *platform.libc_ver()):
        digest.update(b"\0" + part.encode())
    cache = os.environ.get("FLASHRECOVERY_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "flashrecovery")
    return Path(cache) / "parity" / digest.hexdigest()[:16] / "parity.so"


def _compile(target: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler ({compiler!r} not found): install g++, or set CXX")
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    said = ""
    try:
        # A C library without indirect functions (musl) cannot choose when it loads: one instruction set then.
        for extra in ((), ("-DFLASHRECOVERY_ONE_TARGET",)):
            command = [compiler, *_FLAGS, *extra, str(_SOURCE), "-o", str(scratch)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
            if done.returncode == 0:
                os.replace(scratch, target)
                return
            said = f"{' '.join(command)}\n{done.stderr[-4000:]}"
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"compiling the arithmetic of parity took over {_COMPILE_SECONDS} s: start one job alone, which leaves it "
            "built"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    raise BuildError(f"compiling the arithmetic of parity failed\n{said}")


def _length(*views: _View) -> int:
    return _same([view.len for view in views])


def _same(lengths: Sequence[int]) -> int:
    if len(set(lengths)) != 1:
        raise ValueError(f"buffers of {lengths} bytes: equal lengths are allowed")
    return lengths[0]


def _rows(nbytes: int, distance: int) -> int:
    if nbytes % ROW or distance < 1:
        raise ValueError(f"{nbytes} bytes, distance {distance}: whole rows of {ROW} bytes and at least 1 are allowed")
    return nbytes // ROW
