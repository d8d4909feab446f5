"""The flags: shown by ``--help`` in a group of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def with_flags(provider: Provider | None) -> Provider:
    """An ``extra_args_provider`` that adds our flags, and then what ``provider`` adds."""

    def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        _add(parser.add_argument_group("flash recovery", "in-place recovery from the death of a rank"))
        return parser if provider is None else provider(parser)

    return both


def _add(group: Any) -> None:
    group.add_argument(
        "--flash-recovery", action="store_true", help="survive the death of a rank (needs `flashrecovery run`)"
    )
    group.add_argument(
        "--flash-recovery-redundancy",
        choices=("auto", "replica", "neighbor", "none"),
        help="copies of what no other rank holds (shards of the distributed optimizer); default: the launcher's",
    )
    group.add_argument(
        "--flash-recovery-undo", choices=("auto", "always", "never"), help="own pre-step copy; default: the launcher's"
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
        "--flash-recovery-checkpoint-dir", metavar="DIR", help="where fallback checkpoints are kept; default: none"
    )
    group.add_argument(
        "--flash-recovery-checkpoint-interval", type=float, metavar="SECONDS", help="between two; default: measured"
    )
    group.add_argument(
        "--flash-recovery-digest", action="store_true", help="print the SHA-256 of each rank's state after training"
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags set, as :func:`flashrecovery.init` takes it."""
    result: dict[str, Any] = {
        name: value
        for name in ("redundancy", "undo", "verify")
        if (value := getattr(args, f"flash_recovery_{name}")) is not None
    }
    if args.flash_recovery_hang_timeout is not None:
        result["timeouts"] = {"hang_floor_s": args.flash_recovery_hang_timeout}
    checkpoint = {"dir": args.flash_recovery_checkpoint_dir, "interval_s": args.flash_recovery_checkpoint_interval}
    given = {name: value for name, value in checkpoint.items() if value is not None}
    if given:
        result["checkpoint"] = given
    return result
