"""The Hugging Face ``Trainer``, which trains by DistributedDataParallel, by FSDP2, or by DeepSpeed (with a config that
enables ``flash_recovery``)::

    trainer = Trainer(model, TrainingArguments(...), train_dataset=...)
    flashrecovery.trainer.protect(trainer)
    trainer.train()

The Trainer keeps its own loop, so every part of it that communicates becomes one call of the core
(:mod:`flashrecovery.worker.framework_calls`):

=====================  ================================================================================
``train:<n>``          fetching ``n`` micro-batches, counting their items, all ``n`` training steps, and what ends them
``log:<flags>``        logging, evaluation and saving after a step or an epoch
``on_<event>``         callbacks that change what is protected (:mod:`.events`)
``flops``, ``best``,   counting operations at the end, and loading the best model; ``evaluate()`` and ``save_model()``
``evaluate``, ``save`` of the script
=====================  ================================================================================

The Trainer fetches all micro-batches of an optimizer step before it trains on the first. So the whole step is made in
``get_batch_samples``, and its ``training_step`` then hands out the losses one by one: the same operations in the same
order, only the callbacks of a step see it when it is over. What the loop itself keeps (averages, history, flags) is
in :mod:`.state`; how a step ends, in :mod:`.plain` and :mod:`.with_deepspeed`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable
from typing import Any, ClassVar

from flashrecovery import Recovery, init
from flashrecovery.capabilities.of_trainer import ACCELERATE, LOADERS, STATE, TRANSFORMERS
from flashrecovery.config import prints_patch, protects_as_it_is
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.trainer.data import Epochs, WatchedLoader
from flashrecovery.trainer.events import BETWEEN, may_change_state, may_stop, without_reports, writes_texts_once
from flashrecovery.trainer.held_modules import HeldModules
from flashrecovery.trainer.plain import PlainTraining
from flashrecovery.trainer.start import Start
from flashrecovery.trainer.state import TrainerLoop, refused
from flashrecovery.trainer.with_deepspeed import DeepSpeedTraining


def protect(trainer: Any) -> None:
    """Let ``trainer`` survive the death of a rank. Call it once, before ``trainer.train()``.

    Changes nothing unless ``flashrecovery run`` started the script and, with DeepSpeed, its config enables
    ``flash_recovery``.

    Raises:
        ConfigError: the ``flash_recovery`` block is wrong.
        RegistrationError: the Trainer has made its engine already, or is protected already.
        UnsupportedError: a version, a training argument or a kind of training that cannot be protected, by name.
    """
    if _is_protected(trainer):
        raise RegistrationError("this trainer is protected already")
    kind = _kind_of(trainer)
    if not kind.enabled(trainer):
        return
    _protect(trainer, kind, trainer.train)


def protected_train(trainer: Any, train: Callable[..., Any]) -> Callable[..., Any]:
    """What is to be called in the place of ``train``, the class's own, bound to ``trainer``: a script that does not
    call :func:`protect` is protected if the config of its DeepSpeed engine enables ``flash_recovery``, or, where it
    trains without an engine, by `flashrecovery run --auto`.

    Raises what :func:`protect` raises.
    """
    if _is_protected(trainer):
        return train
    kind = _kind_of(trainer)
    if prints_patch(os.environ):
        raise UnsupportedError(
            "--auto=print: the loop of steps is the Trainer's own; by hand it is one line before trainer.train(): "
            "flashrecovery.trainer.protect(trainer); see docs/trainer.md"
        )
    wanted = kind is DeepSpeedTraining or protects_as_it_is(os.environ)
    return _protect(trainer, kind, train).train if wanted and kind.enabled(trainer) else train


def _is_protected(trainer: Any) -> bool:
    return isinstance(vars(trainer).get("training_step"), _Step)


def _kind_of(trainer: Any) -> type[DeepSpeedTraining | PlainTraining]:
    by_engine = getattr(trainer.accelerator.state, "deepspeed_plugin", None) is not None
    return DeepSpeedTraining if by_engine else PlainTraining


def _protect(trainer: Any, kind: type[DeepSpeedTraining | PlainTraining], train: Callable[..., Any]) -> _Protected:
    TRANSFORMERS.require()
    ACCELERATE.require((STATE, LOADERS))
    _check_arguments(trainer)
    loop = TrainerLoop(trainer)
    return _Protected(trainer, loop, kind(trainer, loop), train)


def _check_arguments(trainer: Any) -> None:
    args = trainer.args
    found = [
        name
        for name, wrong in (
            (
                "auto_find_batch_size, which starts over in the middle of training with another batch size, on one "
                "rank alone if "
                "only that one lacks memory: find the size in a job without recovery, and set "
                "per_device_train_batch_size",
                args.auto_find_batch_size,
            ),
            ("include_num_input_tokens_seen", args.include_num_input_tokens_seen not in ("no", False)),
            ("push_to_hub", args.push_to_hub),
            ("past_index", getattr(args, "past_index", -1) >= 0),
            ("apex", getattr(trainer, "use_apex", False)),
            ("tensor parallelism", getattr(trainer, "is_tp_enabled", False)),
            ("a train_dataset without a length", not hasattr(trainer.train_dataset, "__len__")),
        )
        if wrong
    ]
    if found:
        raise refused("; ".join(found))


class _Step:
    """Stands in for ``training_step``: hands out the losses of the micro-batches that have been trained on."""

    def __init__(self, loop: TrainerLoop) -> None:
        self._loop = loop

    def __call__(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self._loop.step.next_loss()
        self._loop.running.adds(loss)
        return loss


class _Protected:
    """Replaces methods of one Trainer. ``train``: that of its class."""

    trained: ClassVar[bool] = False
    """A Trainer of this process has begun to train."""

    def __init__(
        self,
        trainer: Any,
        loop: TrainerLoop,
        training: DeepSpeedTraining | PlainTraining,
        train: Callable[..., Any],
    ) -> None:
        self._trainer, self._loop, self._training = trainer, loop, training
        self._recovery: Recovery | None = None
        self._source: WatchedLoader | None = None
        self._train = train
        self._loader: Callable[..., Any] = trainer.get_train_dataloader
        self._samples: Callable[..., Any] = trainer.get_batch_samples
        self._training_step: Callable[..., Any] = trainer.training_step
        self._operations: Callable[..., Any] = trainer.floating_point_ops
        self._log: Callable[..., Any] = trainer._maybe_log_save_evaluate
        self._count: Callable[..., Any] = trainer.store_flos
        self._load_best: Callable[..., Any] = trainer._load_best_model
        self._evaluate: Callable[..., Any] = trainer.evaluate
        self._save: Callable[..., Any] = trainer.save_model
        self._backward: Callable[..., Any] = trainer.accelerator.backward
        self._report: Callable[..., Any] = trainer.log
        self._final_loss: float | None = None
        self._stops = False  # what comes behind a step may depend on something other than the number of steps
        self._start: Start | None = None
        self._before_first: Start | None = None  # until the Trainer asks for its first step
        self._held = HeldModules(self._loop.own)
        self._events: dict[str, Callable[..., Any]] = {e: getattr(trainer.callback_handler, e) for e in BETWEEN}
        for event in BETWEEN:
            setattr(trainer.callback_handler, event, functools.partial(self.between, event))
        trainer.train = self.train
        trainer.get_train_dataloader = self.get_train_dataloader
        trainer.get_batch_samples = self.get_batch_samples
        trainer.training_step = _Step(self._loop)
        trainer.floating_point_ops = lambda inputs: self._loop.step.next_operations()
        trainer._maybe_log_save_evaluate = self.maybe_log_save_evaluate
        trainer.store_flos = self.store_flos
        trainer._load_best_model = self.load_best_model
        trainer.evaluate = self.evaluate
        trainer.save_model = self.save_model
        trainer.accelerator.backward = self.backward
        trainer.log = self.log_metrics

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, kind: str, body: Callable[[], Any], skipped: Callable[[], Any]) -> Any:
        """One call of the core; ``body`` alone within another one, and before the Trainer has made what it trains."""
        if self._in_call or not self._training.ready:
            return body()
        if self._recovery is None:
            self._stops = may_stop(self._trainer) or self._loop.loads_best_first
            self._recovery = self._open()
        loaders = self._trainer.accelerator.gradient_state
        active = list(loaders.dataloader_references)

        def made() -> Any:
            self._loop.makes(kind)
            if not kind.startswith("train"):
                loaders.dataloader_references = list(active)  # an interrupted evaluation has left its own there
            if self._start is not None:
                self._start.check(restored=self._loop.is_restored)
            return body()

        def passed() -> Any:
            if self._loop.is_restored:
                self._held.keep()
            result = skipped()
            if self._loop.resumed:
                self._held.put_back()
            return result

        ahead = self._training.skips_ahead and not self._stops and kind.startswith(("train:", "log:", "on_"))
        self._loop.enter_call(kind)
        result = self._recovery.call(kind, made, skipped=passed, loop=self._loop, ahead=ahead)
        self._held.check()
        return result

    @property
    def _in_call(self) -> bool:
        return self._recovery is not None and self._recovery.in_call

    def _open(self) -> Recovery:
        """The loop is about to begin."""
        _Protected.trained = True
        trainer = self._trainer
        if self._start is not None:
            self._start.is_known()
        recovery, adapter = self._training.open()
        self._loop.own.passes_over(
            *(trainer, trainer.accelerator, trainer.args, trainer.state, trainer.control, trainer.callback_handler),
            *(trainer.optimizer, getattr(trainer.optimizer, "optimizer", None), trainer.lr_scheduler),
            *(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator, trainer.processing_class),
        )
        self._held.register(recovery, self._training.model)
        if self._source is None:
            raise refused(
                "a training loop that does not get its data from trainer.get_train_dataloader(): let it call that "
                "before the first step"
            )
        stream = recovery.data(Epochs(self._source, lambda: trainer.state))
        stream.begin_with(self._source.first_epoch)
        self._source.reads(stream)
        self._loop.opens(adapter, stream)
        return recovery

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """As the Trainer's. A replacement begins where its rank began, whatever the script passes there."""
        if _Protected.trained:
            raise refused(
                "a second train() in one process, of this Trainer or of another: a replacement would make the first "
                "one again; make a job of each, which loads what the one before has saved"
            )
        recovery = init()
        if recovery.is_replacement:
            writes_texts_once(self._trainer.callback_handler)
        self._start = self._before_first = start = Start(self._trainer, recovery, resume_from_checkpoint)
        self._loop.begins(start.step)
        with start.begun() as checkpoint:
            ended = self._train(resume_from_checkpoint=checkpoint, **kwargs)
        if self._final_loss is None:
            return ended
        return type(ended)(ended.global_step, self._final_loss, ended.metrics)

    def get_train_dataloader(self) -> Any:
        self._source = WatchedLoader(self._loader())
        return self._source

    def get_batch_samples(self, epoch: Any, num_batches: int, device: Any) -> Any:
        """The optimizer step. Returns what the Trainer goes over, micro-batch by micro-batch."""
        trainer, step = self._trainer, self._loop.step
        first, self._before_first = self._before_first, None
        fetched = epoch.fetched
        epoch.fetched += num_batches

        def body() -> Any:
            step.begin()
            epoch.check(fetched)
            batches, items = self._samples(epoch, num_batches, device)
            if first is not None:
                first.random_state()
            trainer.current_gradient_accumulation_steps = len(batches)
            for i, inputs in enumerate(batches):
                last = i == len(batches) - 1
                step.operations.append(float(self._operations(inputs)))
                trainer.accelerator.gradient_state._set_sync_gradients(last)
                with self._training.synchronised(last=last):
                    loss = self._training_step(self._training.model, inputs, items)
                step.finish(i, loss)
            self._training.finish(step)
            return batches, items

        def skipped() -> Any:
            return [{}] * num_batches, None

        result = self._call(f"train:{num_batches}", body, skipped)
        step.rewind(num_batches, trainer.args.device)
        return result

    def backward(self, loss: Any, **kwargs: Any) -> Any:
        """The loss is known, and the gradients' synchronisation has not begun: the rank-local state can contain the
        loss."""
        if self._in_call and self._loop.adapter is not None:
            self._loop.step.losses.append(loss.detach())
            if self._trainer.accelerator.gradient_state.sync_gradients:
                self._loop.adapter.sealed()
        return self._backward(loss, **kwargs)

    def maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What ends a step or an epoch. Then the Trainer's loop looks whether a callback has stopped it."""
        self._log_save_evaluate(*args, **kwargs)
        self._loop.decides()

    def _log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        """Logging, evaluation and saving, as far as the flags say."""
        trainer = self._trainer
        self._loop.running.shows(tr_loss)
        control, state = trainer.control, trainer.state
        log = control.should_log and state.global_step > trainer._globalstep_last_logged
        flags = "".join(str(int(f)) for f in (log, control.should_evaluate, control.should_save))
        if "1" not in flags:
            self._log(tr_loss, *args, **kwargs)
            return

        def skipped() -> None:
            trainer.control.should_log = trainer.control.should_evaluate = trainer.control.should_save = False
            if log:
                trainer._globalstep_last_logged = state.global_step

        self._call(f"log:{flags}", lambda: self._log(tr_loss, *args, **kwargs), skipped)

    def between(self, event: str, *args: Any, **kwargs: Any) -> Any:
        """An event of the callbacks that comes between two calls."""
        control = self._between(event, *args, **kwargs)
        if event == "on_substep_end":
            self._loop.goes_on()
        return control

    def _between(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An event of the callbacks that comes between two calls: those that may change what is protected are called
        in separate calls, between the others, in their order."""
        handler, all_ = self._trainer.callback_handler, self._trainer.callback_handler.callbacks
        first = last = len(all_)
        if self._recovery is not None:
            changing = [
                n for n, c in enumerate(all_) if may_change_state(c, event, holds_module=self._held.belongs_to(c))
            ]
            first, last = (changing[0], changing[-1] + 1) if changing else (first, last)

        def call(some: list[Any], through: Callable[..., Any]) -> Any:
            handler.callbacks = some
            try:
                self._trainer.control = through(args, state, self._trainer.control, **kwargs)
            finally:
                handler.callbacks = all_
            return self._trainer.control

        each = functools.partial(handler.call_event, event)
        if first == len(all_):
            return self._events[event](args, state, control, **kwargs)
        self._trainer.control = control
        call(all_[:first], self._events[event])

        def body() -> None:
            self._loop.mutating()
            call(all_[first:last], each)

        def skipped() -> None:
            """They may decide what the loop does next; the dead process's last decisions have come with its state."""
            if not self._loop.resumed:
                call(all_[first:last], each)

        self._call(event, body, skipped)
        return call(all_[last:], each)

    def store_flos(self) -> None:
        """What ends the training."""

        def skipped() -> None:
            self._final_loss = self._loop.final_loss()

        self._call("flops", self._count, skipped)

    def load_best_model(self) -> None:
        """``load_best_model_at_end``: what is trained is read from a checkpoint, after the last step."""

        def body() -> None:
            self._loop.mutating()
            self._load_best()

        self._call("best", body, lambda: None)

    def log_metrics(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's ``log``. A replacement that skipped the end of the training gets the overall loss from the
        process that it replaces. Lines that were logged before are logged again only to callbacks that may keep
        them."""
        if self._final_loss is not None and "train_loss" in logs:
            logs["train_loss"] = self._final_loss
        deliveries = None if self._recovery is None else self._recovery.deliveries
        if deliveries is None or deliveries.next_is_new():
            self._report(logs, *args, **kwargs)
        else:
            with without_reports(self._trainer.callback_handler), contextlib.redirect_stdout(io.StringIO()):
                self._report(logs, *args, **kwargs)
        if deliveries is not None:
            deliveries.made()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. In a replacement, an evaluation that others have behind them returns the newest metrics."""

        def body() -> Any:
            metrics = self._evaluate(*args, **kwargs)
            self._loop.evaluated(metrics)
            return metrics

        return self._call("evaluate", body, lambda: self._loop.metrics)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's. As part of a checkpoint it makes the checkpoint's folder, on each rank: with FSDP's sharded
        checkpoints the Trainer makes it later, and a rank that looks for it in between takes another one for the best,
        or none."""
        folder = args[0] if args else kwargs.get("output_dir")
        if self._in_call and folder is not None:
            os.makedirs(folder, exist_ok=True)
        self._call("save", lambda: self._save(*args, **kwargs), lambda: None)
