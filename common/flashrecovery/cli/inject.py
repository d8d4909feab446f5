"""``flashrecovery inject``: a fault on demand, for drills."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import grpc

from flashrecovery.access import CONTROLLER, Access
from flashrecovery.cli.status import access_of
from flashrecovery.config import FAULTS, check_fault
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import RunFiles
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc

_ANSWER_S = 5.0


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="The job's run directory.")
@click.option("--rank", type=int, required=True)
@click.option(
    "--fault",
    type=click.Choice(FAULTS),
    default="sigkill",
    show_default=True,
)
@click.option("--at", "phase", default="", help="Phase of a step, or recovery:<state>; without it, at once.")
@click.option("--step", type=int, default=-1, help="Step of the phase; without it, the next one.")
def inject(run_dir: Path, rank: int, fault: str, phase: str, step: int) -> None:
    """Inject a fault into a running job."""
    check_fault(fault, phase or None)
    if step >= 0 and not phase:
        raise ConfigError(f"--step {step} needs --at PHASE")
    controller = RunFiles(run_dir).controller()
    if controller is None:
        raise ConfigError(f"--run-dir {run_dir}: no job runs there (no controller.json)")
    address = controller["address"]
    request = pb.InjectRequest(rank=rank, fault=fault, phase=phase, step=step)
    try:
        reply = asyncio.run(_inject(address, access_of(controller), request))
    except grpc.aio.AioRpcError as e:
        raise ConfigError(f"--run-dir {run_dir}: no controller answers at {address} ({e.code()})") from e
    except StrangerError as e:
        raise ConfigError(f"--run-dir {run_dir}: its controller is gone: {e}") from e
    if not reply.accepted:
        raise ConfigError(reply.error)
    click.echo(f"{fault} for rank {rank}" + (f" armed at {phase}" if phase else " sent"))


async def _inject(address: str, access: Access, request: pb.InjectRequest) -> pb.InjectReply:
    async with access.dial(address, CONTROLLER, _ANSWER_S) as channel:
        reply: pb.InjectReply = await rpc.ControllerStub(channel).Inject(request, timeout=_ANSWER_S)
        return reply
