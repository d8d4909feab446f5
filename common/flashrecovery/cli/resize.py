"""``flashrecovery resize``: another number of data-parallel replicas for a running elastic job."""

from __future__ import annotations

from pathlib import Path

import click

from flashrecovery.cli.asking import ANSWER_S, ask
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--to", "replicas", type=click.IntRange(min=1), required=True, help="Replicas from then on.")
@click.option(
    "--at-step",
    "step",
    type=click.IntRange(min=1),
    default=None,
    help="Change before this step; default: the next one.",
)
def resize(run_dir: Path, replicas: int, step: int | None) -> None:
    """Change the number of replicas of a running elastic job. Its last ranks leave."""
    request = pb.ResizeRequest(replicas=replicas, step=-1 if step is None else step)
    reply: pb.ResizeReply = ask(run_dir, str(run_dir), lambda stub: stub.Resize(request, timeout=ANSWER_S))
    if reply.error:
        raise ConfigError(reply.error)
    click.echo(f"{replicas} replicas from " + ("the next step on" if step is None else f"step {step} on"))
