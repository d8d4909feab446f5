"""The flags: shown by ``--help`` in their own group."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrecovery.errors import UnsupportedError

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def with_flags(provider: Provider | None) -> Provider:
    """An ``extra_args_provider`` that adds our flags, unless Megatron-LM has them, and then what ``provider`` adds."""

    def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if "--flash-recovery" not in parser._option_string_actions:  # patches/megatron/0001
            _add(parser.add_argument_group("flash recovery", "in-place recovery from the death of a rank"))
        return parser if provider is None else provider(parser)

    return both


def _add(group: Any) -> None:
    group.add_argument(
        "--flash-recovery", action="store_true", help="survive the death of a rank (needs `flashrecovery run`)"
    )
    group.add_argument(
        "--flash-recovery-redundancy",
        choices=("auto", "replica", "neighbor", "parity", "none"),
        help="copies of what no other rank holds (shards of the distributed optimizer); default: the launcher's",
    )
    group.add_argument(
        "--flash-recovery-parity",
        type=int,
        choices=(1, 2),
        help="with redundancy parity: how many ranks of a group may be lost at once; default: the launcher's",
    )
    group.add_argument(
        "--flash-recovery-pre-step-copy",
        choices=("auto", "always", "never"),
        help="own pre-step copy; default: the launcher's",
    )
    group.add_argument(
        "--flash-recovery-verify",
        action=argparse.BooleanOptionalAction,
        help="compare the digest of every restored shard with its source's; default: the launcher's",
    )
    group.add_argument(
        "--flash-recovery-hang-timeout",
        type=float,
        metavar="SECONDS",
        help="no progress for so long (and ten usual steps) is a hang; default: the launcher's",
    )
    group.add_argument(
        "--flash-recovery-elastic",
        metavar="MIN:MAX",
        help="go on with fewer data-parallel replicas when one is lost for good; as the launcher's --elastic",
    )
    group.add_argument(
        "--flash-recovery-parallelism",
        type=int,
        metavar="MIN",
        help="go on in another parallel layout, of that many ranks at least, when one is lost; as the launcher's "
        "--parallelism",
    )
    group.add_argument(
        "--flash-recovery-checkpoint-dir", metavar="DIR", help="where fallback checkpoints are kept; default: none"
    )
    group.add_argument(
        "--flash-recovery-checkpoint-interval", type=float, metavar="SECONDS", help="between two; default: measured"
    )
    group.add_argument(
        "--flash-recovery-digest", action="store_true", help="print the SHA-256 of each rank's state after training"
    )


def given(args: argparse.Namespace, name: str) -> Any:
    """The value of ``--flash-recovery-<name>``; None also where Megatron has its arguments from a file."""
    return getattr(args, f"flash_recovery_{name}", None)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags set, as :func:`flashrecovery.init` takes it."""
    result: dict[str, Any] = {
        name: value
        for name in ("redundancy", "parity", "pre_step_copy", "verify")
        if (value := given(args, name)) is not None
    }
    if (seconds := given(args, "hang_timeout")) is not None:
        result["timeouts"] = {"hang_step_s": seconds}
    checkpoint = {"dir": given(args, "checkpoint_dir"), "interval_s": given(args, "checkpoint_interval")}
    if checkpoint := {name: value for name, value in checkpoint.items() if value is not None}:
        result["checkpoint"] = checkpoint
    return result


def check_protected(args: argparse.Namespace) -> None:
    """Raises UnsupportedError for a flag with which the loop communicates where no call can be, or a replacement would
    be another process than the one whose place it takes. ``args``: as the loop uses them."""
    found = []
    if getattr(args, "async_save", False):
        found.append(
            "--async-save (between its calls the loop asks on all ranks whether writing is over, and a rank that is "
            "replaced writes nothing); allowed: without it"
        )
    if getattr(args, "log_energy", False):
        found.append(
            "--log-energy (after its last iteration the loop sums up over all ranks, between its calls, where no death "
            "is survived); allowed: without it"
        )
    found += [f"{flag} ({why}); allowed: without it" for name, flag, why in _OUTSIDE if getattr(args, name, None)]
    if getattr(args, "use_checkpoint_args", False) and _loads_what_it_saves(args):
        found.append(_ARGUMENTS_OF_A_CHECKPOINT)
    if found:
        raise UnsupportedError(f"flash-recovery does not support: {'; '.join(found)}")


_OUTSIDE = (
    ("hybrid_context_parallel", "--hybrid-context-parallel", "its iterator communicates where the loop reads data"),
    (
        "optimizer_cuda_graph",
        "--optimizer-cuda-graph",
        "a captured graph holds the communicators that a recovery frees",
    ),
    (
        *("moe_expert_rank_capacity_factor", "--moe-expert-rank-capacity-factor"),
        "it reads samples ahead, and does a step again by itself",
    ),
    ("moe_routing_trace_path", "--moe-routing-trace-path", "it counts the steps that it sees, and writes each"),
    ("perform_rl_step", "--perform-rl-step", "rollouts communicate between the loop's calls"),
)
"""What of the loop communicates or counts where no call is: argument, flag and why. From core 0.16 on, some later."""
_ARGUMENTS_OF_A_CHECKPOINT = (
    "--use-checkpoint-args with --load and --save of the same directory (a replacement would read the arguments from "
    "the newest checkpoint there, which is not that of the launch); allowed: another --save, or --ckpt-step"
)


def checked_arguments(load_args_from_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function, which raises UnsupportedError where a replacement would read other arguments than the launch
    has. A script may have it called without the flag (``args_defaults={"use_checkpoint_args": True}``)."""

    @functools.wraps(load_args_from_checkpoint)
    def checked(args: argparse.Namespace, load_arg: str = "load", *rest: Any, **kwargs: Any) -> Any:
        if load_arg == "load" and _loads_what_it_saves(args):
            raise UnsupportedError(f"flash-recovery does not support: {_ARGUMENTS_OF_A_CHECKPOINT}")
        return load_args_from_checkpoint(args, load_arg, *rest, **kwargs)

    return checked


def _loads_what_it_saves(args: argparse.Namespace) -> bool:
    load, save = getattr(args, "load", None), getattr(args, "save", None)
    if not load or not save or getattr(args, "ckpt_step", None):
        return False
    return Path(load).resolve() == Path(save).resolve()


_OF_A_RANK = frozenset(("rank", "local_rank"))
_OF_A_NODE = frozenset(("data_cache_path", "tensorboard_dir", "wandb_save_dir", "non_persistent_local_ckpt_dir"))


def common(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that all ranks must have alike, by flag."""
    own = _OF_A_RANK | _OF_A_NODE
    return {"--" + name.replace("_", "-"): value for name, value in vars(args).items() if name not in own}
