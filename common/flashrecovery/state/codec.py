"""Plain state to bytes and back: compact, fast, and safe to read from another process.

``dumps`` is pickle restricted to an allow list of types, so rank-local state (a few KB of counters, RNG states,
cursors) takes tens of microseconds; ``loads`` refuses every global that ``dumps`` does not write, so a byte
string can build data and nothing else. What is not on the list is refused by name, with the place where it
stands.

Allowed: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range,
OrderedDict, Counter, deque, torch.Tensor (plain, strided), torch.dtype, torch.device, torch.Size, numpy
arrays and scalars of plain dtypes. Only values count: equal states give equal bytes (dicts and sets in equal
order), so encoded states can be compared by digest; an object that appears twice comes back as two. For what is not on
the list a caller may give a :class:`StandIn`, which comes back as such.

``encode`` copies no large tensor or array: they stay where they are, beside the pickled rest, until they are read.
``loads`` reads both forms.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import io
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from flashrecovery.errors import ProtocolError, UnsupportedError
from flashrecovery.state.exact import exact_contiguous


@dataclass(frozen=True)
class StandIn:
    """What is written in the place of an object that is not plain. ``value`` may hold such objects, too."""

    kind: str
    value: Any


def dumps(obj: Any, stand_in: Callable[[Any], StandIn | None] | None = None) -> bytes:
    """``obj`` as bytes. ``stand_in`` is asked for everything but the built-in types; None: as without it.

    Raises UnsupportedError naming the type (and where it stands) that is not plain state.
    """
    return _pickled(obj, stand_in, None)


def encode(obj: Any) -> EncodedState:
    """``obj``, of which large tensors and arrays are not copied. Raises UnsupportedError like :func:`dumps`."""
    found: list[pickle.PickleBuffer] = []
    skeleton = _pickled(obj, None, found.append)
    return EncodedState(skeleton, tuple(buffer.raw() for buffer in found))


class StateMark(NamedTuple):
    """What an encoded state was like; equal for equal states. ``nbytes``: of all of it."""

    skeleton: bytes
    digests: tuple[bytes, ...]
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether ``skeleton`` is all of the encoded state."""
        return not self.digests


@dataclass(frozen=True)
class EncodedState:
    """An encoded state. It is to be read before anybody else can write to the tensors that it was made of.

    Attributes:
        skeleton: all but the content of large tensors and arrays.
        buffers: that content, where it lies; memory on a device has been copied.
        end: bytes that follow the state.
    """

    skeleton: bytes
    buffers: tuple[memoryview, ...]
    end: bytes = b""

    @property
    def parts(self) -> Sequence[bytes | memoryview]:
        """The bytes that :func:`loads` reads, one part after another. What lies at the beginning changes least."""
        if not self.buffers:
            return [self.skeleton, self.end]
        lengths = struct.pack(f"<{len(self.buffers)}Q", *(buffer.nbytes for buffer in self.buffers))
        head = _HEAD.pack(_MAGIC, len(self.buffers), len(self.skeleton))
        return [head + lengths, *self.buffers, self.skeleton + self.end]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts))

    def tobytes(self) -> bytes:
        return b"".join(self.parts)

    def mark(self) -> StateMark:
        """Equal for equal states."""
        return StateMark(self.skeleton, tuple(map(xxhash.xxh3_128_digest, self.buffers)), self.nbytes)


_MAGIC = b"FRstate1"
_HEAD = struct.Struct("<8sQQ")
"""Before a state with buffers: magic, number of buffers, bytes of the skeleton. Then their lengths, they themselves,
and the skeleton."""
OUT_OF_BAND = 16 << 10
"""Bytes from which on a tensor's or array's content is left where it lies."""


