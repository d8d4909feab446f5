"""``flashrecovery replan``: another parallel layout for a running job, on command."""

from __future__ import annotations

from pathlib import Path

import click

from flashrecovery.cli.asking import ANSWER_S, ask
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    default="",
    metavar="tp=1,pp=2,dp=1",
    help="Sizes; default: the planner chooses and explains its choice.",
)
@click.option(
    "--at-step",
    "step",
    type=click.IntRange(min=1),
    default=None,
    help="Change before this step; default: the next one.",
)
def replan(run_dir: Path, layout: str, step: int | None) -> None:
    """Change the parallel layout of a running job that was launched with --parallelism. Its workers are restarted,
    and get their state from the node's memory."""
    request = pb.ReplanRequest(layout=layout, step=-1 if step is None else step)
    reply: pb.ReplanReply = ask(run_dir, str(run_dir), lambda stub: stub.Replan(request, timeout=ANSWER_S))
    if reply.error:
        raise ConfigError(reply.error)
    for line in reply.lines:
        click.echo(line)
    click.echo(f"{reply.layout} from " + ("the next step on" if step is None else f"step {step} on"))
