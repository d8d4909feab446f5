"""Which samples belong to a step, and which replica computes with them, for any number of replicas. Pure.

The samples of step i are a property of the step: positions ``i * global_batch`` up to ``(i + 1) * global_batch`` of one
endless order, epoch after epoch. The order is indexed by position (as in FFTrainer), so there is no state that could be
lost, and nothing in it depends on the number of replicas. A step is cut into numbered micro-batches; only their
assignment to replicas depends on the size. If the replicas do not divide them, some compute one more, and weights make
the sum over all replicas the mean over all samples.

Random streams have the step and the micro-batch in their seed, not the replica: a sample is treated alike on any
replica, and in any size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

_ROUNDS = 6
"""The rounds of the Feistel network; four would do for a pseudo-random permutation."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """One order of all samples, epoch after epoch.

    Attributes:
        samples: in the data set.
        global_batch: samples of a step.
        seed: of the shuffle; None: as they come.
    """

    samples: int
    global_batch: int
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        if self.samples < 1 or self.global_batch < 1:
            raise ValueError(
                f"samples = {self.samples}, global_batch = {self.global_batch}: 1 or more is allowed for each"
            )

    def positions(self, step: int) -> range:
        """The positions of the samples of a step."""
        return range(step * self.global_batch, (step + 1) * self.global_batch)

    def sample(self, position: int) -> int:
        """The sample at a position; each one comes once in an epoch."""
        epoch, place = divmod(position, self.samples)
        return place if self.seed is None else _shuffled(place, self.samples, self.seed, epoch)

    def of_step(self, step: int) -> list[int]:
        """The samples of a step, in order."""
        return [self.sample(position) for position in self.positions(step)]


def _shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """A permutation of 0 .. count - 1, by index: a Feistel network over the next power of four; what falls outside is
    sent round again."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(seed, epoch, number, right) & mask)
        place = left << half | right
        if place < count:
            return place


def _mixed(*numbers: int) -> int:
    """64 bits that depend on all of the numbers."""
    packed = struct.pack(f"<{len(numbers)}q", *((n + (1 << 63)) % (1 << 64) - (1 << 63) for n in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def stream_seed(seed: int, step: int, micro_batch: int, purpose: str = "") -> int:
    """The seed of a random stream for a micro-batch of a step, 0 up to 2^63. ``purpose``: one for each independent
    stream, such as dropout, or a tensor-parallel rank's."""
    name = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    return _mixed(seed, step, micro_batch, name) >> 1


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A step's micro-batches on a given number of replicas.

    Attributes:
        global_batch, micro_batch: samples.
        replicas: data-parallel ones.
    """

    global_batch: int
    micro_batch: int
    replicas: int

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        if min(self.global_batch, self.micro_batch, self.replicas) < 1:
            raise ValueError(
                f"global_batch = {self.global_batch}, micro_batch = {self.micro_batch}, replicas = {self.replicas}: "
                "1 or more is allowed for each"
            )
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"micro_batch = {self.micro_batch}: a divisor of the global batch ({self.global_batch}) is allowed"
            )

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, on all replicas."""
        return self.global_batch // self.micro_batch

    @property
    def accumulation(self) -> int:
        """The most that one replica computes: so long a step takes."""
        return -(-self.micro_batches // self.replicas)

    @property
    def even(self) -> bool:
        """Whether every replica computes as many."""
        return self.micro_batches % self.replicas == 0

    def count(self, replica: int) -> int:
        """How many micro-batches a replica computes; 0 is possible if there are more replicas than micro-batches."""
        return len(self.of(replica))

    def of(self, replica: int) -> range:
        """The numbers of its micro-batches in the step: consecutive ones; the first replicas have one more."""
        if not 0 <= replica < self.replicas:
            raise ValueError(f"replica = {replica}: 0 to {self.replicas - 1} is allowed")
        each, more = divmod(self.micro_batches, self.replicas)
        first = replica * each + min(replica, more)
        return range(first, first + each + (replica < more))

    def owner(self, micro_batch: int) -> int:
        """The replica that computes it."""
        each, more = divmod(self.micro_batches, self.replicas)
        if micro_batch < more * (each + 1):
            return micro_batch // (each + 1)
        return more + (micro_batch - more * (each + 1)) // each

    def positions(self, step: int, micro_batch: int) -> range:
        """The positions of its samples in the :class:`SampleOrder`."""
        first = step * self.global_batch + micro_batch * self.micro_batch
        return range(first, first + self.micro_batch)

    def weight(self, *, averaged: bool) -> Fraction:
        """What the mean of a micro-batch (loss or gradient) is multiplied by, so that all together are the mean over
        all samples of the step. ``averaged``: replicas are averaged afterwards, as DDP does it, and not summed."""
        return Fraction(self.replicas if averaged else 1, self.micro_batches)

    def correction(self, replica: int) -> Fraction:
        """The same for a framework that divides by its own number of micro-batches and then averages over replicas:
        what is left to multiply by. 1 if all have as many."""
        return Fraction(self.count(replica) * self.replicas, self.micro_batches)

    def schedule(self, step: int, replica: int) -> Iterator[tuple[int, range]]:
        """The micro-batches of a replica, each with the positions of its samples."""
        for number in self.of(replica):
            yield number, self.positions(step, number)


def exact_sizes(
    global_batch: int,
    micro_batch: int,
    most: int,
    *,
    least: int = 1,
    uneven: bool = True,
    each: int = 1,
    runs: Callable[[int], bool] | None = None,
) -> list[int]:
    """The numbers of replicas, largest first, with which a step has exactly its samples and no replica is idle.

    Args:
        uneven: replicas may compute one micro-batch more than others.
        each: the number of ranks in a replica that have their own micro-batches; ``most`` and ``least`` count such
            ranks.
        runs: whether such a rank can compute a given number of micro-batches in a step; None: any number.
    """
    micro_batches = BatchSplit(global_batch, micro_batch, 1).micro_batches
    sizes = range(min(most, micro_batches), least - 1, -1)
    found = [size for size in sizes if size % each == 0 and (uneven or micro_batches % size == 0)]
    return [size // each for size in found if runs is None or runs(micro_batches // size)]
