"""What the Trainer's own loop keeps between two calls, and how it gets into a replacement.

It is saved when a call begins, for a survivor that has to make the call again. It is part of the rank-local state, too,
for a replacement whose loop has only skipped: when its last skipped call returns, all is as in the dead process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from flashrecovery.adapter import InspectableAdapter
from flashrecovery.adapter.loop import LoopAdapter
from flashrecovery.capabilities.of_trainer import LOOP, RESUMING
from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec
from flashrecovery.trainer.own_state import OwnState
from flashrecovery.trainer.running_loss import RunningLoss, running_loss
from flashrecovery.worker.data.stream import DataStream

_COUNTERS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")


def refused(what: str) -> UnsupportedError:
    """The error for what cannot be protected."""
    return UnsupportedError(f"flash_recovery does not support, with the Trainer: {what}")


class StepResults:
    """The losses and operation counts of one optimizer step's micro-batches.

    Attributes:
        grad_norm, learning_rate: what the loop logs of the step, the same on all ranks; None where a DeepSpeed engine
            knows them.
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.operations: list[float] = []
        self.grad_norm: torch.Tensor | float | None = None
        self.learning_rate: float | None = None
        self._given = [0, 0]

    def begin(self) -> None:
        """A step, maybe for the second time."""
        self.losses, self.operations = [], []

    def finish(self, index: int, loss: torch.Tensor) -> None:
        """``training_step`` has returned ``loss`` for this micro-batch."""
        self.losses[index:] = [loss]

    def clipped(self, grad_norm: torch.Tensor | float | None) -> None:
        """The gradients had this norm."""
        self.grad_norm = grad_norm

    def optimized(self, learning_rate: float | None) -> None:
        """The optimizer has made its step with this rate."""
        self.learning_rate = learning_rate

    def put_back(self, losses: Iterable[torch.Tensor], operations: Iterable[float]) -> None:
        """Of the step in which the saved process was."""
        self.losses, self.operations = [*losses], [*operations]

    def rewind(self, count: int, device: torch.device) -> None:
        """The loop goes over the ``count`` micro-batches now. A skipped step has none: its losses are not used."""
        if len(self.losses) != count:
            self.losses = [torch.zeros((), device=device) for _ in range(count)]
            self.operations = [0.0] * count
        self.losses = [loss.to(device) for loss in self.losses]
        self._given = [0, 0]

    def next_loss(self) -> torch.Tensor:
        self._given[0] += 1
        return self.losses[self._given[0] - 1]

    def next_operations(self) -> float:
        self._given[1] += 1
        return self.operations[self._given[1] - 1]


