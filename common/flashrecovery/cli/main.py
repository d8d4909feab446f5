"""``flashrecovery``: the commands, each imported only when it is used."""

from __future__ import annotations

import importlib
import sys

import click

from flashrecovery import __version__
from flashrecovery.errors import FlashRecoveryError
from flashrecovery.terminal import say, show_warnings
from flashrecovery.util.collector import uncollected

_COMMANDS = {
    "demo": "Train a small GPT here, kill a rank, and end with the same bits.",
    "run": "Start a training job that survives the death of a rank.",
    "adopt": "Be a rank that srun, mpirun or the like has started, and survive its death.",
    "shim": "Write a torchrun, deepspeed and accelerate that pass on to `run`.",
    "controller": "Run only the controller of a job of several nodes.",
    "status": "What a job is doing.",
    "inject": "Inject a fault into a running job.",
    "resize": "Another number of replicas for a running elastic job.",
    "replan": "Another parallel layout for a running job.",
    "drain": "Have a node leave a running job, its ranks first.",
    "report": "Every recovery of a job, phase by phase.",
    "story": "What one rank of a job went through, in order.",
    "checkpoints": "What of a job is on disk, and whether it is whole.",
    "checkpoint": "What a checkpoint holds, and the same for another number of ranks.",
    "nodes": "Which nodes have failed, and what jobs make of it.",
    "plan": "What copies cost, what a job survives, what a day loses.",
    "strategies": "The ways to lay a model out on so many ranks, ranked.",
    "doctor": "What of the environment helps or hinders.",
}


class _Lazy(click.Group):
    """Finds ``flashrecovery.cli.<name>.<name>`` on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with uncollected():
            module = importlib.import_module(f"flashrecovery.cli.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Training jobs that survive the death of a rank."""


def main() -> None:
    """Entry point: errors made by the user are one clear message, not a traceback."""
    show_warnings()
    try:
        cli()
    except FlashRecoveryError as e:
        say(f"error: {e}")
        sys.exit(2)


if __name__ == "__main__":
    main()