def _split(data: memoryview) -> tuple[memoryview, list[memoryview]]:
    """The skeleton and the buffers. Raises ValueError or struct.error if they do not fit."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        return data, []
    _, number, nbytes = _HEAD.unpack_from(data)
    at = _HEAD.size + 8 * number
    if at > len(data):
        raise ValueError("it has been cut off")
    buffers = []
    for length in struct.unpack_from(f"<{number}Q", data, _HEAD.size):
        buffers.append(data[at : at + length])
        at += length
    if at + nbytes > len(data):
        raise ValueError("it has been cut off")
    return data[at : at + nbytes], buffers


def _pickled(
    obj: Any,
    stand_in: Callable[[Any], StandIn | None] | None,
    beside: Callable[[pickle.PickleBuffer], None] | None,
) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out, stand_in, beside).dump(obj)
    except _Refused as refused:
        where = "".join(_path_to(obj, refused.culprit))
        raise UnsupportedError(f"{refused.reason}{f' (at [...]{where})' if where else ''}") from None
    except (RecursionError, ValueError) as e:
        # Fast mode reports a cycle as ValueError.
        raise UnsupportedError(f"the state contains itself or is nested too deeply to be encoded: {e}") from e
    return out.getvalue()


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The object that ``dumps`` was given; tensors on the device they were on.

    Raises ProtocolError if ``data`` is damaged or names anything that ``dumps`` does not write.
    """
    try:
        skeleton, buffers = _split(memoryview(data))
        _check(skeleton)
        return _Unpickler(io.BytesIO(skeleton), buffers=buffers).load()
    except (pickle.UnpicklingError, EOFError, *_DAMAGE) as e:
        raise ProtocolError(f"not an encoded state: {e}") from e


# What building values from damaged bytes can raise; a damaged length may ask for more memory than there is.
_DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError, MemoryError),
    struct.error,
)


_MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Instructions that ``dumps`` does not write, and for which pickle gets memory up to whatever number they name."""


def _check(data: memoryview) -> None:
    """Pickle would get memory for any length that damaged bytes name; this reads no further than they go."""
    for instruction, _, _ in pickletools.genops(bytes(data)):
        if instruction.name in _MEMO:
            raise pickle.UnpicklingError(f"{instruction.name} is not allowed")


class _Refused(Exception):
    def __init__(self, culprit: Any, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.reason = reason


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        out: io.BytesIO,
        stand_in: Callable[[Any], StandIn | None] | None,
        beside: Callable[[pickle.PickleBuffer], None] | None,
    ) -> None:
        super().__init__(out, protocol=5, buffer_callback=beside)
        self._stand_in = stand_in
        self._beside = beside is not None
        # No memo: it would make the bytes depend on which equal values happen to be one object.
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        # The C pickler asks only for what is not one of its own exact built-in types.
        if self._stand_in is not None and type(obj) is not StandIn and id(obj) not in _CONSTRUCTOR_IDS:
            found = self._stand_in(obj)
            if found is not None:
                return StandIn, (found.kind, found.value)
        content = _CONTENT.get(type(obj))
        if content is not None:
            return content(obj, self._content)
        reduce = _REDUCERS.get(type(obj))
        if reduce is not None:
            return reduce(obj)
        if isinstance(obj, np.generic):
            return _reduce_numpy_scalar(obj)
        if isinstance(obj, type) or callable(obj):
            if id(obj) in _CONSTRUCTOR_IDS:
                return NotImplemented  # pickled by name: it is what rebuilds the object around it
            raise _Refused(obj, f"{obj!r} is code, not plain state")
        kind = type(obj)
        raise _Refused(
            obj,
            f"a value of type {kind.__module__}.{kind.__qualname__} is not plain state and cannot be encoded",
        )

    def _content(self, address: int, nbytes: int, owner: Any) -> Any:
        """What lies in memory that ``owner`` keeps."""
        if not self._beside or nbytes < OUT_OF_BAND:
            return ctypes.string_at(address, nbytes) if nbytes else b""
        where: Any = np.asarray(_Memory(address, nbytes, owner))
        return pickle.PickleBuffer(where)


class _Memory:
    """Memory as an array of bytes. That it is read does not show: ``numpy()`` of a tensor would forbid to resize it."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed") from None


# -- tensors ------------------------------------------------------------------------------------------


_ContentOf = Callable[[int, int, Any], Any]


