"""The part of a restore's payload that goes from device to device, over the script's own group.

Each pair of ranks that exchanges anything on devices has a *lane* in each direction, with messages that both sides
know from the headers. In round k a rank starts the k-th message of each of its lanes, all in one section. So pairs
cannot wait for each other in a ring, in whatever order they come: the k-th section of a rank waits for nothing but
the k-th sections of its peers, and behind those of earlier rounds.

A few rounds are under way at a time. Large contiguous tensors travel straight from and into their own memory,
everything else is packed on the device. What a message brings is touched only after the host has seen that its round
is over, on another stream than the messages', so that fingerprints are computed while later rounds are under way.

The host never waits for the device without bound: it asks, and gives up when communication is abandoned. An abort
ends what is under way and may leave anything in its outputs, without an error. So after each round it is asked
*again* whether communication has been abandoned; and nothing is taken for right that has not its source's digest.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.groups.accelerator import DeviceMark, SideStream, accelerator
from flashrecovery.state.fingerprint import Fingerprints
from flashrecovery.worker.transfer.chunks import WINDOW, Message, direct, flip_a_bit, pack, unpack

_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3  # between two questions to the device


class Patience:
    """Waits for the device for as long as communication has not been abandoned."""

    def __init__(self) -> None:
        self._epoch = groups.abandonment_count()

    def wait(self, mark: DeviceMark) -> None:
        """Until the device has come to ``mark``.

        Raises DistBackendError if communication has been abandoned since this object was made, also if the device has
        come there by that.
        """
        pause = _SHORTEST_S
        while not mark.done():
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        self.check()

    def check(self) -> None:
        if groups.abandonment_count() != self._epoch:
            raise dist.DistBackendError(groups.last_abandonment())


@dataclass
class Lane:
    """What goes from device to device between this rank and one other, in one direction.

    Attributes:
        peer: the other rank.
        tensors: of this rank, in the order of the payload.
        messages: see :func:`~.chunks.messages`.
        ready: the device has come so far with what has been done to the tensors before.
        damaged: numbers of tensors of which a bit is flipped when they are there (fault injection).
        arrived: of a lane that receives, the fingerprints of the tensors, by number, when all is over.
    """

    peer: int
    sending: bool
    tensors: Sequence[torch.Tensor]
    messages: Sequence[Message]
    ready: DeviceMark
    damaged: frozenset[int] = frozenset()
    arrived: Future[dict[int, bytes]] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.messages)


@dataclass(frozen=True)
class _Moving:
    """A message under way; ``staged``: its bytes are not the tensors' own."""

    lane: Lane
    message: Message
    buffer: torch.Tensor
    staged: bool


class Lanes:
    """All lanes of this rank in one exchange."""

    def __init__(self, group: groups.DeviceGroup, patience: Patience) -> None:
        self._group, self._patience = group, patience
        self._moves, self._reads = accelerator().stream(group.device), accelerator().stream(group.device)
        self._prints = Fingerprints(lambda: patience.wait(self._reads.mark()))
        self._numbers: dict[int, dict[int, int]] = {}  # of the fingerprints, by id of the lane and number of the tensor
        self._in_use: collections.deque[tuple[DeviceMark, torch.Tensor]] = collections.deque()

    def run(self, lanes: Sequence[Lane]) -> None:
        """Carry out all of them. Raises what the group's operations raise; then tensors may be partly overwritten, and
        the device may go on to do so until the group's communicator has been aborted and the device is idle."""
        try:
            for lane in lanes:
                self._patience.wait(lane.ready)
            with self._moves.current():
                self._move(lanes)
            with self._reads.current():
                found = self._prints.results()
            for lane in lanes:
                numbers = self._numbers.get(id(lane), {})
                lane.arrived.set_result({index: found[number] for index, number in numbers.items()})
        except BaseException as e:
            for lane in lanes:
                if not lane.arrived.done():
                    lane.arrived.set_exception(e)  # or the receivers would wait for ever
            raise

    def _move(self, lanes: Sequence[Lane]) -> None:
        under_way: collections.deque[tuple[DeviceMark, list[_Moving]]] = collections.deque()
        for messages in zip_longest(*(lane.messages for lane in lanes)):
            if len(under_way) >= WINDOW:
                self._finish(*under_way.popleft())
            moving = [self._prepare(lane, m) for lane, m in zip(lanes, messages, strict=True) if m is not None]
            self._group.start(
                [(m.buffer, m.lane.peer) for m in moving if m.lane.sending],
                [(m.buffer, m.lane.peer) for m in moving if not m.lane.sending],
            )
            under_way.append((self._moves.mark(), moving))
        while under_way:
            self._finish(*under_way.popleft())

    def _prepare(self, lane: Lane, message: Message) -> _Moving:
        own = direct(message, lane.tensors)
        if own is not None:
            return _Moving(lane, message, own, staged=False)
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=self._group.device)
        if lane.sending:
            pack(message, lane.tensors, buffer)
        return _Moving(lane, message, buffer, staged=True)

    def _finish(self, over: DeviceMark, moving: Sequence[_Moving]) -> None:
        """A round. Its buffers are free when what is read of them has been read."""
        self._patience.wait(over)
        with self._reads.current():
            for part in moving:
                if not part.lane.sending:
                    self._take(part)
        read = self._reads.mark()
        self._in_use.extend((read, part.buffer) for part in moving if part.staged and not part.lane.sending)
        while len(self._in_use) > WINDOW:
            self._patience.wait(self._in_use[0][0])
            self._in_use.popleft()

    def _take(self, part: _Moving) -> None:
        lane = part.lane
        if part.staged:
            unpack(part.message, lane.tensors, part.buffer)
        for piece in part.message.pieces:
            tensor = lane.tensors[piece.index]
            if piece.start + piece.nbytes < tensor.numel() * tensor.element_size():
                continue
            if piece.index in lane.damaged:
                flip_a_bit(tensor)
            self._numbers.setdefault(id(lane), {})[piece.index] = self._prints.add(tensor)


def prints_of(tensors: Sequence[torch.Tensor], stream: SideStream, patience: Patience) -> list[bytes]:
    """Fingerprints of tensors that do not change meanwhile, computed on ``stream``."""
    with stream.current():
        prints = Fingerprints(lambda: patience.wait(stream.mark()))
        for tensor in tensors:
            prints.add(tensor)
        return prints.results()
