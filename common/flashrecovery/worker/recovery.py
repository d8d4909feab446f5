"""The public face inside a training script: the object that ``flashrecovery.init()`` returns.

Under ``flashrecovery run`` the object is live; under plain ``python`` or ``torchrun`` it is inert: the same script
trains normally, and says once that recovery is off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import default_collate

from flashrecovery.errors import ConfigError, RegistrationError, UnsupportedError
from flashrecovery.worker.data import lightning_fabric
from flashrecovery.worker.data.accelerate import note_checkpoints, readable, unwrapped
from flashrecovery.worker.data.global_batches import (
    BatchSettings,
    Dataset,
    ElasticBatches,
    FrameworkBatch,
    GlobalBatches,
)
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.script_checks.wrapped_module import wrapper_of
from flashrecovery.worker.step.step import Step

if TYPE_CHECKING:
    from flashrecovery.config import ElasticSettings, ParallelismSettings
    from flashrecovery.contract.adapter import Adapter
    from flashrecovery.contract.loop_adapter import LoopState
    from flashrecovery.worker.framework_calls import Calls, Deliveries
    from flashrecovery.worker.own_loops.loops import Accumulation
    from flashrecovery.worker.session import Session

T = TypeVar("T")


class Recovery:
    """Recovery of one training process.

    Args:
        session: the connection to the agent, None outside ``flashrecovery run``.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._registered: list[object] = []
        self._looping = False
        self._looped = False
        self._calls: Calls | None = None
        self._batches: ElasticBatches | None = None
        self._framework_batches: list[Callable[[], FrameworkBatch]] = []

    @property
    def enabled(self) -> bool:
        """True under ``flashrecovery run``."""
        return self._session is not None

    @property
    def is_replacement(self) -> bool:
        """True in a process that has come into a job that had begun: for a dead rank, for one that has moved, for one
        that joins an elastic job, or after a change of parallelism. It never changes. False without recovery."""
        return self._session is not None and self._session.is_replacement

    @property
    def first_launch(self) -> bool:
        """True in the first processes of a job that starts from scratch, where the files and folders of the run are
        created. False in replacements (:attr:`is_replacement`) and with ``--resume``. It never changes. True without
        recovery."""
        return self._session is None or self._session.first_launch

    @property
    def leaving(self) -> bool:
        """True once a notice of preemption has reached this node, in any phase: a signal to the launcher, the setting
        ``notice``, or a signal to this process or its data loader's workers. It stays True. False without recovery.

        The other ranks see it at another moment, and those of other nodes perhaps never. What all of them decide by it
        they agree on in the block (an ``all_reduce`` with MAX); see docs/howto/preemption.md. Cheap enough for each
        step. A script that has asked for it once has ``timeouts.signal_grace_s`` to end by itself after SIGTERM."""
        return self._session is not None and self._session.leaving

    @property
    def generation(self) -> int:
        """Number of recoveries so far."""
        return self._session.gate.generation if self._session is not None else 0

    @property
    def void(self) -> bool:
        """Whether the script is below the block of an attempt that does not count: what it has there goes nowhere, and
        the step is done again. For code that has no step at hand to ask (:attr:`.step.step.Step.committed`)."""
        return self._session is not None and self._session.void

    @property
    def version(self) -> int:
        """The number of the step that comes next; -1 before the first one is asked for, and without recovery."""
        return self._session.gate.version if self._session is not None and self._session.begun else -1

    @property
    def elastic(self) -> ElasticSettings | None:
        """How many replicas the job may have; None: always all of them."""
        return self._session.settings.elastic if self._session is not None else None

    @property
    def has_checkpoints(self) -> bool:
        """Whether the job writes fallback checkpoints."""
        return self._session is not None and self._session.has_checkpoints

    @property
    def parallelism(self) -> ParallelismSettings | None:
        """Whether the job's parallel layout may change; None: it does not."""
        return self._session.settings.parallelism if self._session is not None else None

    def check_settings(self, wanted: Mapping[str, Any]) -> None:
        """Raises ConfigError if this object was made with other values than ``wanted``."""
        if self._session is None:
            return
        settings = self._session.settings.model_dump()
        for key, value in wanted.items():
            made = settings[key]
            if isinstance(value, Mapping):
                made = {name: made[name] for name in value}
            if made != value:
                raise ConfigError(
                    f"{key} = {value!r}, but recovery was initialised with {made!r} before; "
                    "set it in one place, or call flashrecovery.init() later"
                )

    def register(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        per_rank: bool | Collection[str] = (),
        **objects: Any,
    ) -> None:
        """Protect a model with its optimizer(s), and named objects: anything with ``state_dict`` and
        ``load_state_dict`` (``scheduler=``, ``scaler=``, or any other name), further modules (an average of the
        weights), and random generators of torch, Python or numpy.

        Args:
            model: None where a framework has registered it (DeepSpeed's engine, Megatron's chunks) and only objects
                are added.
            per_rank: names of the objects that are each rank's own (``["best"]``), or True for all of this call. A
                replacement gets the dead rank's; of others it gets its peers'. Generators are always each rank's own,
                and objects that differ at the start are found to be.

        Raises:
            RegistrationError: registered twice, or an object without a state.
            UnsupportedError: a wrapper or option that cannot be protected.

        What accelerate or Lightning Fabric has wrapped is taken as it is; for the module inside of a
        DistributedDataParallel the wrapper is.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        note_checkpoints(objects.values(), self.noted)
        optimizers, objects = unwrapped(
            [lightning_fabric.optimizer_inside(o) for o in optimizers],
            {name: lightning_fabric.trained_module(o) for name, o in objects.items() if o is not None},
        )
        if model is not None:
            scaler = lightning_fabric.scaler_of(model)
            if scaler is not None and not any(o is scaler for o in objects.values()):
                objects["fabric_scaler"] = scaler
            model = lightning_fabric.trained_module(model)
            if self._session is not None and isinstance(model, torch.nn.Module):
                model = wrapper_of(model)
        if model is None and (optimizers or not objects):
            raise RegistrationError("register() needs the model of these optimizers, or named objects")
        for thing in (*([] if model is None else [model]), *optimizers, *objects.values()):
            if any(known is thing for known in self._registered):
                raise RegistrationError(f"{type(thing).__name__} is registered already")
            self._registered.append(thing)
        if self._session is not None:
            self._session.registry.register(model, optimizers, objects, _names(per_rank, objects))

    def take_framework_batch(self, batch: Callable[[], FrameworkBatch]) -> None:
        """For frameworks that have the batch in their own configuration: ``batch`` says what it is now."""
        self._framework_batches.append(batch)

    def take_batches(self, batches: GlobalBatches) -> None:
        """For frameworks that read one global order of samples themselves, in an elastic job.

        Raises:
            RegistrationError: after the first step.
        """
        if self._session is not None:
            self._session.take_batches(batches)

    def register_adapter(self, adapter: Adapter, **objects: Any) -> None:
        """Protect what ``adapter`` describes; for frameworks that bring an adapter."""
        self._registered.append(adapter)
        if self._session is not None:
            self._session.registry.register_adapter(adapter, objects)

    def protect_own_loops(self, accumulation: Accumulation) -> None:
        """For frameworks whose calls a script's own loop makes (:mod:`.own_loops`)."""
        if self._session is not None:
            from flashrecovery.worker.own_loops.loops import LOOPS

            LOOPS.protect(self._session, accumulation)
            accumulation.check_first(LOOPS.check_call)

    def tell_not_registered(self, text: str) -> None:
        """For frameworks: say what of theirs is not brought back."""
        if self._session is not None:
            self._session.tell_not_registered(text)

    def report(self, *, tokens_per_step: int) -> None:
        """Say how many tokens a step takes in, of all ranks together, for what is shown of the job's speed. May be
        called at any time, and again when it changes; costs nothing.

        Raises:
            ConfigError: it is not a whole number from 0 to 2**63 - 1.
        """
        whole = isinstance(tokens_per_step, int) and not isinstance(tokens_per_step, bool)
        if not whole or not 0 <= tokens_per_step < 1 << 63:
            raise ConfigError(f"tokens_per_step = {tokens_per_step!r}: a whole number from 0 to 2**63 - 1 is allowed")
        if self._session is not None:
            self._session.gate.page.set_tokens_per_step(tokens_per_step)

    def data(self, loader: Iterable[Any], *, first_epoch: int = 0) -> DataStream:
        """An iterator over ``loader``, epoch after epoch (``set_epoch`` is called on its sampler), that rolls back with
        the step.

        Args:
            loader: a DataLoader, or another source of batches.
            first_epoch: what ``set_epoch`` is given first, of a script that counts its epochs from 1.

        Raises:
            DataSourceError: ``loader`` is not iterable.
            UnsupportedError: the job is elastic, and a loader of each rank's own batches depends on how many ranks
                there are; see :meth:`elastic_batches`.
        """
        if self._session is not None:
            self._session.refuse_streams()
        loader = lightning_fabric.loader_inside(loader)
        stream = DataStream(loader if self._session is None else readable(loader), first_epoch=first_epoch)
        if self._session is not None:
            self._session.add_stream(stream)
        return stream

    def elastic_batches(
        self,
        dataset: Dataset,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        first_step: int = 0,
        averaged: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> ElasticBatches:
        """The batches of an elastic job: ``for batch in batches.of(step):`` inside of ``with step:``. Works alike in a
        job of a fixed size, and without recovery.

        Args:
            dataset: map-style, the same on all ranks.
            global_batch: samples of a step, on all replicas together, in any size of the job.
            micro_batch: samples that are computed at once; it divides the global batch. Replicas may have one
                micro-batch more than others. Of a DeepSpeed engine both sizes are those of its config
                (train_batch_size, train_micro_batch_size_per_gpu), and every replica has as many micro-batches.
            seed: of the order of the samples, and of the random streams of all micro-batches.
            shuffle: another order in each epoch; False: as they come.
            first_step: the number, in the order of the samples, of this job's step 0: of a script that goes on from a
                its own checkpoint.
            averaged: gradients are averaged over the replicas afterwards, as DistributedDataParallel does it; False:
                the script sums them.
            collate: makes a list of samples one batch.

        Raises:
            ConfigError: a size is not possible, or there are more replicas than micro-batches.
            UnsupportedError: there are several engines, each with its own batch.
            RegistrationError: called twice, or after the first step.
        """
        if self._batches is not None:
            raise RegistrationError("elastic_batches() is called twice; a step has one global batch")
        if len(self._framework_batches) > 1:
            raise UnsupportedError(
                f"elastic_batches() with {len(self._framework_batches)} engines, each with its own batch; "
                "one is allowed"
            )
        batches = ElasticBatches(
            dataset,
            BatchSettings(global_batch, micro_batch, seed, shuffle, first_step, averaged, collate),
            models=lambda: [thing for thing in self._registered if isinstance(thing, torch.nn.Module)],
            framework=next(iter(self._framework_batches), None),
            watched=self.elastic is not None or self.parallelism is not None,
        )
        if self._session is not None:
            self._session.take_batches(batches)
        self._batches = batches
        return batches

    def steps(self, num_steps: int) -> Iterator[Step]:
        """Yield the steps up to ``num_steps`` in total; a step that failed is yielded again.

        Raises:
            RegistrationError: nothing is registered, or a step was not entered with ``with step:``.
        """
        if not self._registered:
            raise RegistrationError(
                "no model is registered: call recovery.register(model=..., optimizer=...) before recovery.steps()"
            )
        if self._looping:
            raise RegistrationError("recovery.steps() is running already; one loop at a time")
        if self._calls is not None:
            raise RegistrationError("steps have been taken outside of recovery.steps() already; use one or the other")
        self._looping = self._looped = True
        try:
            if self._session is None:
                yield from self._plain(num_steps)
            else:
                yield from self._protected(self._session, num_steps)
        finally:
            self._looping = False

    @property
    def takes_steps(self) -> bool:
        """Whether the script, or a framework, takes its steps by :meth:`steps` or :meth:`call`."""
        return self._looped or self._calls is not None

    @property
    def registered(self) -> Sequence[object]:
        """Models, optimizers and objects, as they were given."""
        return self._registered

    @property
    def in_call(self) -> bool:
        """Whether the body of a :meth:`call` is being run."""
        return self._calls is not None and self._calls.running

    def noted(self, name: str, make: Callable[[], str]) -> str | None:
        """For frameworks, before the first step: what ``make()`` gave in the first process of this rank; None in a
        replacement for which that is lost."""
        return make() if self._session is None else self._session.noted(name, make)

    @property
    def deliveries(self) -> Deliveries | None:
        """What calls have let out of the process; None before the first :meth:`call`, and without recovery."""
        return None if self._calls is None else self._calls.deliveries

    def call(
        self,
        kind: str,
        body: Callable[[], T],
        *,
        skipped: Callable[[], T],
        loop: LoopState | None = None,
        ahead: bool = False,
    ) -> T:
        """Make one protected call of ``body()``, for frameworks in which a step is one call; see
        :mod:`.framework_calls`. Where ``steps()`` is used, inside another call, and without recovery, it is
        just called."""
        if self._session is None or self._looped or self.in_call:
            return body()
        if self._calls is None:
            from flashrecovery.worker.framework_calls import Calls

            self._calls = Calls(self._session)
        return self._calls.run(kind, body, skipped, loop, ahead=ahead)

    def end_calls(self) -> None:
        """For frameworks: their last :meth:`call` is made, and the script goes on without protection. Waits for the
        other ranks, and makes calls again where one of them is replaced."""
        if self._calls is not None:
            self._calls.finish()

    def protect_output(self) -> None:
        """For frameworks whose calls print what the script's hooks do: see :mod:`.own_loops.output`."""
        if self._session is not None:
            from flashrecovery.worker.own_loops.loops import LOOPS

            LOOPS.output.protect(self._session.gate.page)

    def _plain(self, num_steps: int) -> Iterator[Step]:
        for index in range(num_steps):
            self._begin(index)
            step = Step(index, None)
            yield step
            _must_be_entered(step)
            step.over()

    def _protected(self, session: Session, num_steps: int) -> Iterator[Step]:
        loop = session.open(num_steps)
        try:
            while not loop.finished(num_steps):
                self._begin(loop.gate.version)
                step = Step(loop.gate.version, loop)
                yield step
                _must_be_entered(step)
                step.over()
        except GeneratorExit:
            loop.leave_early()
            raise

    def _begin(self, step: int) -> None:
        if self._batches is not None:
            self._batches.begin(step)


def _names(per_rank: bool | Collection[str], objects: Mapping[str, Any]) -> Collection[str]:
    if isinstance(per_rank, bool):
        return list(objects) if per_rank else ()
    return [per_rank] if isinstance(per_rank, str) else per_rank


def _must_be_entered(step: Step) -> None:
    if not step.entered:
        raise RegistrationError(
            f"step {step.index} was yielded but not entered; "
            "write `for step in recovery.steps(n):` and then `with step:`"
        )
