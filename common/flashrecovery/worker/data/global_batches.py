"""The batches of an elastic job: one global order of samples, read by index, for any number of replicas.

A step's samples belong to the step, and its micro-batches are numbered within it. The current number of replicas
determines which replica computes which micro-batch (:mod:`flashrecovery.plan.elastic.sample_order`). So there is no
data position that could be lost, and a step that is repeated in another size has the same global batch.

``for batch in batches.of(step)`` iterates over this replica's micro-batches. Before each of them the random streams are
seeded from the step and the micro-batch's number, so that a sample is treated alike on any replica.
DistributedDataParallel reduces gradients in the last micro-batch only, as under ``no_sync()``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, SupportsIndex

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from flashrecovery.errors import ConfigError, RegistrationError
from flashrecovery.plan.elastic.sample_order import BatchSplit, SampleOrder, exact_sizes, stream_seed
from flashrecovery.worker.data.data_parallel import communicates, data_parallel_group
from flashrecovery.worker.data.forwards import Forwards

BETWEEN = -1
"""The number, as of a micro-batch, of the random stream of a step outside of its micro-batches."""


class Dataset(Protocol):
    """A map-style data set: as many samples as it says, each by its index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class FrameworkBatch:
    """The batch of a framework that has batch sizes in its own configuration. Such a framework divides the loss of each
    micro-batch by the number of micro-batches per replica, which is the same on all replicas.

    Attributes:
        global_batch: samples of a step, on all replicas together; None: not in its configuration.
        micro_batch: samples of one micro-batch; None: not in its configuration.
        sizes: the numbers of replicas that its configuration allows; None: all.
        counted: its schedule takes a fixed number of micro-batches, without asking whether there are more.
        seed: seeds the random streams that the framework tracks itself, for the model chunk with the given number;
            None: there are none.
        replicas: returns the group of ranks that share the micro-batches, usually that of
            :meth:`ElasticAdapter.replicas`; None: taken from the models.
        computing: number of ranks in a replica that have their own micro-batches (expert parallelism).
        chunks: model chunks on a rank, each of which computes all of its micro-batches (virtual pipelines).
        runs: whether a schedule can compute a given number of micro-batches on a rank; None: any number.
        forwards: number of forward passes of the model (of any chunk) begun so far, one per micro-batch; None: those of
            the registered models are counted, and a micro-batch may have several.
    """

    global_batch: int | None
    micro_batch: int | None
    sizes: frozenset[int] | None = None
    counted: bool = False
    seed: Callable[[int, int], None] | None = None
    replicas: Callable[[], dist.ProcessGroup | None] | None = None
    computing: int = 1
    chunks: int = 1
    runs: Callable[[int], bool] | None = None
    forwards: Callable[[], int] | None = None


@dataclass(frozen=True)
class Turn:
    """What a replica is to compute: the number of a micro-batch, where its samples are in the order, and whether it
    only repeats it."""

    number: int
    positions: range
    repeated: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step.

    Attributes:
        number: in the step, of all replicas.
        data: its samples, collated.
        weight: what the mean loss over its samples is multiplied by before ``backward()``. The gradients are then, once
            they have been reduced, the mean over all samples of the global batch.
        last: this replica's last one in the step, in whose backward pass the gradients are reduced.
        repeated: it is computed again, with weight 0: where each micro-batch communicates (FSDP2), all replicas
            must compute equally many.
    """

    number: int
    data: Any
    weight: float
    last: bool
    repeated: bool = False


class GlobalBatches(Protocol):
    """What the core asks of the batches of an elastic job: :class:`ElasticBatches`, or those of a framework whose steps
    are its own calls (:class:`.framework_batches.CallBatches`)."""

    of_calls: ClassVar[bool]
    """Steps are a framework's own calls."""

    @property
    def most(self) -> int:
        """Replicas that the job may have; 0: those of now."""

    def join_job(self, most: int, fetch_pre_hook: Callable[[], None]) -> None:
        """The job may have ``most`` replicas (0: those of now); ``fetch_pre_hook`` is to be called whenever samples are
        about to be read."""

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, on all replicas together."""

    @property
    def ranks(self) -> int:
        """Number of replicas that share a step's micro-batches now; or of ranks, if several ranks of a replica compute
        their own micro-batches."""

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of replicas, up to that of now or ``most``, with which the batch can be divided; none: all."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What all ranks must have alike."""

    def check_framework(self) -> None:
        """Raises ConfigError if the framework's batch is not the one that it was."""

    def refuse_unread(self, step: int) -> None:
        """Raises RegistrationError unless ``step``, which is about to be committed, has taken its whole batch here."""


