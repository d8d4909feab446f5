"""The one table of what is replaced in Megatron-LM, and the check that it is what we know.

``megatron.training.arguments.parse_args`` is wrapped as soon as that module is imported by a process of
``flashrecovery run``. The rest follows when the flag is there (or :func:`require` was called): without it, nothing is
touched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from flashrecovery.errors import UnsupportedError
from fr_megatron.lm.arguments import checked_arguments, with_flags
from fr_megatron.lm.saving import keeping_the_whole_one

ARGUMENTS = "megatron.training.arguments"
TRAINING = "megatron.training.training"
TIMERS = "megatron.core.timers"
PARALLEL = "megatron.core.parallel_state"
CHECKPOINTING = "megatron.training.checkpointing"
_MARK = "__flashrecovery_wrapped__"
_INSTALLED = "__flashrecovery_installed__"
_REQUIRED = "__flashrecovery_required__"


@dataclass(frozen=True)
class ReplacedFunction:
    """One function that is replaced.

    Attributes:
        module, name: where the loop finds it.
        parameters: its first parameters, by which a changed one is recognised.
        other: the same as other releases have it. Each function may be that of another release: 0.18 has some of 0.16,
            and some of 0.19.
        optional: not every release has it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    other: tuple[str, ...] | None = None
    optional: bool = False

    @property
    def known(self) -> tuple[tuple[str, ...], ...]:
        """The first parameters that it may have."""
        return (self.parameters,) if self.other is None else (self.parameters, self.other)


PARSE_ARGS = ReplacedFunction(ARGUMENTS, "parse_args", ("extra_args_provider", "ignore_unknown_args"))
TIMER_START = ReplacedFunction(TIMERS, "Timer.start", ("self", "barrier"))
LOOP = (
    ReplacedFunction(
        PARALLEL, "initialize_model_parallel", ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    ),
    ReplacedFunction(
        TRAINING,
        "setup_model_and_optimizer",
        ("model_provider_func", "model_type"),
        ("model_type", "model_provider_func"),
    ),
    ReplacedFunction(TRAINING, "build_train_valid_test_data_loaders", ("build_train_valid_test_datasets_provider",)),
    ReplacedFunction(TRAINING, "train", ("forward_step_func", "model", "optimizer", "opt_param_scheduler")),
    ReplacedFunction(TRAINING, "train_step", ("forward_step_func", "data_iterator", "model", "optimizer")),
    ReplacedFunction(
        TRAINING,
        "training_log",
        (
            *("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag"),
            *("skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad"),
        ),
    ),
    ReplacedFunction(TRAINING, "calc_params_l2_norm", ("model",)),
    ReplacedFunction(TRAINING, "evaluate_and_print_results", ("prefix", "forward_step_func", "data_iterator", "model")),
    ReplacedFunction(TRAINING, "save_checkpoint_and_time", ("iteration", "model", "optimizer", "opt_param_scheduler")),
    ReplacedFunction(TRAINING, "save_checkpoint", ("iteration", "model", "optimizer", "opt_param_scheduler")),
    ReplacedFunction(
        TRAINING,
        "post_training_step_callbacks",
        ("model", "optimizer", "opt_param_scheduler", "iteration", "prof"),
    ),
    ReplacedFunction(
        TRAINING, "checkpoint_and_decide_exit", ("model", "optimizer", "opt_param_scheduler", "iteration")
    ),
    ReplacedFunction(
        TRAINING,
        "disable_forward_pre_hook",
        ("model_chunks", "param_sync"),
        ("model_chunks", "optimizer", "param_sync"),
    ),
    ReplacedFunction(TRAINING, "print_datetime", ("string",)),
    ReplacedFunction(TRAINING, "update_num_microbatches", ("consumed_samples", "consistency_check")),
    ReplacedFunction(TRAINING, "get_num_microbatches", ()),
    ReplacedFunction(TRAINING, "update_pg_timeout", ("timeout",), optional=True),
    ReplacedFunction(TRAINING, "consume_seqlen_stats_in_iteration", (), optional=True),  # from 0.18 on
)
ALL = (PARSE_ARGS, TIMER_START, *LOOP)


