"""The one table of what is replaced in Megatron-LM, and the check that it is what we know.

``megatron.training.arguments.parse_args`` is wrapped as soon as that module is imported by a process of
``flashrecovery run``. The rest follows when the flag is there: without it, nothing is touched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from flashrecovery.errors import UnsupportedError
from fr_megatron.lm.arguments import with_flags

ARGUMENTS = "megatron.training.arguments"
TRAINING = "megatron.training.training"
TIMERS = "megatron.core.timers"
_MARK = "__flashrecovery_wrapped__"
_INSTALLED = "__flashrecovery_installed__"


@dataclass(frozen=True)
class Hook:
    """One function that is replaced.

    Attributes:
        module, name: where the loop finds it.
        parameters: its first parameters, by which a changed one is recognised.
    """

    module: str
    name: str
    parameters: tuple[str, ...]


PARSE_ARGS = Hook(ARGUMENTS, "parse_args", ("extra_args_provider", "ignore_unknown_args"))
TIMER_START = Hook(TIMERS, "Timer.start", ("self", "barrier"))
LOOP = (
    Hook(TRAINING, "setup_model_and_optimizer", ("model_provider_func", "model_type")),
    Hook(TRAINING, "build_train_valid_test_data_loaders", ("build_train_valid_test_datasets_provider",)),
    Hook(TRAINING, "train", ("forward_step_func", "model", "optimizer", "opt_param_scheduler")),
    Hook(TRAINING, "train_step", ("forward_step_func", "data_iterator", "model", "optimizer")),
    Hook(
        TRAINING,
        "training_log",
        ("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag"),
    ),
    Hook(TRAINING, "evaluate_and_print_results", ("prefix", "forward_step_func", "data_iterator", "model")),
    Hook(TRAINING, "save_checkpoint_and_time", ("iteration", "model", "optimizer", "opt_param_scheduler")),
    Hook(
        TRAINING,
        "post_training_step_callbacks",
        ("model", "optimizer", "opt_param_scheduler", "iteration", "prof"),
    ),
    Hook(TRAINING, "checkpoint_and_decide_exit", ("model", "optimizer", "opt_param_scheduler", "iteration")),
    Hook(TRAINING, "disable_forward_pre_hook", ("model_chunks", "param_sync")),
    Hook(TRAINING, "print_datetime", ("string",)),
)


def install(arguments: ModuleType) -> None:
    """Wrap ``parse_args``; called with its module as soon as it has been imported. Idempotent."""
    module: Any = arguments
    original = module.parse_args
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        args = original(with_flags(extra_args_provider), ignore_unknown_args)
        if args.flash_recovery and not hasattr(parse_args, _INSTALLED):  # Megatron parses its flags several times
            install_loop(args)
            setattr(parse_args, _INSTALLED, True)
        return args

    setattr(parse_args, _MARK, True)
    module.parse_args = parse_args


def install_loop(args: Any) -> None:
    """Replace the functions of the loop.

    Raises:
        UnsupportedError: Megatron-LM's functions are not those that we know; the difference is in the message.
    """
    from fr_megatron.lm.loop import ProtectedLoop

    check_hooks()
    training: Any = importlib.import_module(TRAINING)
    timer: Any = importlib.import_module(TIMERS).Timer
    original = {hook.name: getattr(training, hook.name) for hook in LOOP}
    original[TIMER_START.name] = timer.start
    loop = ProtectedLoop(args, original)
    for hook in LOOP:
        setattr(training, hook.name, getattr(loop, hook.name))
    timer.start = lambda self, barrier=False: loop.start_timer(self, barrier)


def check_hooks() -> None:
    """Raises UnsupportedError that lists what is missing or has other parameters."""
    wrong = [difference for hook in (PARSE_ARGS, TIMER_START, *LOOP) if (difference := _difference(hook))]
    if wrong:
        raise UnsupportedError("this Megatron-LM is not one that flash-recovery knows: " + "; ".join(wrong))


def _difference(hook: Hook) -> str:
    found: Any = importlib.import_module(hook.module)
    for part in hook.name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return f"{hook.module}.{hook.name} is missing"
    names = tuple(inspect.signature(found).parameters)
    if names[: len(hook.parameters)] != hook.parameters:
        known, here = ", ".join(hook.parameters), ", ".join(names[: len(hook.parameters)])
        return f"{hook.module}.{hook.name} begins with ({here}), not with ({known})"
    return ""
