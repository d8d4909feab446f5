"""The tensors of many shards in one flat host buffer: one allocation, one copy call, one message.

The buffer is page-locked where there is a GPU: it copies into it directly, and beside its kernels. torch's own
``pin_memory`` cannot be shared with another process, rounds sizes up to powers of two (pytorch#95823), and keeps what
is freed. So memory that exists already is registered with CUDA instead.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash

from flashrecovery.snapshot.memory import HEADER, SharedMemory
from flashrecovery.state import codec
from flashrecovery.state.exact import copied_as_bytes, exact
from flashrecovery.state.spec import ShardSpec, TensorSpec


def page_lock(owner: object, memory: torch.Tensor) -> bool:
    """Page-lock ``memory`` (contiguous, in host memory) for as long as ``owner`` lives. False, with a warning, if CUDA
    refuses: copies are then right, and slower."""
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != 0:
        text = f"cudaHostRegister of {memory.nbytes} bytes failed with error {code}: copies of the state are slower"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    # At the end of the process the driver goes first, and takes the registration with it.
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return True


ALIGN = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and any dtype's alignment."""


@dataclass(frozen=True)
class Layout:
    """Which tensor lies where. ``entries``: (shard, key, spec, offset in bytes), shards one after another.

    ``shards`` are all names in order, also of shards that have no tensors.
    """

    shards: tuple[str, ...] = ()
    entries: tuple[tuple[str, str, TensorSpec, int], ...] = ()
    nbytes: int = 0

    @staticmethod
    def of(shards: Mapping[str, Mapping[str, torch.Tensor]]) -> Layout:
        entries, offset = [], 0
        for name, tensors in shards.items():
            for key, t in tensors.items():
                spec = TensorSpec(tuple(t.shape), t.dtype)
                entries.append((name, key, spec, offset))
                offset += -(-spec.nbytes // ALIGN) * ALIGN
        return Layout(tuple(shards), tuple(entries), offset)

    @staticmethod
    def decode(data: bytes) -> Layout:
        shards, raw, nbytes = codec.loads(data)
        entries = tuple((s, k, TensorSpec(tuple(shape), dtype), off) for s, k, shape, dtype, off in raw)
        return Layout(shards, entries, nbytes)

    @cached_property
    def encoded(self) -> bytes:
        raw = [(s, k, t.shape, t.dtype, off) for s, k, t, off in self.entries]
        return codec.dumps((self.shards, raw, self.nbytes))

    @cached_property
    def ident(self) -> int:
        """63 bits that differ between layouts."""
        return xxhash.xxh3_64_intdigest(self.encoded) >> 1

    @cached_property
    def payload(self) -> Mapping[str, int]:
        """Bytes of each shard's tensors, without padding."""
        sizes = dict.fromkeys(self.shards, 0)
        for name, _, spec, _ in self.entries:
            sizes[name] += spec.nbytes
        return sizes

    @cached_property
    def as_bytes(self) -> bool:
        """Whether there are tensors that have to be copied as bytes."""
        return any(copied_as_bytes(spec.dtype) for _, _, spec, _ in self.entries)

    def matches(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """True if ``shards`` have exactly this structure."""
        if tuple(shards) != self.shards:
            return False
        entries = iter(self.entries)
        for name, tensors in shards.items():
            for key, t in tensors.items():
                entry = next(entries, None)
                if entry is None or entry[0] != name or entry[1] != key:
                    return False
                if entry[2].dtype != t.dtype or entry[2].shape != tuple(t.shape):
                    return False
        return next(entries, None) is None

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per entry, sharing the memory of ``buffer``."""
        return [
            buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            if spec.nbytes
            else torch.empty(spec.shape, dtype=spec.dtype)
            for _, _, spec, offset in self.entries
        ]


class FirstShards:
    """The part of a layout that some of its shards take, its first ones: one range of the buffer."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._full = self._part = Layout()

    def of(self, full: Layout) -> Layout:
        """The layout of that range."""
        if self._full is not full:
            entries = tuple(e for e in full.entries if e[0] in self.names)
            rest = [e[3] for e in full.entries if e[0] not in self.names]
            shards = tuple(n for n in full.shards if n in self.names)
            self._full, self._part = full, Layout(shards, entries, min(rest, default=full.nbytes))
        return self._part


@dataclass(frozen=True)
class Outliving:
    """Where a slot's memory is kept so that it outlives this process.

    Attributes:
        keep: called with the slot's memory whenever it has a new one; None: it has none any more.
        check: called before each version, so that a keeper which was lost is informed again.
        left: what the process before this one had in the same slot.
    """

    keep: Callable[[SharedMemory | None], None]
    check: Callable[[], None]
    left: SharedMemory | None = None


Keep = Callable[[str], Outliving]
"""By name of the slot."""


@dataclass(frozen=True)
class Beside:
    """What is kept of a version beside tensors: ``plain`` state by shard name, and of which rank it is. ``early``: the
    rank-local state among it is not final."""

    owner: int = -1
    plain: Mapping[str, bytes] = field(default_factory=dict)
    early: bool = False


NOTHING = Beside()


class Slot:
    """One version of the shards of a layout.

    The memory is this process's own, or shared with another process (``shared``), and then either made here or
    :meth:`adopt`-ed from the process that fills it. With ``outliving`` it is kept elsewhere, too, with everything that
    another process needs to use it, and begins with what was kept there.
    """

    def __init__(self, outliving: Outliving | None = None) -> None:
        self.layout = Layout()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.values: dict[str, dict[str, Any]] = {}
        self.views: list[torch.Tensor] = []
        self.shared: SharedMemory | None = None
        self._adopted = False
        self._pinned = False
        self._version = -1
        self._outliving = outliving
        self.beside = NOTHING
        if outliving is not None and outliving.left is not None:
            self._take_over(outliving.left)

    @property
    def version(self) -> int:
        """-1 while the content is not whole, also because the process that fills it has begun to overwrite it."""
        if self._adopted and self.shared is not None and self.shared.version != self._version:
            return -1
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self.shared is not None and not self._adopted:
            self.shared.version = value

    def drop(self) -> None:
        """The content is not whole any more, or is of no use."""
        self.version = -1

    def drop_after(self, version: int) -> None:
        """Forget a newer content: it belongs to steps that have been undone.

        Also where its owner has dropped it already: it will write that version again, which is not held before it has
        been exchanged again.
        """
        if self._version > version:
            self.version = -1

    def shape(self, layout: Layout, *, pin: bool, share: bool = False) -> None:
        """Make room for ``layout``; the content is then undefined, but for what lies between tensors: that is zero, so
        that equal tensors are equal bytes. Memory is kept if it fits exactly.

        ``pin``: page-locked memory. ``share``: memory that another process can map. Page-locked memory can be, too.
        """
        self.version = -1
        fits = not self._adopted and self._pinned >= pin
        outlives = self._outliving is not None
        # Memory for no tensor at all is memory, too: what belongs to them lies in its notes.
        if fits and self._is(layout) and (self.shared is not None or not outlives):
            return
        self.views = []
        if fits and self.buffer.numel() == layout.nbytes and (self.shared is not None or not outlives):
            self.buffer.zero_()
        else:
            self.free()
            self._pinned = pin
            if outlives or ((share or pin) and layout.nbytes > 0):
                self.shared = SharedMemory.create(layout.nbytes, notes=outlives)
                self.shared.version = -1
                self.buffer = _content(self.shared)
                if self._outliving is not None:
                    self._outliving.keep(self.shared)
                if pin and layout.nbytes > 0:
                    page_lock(self.shared, self.buffer)
            else:
                self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.layout = layout
        self.views = layout.views(self.buffer)

    def adopt(self, memory: SharedMemory, layout: Layout) -> None:
        """Show what another process has at the beginning of ``memory``."""
        if self.shared is memory and self._is(layout):
            return
        self.free()
        self.shared, self._adopted = memory, True
        self.buffer = _content(memory)[: layout.nbytes]
        self.layout = layout
        self.views = layout.views(self.buffer)

    def describe(self, values: dict[str, dict[str, Any]]) -> None:
        """What belongs to the shards in it besides their tensors, by shard."""
        self.values = values

    def finish(self, version: int, beside: Beside) -> None:
        """The content is whole: it is ``version``, and this is what belongs to it."""
        self.beside = beside
        if self._outliving is not None and self.shared is not None and not self._adopted:
            self._outliving.check()
            notes = (self.layout.encoded, self.values, beside.owner, dict(beside.plain), beside.early)
            self.shared.write_notes(codec.dumps(notes))  # without, it is not what another process can use
        self.version = version

    def stop_outliving(self) -> None:
        """The content stays, and is not kept for another process any more."""
        if self._outliving is not None:
            self._outliving.keep(None)
            self._outliving = None

    def _take_over(self, memory: SharedMemory) -> None:
        """Go on with the memory of a dead process, if it was whole."""
        version, notes = memory.version, memory.read_notes()
        if version < 0 or notes is None:
            return
        layout, self.values, owner, plain, early = codec.loads(notes)
        self.layout = Layout.decode(layout)
        if self.layout.nbytes > memory.nbytes:
            return
        self.beside = Beside(owner, plain, early)
        self.shared, self.buffer = memory, _content(memory)
        self.views = self.layout.views(self.buffer)
        self._version = version

    @property
    def nbytes(self) -> int:
        """Host memory that this slot takes itself, bytes."""
        return 0 if self._adopted else self.buffer.numel()

    @property
    def exact(self) -> list[torch.Tensor]:
        """The views, as they are copied into."""
        return [exact(view) for view in self.views] if self.layout.as_bytes else self.views

    def _is(self, layout: Layout) -> bool:
        return layout is self.layout or (layout.ident == self.layout.ident and layout.entries == self.layout.entries)

    def free(self) -> None:
        """Give the memory back."""
        self.version = -1
        self.views = []
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self._outliving is not None and self.shared is not None and not self._adopted:
            self._outliving.keep(None)
        self.shared, self._adopted = None, False

    def content(self, shard: str) -> tuple[ShardSpec, list[torch.Tensor]]:
        """Spec and tensors of one shard, sharing this slot's memory."""
        specs, tensors = {}, []
        for (name, key, spec, _), view in zip(self.layout.entries, self.views, strict=True):
            if name == shard:
                specs[key] = spec
                tensors.append(view)
        return ShardSpec(specs, self.values.get(shard, {})), tensors


def _content(memory: SharedMemory) -> torch.Tensor:
    """uint8 of shape (nbytes,)."""
    if memory.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory.map, dtype=torch.uint8, offset=HEADER, count=memory.nbytes)


def slot_for_next(slots: Sequence[Slot]) -> Slot:
    """The slot to overwrite: one that holds nothing whole, else the oldest. The newest whole version is never
    lost.
    """
    return min(slots, key=lambda s: s.version)
