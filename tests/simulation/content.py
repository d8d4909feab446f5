"""What a simulated job computes: numbers that depend on everything before them, so that no mistake cancels out.

The parameters of version i+1 follow from those of version i and from the gradients of all ranks, a gradient from this
rank's own data, random numbers, buffer and learning rate. One value that is lost, drawn twice or taken from another
version or rank changes everything after it. :class:`Reference` is the same job without any fault.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import ClassVar

_LOCAL_STATE = struct.Struct("<qqq")
_BATCH = struct.Struct("<qqq")


def mix(*parts: int) -> int:
    """A number that follows from all of ``parts``; the same in every process."""
    return hash(parts) & 0x7FFFFFFFFFFFFFFF


TOKEN = "simulated-job-token-0123456789"
"""Of the job."""


@dataclass(frozen=True)
class Script:
    """What the user's script is like.

    Attributes:
        steps: that it takes.
        unique: each rank has a shard that no other rank has (ZeRO, FSDP).
        late_every: every that many steps random numbers are drawn after the mutation has begun (0: never).
        late_buffer: a buffer of this rank alone is changed after the forward pass.
        bias: it is changed after the optimizer, too, by the gradients of all ranks.
        thing: a registered object: "" none, "own": another one on each rank, "later": so from the third step on.
        plain: a plain variable, which the first step sets, decides on the learning rate.
        in_place: the forward pass writes into the middle of its batch.
        below: the learning rate changes below the ``with step:`` block.
        below_every: in every that many steps random numbers are drawn there, too (0: never).
        read_amid: a rank that is asked to go on always does so while its agent reads its page; else one in ten does.
        forward_s, backward_s, optimizer_s: times.
        micro_batches: of an elastic job, in a step; all that a rank has is equal on all ranks (0: it is not elastic).
    """

    steps: int
    unique: bool = False
    late_every: int = 0
    late_buffer: bool = False
    bias: bool = False
    thing: str = ""
    plain: bool = False
    in_place: bool = False
    below: bool = False
    below_every: int = 0
    read_amid: bool = False
    forward_s: float = 0.03
    backward_s: float = 0.03
    optimizer_s: float = 0.02
    startup_s: float = 0.3
    micro_batches: int = 0

    @property
    def first_late(self) -> int:
        """The first step in which a rank's own state changes after the mutation has begun; -1: there is none."""
        often = (1 if self.bias or self.thing == "own" else 3 if self.thing else 0, self.late_every, self.below_every)
        return min((every for every in often if every), default=0) - 1

    @property
    def comes_apart(self) -> bool:
        """Something in it does not come back with a replacement, whatever recovery does: a named failure is right."""
        return self.plain or self.thing == "later"


@dataclass(frozen=True)
class Own:
    """State of one rank alone, which goes into its rank-local state."""

    random: int
    position: int
    buffer: int

    def pack(self) -> bytes:
        return _LOCAL_STATE.pack(self.random, self.position, self.buffer)

    SIZE: ClassVar[int] = _LOCAL_STATE.size

    @staticmethod
    def unpack(data: bytes) -> Own:
        return Own(*_LOCAL_STATE.unpack(data[: Own.SIZE]))


@dataclass(frozen=True)
class Content:
    """Everything that one rank has at one version. ``rate``: equal on all ranks, like ``weights``. ``thing``: a
    registered object."""

    weights: int
    unique: int
    rate: int
    own: Own
    thing: int = 0


PLAIN = 7
"""What the first step makes of the plain variable."""


def start(script: Script, rank: int) -> Content:
    """What the script sets up."""
    thing = mix(6, rank) if script.thing == "own" else mix(6)
    return Content(mix(1), mix(2, rank), mix(3), Own(mix(4, rank), 0, mix(5, rank)), thing)


def batch_of(rank: int, position: int) -> bytes:
    """What the data source gives at this position."""
    return _BATCH.pack(*(mix(12, rank, position, part) for part in range(3)))


def written(batch: bytes) -> bytes:
    """The batch, after the script has written into its middle."""
    head, middle, tail = _BATCH.unpack(batch)
    return _BATCH.pack(head, mix(middle, 13), tail)


def read(script: Script, batch: bytes) -> int:
    """What the forward pass makes of a batch."""
    return mix(*_BATCH.unpack(written(batch) if script.in_place else batch))


def digest_of(batch: bytes) -> int:
    """Of the whole batch."""
    return hash(batch)


def forward(script: Script, rank: int, now: Content) -> Content:
    """Data and random numbers are drawn, the buffer is changed."""
    position = now.own.position + 1
    drawn = mix(now.own.random, 7)
    buffer = mix(now.own.buffer, rank, position)
    return replace(now, own=Own(drawn, position, buffer))


def gradient(script: Script, rank: int, now: Content, seen: int) -> int:
    """After :func:`forward`. ``seen``: of the batch."""
    own = now.own
    return mix(now.weights, now.unique if script.unique else 0, now.rate, own.random, seen, own.buffer, rank)


def batch_split(script: Script, place: int, size: int) -> range:
    """Of an elastic job's micro-batches, those of the replica at this place."""
    return range(place, script.micro_batches, size)


def micro_gradient(script: Script, now: Content, seen: int, number: int) -> int:
    """Of one micro-batch, wherever it is computed."""
    return gradient(script, number, now, seen)


def update(script: Script, rank: int, now: Content, gradients: int, step: int, plain: int = PLAIN) -> Content:
    """The optimizer step, and what else changes after the forward pass. ``plain``: the variable of that name."""
    own = now.own
    if script.bias:
        own = replace(own, buffer=mix(own.buffer, gradients, 10))
    if script.late_every and step % script.late_every == script.late_every - 1:
        own = replace(own, random=mix(own.random, 8))
    unique = mix(now.unique, gradients, now.rate, rank) if script.unique else now.unique
    rate = now.rate if script.below else mix(now.rate, step)
    thing = mix(now.thing, gradients if script.thing == "own" or step < 2 else rank) if script.thing else now.thing
    decided = plain if script.plain else 0
    return Content(mix(now.weights, gradients, now.rate, decided), unique, rate, own, thing)


def changed(now: Content, gradients: int) -> Content:
    """A buffer of this rank alone, changed between the forward pass and the optimizer step."""
    return replace(now, own=replace(now.own, buffer=mix(now.own.buffer, gradients)))


def below(script: Script, now: Content, step: int) -> Content:
    """What the script does between two steps."""
    own = now.own
    if script.below_every and step % script.below_every == script.below_every - 1:
        own = replace(own, random=mix(own.random, 9))
    return replace(now, rate=mix(now.rate, step) if script.below else now.rate, own=own)


class Reference:
    """The undisturbed job: what every rank has at every version, as it is when the step that follows begins."""

    def __init__(self, script: Script, world: int) -> None:
        self.script = script
        self._at = [[start(script, r) for r in range(1 if script.micro_batches else world)]]
        for step in range(script.steps):
            now = [forward(script, r, c) for r, c in enumerate(self._at[-1])]
            seen = [read(script, batch_of(r, c.own.position)) for r, c in enumerate(now)]
            if script.micro_batches:
                total = mix(*(micro_gradient(script, now[0], seen[0], n) for n in range(script.micro_batches)))
            else:
                total = mix(*(gradient(script, r, c, seen[r]) for r, c in enumerate(now)))
            if script.late_buffer:
                now = [changed(c, total) for c in now]
            new = [update(script, r, c, total, step) for r, c in enumerate(now)]
            self._at.append([below(script, c, step) for c in new])

    def at(self, version: int, rank: int) -> Content:
        return self._at[version][0 if self.script.micro_batches else rank]
