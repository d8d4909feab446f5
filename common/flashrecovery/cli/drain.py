"""``flashrecovery drain``: a node leaves a running job, and its ranks move away before."""

from __future__ import annotations

from pathlib import Path

import click

from flashrecovery.cli.asking import ANSWER_S, ask
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--node", required=True, help="The node's name, as `flashrecovery status` shows it.")
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Time limit in seconds.",
)
def drain(run_dir: Path, node: str, within_s: float) -> None:
    """Have a node leave a running job. Its ranks get processes on other nodes, which take over at a step boundary."""
    request = pb.DrainRequest(node=node, within_s=within_s)
    reply: pb.DrainReply = ask(run_dir, str(run_dir), lambda stub: stub.Drain(request, timeout=ANSWER_S))
    if reply.error:
        raise ConfigError(reply.error)
    click.echo(reply.text)
