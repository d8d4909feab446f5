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
    "demo": "Train a small GPT, kill a rank, and compare the result with a run without the kill.",
    "run": "Start a training job that survives the death of a rank.",
    "adopt": "Start one rank under srun, mpirun or the like, so that it survives its death.",
    "shim": "Write stand-ins for torchrun, deepspeed and accelerate that call `run`.",
    "controller": "Run only the controller of a job with several nodes.",
    "status": "Show what a job is doing.",
    "inject": "Inject a fault into a running job.",
    "resize": "Change the number of replicas of a running elastic job.",
    "replan": "Change the parallel layout of a running job.",
    "drain": "Remove a node from a running job, after its ranks were handed over.",
    "groups": "Show which backends stand in a job's process groups, and on which devices.",
    "report": "Show every recovery of a job, phase by phase.",
    "story": "Show what happened to one rank of a job, in order.",
    "checkpoints": "List the checkpoints and snapshots of a job, and check them.",
    "checkpoint": "Show the content of a checkpoint, or rewrite it for another number of ranks.",
    "nodes": "Show which nodes have failed, and how jobs treat them.",
    "plan": "Compute what copies cost, what a job survives, and how much time a day is lost.",
    "strategies": "Rank the parallel layouts of a model for a number of ranks.",
    "doctor": "Check whether this environment can run and recover jobs.",
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
