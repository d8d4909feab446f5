"""``flashrecovery inject``: a fault on demand, for drills."""

from __future__ import annotations

from pathlib import Path

import click

from flashrecovery.cli.asking import ANSWER_S, ask
from flashrecovery.config import FAULTS, check_fault
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="The job's run directory.")
@click.option("--rank", type=int, required=True)
@click.option(
    "--fault",
    type=click.Choice(FAULTS),
    default="sigkill",
    show_default=True,
)
@click.option("--at", "phase", default="", help="Phase of a step, or recovery:<state>; default: at once.")
@click.option("--step", type=int, default=-1, help="Step of the phase; default: the next one.")
def inject(run_dir: Path, rank: int, fault: str, phase: str, step: int) -> None:
    """Inject a fault into a running job."""
    check_fault(fault, phase or None)
    if step >= 0 and not phase:
        raise ConfigError(f"--step {step} needs --at PHASE")
    request = pb.InjectRequest(rank=rank, fault=fault, phase=phase, step=step)
    reply: pb.InjectReply = ask(run_dir, f"--run-dir {run_dir}", lambda stub: stub.Inject(request, timeout=ANSWER_S))
    if not reply.accepted:
        raise ConfigError(reply.error)
    click.echo(f"{fault} for rank {rank}" + (f" armed at {phase}" if phase else " sent"))
