"""The part of a restore's payload that its destination reads from the memory of a source on the same host.

The source offers the addresses of its contiguous host tensors, and how to recognise the process. The destination reads
that first, and a byte from both ends of each tensor: so it is known before anything relies on it whether all of it can
be read (another host, container or user, a kernel that refuses). If so, none of these tensors goes over the wire.

The source does nothing meanwhile. It waits until the destination has said that it has read everything, and sends its
digests only then. So a destination that has the digests has read memory that was held for it. A source that goes on
earlier, because communication was abandoned, sends none.
"""

from __future__ import annotations

import collections
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashrecovery.errors import RestoreError
from flashrecovery.runtime import process_memory
from flashrecovery.snapshot.memory import host_id
from flashrecovery.state import codec
from flashrecovery.state.digest import byte_view

PIECE = 8 << 20
"""Bytes read at once: between two of them it is asked whether communication has been abandoned."""
_RANGES = 512
_MOST_THREADS = 4
_GONE = (errno.ESRCH, errno.EPERM)  # a process that is ending has no memory to be permitted to read

NO, YES, NOT_PERMITTED = range(3)
"""What a destination answers."""

_unreadable = threading.Event()  # memory that had looked readable was not: this process reads directly no more


def refused() -> bool:
    """Whether this process reads no other one's memory any more."""
    return _unreadable.is_set()


@dataclass(frozen=True)
class Offer:
    """Where the source's tensors are. ``proof``: random bytes, which stand at ``proof_at`` in its memory. ``addresses``
    of tensors that cannot be read are 0."""

    host: int
    pid: int
    proof_at: int
    proof: bytes
    addresses: tuple[int, ...]

    @property
    def encoded(self) -> bytes:
        return codec.dumps((self.host, self.pid, self.proof_at, self.proof, self.addresses))

    @staticmethod
    def decode(data: bytes) -> Offer:
        return Offer(*codec.loads(data))


class ReadableMemory:
    """A source's offer, and the memory that it names."""

    def __init__(self, tensors: Sequence[torch.Tensor], left_out: Sequence[bool]) -> None:
        """``left_out``: tensors that go another way."""
        self.count = len(tensors)
        self._proof = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
        addresses = tuple(0 if out else _address(t) for t, out in zip(tensors, left_out, strict=True))
        self.offer: Offer | None = None
        if any(addresses):
            proof = self._proof.numpy().tobytes()
            self.offer = Offer(host_id(), os.getpid(), self._proof.data_ptr(), proof, addresses)


def _address(tensor: torch.Tensor) -> int:
    """0 if it is not one range of host memory."""
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.is_contiguous():
        return 0
    return byte_view(tensor).data_ptr()


@dataclass(frozen=True)
class _Piece:
    """What is read in one call. ``ranges``: (address here, address there, bytes); ``tensors``: whose they are."""

    ranges: Sequence[tuple[int, int, int]]
    tensors: Sequence[int]