def _reduce_tensor(t: torch.Tensor, content: _ContentOf) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if t.layout != torch.strided or t.is_quantized or t.device.type == "meta":
        raise _Refused(
            t,
            f"a tensor of layout {t.layout} on {t.device} cannot be encoded; only strided tensors with data",
        )
    plain = t.is_cpu and t.is_contiguous() and not t.is_conj() and not t.is_neg()
    host = t if plain else exact_contiguous(t).cpu()
    data = content(host.data_ptr(), host.numel() * host.element_size(), host)
    device = None if t.device.type == "cpu" else str(t.device)
    return _tensor, (str(t.dtype)[6:], tuple(t.shape), data, device, t.requires_grad)


def _tensor(dtype: str, shape: tuple[int, ...], data: Any, device: str | None, requires_grad: bool) -> torch.Tensor:
    if len(data):
        t = torch.frombuffer(bytearray(data), dtype=_dtype(dtype)).reshape(shape)
    else:
        t = torch.empty(shape, dtype=_dtype(dtype))
    if device is not None:
        t = t.to(device)
    return t.requires_grad_() if requires_grad else t


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise pickle.UnpicklingError(f"torch.{name} is not a dtype")
    return found


def _reduce_array(a: np.ndarray[Any, Any], content: _ContentOf) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    _check_numpy(a, a.dtype)
    whole = np.ascontiguousarray(a)
    return _array, (a.dtype.str, a.shape, content(whole.__array_interface__["data"][0], whole.nbytes, whole))


def _array(dtype: str, shape: tuple[int, ...], data: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), dtype=_numpy_dtype(dtype)).reshape(shape)


def _reduce_numpy_scalar(x: np.generic) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    _check_numpy(x, x.dtype)
    return _scalar, (x.dtype.str, x.tobytes())


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype=_numpy_dtype(dtype))[0]


def _check_numpy(value: Any, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "biufcSUMm":
        raise _Refused(value, f"a numpy value of dtype {dtype} cannot be encoded")


def _numpy_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise pickle.UnpicklingError(f"numpy dtype {text} is not allowed")
    return dtype


@functools.cache
def _reduce_dtype(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _dtype, (str(dtype)[6:],)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    StandIn: lambda s: (StandIn, (s.kind, s.value)),
    torch.dtype: _reduce_dtype,
    torch.device: lambda d: (torch.device, (str(d),)),
    torch.Size: lambda s: (torch.Size, (tuple(s),)),
    range: lambda r: (range, (r.start, r.stop, r.step)),
    complex: lambda c: (complex, (c.real, c.imag)),
    # Order and counts matter, subclass attributes do not exist on these exact types.
    collections.OrderedDict: lambda d: (collections.OrderedDict, (), None, None, iter(d.items())),
    collections.Counter: lambda c: (collections.Counter, (dict(c),)),
    collections.deque: lambda d: (collections.deque, (list(d), d.maxlen)),
}

_CONTENT: dict[type, Callable[[Any, _ContentOf], Any]] = {torch.Tensor: _reduce_tensor, np.ndarray: _reduce_array}

_CONSTRUCTORS: frozenset[Any] = frozenset(
    {
        *(_tensor, _dtype, _array, _scalar, torch.device, torch.Size),
        *(range, complex, bytearray, set, frozenset, StandIn),
        *(collections.OrderedDict, collections.Counter, collections.deque),
    }
)

_CONSTRUCTOR_IDS = frozenset({id(c) for c in _CONSTRUCTORS} | {id(f) for f in (_dtype, _array, _scalar)})
_ALLOWED: dict[tuple[str, str], Any] = {(c.__module__, c.__qualname__): c for c in _CONSTRUCTORS}
# Checkpoints that were written before the codec came into this folder.
_ALLOWED |= {("flashrecovery.worker.codec", c.__qualname__): c for c in _CONSTRUCTORS if c.__module__ == __name__}


def _path_to(root: Any, culprit: Any) -> Iterator[str]:
    """The keys that lead from ``root`` to ``culprit``; for the error message only."""
    seen: set[int] = set()

    def walk(node: Any) -> list[str] | None:
        if node is culprit:
            return []
        if id(node) in seen:
            return None
        seen.add(id(node))
        children: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(node, dict):
            children = iter(node.items())
        elif isinstance(node, (list, tuple, set, frozenset, collections.deque)):
            children = iter(enumerate(node))
        for key, child in children:
            below = walk(child)
            if below is not None:
                return [f"[{key!r}]", *below]
        return None

    yield from walk(root) or ()
