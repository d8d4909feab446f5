"""Shards between ranks: this rank's part of a restore plan, over one process group.

Bytes on the wire are the bytes lost, plus one small header a pair of ranks. For each pair that exchanges
anything::

    length (8 bytes) -> header: every shard's name and spec -> payload -> digests (16 bytes a shard)

Both sides cut the payload into the same messages, from the specs alone: small tensors are packed together,
large contiguous host tensors travel straight from and into their own memory, everything else (devices,
strided views) is staged through one bounded set of host buffers, pinned if a device is involved. The digests
come last so that hashing overlaps with sending.

Each (peer, direction) has its own thread and a window of messages under way: sources and destinations
overlap, and no order of waits can make two ranks wait for each other. When the group is abandoned every
thread raises, and only then does ``exchange`` raise: nothing touches a tensor afterwards.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.state import codec
from flashrecovery.state.digest import byte_view, shard_digest
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import TensorSpec, decode_spec, encode_spec

PACK_BYTES = 32 << 20
"""Largest message, and the size of a staging buffer."""
DIRECT_BYTES = 1 << 20
"""Contiguous host tensors of at least this size are sent without a copy."""
WINDOW = 4
"""Messages under way for each peer and direction: bounds staging memory to WINDOW * PACK_BYTES."""
_TAG = 0x4652
_DIGEST_BYTES = 16


@contextmanager
def within(deadline_s: float) -> Iterator[None]:
    """Transfers that take longer are given up, with all communication of this process: a peer that stands still would
    be waited for as long as it does. It is found in the next generation, in which it does not answer.

    Raises RestoreError after ``deadline_s`` seconds.
    """
    late = threading.Event()
    said = f"the transfers of a restore took more than {deadline_s:g} s (timeouts.restore_s)"

    def give_up() -> None:
        late.set()
        groups.abandon(said)

    timer = threading.Timer(deadline_s, give_up)
    timer.name, timer.daemon = "flashrecovery-restore-deadline", True
    timer.start()
    try:
        yield
    except RuntimeError as e:
        if late.is_set() and groups.is_communication_error(e):
            raise RestoreError(said) from e
        raise
    finally:
        timer.cancel()


@dataclass
class TransferReport:
    """What this rank has sent and received. Bytes are payload bytes; digests by shard name, hex.

    ``mismatched`` names received shards whose content is not what their source had; nothing is raised for it,
    because the controller can take the next source.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    sent_digests: dict[str, str] = field(default_factory=dict)
    received_digests: dict[str, str] = field(default_factory=dict)
    mismatched: list[str] = field(default_factory=list)