class TrainerLoop:
    """A :class:`flashrecovery.adapter.LoopState`.

    Attributes:
        own: what subclass, callbacks and functions keep.
        kind: of the call that is being made, or skipped.
        resumed: in a replacement: the loop has the state of the dead process, at the end of the call that is skipped
            last.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step = StepResults()
        self._running: RunningLoss = running_loss(trainer)
        self.own = OwnState(trainer)
        self._metrics: dict[str, Any] = {}
        self._adapter: TrainerLoopAdapter | None = None
        self._stream: DataStream | None = None  # its samplers may be set by the loop
        self.resumed = False
        self._begun_at = 0
        self.kind = ""
        self._decided: tuple[int, bool, bool] = (-1, False, False)
        """At the end of which step the callbacks have decided last, and whether to end the training, or the epoch."""
        self._makes_calls = False
        self._follows: dict[str, Any] | None = None
        """The state of the dead process, while this one goes where that one has gone."""
        self._restored: dict[str, Any] | None = None
        self._history: tuple[int, int, bytes] | None = None

    def enter_call(self, kind: str) -> None:
        """A call is about to be made, or skipped."""
        self.kind = kind

    def begins(self, step: int) -> None:
        """``train()`` begins, at ``state.global_step == step``."""
        self._running, self._begun_at = running_loss(self._trainer), step

    def opens(self, adapter: TrainerLoopAdapter, stream: DataStream) -> None:
        """The loop is about to make its first step, with batches of ``stream``."""
        self._adapter, self._stream = adapter, stream

    @property
    def running(self) -> RunningLoss:
        """The sum of losses since the last log."""
        return self._running

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the newest ``evaluate()`` of the script; a copy."""
        return dict(self._metrics)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """The script's ``evaluate()`` has returned ``metrics``."""
        self._metrics = metrics

    @property
    def adapter(self) -> TrainerLoopAdapter | None:
        """None before the first call."""
        return self._adapter

    def mutating(self) -> None:
        """What follows in this call may change parameters. Nothing follows from it before the first call."""
        if self._adapter is not None:
            self._adapter.mutating()

    # -- LoopState --------------------------------------------------------------------------------

    counted = "calls of the Trainer: each optimizer step is one, and each log, evaluation or checkpoint that is due"

    def iteration_of(self, kind: str) -> int:
        """As ``state.global_step`` has it when the step is made, and its log."""
        return int(self._trainer.state.global_step) + kind.startswith("train:")

    def save(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        names = [f.name for f in dataclasses.fields(state) if f.name != "log_history"]
        return {
            "state": codec.dumps({name: getattr(state, name) for name in names}),
            "history": self._encoded_history(state.log_history),
            "control": dict(vars(trainer.control)),
            "loss": self._running.value(),
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "callbacks": [codec.dumps(vars_of(c)) for c in self._callbacks()],
            "losses": [loss.cpu() for loss in self.step.losses],
            "operations": list(self.step.operations),
            "metrics": dict(self._metrics),
            "begun_at": self._begun_at,
            "decided": self._decided,
            "kind": self.kind,
            "own": self.own.capture(),
            "samplers": self._stream.samplers() if self._stream is not None else [],
        }

    def load(self, saved: dict[str, Any]) -> None:
        self._load(saved, same_process=True)

    def _load(self, saved: dict[str, Any], *, same_process: bool) -> None:
        trainer, state = self._trainer, self._trainer.state
        for name, value in codec.loads(saved["state"]).items():
            setattr(state, name, value)
        state.log_history = codec.loads(saved["history"])
        vars(trainer.control).update(saved["control"])
        for name, value in saved["counters"].items():
            setattr(trainer, name, value)
        self._running.put(saved["loss"])
        for callback, attributes in zip(self._callbacks(), saved["callbacks"], strict=True):
            vars(callback).update(codec.loads(attributes))
        self.step.put_back(saved["losses"], saved["operations"])
        self._metrics = dict(saved["metrics"])
        self._decided = saved.get("decided", self._decided)  # not in checkpoints of before
        self.own.restore(saved["own"], same_process=same_process)
        if self._stream is not None:
            self._stream.put_samplers(saved.get("samplers", []))  # none in checkpoints of before

    def restored(self, saved: dict[str, Any]) -> None:
        begun_at = saved.get("begun_at", 0)  # none in checkpoints of before
        if begun_at != self._begun_at:
            raise UnsupportedError(
                f"the job's train() began behind step {begun_at} (resume_from_checkpoint), and this one behind step "
                f"{self._begun_at}: its calls are not the same ones; begin a new job (without --resume) with "
                "resume_from_checkpoint and the Trainer's newest checkpoint"
            )
        if not self._makes_calls:
            step, stops, _ = saved.get("decided", self._decided)
            if stops and self._trainer.state.global_step > step:
                raise UnsupportedError(
                    f"the training was stopped behind step {step}, and this process, which takes the place of a dead "
                    "one, has gone on: set control.should_training_stop in a method of a callback, by its name"
                )
            self._follows = saved
        self._restored = saved
        # A replacement that begins with the first call skips none, and the rest of the loop is as it was then.
        self._trainer.state.log_history = codec.loads(saved["history"])

    def makes(self, kind: str) -> None:
        """A call is about to be made, maybe again."""
        self.kind, self._makes_calls, self._follows = kind, True, None

    def decides(self) -> None:
        """A step or an epoch is over, and the Trainer's loop is about to look whether the training is. That is noted
        for a replacement, which does what was decided then: what has decided it may be passed over (an evaluation), or
        not be known to it (an attribute of a callback)."""
        control, step = self._trainer.control, self._trainer.state.global_step
        if self._follows is not None:
            at, *decided = self._follows.get("decided", self._decided)
            control.should_training_stop, control.should_epoch_stop = decided if at == step else (False, False)
            if self.loads_best_first:
                best = codec.loads(self._follows["state"])["best_model_checkpoint"]
                self._trainer.state.best_model_checkpoint = best
        self._decided = step, control.should_training_stop, control.should_epoch_stop

    def goes_on(self) -> None:
        """The Trainer's loop is about to look whether to leave a step amid its micro-batches. The protected call has
        made it whole."""
        control = self._trainer.control
        if self._follows is not None:
            control.should_training_stop = control.should_epoch_stop = False
        if control.should_training_stop or control.should_epoch_stop:
            raise refused(
                "a callback that ends the training or an epoch amid the micro-batches of a step "
                "(control.should_training_stop, should_epoch_stop): let it do so in on_step_end, on_log, on_evaluate, "
                "on_save or on_epoch_end"
            )

    @property
    def loads_best_first(self) -> bool:
        """Whether the Trainer looks for the best model as soon as its loop is left (transformers 4): a replacement must
        know by then whether there is one. Later ones count their operations first, by when all is restored."""
        return bool(self._trainer.args.load_best_model_at_end) and not LOOP.takes("kept")

    @property
    def is_restored(self) -> bool:
        """Whether this process has got the state of the one that it replaces."""
        return self._restored is not None

    def resume(self) -> None:
        if self._restored is not None:
            self._check_place(self._restored)
            self._load(self._restored, same_process=False)
            self.resumed, self._follows = True, None

    def _check_place(self, saved: dict[str, Any]) -> None:
        """The loop of a replacement has come to where the state is from."""
        kind = saved.get("kind", self.kind)  # not in checkpoints of before
        step = codec.loads(saved["state"])["global_step"]
        if (kind, step) != (self.kind, self._trainer.state.global_step):
            raise UnsupportedError(
                f"this process, which takes the place of a dead one, has come to the call {self.kind!r} behind step "
                f"{self._trainer.state.global_step}, and the dead one was then in {kind!r} behind step {step}: what "
                "has decided when to evaluate, to save or to stop is not known here; let it follow from "
                "trainer.state.global_step, or from what is decided in on_log, on_evaluate or on_save"
            )

    def final_loss(self) -> float | None:
        """In a replacement that skips the end of the training: the mean loss of all of it. The Trainer has formed its
        own from what it has skipped. The loop is as it was then."""
        if self._restored is None:
            return None
        self._load(self._restored, same_process=False)
        steps = self._trainer.state.global_step
        if RESUMING.takes("there"):
            steps -= self._trainer._initial_global_step
        mean: float = self._trainer._total_loss_scalar / max(steps, 0.001)
        return mean

    def flags(self) -> tuple[Any, ...]:
        """What the callbacks have decided."""
        return tuple(vars(self._trainer.control).values())

    # -- parts ------------------------------------------------------------------------------------

    def _encoded_history(self, history: list[dict[str, Any]]) -> bytes:
        """The log's history as bytes. It is long and only grows, so it is encoded again only when it has grown."""
        if self._history is None or self._history[:2] != (id(history), len(history)):
            self._history = (id(history), len(history), codec.dumps(history))
        return self._history[2]

    def _callbacks(self) -> list[Any]:
        """Callbacks that say what their state is."""
        from transformers.trainer_callback import ExportableState

        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]


def vars_of(callback: Any) -> dict[str, Any]:
    """The attributes that a callback exports."""
    attributes: dict[str, Any] = callback.state()["attributes"]
    return attributes


class TrainerLoopAdapter(LoopAdapter, InspectableAdapter):
    """Carries the loop's state."""

    name = "trainer-loop"

    def __init__(self, loop: TrainerLoop) -> None:
        super().__init__(loop)
        self._trainer_loop = loop
        self._own = loop.own

    def local_state_mark(self) -> Any:
        return self._own.mark(), self._trainer_loop.flags()

    def known(self) -> Sequence[object]:
        return self._own.holders()

    def rank_bytes(self) -> Mapping[str, int]:
        return {path: len(data) for path, data in self._own.newest.items() if isinstance(data, bytes)}
