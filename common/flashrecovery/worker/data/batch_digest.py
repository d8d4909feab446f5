"""What a batch contains, as a few bytes: whether a step has written into it, and whether two sources gave the same.

The whole content counts, without copying it: a digest of 1 MiB takes about 0.1 ms, far less than loading it has taken.
Large tensors and arrays are digested each by itself, which a loader's worker can do (:mod:`.worker_digests`).
Tensors on a device are digested there, without waiting for the device; the result is read only in a recovery.

Two things are kept apart. The *digest* is compared between processes, so it contains only what is equal there. The
*marks* are compared within this process alone: digests that still lie on a device, and the pickled form of objects of
whose inside nothing else is known.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import logging
import mmap
import pickle
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

log = logging.getLogger("flashrecovery")

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_BUFFERS = (bytes, bytearray, memoryview, array.array, mmap.mmap)
_CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    weakref.ReferenceType,
    nn.Module,
)
"""Not content: what a batch may refer to, but does not count as its data."""
_DEEPEST = 64
"""Containers in one another; whatever is below counts as one object."""
LARGE = 256 << 10
"""Bytes from which on the content of a tensor or an array is digested by itself."""


class LeafDigest(NamedTuple):
    """The digest of a large tensor or array."""

    nbytes: int
    digest: bytes


@dataclasses.dataclass(frozen=True)
class Content:
    """What a batch contained at one moment.

    Attributes:
        digest: equal in all processes that read the same samples.
        marks: equal in this process as long as the batch is not written to.
        opaque: type of an object whose content cannot be read, "" if there is none.
    """

    digest: str
    marks: tuple[Any, ...]
    opaque: str

    @staticmethod
    def of(batch: Any, leaves: Sequence[LeafDigest] = ()) -> Content:
        """Does not wait for a device. ``leaves``: what :func:`digests_of_leaves` gave in the process where the batch
        was made, which nothing has changed since; not used where it does not fit."""
        return Content._read(batch, _Reader(_known(batch, leaves)))

    @staticmethod
    def _read(batch: Any, reader: _Reader) -> Content:
        reader.read(batch, 0)
        return Content(reader.digest.hexdigest(), tuple(reader.marks), reader.opaque)

    def is_called(self, digest: str, batch: Any) -> bool:
        """Whether ``digest`` is that of this content, of ``batch``, in this version's form or in that of versions that
        digested all of a batch in one."""
        return digest == self.digest or digest == Content._read(batch, _Reader(in_one=True)).digest

    def still_in(self, batch: Any) -> bool:
        """Whether ``batch`` contains the same as it did then. False also if that is unknown."""
        now = Content.of(batch)
        if self.opaque or self.digest != now.digest or len(self.marks) != len(now.marks):
            return False
        return all(bool(a == b) for a, b in zip(self.marks, now.marks, strict=True))


class _Reader:
    """Reads a batch once, leaf by leaf. ``known``: digests of large leaves, by ``id()``. ``in_one``: none is digested
    by itself."""

    def __init__(self, known: Mapping[int, bytes] = types.MappingProxyType({}), *, in_one: bool = False) -> None:
        self._known, self._in_one = known, in_one
        self.digest: Any = xxhash.xxh3_64()
        self.marks: list[Any] = []
        self.opaque = ""
        self._path: set[int] = set()

    def read(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._say(repr(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, depth)
        elif isinstance(value, np.ndarray):
            self._array(value, depth)
        elif isinstance(value, np.generic):
            self._array(np.asarray(value), depth)
        elif isinstance(value, _BUFFERS):
            self._buffer(memoryview(value))
        elif isinstance(value, _CODE):
            self._say(f"{kind.__qualname__} {getattr(value, '__qualname__', '')}")
        elif isinstance(value, enum.Enum):
            self._say(f"{kind.__qualname__}.{value.name}")
        elif isinstance(value, torch.Generator):
            self._tensor(value.get_state(), depth)
        elif depth > _DEEPEST or id(value) in self._path:
            self._other(value)
        else:
            self._path.add(id(value))
            self._container(value, depth + 1)
            self._path.discard(id(value))

    def _container(self, value: Any, depth: int) -> None:
        self._say(type(value).__qualname__)
        if isinstance(value, Mapping):
            self._sequence([x for item in value.items() for x in item], depth)
            if isinstance(value, dict) and hasattr(value, "__dict__"):
                self.read(vars(value), depth)
        elif isinstance(value, (list, tuple, collections.deque)):
            self._sequence(list(value), depth)
            if getattr(value, "__dict__", None):
                self.read(vars(value), depth)
        elif isinstance(value, (set, frozenset)):
            self._unordered(value, depth)
        elif hasattr(type(value), "__array_interface__"):  # a PIL image
            self._array(np.asarray(value), depth)
        elif hasattr(value, "__dict__") and _is_all_python(type(value)):
            self.read(vars(value), depth)
        elif dataclasses.is_dataclass(value):
            for name in (f.name for f in dataclasses.fields(value)):
                self.read(getattr(value, name, None), depth)
        else:
            self._other(value)

    def _sequence(self, values: list[Any], depth: int) -> None:
        if set(map(type, values)) <= _PLAIN:
            self._say(repr(values))
            return
        self._say(str(len(values)))
        for value in values:
            self.read(value, depth)

    def _unordered(self, values: Any, depth: int) -> None:
        """The order of a set differs between processes."""
        parts = []
        for value in values:
            one = _Reader(in_one=self._in_one)
            one.read(value, depth)
            parts.append(one.digest.hexdigest())
            self.marks += one.marks
            self.opaque = self.opaque or one.opaque
        self._say(repr(sorted(parts)))

    def _tensor(self, tensor: torch.Tensor, depth: int) -> None:
        self._say(f"{tuple(tensor.shape)}{tensor.dtype}{tensor.layout}")
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for part in _strided_parts(tensor):
                if part.layout != torch.strided:
                    self.opaque = f"tensor of layout {part.layout}"
                    continue
                if part.device.type == "meta" or not part.numel():
                    continue
                if id(tensor) in self._known:
                    self.digest.update(self._known[id(tensor)])
                    continue
                raw = _raw(part)
                if raw.device.type == "cpu":
                    self._content(raw.numpy(), raw.numel())
                else:
                    self.marks.append(device_digest(raw))
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            self.read(attributes, depth + 1)

    def _array(self, values: np.ndarray[Any, Any], depth: int) -> None:
        self._say(f"{values.shape}{values.dtype}")
        if isinstance(values, np.ma.MaskedArray):
            self._array(np.ma.getmaskarray(values), depth)
        if values.dtype.hasobject:
            self._path.add(id(values))
            for value in values.reshape(-1).tolist():
                self.read(value, depth + 1)
            self._path.discard(id(values))
        elif id(values) in self._known:
            self.digest.update(self._known[id(values)])
        elif values.nbytes:
            # In the order of memory: nothing is copied, unless there are gaps.
            self._content(np.asarray(values).ravel(order="K").view(np.uint8), values.nbytes)

    def _content(self, raw: Any, nbytes: int) -> None:
        self.digest.update(raw if nbytes < LARGE or self._in_one else xxhash.xxh3_128_digest(raw))

    def _buffer(self, view: memoryview) -> None:
        self._say(f"{view.shape}{view.format}")
        self.digest.update(view if view.contiguous else view.tobytes())

    def _other(self, value: Any) -> None:
        """Read an object of which only this process can say whether it has changed, by its pickled form."""
        self._say(type(value).__qualname__)
        try:
            self.marks.append(xxhash.xxh3_128_digest(pickle.dumps(value)))
        except Exception:  # noqa: BLE001 - any object's own code runs here
            self.opaque = f"{type(value).__module__}.{type(value).__qualname__}"

    def _say(self, text: str) -> None:
        self.digest.update(text.encode("utf-8", "surrogatepass"))
        self.digest.update(b"\0")


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a strided tensor, in the order of its elements."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def digests_of_leaves(batch: Any) -> list[LeafDigest]:
    """The digests of the large tensors and arrays that come to another process as they are, in a fixed order."""
    found = []
    with torch.no_grad():
        for leaf in _large_leaves(batch, 0):
            array: Any = leaf if isinstance(leaf, np.ndarray) else _raw(leaf.detach()).numpy()
            found.append(LeafDigest(leaf.nbytes, xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8))))
    return found


def _known(batch: Any, leaves: Sequence[LeafDigest]) -> dict[int, bytes]:
    """What ``leaves`` say, by ``id()`` of the same leaves here."""
    if not leaves:
        return {}
    here = [*_large_leaves(batch, 0)]
    if [leaf.nbytes for leaf in here] != [leaf.nbytes for leaf in leaves]:
        return {}
    return {id(leaf): said.digest for leaf, said in zip(here, leaves, strict=True)}


def _large_leaves(value: Any, depth: int) -> Iterator[torch.Tensor | np.ndarray[Any, Any]]:
    """In containers and of classes that are brought to another process, and pinned, without code of anybody else."""
    kind = type(value)
    if kind is torch.Tensor:
        strided = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
        if strided and not getattr(value, "__dict__", None) and value.nbytes >= LARGE:
            yield value
    elif kind is np.ndarray:
        if value.nbytes >= LARGE and value.flags.c_contiguous and not value.dtype.hasobject:
            yield value
    elif depth <= _DEEPEST and (kind in (list, tuple, dict) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))):
        for part in value.values() if kind is dict else value:
            yield from _large_leaves(part, depth + 1)


def _strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of which a sparse, nested, quantized or wrapped one consists."""
    tensor = tensor.detach()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _strided_parts(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested:
        for part in tensor.unbind():
            yield from _strided_parts(part)
    elif tensor.is_quantized:
        yield tensor.int_repr()
    else:
        yield tensor


_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers of 64 bits without a pattern (of splitmix64)."""


def device_digest(raw: torch.Tensor) -> torch.Tensor:
    """64 bits on the device of ``raw``, a line of bytes; they depend on the place of every byte."""
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    mixed = words + torch.arange(words.numel(), device=raw.device) * _MIX[0]
    mixed = (mixed ^ (mixed >> 30)) * _MIX[1]
    mixed = (mixed ^ (mixed >> 27)) * _MIX[2]
    return (mixed ^ (mixed >> 31)).sum()


def _is_all_python(kind: type) -> bool:
    """Whether ``vars()`` shows everything that an instance contains: no base class has hidden memory."""
    expected = object.__basicsize__ + 8 * (kind.__dictoffset__ > 0) + 8 * (kind.__weakrefoffset__ > 0)
    return not kind.__itemsize__ and kind.__basicsize__ <= expected


def copy_of_structure(batch: Any) -> Any:
    """The same tensors in new containers: a step may take items out of a batch, or put others in."""
    kind = type(batch)
    if kind in (list, tuple):
        return kind(batch if set(map(type, batch)) <= _PLAIN else map(copy_of_structure, batch))
    if kind in (dict, collections.OrderedDict):
        return kind((key, copy_of_structure(value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*map(copy_of_structure, batch))
    if isinstance(batch, collections.UserDict) and _is_all_python(kind):
        new: Any = object.__new__(kind)
        new.__dict__.update(batch.__dict__, data=copy_of_structure(batch.data))
        return new
    return batch