def exchange(
    group: dist.ProcessGroup,
    outgoing: Mapping[int, Sequence[ShardSource]],
    incoming: Mapping[int, Sequence[str]],
    shards: Mapping[str, Shard],
    *,
    corrupt: Set[str] = frozenset(),
) -> TransferReport:
    """Send ``outgoing`` (by destination) and receive ``incoming`` (names by source) into ``shards``, all at
    once.

    Ranks are ranks of ``group``. A received shard is made room for by its ``allocate`` and filled in place.
    ``corrupt`` (fault injection) names received shards of which one bit is flipped before the digest is taken.

    Raises ProtocolError if a peer offers other shards than expected, and whatever the group's operations
    raise; a shard may then be partly overwritten.
    """
    report = TransferReport()
    jobs: list[Callable[[], None]] = []
    lock = threading.Lock()  # frameworks' allocate() and the report are not made for several threads
    digests: dict[str, Future[str]] = {s.name: Future() for sources in outgoing.values() for s in sources}
    unique = {s.name: s for sources in outgoing.values() for s in sources}

    def sender(peer: int, sources: Sequence[ShardSource]) -> None:
        sent = _send(group, peer, sources, digests)
        with lock:
            report.bytes_sent += sent

    def receiver(peer: int, names: Sequence[str]) -> None:
        _receive(group, peer, names, shards, report, lock, corrupt)

    # The threads below copy on other streams than the one that has produced the content.
    for device in {t.device for source in unique.values() for t in source.tensors if t.is_cuda}:
        torch.cuda.synchronize(device)
    jobs += [functools.partial(sender, dest, sources) for dest, sources in outgoing.items() if sources]
    jobs += [functools.partial(receiver, source, names) for source, names in incoming.items() if names]

    def hash_all() -> None:
        try:
            for name, source in unique.items():
                digests[name].set_result(shard_digest(source.tensors, source.spec))
        except BaseException as e:
            for future in digests.values():
                if not future.done():
                    future.set_exception(e)  # or the senders would wait for ever
            raise

    _run_all([*jobs, hash_all] if unique else jobs)
    report.sent_digests = {name: future.result() for name, future in digests.items()}
    return report


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """All jobs side by side; returns when all have ended, then raises the first error."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(e)

    if not jobs:
        return
    threads = [
        threading.Thread(target=guarded, args=(job,), name="flashrecovery-transfer", daemon=True) for job in jobs[1:]
    ]
    for thread in threads:
        thread.start()
    guarded(jobs[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- one pair of ranks --------------------------------------------------------------------------------


def _send(
    group: dist.ProcessGroup, peer: int, sources: Sequence[ShardSource], digests: Mapping[str, Future[str]]
) -> int:
    header = torch.frombuffer(
        bytearray(codec.dumps([(s.name, encode_spec(s.spec)) for s in sources])), dtype=torch.uint8
    )
    length = torch.tensor([header.numel()], dtype=torch.int64)
    pending: collections.deque[tuple[dist.Work, list[torch.Tensor]]] = collections.deque()

    def post(tensor: torch.Tensor) -> None:
        if len(pending) >= WINDOW:
            pending.popleft()[0].wait()
        pending.append((group.send([tensor], peer, _TAG), [tensor]))

    post(length)
    post(header)
    tensors = [t.detach() for s in sources for t in s.tensors]
    sent = 0
    for message in _messages([t for s in sources for t in s.spec.tensors.values()]):
        buffer = _direct(message, tensors)
        if buffer is None:
            buffer = _staging(message, tensors)
            _pack(message, tensors, buffer)
        post(buffer)
        sent += message.nbytes
    raw = b"".join(bytes.fromhex(digests[s.name].result()) for s in sources)
    post(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    while pending:
        pending.popleft()[0].wait()
    return sent


def _receive(
    group: dist.ProcessGroup,
    peer: int,
    names: Sequence[str],
    shards: Mapping[str, Shard],
    report: TransferReport,
    lock: threading.Lock,
    corrupt: Set[str],
) -> None:
    length = torch.zeros(1, dtype=torch.int64)
    group.recv([length], peer, _TAG).wait()
    header = torch.empty(int(length.item()), dtype=torch.uint8)
    group.recv([header], peer, _TAG).wait()
    offered: list[tuple[str, bytes]] = codec.loads(header.numpy().tobytes())
    if [name for name, _ in offered] != list(names):
        raise ProtocolError(f"rank {peer} sends {[n for n, _ in offered]}, but {list(names)} were expected")
    specs = [decode_spec(data) for _, data in offered]
    targets: list[list[torch.Tensor]] = []
    for name, spec in zip(names, specs, strict=True):
        with lock:
            allocated = shards[name].allocate(spec)
        targets.append([_checked(name, key, allocated[key], wanted) for key, wanted in spec.tensors.items()])
    flat = [t for tensors in targets for t in tensors]

    pending: collections.deque[tuple[dist.Work, _Message, torch.Tensor | None]] = collections.deque()

    def settle() -> None:
        work, message, buffer = pending.popleft()
        work.wait()
        if buffer is not None:
            _unpack(message, flat, buffer)

    received = 0
    for message in _messages([t for spec in specs for t in spec.tensors.values()]):
        if len(pending) >= WINDOW:
            settle()
        direct = _direct(message, flat)
        buffer = direct if direct is not None else _staging(message, flat)
        pending.append((group.recv([buffer], peer, _TAG), message, None if direct is not None else buffer))
        received += message.nbytes
    trailer = torch.empty(_DIGEST_BYTES * len(names), dtype=torch.uint8)
    last = group.recv([trailer], peer, _TAG)
    while pending:
        settle()
    last.wait()

    for name, tensors in zip(names, targets, strict=True):
        if name in corrupt:
            _flip_a_bit(next(t for t in tensors if t.numel()))
    raw = trailer.numpy().tobytes()
    for i, (name, spec) in enumerate(zip(names, specs, strict=True)):
        digest = shard_digest(targets[i], spec)
        expected = raw[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES].hex()
        with lock:
            report.received_digests[name] = digest
            if digest != expected:
                report.mismatched.append(name)
    with lock:
        report.bytes_received += received


def _checked(name: str, key: str, tensor: torch.Tensor, wanted: TensorSpec) -> torch.Tensor:
    if tuple(tensor.shape) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
        raise ProtocolError(
            f"shard {name!r}: tensor {key!r} was allocated as {tuple(tensor.shape)} {tensor.dtype}, "
            f"but {tuple(wanted.shape)} {wanted.dtype} is coming"
        )
    return tensor.detach()


# -- cutting the payload into messages ----------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """``nbytes`` bytes of tensor number ``index``, from byte ``start``; whole tensors unless it is a large
    one.
    """

    index: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class _Message:
    pieces: tuple[_Piece, ...]
    nbytes: int


def _messages(specs: Sequence[TensorSpec]) -> Iterator[_Message]:
    """The messages of a payload of these tensors; both sides compute the same ones."""
    packed: list[_Piece] = []
    size = 0
    for index, spec in enumerate(specs):
        nbytes = spec.nbytes
        if nbytes >= DIRECT_BYTES:
            for start in range(0, nbytes, PACK_BYTES):
                part = min(PACK_BYTES, nbytes - start)
                yield _Message((_Piece(index, start, part),), part)
        elif nbytes:
            if size + nbytes > PACK_BYTES:
                yield _Message(tuple(packed), size)
                packed, size = [], 0
            packed.append(_Piece(index, 0, nbytes))
            size += nbytes
    if packed:
        yield _Message(tuple(packed), size)


def _direct(message: _Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of the message itself, if it is one range of a contiguous host tensor."""
    piece = message.pieces[0]
    tensor = tensors[piece.index]
    if len(message.pieces) > 1 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return byte_view(tensor)[piece.start : piece.start + piece.nbytes]


