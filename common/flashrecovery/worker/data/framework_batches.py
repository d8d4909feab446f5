"""The batches of an elastic job whose steps are a framework's own calls, and whose loader reads one global order.

The framework reads the samples itself, each replica its part of them. What is left to the core: to know that a step has
taken all of its global batch, with which numbers of replicas it can be divided, and to seed the random streams for each
micro-batch, so that a sample is treated alike wherever it is computed. Micro-batches are numbered in the step across
the replicas: the first ones of all replicas, then the second ones, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from flashrecovery.errors import ConfigError, RegistrationError
from flashrecovery.plan.elastic.sample_order import exact_sizes, stream_seed
from flashrecovery.worker.data.global_batches import BETWEEN, seed_streams


class CallBatches:
    """The batches of one process in a framework whose steps are calls.

    Args:
        global_batch, micro_batch: samples of a step, and of one micro-batch.
        seed: of the random streams of all micro-batches.
        place: returns this rank's number among the ranks that take their own samples (usually, its replica's
            number), and how many there are now.
        seed_framework: seeds the streams that the framework tracks itself, and those that differ between the ranks of a
            replica and between model chunks. Called with the chunk's number.
        computing: number of ranks in a replica that take their own samples.
        chunks: model chunks on a rank, each of which computes all of its micro-batches (virtual pipelines).
        runs: whether a schedule can compute a given number of micro-batches on a rank; None: any number.
        besides: further settings that must be equal on all ranks, and in every layout.

    Raises ConfigError: the current replicas do not divide the batch, or not so that a schedule can compute it.
    """

    of_calls: ClassVar[bool] = True

    def __init__(
        self,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        place: Callable[[], tuple[int, int]],
        seed_framework: Callable[[int, int], None],
        computing: int = 1,
        chunks: int = 1,
        runs: Callable[[int], bool] | None = None,
        besides: Mapping[str, Any] | None = None,
    ) -> None:
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._seed = seed
        self._place, self._computing, self._runs = place, computing, runs
        self._seed_framework = seed_framework
        self._most = 0
        self._besides = dict(besides or {})
        self._fetch_pre_hook: Callable[[], None] = lambda: None
        self._step = 0
        self._computed = [0] * chunks
        self._open = False  # a step that computes has begun, and has not been committed
        replicas = place()[1]
        if global_batch % (micro_batch * replicas):
            raise ConfigError(
                f"an elastic job with a global batch of {global_batch} in micro-batches of {micro_batch} on {replicas} "
                "replicas: each of them needs as many"
            )
        if runs is not None and not runs(self.accumulation):
            raise ConfigError(
                f"an elastic job with a global batch of {global_batch} in micro-batches of {micro_batch} on {replicas} "
                f"replicas: the framework's schedule cannot compute {self.accumulation} micro-batches on a replica"
            )

    @property
    def most(self) -> int:
        """Replicas that the job may have; 0: those of now."""
        return self._most

    def join_job(self, most: int, fetch_pre_hook: Callable[[], None]) -> None:
        """See :class:`.GlobalBatches`."""
        self._most, self._fetch_pre_hook = most, fetch_pre_hook

    def before_fetch(self) -> None:
        """Samples are about to be read. May raise: then they are not."""
        self._fetch_pre_hook()

    @property
    def ranks(self) -> int:
        """Number of ranks that share a step's micro-batches now."""
        return self._place()[1]

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of replicas, up to that of now or ``most``, that divide the batch."""
        most = max(self.ranks, self._most * self._computing)
        batch = (self._global_batch, self._micro_batch, most)
        return exact_sizes(*batch, uneven=False, each=self._computing, runs=self._runs)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, on all replicas together."""
        return self._global_batch // self._micro_batch

    @property
    def settings(self) -> Mapping[str, Any]:
        """What all ranks must have alike."""
        own = {"global_batch": self._global_batch, "micro_batch": self._micro_batch, "seed": self._seed}
        return {**own, **self._besides}

    @property
    def samples_at_once(self) -> int:
        """The samples of all replicas together that one micro-step takes."""
        return self._micro_batch * self._place()[1]

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on each replica."""
        return self._global_batch // self.samples_at_once

    def check_framework(self) -> None:
        """The framework's batch is fixed."""

    # -- a step -----------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """The call of a step begins, again perhaps; ``step`` is the framework's own number of it."""
        self.give_up()
        self._step, self._open = step, True
        self._seed_all(step, BETWEEN)

    def micro_batch(self, chunk: int = 0) -> None:
        """This replica's next micro-batch is about to be computed by this model chunk. (After the last one a framework
        may compute all of them again, to see whether they come out alike.)"""
        replica, replicas = self._place()
        number = self._computed[chunk] % self.accumulation * replicas + replica
        self._computed[chunk] += 1
        self._seed_all(self._step, number, chunk)

    def give_up(self) -> None:
        """The step that has begun is not committed: it is done again, or a call before it is."""
        self._computed, self._open = [0] * len(self._computed), False

    def end(self) -> None:
        """All has been computed; what is drawn until the next step is the same on all replicas."""
        self._seed_all(self._step + 1, BETWEEN)

    def refuse_unread(self, step: int) -> None:
        """Raises RegistrationError if the call that is about to be committed as ``step`` has left some of its
        micro-batches."""
        computed, was_open = self._computed, self._open
        self.give_up()
        if was_open and (not computed[0] or computed[0] % self.accumulation or len({*computed}) > 1):
            shown = computed[0] if len(computed) == 1 else f"of each model chunk {computed}"
            raise RegistrationError(
                f"call {step} has computed {shown} micro-batches, and {self.accumulation} are this replica's share "
                "of the global batch; in an elastic job a step computes all of them"
            )

    def _seed_all(self, step: int, number: int, chunk: int = 0) -> None:
        seed = stream_seed(self._seed, step, number)
        seed_streams(seed)
        self._seed_framework(seed, chunk)
