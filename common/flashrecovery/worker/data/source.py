"""What a data stream needs to know about its source: how an epoch begins, its state, how to go forward in it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flashrecovery.errors import DataSourceError
from flashrecovery.worker.data import accelerate, worker_digests
from flashrecovery.worker.data.accelerate import PreparedLoader, ShardIterator
from flashrecovery.worker.data.draws import RECENT
from flashrecovery.worker.data.sampler_settings import SamplerValues, SetSamplers, has_own_values, rows_of, values_of
from flashrecovery.worker.data.torchdata_workers import TorchdataWorkers
from flashrecovery.worker.local_state.fingerprints import PLAIN
from flashrecovery.worker.local_state.generators import Stateful, as_stateful, generators_of
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.script_text.script_frames import is_own

log = logging.getLogger("flashrecovery")

_KNOWN_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Their order depends on seeds and epochs alone."""
_PROBED = 8
"""Batches (or samples) of an order that are compared before the first step."""
_PROBED_LENGTH = 5_000_000
"""A longer order is not probed: making it would take seconds."""


class Source:
    """A loader, a list, a generator: anything iterable.

    Args:
        set_epochs: call ``set_epoch`` of the samplers when an epoch begins; False: the script does it.
        first_epoch: the number of the first epoch.

    Attributes:
        one_shot: it cannot be begun again.

    Raises:
        DataSourceError: ``loader`` is not iterable; or what it gives cannot be repeated, as far as that can be seen
            before the first step.
    """

    def __init__(self, loader: Iterable[Any], *, set_epochs: bool = True, first_epoch: int = 0) -> None:
        if not isinstance(loader, Iterable):
            raise DataSourceError(f"recovery.data() needs something iterable, not a {type(loader).__name__}")
        self.loader = loader
        self._set_epochs = set_epochs
        self._first_epoch = first_epoch
        self.one_shot = isinstance(loader, Iterator) and not _begins_again(loader)
        self._stateful = is_stateful(loader)
        self._told_persistent = False
        self._unset = [
            (thing, name)
            for thing in self._parts(loader)
            for name, value in getattr(thing, "__dict__", {}).items()
            if value is None
        ]
        self.samplers = SetSamplers(self._samplers(), getattr(loader, "loop_state", None))
        """What the script's own samplers are set to."""
        self._refuse_unordered()
        self._check_order()
        self._draws = self._watch_workers()

    @functools.cached_property
    def runs_script(self) -> bool:
        """Whether what is read may run code of the script's that changes its own objects: a loader, iterator or sampler
        of its own, a generator, what stands around one of these. What a data set changes of itself stays in it."""
        return self.samplers.any or not _is_frameworks(self.loader)

    @property
    def kept_draws(self) -> int:
        """How many fetches' random numbers have to be known. What may draw in one fetch what it needs in a later one
        needs several: a prefetcher, a buffer of samples, an own sampler."""
        loader = self.loader
        if isinstance(loader, (DataLoader, PreparedLoader)):
            known = all(type(sampler) in _KNOWN_SAMPLERS for sampler in self._samplers())
            return 1 if known and not isinstance(getattr(loader, "dataset", None), IterableDataset) else RECENT
        return 1 if isinstance(loader, (list, tuple)) else RECENT

    @property
    def is_read_whole(self) -> bool:
        """Whether all fetches are made again on the way to a place. Else a state of its own leads there, or batches are
        skipped (:meth:`skip_indices`), and what only the fetches draw does not follow from the first of them."""
        loader: Any = self.loader.shard.base_dataloader if isinstance(self.loader, PreparedLoader) else self.loader
        in_process = isinstance(loader, DataLoader) and not loader.num_workers
        skipped = in_process and not isinstance(loader.dataset, IterableDataset)
        return not self._stateful and not skipped

    @property
    def begins_anywhere(self) -> bool:
        """Whether ``iter()`` begins a new epoch in the midst of one, too."""
        return not self.one_shot and (not self._stateful or isinstance(self.loader, (DataLoader, PreparedLoader)))

    @property
    def name(self) -> str:
        return type(self.loader).__name__

    @property
    def how_to_repeat(self) -> str:
        """What to do if it does not give the same samples again."""
        order = "make its order depend only on seeds and set_epoch()"
        if not self._stateful:
            return f"{order}, or use a stateful loader (torchdata's StatefulDataLoader)"
        if getattr(self.loader, "persistent_workers", False):
            return f"{order}; if its workers draw random numbers, set persistent_workers=False"
        return f"{order}, and on what its state_dict() has"

    # -- epochs -------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` on the samplers that have it."""
        loaders = [self.loader] if isinstance(self.loader, PreparedLoader) else []
        for thing in [*loaders, *self._samplers()]:
            set_epoch = getattr(thing, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def epochs(self) -> list[int]:
        """Which epochs the script has told its samplers, of those that keep it."""
        return [thing.epoch for thing in self._telling_epochs()]

    def put_epochs(self, epochs: Iterable[int]) -> None:
        """As :meth:`epochs` gave them."""
        for thing, epoch in zip(self._telling_epochs(), epochs, strict=False):
            thing.epoch = epoch

    def _telling_epochs(self) -> list[Any]:
        return [thing for thing in self._samplers() if type(getattr(thing, "__dict__", {}).get("epoch")) is int]

    def begin(self, epoch: int, start: Mapping[str, Any] | None = None) -> tuple[Iterator[Any], EpochStart]:
        """The iterator of an epoch; with ``start``, of one that began in that random state."""
        self._renew_workers()
        if self._set_epochs:
            self.set_epoch(self._first_epoch + epoch)
        if start is not None:
            self.restore_generators(start)
        begun = EpochStart(RngState.now(), self.generator_states(), self.samplers.at_start())
        return worker_digests.begin(self.loader), begun

    def _renew_workers(self) -> None:
        """Replace persistent workers in each epoch: they continue the random numbers of the previous epoch, and a new
        worker cannot be brought to that state. Workers that hold a stateful data set are kept: torchdata's loader saves
        its state."""
        loader = self.loader.shard.base_dataloader if isinstance(self.loader, PreparedLoader) else self.loader
        if not isinstance(loader, DataLoader) or not loader.persistent_workers:
            return
        if self._stateful and (is_stateful(loader.dataset) or getattr(loader, "_initial_iter_for_state_dict", False)):
            return
        if loader._iterator is not None:
            loader._iterator = None
            if not self._told_persistent:
                self._told_persistent = True
                log.info("persistent_workers=True: each epoch gets new workers, as their random numbers must be known")

    def _samplers(self) -> list[Any]:
        return self._parts(self.loader)[1:]

    @staticmethod
    def _parts(whole: Any) -> list[Any]:
        """Samplers contain others: a batch sampler has one of samples, a shard of it another batch sampler."""
        found: list[Any] = [whole]
        waiting = [whole]
        while waiting:
            thing = waiting.pop(0)
            for name in ("sampler", "batch_sampler", "data_sampler"):  # the last: DeepSpeed's
                part = getattr(thing, name, None)
                if part is not None and not any(part is f for f in found):
                    found.append(part)
                    waiting.append(part)
        return found

    def _generators(self) -> list[Stateful]:
        """Generators that belong to the loader, its samplers and its data set: they go on from epoch to epoch."""
        wholes = [self.loader, *self._loaders_within()]
        parts = [part for whole in wholes for part in (*self._parts(whole), getattr(whole, "dataset", None))]
        return generators_of([part for n, part in enumerate(parts) if not any(part is p for p in parts[:n])])

    def _loaders_within(self) -> list[DataLoader[Any]]:
        """The loaders that an object of the script's own class reads."""
        values = vars(self.loader).values() if is_own(type(self.loader)) and hasattr(self.loader, "__dict__") else ()
        several = (v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,)))
        return [value for value in several if isinstance(value, DataLoader)]

    def generator_states(self) -> list[Any]:
        """The states of these generators."""
        return [g.state_dict() for g in self._generators()]

    def restore_generators(self, start: Mapping[str, Any]) -> None:
        """Bring the random streams to the state of an epoch's beginning. Raises DataSourceError if they do not fit."""
        self.samplers.put(values_of(start.get("values", ())))
        states = start.get("generators", [])
        self._make_generators(len(states))
        generators = self._generators()
        if "rng" in start:
            restore_rng(start["rng"])
        if len(generators) != len(states):
            raise DataSourceError(
                f"the {self.name} has {len(generators)} random generators, that of the failed process had "
                f"{len(states)}: make the same ones in every process"
            )
        for generator, state in zip(generators, states, strict=True):
            generator.load_state_dict(state)

    def _make_generators(self, count: int) -> None:
        """Some samplers make their generator when they are asked first; when an epoch began there were ``count``."""
        found = len(self._generators())
        if found < count:
            for sampler in self._samplers():
                if not isinstance(sampler, DataLoader):
                    next(iter(sampler), None)
        elif found > count:
            for thing, name in self._unset:
                if as_stateful(vars(thing).get(name)) is not None:
                    setattr(thing, name, None)

    # -- before the first step ----------------------------------------------------------------------

    def _refuse_unordered(self) -> None:
        loader = self.loader
        if isinstance(loader, DataLoader) and loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise DataSourceError(
                f"the {self.name} has in_order=False: which batch comes first depends on which worker is faster, so a "
                "replacement could not find its place; leave in_order=True"
            )

    def _check_order(self) -> None:
        """A script's own sampler must give the same order again from the same random state. Tried on a copy of it."""
        loader = self.loader
        if self._stateful or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        parts = self._samplers()
        if all(type(s) in _KNOWN_SAMPLERS for s in parts) or self._too_long(parts):
            return
        try:
            sampler = copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
        except Exception as e:  # noqa: BLE001 - any sampler's own code runs here
            log.debug("the order of the %s is not probed: it cannot be copied: %s", self.name, e)
            return
        before = RngState.now()
        next(iter(sampler), None)  # some make their generator when they are asked first
        if RngState.now() != before:
            restore_rng(before.plain())
        generators = generators_of(Source._parts(sampler))
        states = [g.state_dict() for g in generators]
        own = SetSamplers([part for part in Source._parts(sampler) if has_own_values(part)])
        values = {name: value for name, value in own.values().items() if isinstance(value, PLAIN)}
        orders = []
        for _ in range(2):
            orders.append(list(itertools.islice(iter(sampler), _PROBED)))
            if RngState.now() != before:
                restore_rng(before.plain())
            for generator, state in zip(generators, states, strict=True):
                generator.load_state_dict(state)
            own.put(values)
        if repr(orders[0]) != repr(orders[1]):
            culprit = next(type(s).__name__ for s in reversed(parts) if type(s) not in _KNOWN_SAMPLERS)
            raise DataSourceError(
                f"{culprit}, the sampler of the {self.name}, gives another order each time it is iterated, also from "
                "the same random state, so a replacement could not find its place: make the order depend only on seeds "
                "and set_epoch(), or on a random generator that is an attribute of the sampler, and do not shuffle a "
                "list that it keeps in place"
            )

    @staticmethod
    def _too_long(samplers: list[Any]) -> bool:
        for sampler in samplers:
            try:
                if len(sampler) > _PROBED_LENGTH:
                    return True
            except TypeError:
                continue
        return False

    # -- state --------------------------------------------------------------------------------------

    def _watch_workers(self) -> TorchdataWorkers | None:
        loader = self.loader
        watched = self._stateful and isinstance(loader, DataLoader) and loader.num_workers > 0
        return TorchdataWorkers(loader) if watched else None  # type: ignore[arg-type]

    def state(self) -> dict[str, Any] | None:
        """``state_dict()`` of a stateful source, None for others, and for one whose workers have drawn random numbers:
        that state does not lead to the same samples. Only while it is being iterated."""
        if not self._stateful or (self._draws is not None and self._draws.any):
            return None
        return self.loader.state_dict()  # type: ignore[attr-defined, no-any-return]

    def unread_state(self) -> dict[str, Any] | None:
        """``state_dict()`` of a stateful source of which nothing, or nothing of this epoch, has been read; loading it
        restarts the epoch. None for a source without state at that point, and for a DataLoader: its ``iter()`` restarts
        the epoch (and torchdata's would start its workers)."""
        if not self._stateful or isinstance(self.loader, (DataLoader, PreparedLoader)):
            return None
        before = RngState.now()
        try:
            return copy.deepcopy(self.state())
        except Exception as e:  # noqa: BLE001 - the source's own code runs here
            log.debug("the %s has no state before it is read: %s", self.name, e)
            return None
        finally:
            if RngState.now() != before:
                restore_rng(before.plain())

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` gave. Raises DataSourceError if the source is not stateful here."""
        if not self._stateful:
            raise DataSourceError(
                f"the data source was stateful, the {self.name} of this process is not: give recovery.data() the "
                "same kind of loader in every process"
            )
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def load_unread(self, state: dict[str, Any]) -> None:
        """Load what :meth:`unread_state` gave. A source that cannot load that is left as it is: what it gives is
        compared."""
        try:
            self.load(state)
        except Exception as e:  # noqa: BLE001 - the source's own code runs here
            log.warning("the %s cannot load the state that it had before it was read: %s", self.name, e)

    def mark(self) -> Any:
        """What the source says elsewhere of the batch that it has just given."""
        return accelerate.mark(self.loader.shard) if isinstance(self.loader, PreparedLoader) else None

    def set_mark(self, value: Any) -> None:
        """The batch of which it has said so is given again."""
        if isinstance(self.loader, PreparedLoader):
            accelerate.set_mark(self.loader.shard, value)

    def skip_indices(self, iterator: Iterator[Any], count: int) -> int:
        """Skip up to ``count`` batches without loading them; returns how many.

        Only where the order of samples is all that a batch leaves behind: a plain DataLoader over a map-style dataset
        in this process.
        """
        loader: Any = self.loader
        inner = iterator
        if isinstance(loader, PreparedLoader) and isinstance(iterator, ShardIterator):
            loader, inner = loader.shard.base_dataloader, iterator.inner
        if type(loader) is not DataLoader or loader.num_workers or isinstance(loader.dataset, IterableDataset):
            return 0
        if generators_of([loader.dataset]):
            return 0  # loading draws from them
        sampler_iterator = getattr(inner, "_sampler_iter", None)
        if sampler_iterator is None:
            return 0
        done = 0
        while done < count and next(sampler_iterator, _END) is not _END:
            done += 1
        if isinstance(iterator, ShardIterator):
            iterator.skipped(done)
        return done


_END = object()


def is_stateful(thing: object) -> bool:
    """Whether it has ``state_dict()`` and ``load_state_dict()``."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclasses.dataclass
class EpochStart:
    """The random state in which an epoch began, kept only if beginning it has drawn from it."""

    rng: RngState
    generators: list[Any]
    values: SamplerValues

    def plain(self) -> dict[str, Any]:
        """Call it after the first fetch: samplers draw their seed then."""
        state: dict[str, Any] = {"generators": self.generators}
        if RngState.now() != self.rng:
            state["rng"] = self.rng.plain()
        if self.values:
            state["values"] = rows_of(self.values)
        return state


def _is_frameworks(source: object) -> bool:
    """Loaders as torch, accelerate and DeepSpeed have them, and containers."""
    if isinstance(source, (list, tuple, range, dict, str, torch.Tensor)):
        return True
    if isinstance(source, PreparedLoader):
        return _is_frameworks(getattr(source.shard, "base_dataloader", None))
    if isinstance(source, DataLoader):
        collate = source.collate_fn
        plain = isinstance(collate, types.FunctionType) and not collate.__closure__
        return not is_own(type(source)) and (
            plain or not (isinstance(collate, types.FunctionType) or is_own(type(collate)))
        )
    if type(source).__module__.partition(".")[0] == "deepspeed":
        inner = [value for name in ("loader", "dataloader") if (value := getattr(source, name, None)) is not None]
        return bool(inner) and all(map(_is_frameworks, inner))
    return False


def _begins_again(iterator: Iterator[Any]) -> bool:
    """An iterator of which ``iter()`` begins again, as DeepSpeed's loader: its ``__iter__`` does more than to return
    itself."""
    method = getattr(type(iterator), "__iter__", None)
    if not isinstance(method, types.FunctionType):
        return False  # of C: a file, a generator, zip
    return method.__code__.co_code != _return_self.__code__.co_code


def _return_self(self: Any) -> Any:
    return self
