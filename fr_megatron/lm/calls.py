"""The functions that replace those of ``megatron.training.training``: each calls the original one, protected."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery import Recovery, init
from flashrecovery.adapter.loop import check_equal
from flashrecovery.errors import ConfigError, UnsupportedError
from fr_megatron.adapter import adapter_for
from fr_megatron.digest import state_digest
from fr_megatron.elastic import membership
from fr_megatron.lm import packed, replan
from fr_megatron.lm.arguments import check_protected, common, given, settings
from fr_megatron.lm.data import streamed
from fr_megatron.lm.elastic_loop import ElasticLoop, check_flag
from fr_megatron.lm.loading import as_at_the_launch
from fr_megatron.lm.replan import LayoutLoop
from fr_megatron.lm.state import NOTHING, LMLoop, LMLoopAdapter
from fr_megatron.own_loop import PUT_ASIDE
from fr_megatron.replicas import computing
from fr_megatron.support import check_inside

Original = Callable[..., Any]


@dataclass(frozen=True)
class _Made:
    """By ``setup_model_and_optimizer``, and protected since: what it has returned, and the loop that trains it."""

    chunks: Any
    optimizer: Any
    scheduler: Any
    loop: LMLoop


class ProtectedLoop:
    """The protected loop of one process. ``original``: Megatron's functions by name.

    Raises:
        ConfigError: a flag is wrong, or the script was not started by ``flashrecovery run``.
        UnsupportedError: megatron-core lacks something of its inside that is needed, by name.
    """

    def __init__(self, args: Any, original: dict[str, Original]) -> None:
        import megatron.core

        self._original = original
        self._recovery: Recovery = init(**settings(args))
        if not self._recovery.enabled:
            raise ConfigError("--flash-recovery: start the script with `flashrecovery run` in place of torchrun")
        check_inside(megatron.core.__version__)
        check_flag(args, self._recovery)
        replan.check_flags(args, self._recovery)
        self._elastic: ElasticLoop | None = None
        self._layouts: LayoutLoop | None = None
        self._made: _Made | None = None
        self._started = False

    @property
    def _training(self) -> _Made:
        """Raises UnsupportedError in a script that trains what Megatron has not set up."""
        if self._made is None:
            raise UnsupportedError(
                "flash-recovery does not support: a train_step() whose model setup_model_and_optimizer() has not made, "
                "with its optimizer"
            )
        return self._made

    @property
    def _args(self) -> Any:
        """The arguments that the loop uses; Megatron parses its flags several times."""
        from megatron.training.global_vars import get_args

        return get_args()

    # -- set-up -----------------------------------------------------------------------------------

    def initialize_model_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own. It makes groups, so arguments that differ between the ranks have to be found before it."""
        check_equal("Megatron's arguments", common(self._args))
        return self._original["initialize_model_parallel"](*args, **kwargs)

    def setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own; what it returns is protected from then on."""
        from megatron.core import parallel_state
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.training.global_vars import get_timers

        check_protected(self._args)
        if not parallel_state.model_parallel_is_initialized():
            raise UnsupportedError(
                "flash-recovery does not support: a script that makes its process groups itself "
                "(pretrain(skip_model_parallel_init=True), MIMO models on their own grid); allowed: the groups of "
                "megatron.core.parallel_state"
            )
        with as_at_the_launch(self._args):
            made = self._original["setup_model_and_optimizer"](*args, **kwargs)
        chunks, optimizer, scheduler = made
        if optimizer is not None:
            elastic, layouts = self._recovery.elastic is not None, self._recovery.parallelism is not None
            groups = membership(chunks, optimizer) if elastic else None
            if layouts:
                replan.check_model(chunks)
                replan.check_late(self._args)
                replan.begin(self._args)
            if elastic or layouts:
                alike = replan.started_with(self._args) if layouts else {}
                self._elastic = ElasticLoop(self._args, self._recovery, chunks, computing=computing(), besides=alike)
            if layouts and self._elastic is not None:
                self._layouts = LayoutLoop(self._args, self._elastic)
            known = replan.known_facts(self._args) if layouts else {}
            adapter = adapter_for(chunks, optimizer, scheduler, membership=groups, known=known)
            loop = LMLoop(
                *(self._args, get_timers(), get_rerun_state_machine(), self._elastic, self._layouts),
                far_back=self._recovery.has_checkpoints,
                chunks=chunks,
            )
            self._recovery.register_adapter(adapter)
            self._recovery.register_adapter(LMLoopAdapter(loop))
            self._made = _Made(chunks, optimizer, scheduler, loop)
        return made

    def build_train_valid_test_data_loaders(self, *args: Any, **kwargs: Any) -> Any:
        made = self._original["build_train_valid_test_data_loaders"](*args, **kwargs)
        if self._elastic is not None:
            return tuple(self._elastic.followed(loaders) for loaders in made)
        return made if self._made is None else tuple(streamed(loaders, self._recovery) for loaders in made)

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, kind: str, body: Callable[[], Any], skipped: Callable[[], Any]) -> Any:
        """One call of the core; ``body`` alone before the first step (that is set-up)."""
        if not self._started:
            return body()
        loop = None if self._made is None else self._made.loop
        if loop is not None and not self._recovery.in_call:
            loop.enter_call(kind)
        return self._recovery.call(kind, body, skipped=skipped, loop=loop, ahead=self._skips_ahead)

    @property
    def _skips_ahead(self) -> bool:
        """Whether a process can skip calls before it knows what the others have got in them. With a loss scale, which
        steps overflowed decides what is called."""
        scaled = self._args.fp16 or self._args.loss_scale is not None
        return not scaled and self._elastic is None

    def train_step(self, forward_step_func: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        loop, iteration = self._training.loop, self._args.curr_iteration
        self._started = True
        self._report_tokens()

        def body() -> Any:
            packed.forget()
            for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
                if hasattr(iterator, "advance"):
                    iterator.advance()  # what an interrupted step has put aside for a rerun

            def step(forward: Original) -> Any:
                return self._original["train_step"](forward, data_iterator, *args, **kwargs)

            elastic = self._elastic
            returned = (
                step(forward_step_func) if elastic is None else elastic.train_step(iteration, step, forward_step_func)
            )
            if self._layouts is not None:
                returned = self._layouts.stepped(returned)
            if elastic is not None:
                elastic.losses.stepped()
            return loop.finished(iteration, returned, self._parameters_norm(), self._packed())

        def skipped() -> Any:
            if loop.result is not NOTHING:
                return loop.handed(iteration, loop.result.returned())
            empty, _, *rest = NOTHING.returned()
            return loop.handed(iteration, (empty, int(iteration in loop.overflows), *rest))

        return self._call("train", body, skipped)

    def _parameters_norm(self) -> float | None:
        """What the log is to say of the parameters. A collective, so it is a part of the step: the loop asks for it
        outside of all calls."""
        if not self._args.log_params_norm:
            return None
        found: float = self._original["calc_params_l2_norm"](self._training.chunks)
        return found

    def calc_params_l2_norm(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """After a step, what it has found; where it was skipped, None, which no log shows."""
        if not self._started:
            return self._original["calc_params_l2_norm"](model, *args, **kwargs)
        return self._training.loop.result.params_norm

    def _packed(self) -> tuple[float | None, float | None]:
        """What the log is to say of packed samples. The loop asks for it outside of all calls, too."""
        consume = self._original.get("consume_seqlen_stats_in_iteration")
        found: tuple[float | None, float | None] = packed.NONE if consume is None else consume()
        return found

    def consume_seqlen_stats_in_iteration(self) -> tuple[float | None, float | None]:
        """After a step, what it has found."""
        return self._training.loop.result.packed

    def update_pg_timeout(self, *args: Any, **kwargs: Any) -> None:
        """As Megatron's own, which begins with a barrier. A process that skips the call sets its own groups alone."""
        update = self._original["update_pg_timeout"]

        def without_barrier() -> None:
            with _no_barrier():
                update(*args, **kwargs)

        self._call("timeout", lambda: update(*args, **kwargs), without_barrier)

    def _report_tokens(self) -> None:
        """For what is shown of the job's speed; a ramp-up changes the batch size."""
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size

        self._recovery.report(
            tokens_per_step=int(get_current_global_batch_size() or 0) * int(self._args.seq_length or 0)
        )

    def training_log(self, loss_dict: Any, total_loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        loop = self._training.loop
        loop.logging(total_loss_dict)
        _, iteration, _, report_memory, *_ = args
        first = kwargs.get("is_first_iteration", False)
        settings = self._args
        communicates = first or iteration % settings.log_interval == 0 or _reduces_losses(settings)

        def log(totals: dict[str, Any]) -> Any:
            given = loop.result.logged(self._as_it_is(args) if loop.made_again else args)
            return self._original["training_log"](loss_dict, totals, *given, **kwargs)

        def made() -> Any:
            with nullcontext() if self._elastic is None else self._elastic.losses.logging():
                returned = log(total_loss_dict)
            loop.printed(iteration - 1)
            return returned

        def add(totals: dict[str, Any]) -> Any:
            with _own_learning_rate():
                return log(totals)

        if communicates:
            return self._call("log", made, lambda: report_memory)
        returned = add(total_loss_dict)
        loop.summed(iteration - 1, add)
        return returned

    def _as_it_is(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """What ``training_log`` is given after the losses, with the optimizer's learning rate and loss scale: the loop
        may have read them in a process that skipped the step."""
        training: Any = importlib.import_module("megatron.training.training")
        optimizer = self._training.optimizer
        rate, iteration, scale, *rest = given
        if not optimizer.is_stub_optimizer:
            scale = optimizer.get_loss_scale().item()
        if hasattr(training, "get_canonical_lr_for_logging"):
            rate = training.get_canonical_lr_for_logging(optimizer.param_groups)
        return rate, iteration, scale, *rest

    def evaluate_and_print_results(self, *args: Any, **kwargs: Any) -> Any:
        elastic, layouts = self._elastic, self._layouts

        def body() -> None:
            with kept_functions(self._made.chunks[0].config if self._made else None):
                self._original["evaluate_and_print_results"](*args, **kwargs)
            if elastic is not None:
                elastic.evaluated()
            if layouts is not None:
                layouts.evaluated()

        return self._call("evaluate", body, lambda: None)

    def save_checkpoint_and_time(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole("save", "save_checkpoint_and_time", args, kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own. After the last iteration ``pretrain()`` itself calls it; elsewhere it is a part of another
        call."""
        return self._whole("save", "save_checkpoint", args, kwargs)

    def print_datetime(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole("barrier", "print_datetime", args, kwargs)

    def _whole(self, kind: str, name: str, args: Any, kwargs: Any) -> Any:
        """A protected call of a function that returns nothing."""
        return self._call(kind, lambda: self._original[name](*args, **kwargs), lambda: None)

    def post_training_step_callbacks(
        self, model: Any, optimizer: Any, scheduler: Any, iteration: int, profiler: Any, operations: Any, *rest: Any
    ) -> Any:
        settings = self._args
        due = any(
            interval is not None and iteration % interval == 0
            for interval in (
                settings.check_weight_hash_across_dp_replicas_interval,
                getattr(settings, "gpu_sniff_test_interval", None),  # core 0.20
            )
        )
        due |= bool(settings.log_straggler) and iteration % settings.log_interval == 0

        def body() -> Any:
            return self._original["post_training_step_callbacks"](
                model, optimizer, scheduler, iteration, profiler, operations, *rest
            )

        return self._call("check", body, lambda: operations) if due else body()

    def checkpoint_and_decide_exit(self, model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any) -> Any:
        settings, loop = self._args, self._training.loop
        due = any(
            interval and iteration % interval == 0
            for interval in (settings.save_interval, settings.non_persistent_save_interval, settings.exit_interval)
        ) or bool(settings.exit_signal_handler or settings.exit_duration_in_mins)

        said: list[bool] = []  # to the loop

        def decide(*, due: bool) -> bool:
            before = _decided(said) if due and self._recovery.generation else None
            with nullcontext() if before is None else _deciding(settings, exits=before):
                exits = self._original["checkpoint_and_decide_exit"](model, optimizer, scheduler, iteration, *rest)
            exits = bool(exits) if before is None else before
            loop.decided(exits)
            return exits

        if not due:
            return decide(due=False)  # in no call: nothing may communicate, as the others may be elsewhere
        said.append(bool(self._call("exit", lambda: decide(due=True), loop.has_ended)))
        return said[0]

    def disable_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own, which gathers the parameters first. (From core 0.19 on it is given the optimizer, too, for
        fp8 parameters only.)"""
        disable = self._original["disable_forward_pre_hook"]
        given = inspect.signature(disable).bind(*args, **kwargs).arguments
        chunks, param_sync = given["model_chunks"], given.get("param_sync", True)

        def body() -> None:
            hooked = [chunk for chunk in chunks if chunk.remove_forward_pre_hook_handles]
            disable(hooked, param_sync=False)
            for chunk in chunks:
                with torch.no_grad():
                    chunk.start_param_sync(force_sync=True)

        def without_gathering() -> None:
            disable(chunks, param_sync=False)

        return self._call("gather", body, without_gathering) if param_sync else without_gathering()

    def start_timer(self, timer: Any, barrier: bool) -> None:
        """Takes the place of ``Timer.start``."""
        if not barrier:
            self._original["Timer.start"](timer)
            return
        self._call(
            "barrier",
            lambda: self._original["Timer.start"](timer, barrier=True),
            lambda: self._original["Timer.start"](timer),
        )

    # -- micro-batches ----------------------------------------------------------------------------

    def update_num_microbatches(
        self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False
    ) -> None:
        """As Megatron's own. In an elastic job, the loop compares what comes next with its iteration before."""
        self._original["update_num_microbatches"](consumed_samples, consistency_check, verbose=verbose)
        if self._elastic is not None:
            self._elastic.updated(checks=consistency_check)

    def get_num_microbatches(self) -> int:
        number: int = self._original["get_num_microbatches"]()
        return number if self._elastic is None else self._elastic.seen(number)

    # -- the end ----------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._elastic is not None:
            self._elastic.training(self._original["get_num_microbatches"]())
        returned = self._original["train"](*args, **kwargs)
        if given(self._args, "digest") and self._made is not None:
            made = (self._made.chunks, self._made.optimizer, self._made.scheduler)
            print(f"digest rank={self._args.rank} {state_digest(*made)}", flush=True)
        return returned


def _decided(said: Sequence[bool]) -> bool | None:
    """The earlier decision of a repeated call, on any rank; None: no loop knows of one. A loop that continued
    or ended after the call cannot take that back, and a replacement has got no signal, and sees another time. ``said``:
    the decision that this rank's loop received. A collective."""
    found: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said[0] if said else None)
    known = [one for one in found if one is not None]
    return all(known) if known else None


@contextmanager
def _deciding(settings: Any, *, exits: bool) -> Iterator[None]:
    """Within, Megatron ends the loop as it has done before, with a checkpoint, or does not, whatever signals and time
    say now; intervals say the same as before. Checkpoints get ``settings`` as they are."""
    training: Any = importlib.import_module("megatron.training.training")
    get_args, seen = training.get_args, copy.copy(settings)
    seen.exit_signal_handler = False
    seen.exit_duration_in_mins = -1.0 if exits else None  # more has passed
    training.get_args = lambda: seen
    try:
        yield
    finally:
        training.get_args = get_args


@contextmanager
def kept_functions(config: Any) -> Iterator[None]:
    """The interleaved schedule puts aside how gradients are reduced and parameters gathered while it only goes forward,
    and leaves it so where it is cut short: then survivors would train in another way than replacements."""
    names = [name for name in PUT_ASIDE if hasattr(config, name)]
    kept = {name: getattr(config, name) for name in names}
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(config, name, function)


@contextmanager
def _no_barrier() -> Iterator[None]:
    """Within, torch's barrier does nothing."""
    barrier = dist.barrier
    dist.barrier = lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.barrier = barrier


_REDUCED = "reduce_max_stat_across_model_parallel_group"
"""A function of megatron-core 0.16's loop: ``training_log`` reduces the learning rate with it, also where nothing is
printed."""


@contextmanager
def _own_learning_rate() -> Iterator[None]:
    """Within, ``training_log`` does not communicate: it takes this rank's learning rate, which is that of all ranks
    that train anything. It is no protected call there: a rank that is replaced goes through it while others compute,
    and the death of one would be an error in the others' loops."""
    training: Any = importlib.import_module("megatron.training.training")
    reduced = getattr(training, _REDUCED, None)
    if reduced is None:
        yield
        return
    setattr(training, _REDUCED, lambda stat: stat)
    try:
        yield
    finally:
        setattr(training, _REDUCED, reduced)


def _reduces_losses(settings: Any) -> bool:
    """Whether every ``training_log`` reduces losses that layers have put aside (:mod:`fr_megatron.trackers`)."""
    indexer = getattr(settings, "dsa_indexer_loss_coeff", None) or 0.0
    return settings.num_experts is not None or getattr(settings, "mtp_num_layers", None) is not None or indexer > 0