class Reading:
    """What a destination reads of one offer, into ``targets``; ``taken`` says which of them. ``check`` raises when
    communication has been abandoned."""

    def __init__(self, offer: Offer, targets: Sequence[torch.Tensor], check: Callable[[], None]) -> None:
        self._offer, self._check = offer, check
        here = [_address(t) for t in targets]
        self.taken = [bool(a and b) for a, b in zip(here, offer.addresses, strict=True)]
        self._whole = [
            (number, here[number], offer.addresses[number], targets[number].numel() * targets[number].element_size())
            for number, taken in enumerate(self.taken)
            if taken
        ]
        self._left = collections.deque(self._pieces())
        self._stopped = threading.Event()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for *_, nbytes in self._whole)

    def possible(self) -> int:
        """Whether the source's memory can be read from here: :data:`NO`, :data:`YES`, :data:`NOT_PERMITTED`."""
        if self._offer.host != host_id() or not self._whole or refused():
            return NO
        proof = torch.zeros(len(self._offer.proof), dtype=torch.uint8)
        ends = torch.empty(2 * len(self._whole), dtype=torch.uint8)
        ranges = [(proof.data_ptr(), self._offer.proof_at, proof.numel())]
        for place, (_, _, there, nbytes) in enumerate(self._whole):
            at = ends.data_ptr() + 2 * place
            ranges += [(at, there, 1), (at + 1, there + nbytes - 1, 1)]
        try:
            process_memory.read(self._offer.pid, ranges)
        except OSError as e:
            return NOT_PERMITTED if e.errno == errno.EPERM else NO
        return YES if proof.numpy().tobytes() == self._offer.proof else NO

    def threads(self) -> int:
        """How many threads read: what they wait for is memory, and few of them saturate it."""
        return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(self._left)))

    def stop(self) -> None:
        """No thread begins another piece."""
        self._stopped.set()

    def run(self, arrivals: Arrivals) -> None:
        """Read pieces until none is left; for several threads at once.

        Raises DistBackendError if the source is gone or communication has been abandoned, RestoreError if its memory
        cannot be read for another reason.
        """
        while not self._stopped.is_set():
            self._check()
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            for to, _, nbytes in piece.ranges:
                process_memory.make_present(to, nbytes)
            try:
                process_memory.read(self._offer.pid, piece.ranges)
            except OSError as e:
                if e.errno in _GONE:
                    raise dist.DistBackendError(f"the source of a restore is gone: {e}") from e
                _unreadable.set()
                raise RestoreError(f"the source of a restore cannot be read: {e}") from e
            for tensor, (_, _, nbytes) in zip(piece.tensors, piece.ranges, strict=True):
                arrivals.add(tensor, nbytes)

    def _pieces(self) -> Iterator[_Piece]:
        """Large tensors in parts, small ones together."""
        ranges: list[tuple[int, int, int]] = []
        tensors: list[int] = []
        size = 0
        for number, here, there, whole in self._whole:
            for start in range(0, whole, PIECE):
                nbytes = min(PIECE, whole - start)
                if ranges and (size + nbytes > PIECE or len(ranges) == _RANGES):
                    yield _Piece(ranges, tensors)
                    ranges, tensors, size = [], [], 0
                ranges.append((here + start, there + start, nbytes))
                tensors.append(number)
                size += nbytes
        if ranges:
            yield _Piece(ranges, tensors)


class Arrivals:
    """Which tensors have arrived whole: threads that read digests wait for them. ``sizes`` in bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.count = len(sizes)
        self._missing = list(sizes)
        self._whole = [tensor for tensor, nbytes in enumerate(sizes) if not nbytes]
        self._changed = threading.Condition()
        self._failed = False

    def add(self, tensor: int, nbytes: int) -> None:
        """These bytes of it are there."""
        with self._changed:
            self._missing[tensor] -= nbytes
            if self._missing[tensor] == 0:
                self._whole.append(tensor)
                self._changed.notify_all()

    def fail(self) -> None:
        """Not all will come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, tensors: Sequence[int]) -> bool:
        """Until all of these are there. False if they will not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not any(self._missing[t] for t in tensors))
            return not self._failed

    def as_completed(self, shards: Sequence[Sequence[int]]) -> Iterator[int]:
        """The numbers of ``shards``, each of these tensors, in the order in which they are whole. Ends early if not all
        will come."""
        of_tensor = {tensor: number for number, tensors in enumerate(shards) for tensor in tensors}
        lacking = [len(tensors) for tensors in shards]
        left, seen = len(shards), 0
        for number in (n for n, count in enumerate(lacking) if not count):
            left -= 1
            yield number
        while left:
            new = self._whole_after(seen)
            if not new:
                return
            seen += len(new)
            for number in (of_tensor[tensor] for tensor in new if tensor in of_tensor):
                lacking[number] -= 1
                if not lacking[number]:
                    left -= 1
                    yield number

    def _whole_after(self, seen: int) -> list[int]:
        """The tensors that are whole, without the first ``seen``; waits for some. None of them if not all will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or len(self._whole) > seen)
            return [] if self._failed else self._whole[seen:]