def _staging(message: _Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    on_device = any(tensors[p.index].device.type == "cuda" for p in message.pieces)
    return torch.empty(message.nbytes, dtype=torch.uint8, pin_memory=on_device)


def _pack(message: _Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    offset = 0
    for piece in message.pieces:
        source = byte_view(tensors[piece.index].contiguous())[piece.start : piece.start + piece.nbytes]
        buffer[offset : offset + piece.nbytes].copy_(source)
        offset += piece.nbytes


def _unpack(message: _Message, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    offset = 0
    for piece in message.pieces:
        target = tensors[piece.index]
        content = buffer[offset : offset + piece.nbytes]
        if target.is_contiguous():
            byte_view(target)[piece.start : piece.start + piece.nbytes].copy_(content)
        else:
            _write_strided(target, piece.start, content)
        offset += piece.nbytes


def _write_strided(target: torch.Tensor, start: int, content: torch.Tensor) -> None:
    """Bytes into a strided tensor: through a contiguous copy of it."""
    whole = target.contiguous()
    byte_view(whole)[start : start + content.numel()].copy_(content)
    target.copy_(whole)


def _flip_a_bit(tensor: torch.Tensor) -> None:
    damaged = tensor.contiguous()
    byte_view(damaged)[:1].bitwise_xor_(1)
    if damaged is not tensor:
        tensor.copy_(damaged)