def install(arguments: ModuleType) -> None:
    """Wrap ``parse_args``; called with its module as soon as it has been imported. Idempotent."""
    module: Any = arguments
    original = module.parse_args
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        args = original(with_flags(extra_args_provider), ignore_unknown_args)
        protected = hasattr(module, _REQUIRED) or getattr(args, "flash_recovery", False)
        _follow_layout(args, protected=protected)
        if protected:
            install_loop(args)
        return args

    setattr(parse_args, _MARK, True)
    module.parse_args = parse_args


def _follow_layout(args: Any, *, protected: bool) -> None:
    from fr_megatron.lm.replan import leave_out_loading, take_layout

    take_layout(args)
    if protected:
        leave_out_loading(args)


def require() -> None:
    """From now on the flag counts as given, whichever parser reads the arguments."""
    setattr(importlib.import_module(ARGUMENTS), _REQUIRED, True)


def install_loop(args: Any) -> None:
    """Replace the functions of the loop. Idempotent: Megatron parses its flags several times.

    Raises:
        ConfigError: a flag is wrong, or the script was not started by ``flashrecovery run``.
        UnsupportedError: Megatron-LM's functions are not those that we know; the difference is in the message.
    """
    from fr_megatron.lm.calls import ProtectedLoop

    training: Any = importlib.import_module(TRAINING)
    if hasattr(training, _INSTALLED):
        return
    check_hooks()
    timer: Any = importlib.import_module(TIMERS).Timer
    there = [hook for hook in LOOP if _parameters(hook) is not None]
    original = {hook.name: getattr(importlib.import_module(hook.module), hook.name) for hook in there}
    original[TIMER_START.name] = timer.start
    loop = ProtectedLoop(args, original)
    for hook in there:
        setattr(importlib.import_module(hook.module), hook.name, getattr(loop, hook.name))
    timer.start = lambda self, barrier=False: loop.start_timer(self, barrier)
    _replace_wherever(CHECKPOINTING, "cleanup_old_non_persistent_checkpoint", keeping_the_whole_one)
    _replace_wherever(CHECKPOINTING, "load_args_from_checkpoint", checked_arguments)
    setattr(training, _INSTALLED, True)


def _replace_wherever(module: str, name: str, by: Callable[[Any], Any]) -> None:
    """Replace a function of Megatron's, where there is one, in all of its modules that have it."""
    original = getattr(importlib.import_module(module), name, None)
    if original is None:
        return
    replaced = by(original)
    for key, known in list(sys.modules.items()):
        if key.startswith("megatron.training") and vars(known).get(name) is original:
            setattr(known, name, replaced)


def check_hooks() -> None:
    """Raises UnsupportedError that lists what is missing or has other parameters."""
    import megatron.core

    if wrong := differences(_parameters):
        raise UnsupportedError(
            f"this Megatron-LM (core {megatron.core.__version__}) has not the loop that flash-recovery knows: "
            + "; ".join(wrong)
        )


def differences(parameters: Callable[[ReplacedFunction], tuple[str, ...] | None]) -> list[str]:
    """How the functions differ from those that are known; [] if they do not. ``parameters``: of a function
    that is there, None of one that is not."""
    return [text for hook in ALL if (text := difference(hook, parameters(hook)))]


def difference(hook: ReplacedFunction, found: tuple[str, ...] | None) -> str:
    """How a function differs from what is known of it; "" if it does not. ``found``: its parameters, None if
    there is no such function."""
    if found is None:
        return "" if hook.optional else f"{hook.module}.{hook.name} is missing"
    if any(found[: len(known)] == known for known in hook.known):
        return ""
    here = ", ".join(found[: max(map(len, hook.known))])
    known = " or ".join(f"({', '.join(known)})" for known in hook.known)
    return f"{hook.module}.{hook.name} begins with ({here}), not with {known}"


def _parameters(hook: ReplacedFunction) -> tuple[str, ...] | None:
    found: Any = importlib.import_module(hook.module)
    for part in hook.name.split("."):
        found = getattr(found, part, None)
    return None if found is None else tuple(inspect.signature(found).parameters)