@dataclass(frozen=True)
class BatchSettings:
    """What a script says of the global batch; see :meth:`flashrecovery.worker.recovery.Recovery.elastic_batches`. A
    size that is None is taken from the framework's configuration."""

    global_batch: int | None = None
    micro_batch: int | None = None
    seed: int = 0
    shuffle: bool = True
    first_step: int = 0
    averaged: bool = True
    collate: Callable[[list[Any]], Any] = default_collate


class ElasticBatches:
    """The global batches of a data set; see :meth:`flashrecovery.worker.recovery.Recovery.elastic_batches`.

    Args:
        models: returns the models whose gradients are reduced in a step's last micro-batch.
        framework: returns the batch of a framework that divides and averages itself; None: there is none.
        watched: count forward passes, to check whether micro-batches are computed in turn.

    Raises ConfigError: a size is not possible, or some replicas would have nothing to do.
    """

    of_calls: ClassVar[bool] = False

    def __init__(
        self,
        dataset: Dataset,
        settings: BatchSettings,
        *,
        models: Callable[[], Sequence[torch.nn.Module]] = tuple,
        framework: Callable[[], FrameworkBatch] | None = None,
        watched: bool = True,
    ) -> None:
        own = None if framework is None else framework()
        self._framework, self._sizes = framework, None if own is None else own.sizes
        self._counted, self._seed_framework = (False, None) if own is None else (own.counted, own.seed)
        global_batch = _one_of("global_batch", settings.global_batch, None if own is None else own.global_batch)
        micro_batch = _one_of("micro_batch", settings.micro_batch, None if own is None else own.micro_batch)
        self._dataset = dataset
        self._seed = seed = settings.seed
        self._first_step = settings.first_step
        self._averaged = settings.averaged
        self._collate = settings.collate
        self._models = models
        self._replicas = None if own is None else own.replicas
        self._computing, self._chunks = (1, 1) if own is None else (own.computing, own.chunks)
        self._runs = None if own is None else own.runs
        self._forwards: Callable[[], int] | None = None if own is None else own.forwards
        self._own_forwards: Forwards | None = None  # of the registered models
        self._one_each, self._watched = self._forwards is not None, watched
        self._began = 0  # forward passes when the step began
        self._seen: int | None = None  # ... and when the last micro-batch was yielded, of any chunk
        self._ahead = False  # a micro-batch was yielded before the previous one was computed
        self._late = False  # ... and computed afterwards
        self._group: dist.ProcessGroup | None = None
        self._looked = False  # for that group, for the last time
        self._shape = {
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "seed": seed,
            "shuffle": settings.shuffle,
        }
        self._most = 0
        self._fetch_pre_hook: Callable[[], None] = lambda: None
        self._through: set[tuple[int, int]] = set()  # (step, chunk) whose micro-batches have all been yielded
        try:
            self._order = SampleOrder(len(dataset), global_batch, seed if settings.shuffle else None)
            micro_batches = BatchSplit(global_batch, micro_batch, 1).micro_batches
        except ValueError as e:
            raise ConfigError(f"elastic_batches(): {e}") from e
        replicas = self._place()[1]
        if own is not None and not settings.averaged:
            raise ConfigError("elastic_batches(): averaged=False: the framework averages gradients over the replicas")
        if own is not None and micro_batches % replicas:
            raise ConfigError(
                f"elastic_batches(): {micro_batches} micro-batches on {replicas} replicas: a framework that "
                "accumulates itself needs as many on each of them"
            )
        if self._runs is not None and not self._runs(micro_batches // replicas):
            raise ConfigError(
                f"elastic_batches(): {micro_batches} micro-batches on {replicas} replicas: the framework's schedule "
                f"cannot compute {micro_batches // replicas} of them on a replica"
            )
        if replicas > micro_batches:
            raise ConfigError(
                f"elastic_batches(): global_batch = {global_batch}, micro_batch = {micro_batch}: a step has "
                f"{micro_batches} micro-batches, and there are {replicas} replicas; at least one for each is needed "
                "(where a replica has several ranks, register the model first)"
            )

    def of(self, step: SupportsIndex, chunk: int = 0) -> MicroBatches:
        """This replica's micro-batches of a step, which is a number or what ``recovery.steps()`` yields.

        Args:
            chunk: the model chunk that they are for, where a rank has several (Megatron's virtual pipelines): each
                computes all of the micro-batches, and draws its own random numbers.

        Raises RegistrationError: there is no such chunk.
        """
        if not 0 <= chunk < self._chunks:
            raise RegistrationError(f"batches.of(step, chunk={chunk}): 0 to {self._chunks - 1} is allowed here")
        return MicroBatches(self, step.__index__(), chunk)

    # -- for the iterator and the loop ------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Number of ranks that share a step's micro-batches now."""
        return self._place()[1]

    @property
    def most(self) -> int:
        """Replicas that the job may have; 0: those of now."""
        return self._most

    def join_job(self, most: int, fetch_pre_hook: Callable[[], None]) -> None:
        """See :class:`GlobalBatches`."""
        self._most, self._fetch_pre_hook = most, fetch_pre_hook

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of replicas, up to that of now or ``most``, with which a framework can divide the batch; none:
        all."""
        if self._framework is None:
            return ()
        global_batch, micro_batch = self._shape["global_batch"], self._shape["micro_batch"]
        most = max(self.ranks, self._most * self._computing)
        found = exact_sizes(global_batch, micro_batch, most, uneven=False, each=self._computing, runs=self._runs)
        return [size for size in found if self._sizes is None or size in self._sizes]

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, on all replicas together."""
        return self.batch_split().micro_batches

    def check_framework(self) -> None:
        """Raises ConfigError if the framework's batch is not the one that it was."""
        if self._framework is None:
            return
        now = self._framework()
        for name, value in (("global_batch", now.global_batch), ("micro_batch", now.micro_batch)):
            _one_of(name, self._shape[name], value)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What all ranks must have alike."""
        rest = {"samples": self._order.samples, "first_step": self._first_step, "averaged": self._averaged}
        return {**self._shape, **rest}

    def begin(self, step: int) -> None:
        """A step is yielded. Random numbers drawn outside of its micro-batches are also the same on all replicas."""
        self._through.clear()
        self._seen, self._ahead, self._late = None, False, False
        if not self._looked:  # all models are known now
            self._place()
            self._looked = True
            if self._forwards is None and self._watched:
                self._forwards = self._own_forwards = Forwards(self._models())
        self._began = self._forwards() if self._forwards is not None else 0
        self._seed_all(stream_seed(self._seed, self._first_step + step, BETWEEN))

    def refuse_unread(self, step: int) -> None:
        """Raises RegistrationError unless all micro-batches of ``step``, which is about to be committed, have been
        yielded here: otherwise the gradients would not be those of the global batch."""
        left = [chunk for chunk in range(self._chunks) if (step, chunk) not in self._through]
        if left:
            of_chunks = f" for model chunks {left} (batches.of(step, chunk))" if self._chunks > 1 else ""
            raise RegistrationError(
                f"step {step} has not gone through its micro-batches{of_chunks}: in an elastic job each step takes its "
                "samples from `for batch in batches.of(step):` inside of `with step:`, to the end, and from nowhere "
                "else"
            )
        if self._computed_late():
            raise RegistrationError(
                f"step {step} has taken a micro-batch before it computed the one before, of this model chunk or of "
                "another (in a list, or ahead of time): the random streams are seeded as each of them is handed out, "
                f"so in an elastic job each is computed before the next one is taken{self._how_seen}"
            )

    def _look(self) -> None:
        """Count the forward passes since the last micro-batch was yielded. None: it is computed late, or never.
        Several: earlier ones were late."""
        if self._forwards is None:
            return
        now = self._forwards()
        if self._seen is not None:
            self._ahead |= now == self._seen
            # Within torch.compile several are seen as one, which may be of a micro-batch that is owed.
            self._late |= self._ahead and now > self._seen + (not self._uncounted)
        self._seen = now

    @property
    def _uncounted(self) -> bool:
        """Some forward passes have been within torch.compile."""
        return self._own_forwards is not None and self._own_forwards.compiled

    @property
    def _how_seen(self) -> str:
        if not self._uncounted:
            return ""
        return (
            ". (Of a model that is compiled by torch.compile it is not seen how often it goes forward: a micro-batch "
            "that is left out, before another one is computed, counts as one that is computed late)"
        )

    def _computed_late(self) -> bool:
        """Whether a micro-batch was computed after a later one had been yielded. A model without observable forward
        passes (its class bypasses the hook) tells nothing, and a skipped micro-batch is not late, unless the model is
        compiled."""
        if self._one_each:
            return self._ahead and self._forwards is not None and self._forwards() > self._began
        self._look()
        return self._late

    def batch_split(self) -> BatchSplit:
        """The batch split of a step, on the replicas that there are now."""
        return BatchSplit(self._shape["global_batch"], self._shape["micro_batch"], self._place()[1])

    def _place(self) -> tuple[int, int]:
        """This rank's number among those among which the micro-batches are divided, and how many there are. The others
        compute the same as one of these (tensor parallelism)."""
        if not self._looked:
            self._group = data_parallel_group(self._models()) if self._replicas is None else self._replicas()
        return _place(self._group)

    def _weight(self) -> float:
        batch_split = self.batch_split()
        if self._framework is None:
            return float(batch_split.weight(averaged=self._averaged))
        return float(batch_split.correction(self._place()[0]))  # 1: every replica has as many

    def schedule(self, step: int) -> list[Turn]:
        """This replica's micro-batches of a step. Where all replicas must compute equally many, those that have fewer
        start with one of their own micro-batches, as often as necessary, with weight 0, so that it adds nothing."""
        batch_split = self.batch_split()
        own = [Turn(*turn) for turn in batch_split.schedule(self._first_step + step, self._place()[0])]
        if own and any(communicates(model) for model in self._models()):
            again = replace(own[0], repeated=True)
            own = [again] * (batch_split.accumulation - len(own)) + own
        return own

    def batch(self, step: int, turn: Turn, *, last: bool, chunk: int = 0) -> MicroBatch:
        """Return one micro-batch."""
        self._fetch_pre_hook()
        for model in self._models():
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            elif communicates(model):
                model.set_requires_gradient_sync(last)
        self._look()
        number, positions = turn.number, turn.positions
        self._seed_all(stream_seed(self._seed, self._first_step + step, number), chunk)
        data = self._collate([self._dataset[self._order.sample(position)] for position in positions])
        weight = 0.0 if turn.repeated else self._weight()
        return MicroBatch(number, data, weight, last, turn.repeated)

    def handed_out(self, step: int, chunk: int = 0) -> None:
        """The last micro-batch of a step is with the script."""
        if self._counted:
            self.went_through(step, chunk)

    def went_through(self, step: int, chunk: int = 0) -> None:
        """The script has asked for one more than there are."""
        self._through.add((step, chunk))

    def _seed_all(self, seed: int, chunk: int = 0) -> None:
        seed_streams(seed)
        if self._seed_framework is not None:
            self._seed_framework(seed, chunk)


class MicroBatches(Iterator[MicroBatch]):
    """Iterates over one step's micro-batches, for one model chunk; ``len()`` says how many are left. It needs no
    cleanup, so one that a stop interrupted does no harm later."""

    def __init__(self, batches: ElasticBatches, step: int, chunk: int = 0) -> None:
        self._batches, self._step, self._chunk = batches, step, chunk
        self._left = batches.schedule(step)

    def __next__(self) -> MicroBatch:
        if not self._left:
            self._batches.went_through(self._step, self._chunk)
            raise StopIteration
        turn = self._left.pop(0)
        batch = self._batches.batch(self._step, turn, last=not self._left, chunk=self._chunk)
        if not self._left:
            self._batches.handed_out(self._step, self._chunk)
        return batch

    def __len__(self) -> int:
        return len(self._left)


def _one_of(name: str, said: int | None, configured: int | None) -> int:
    """A size that the script has said, or the framework's configuration. Raises ConfigError if neither has, or they
    differ."""
    if said is None:
        if configured is None:
            raise ConfigError(f"elastic_batches(): {name} is missing: a number of samples is needed")
        return configured
    if configured is not None and said != configured:
        raise ConfigError(
            f"elastic_batches(): {name} = {said}, and the framework's own is {configured}: the same is allowed, and in "
            "an elastic job it stays as it is"
        )
    return said


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the data-parallel group (None: of all ranks), and how many it has."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def seed_streams(seed: int) -> None:
    """The global random streams: torch's of all devices, Python's, and numpy's if it is used."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
