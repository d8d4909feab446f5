"""``flashrecovery resize``: another number of data-parallel replicas for a running elastic job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import grpc

from flashrecovery.access import CONTROLLER, Access
from flashrecovery.cli.status import access_of
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import RunFiles
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc

_ANSWER_S = 5.0


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--to", "replicas", type=click.IntRange(min=1), required=True, help="Replicas from then on.")
@click.option(
    "--at-step", "step", type=click.IntRange(min=1), default=None, help="From this step on; default: the next one."
)
def resize(run_dir: Path, replicas: int, step: int | None) -> None:
    """Change the number of replicas of a running elastic job. Its last ranks leave."""
    controller = RunFiles(run_dir).controller()
    if controller is None:
        raise ConfigError(f"{run_dir}: no job runs there (no controller.json)")
    address = controller["address"]
    request = pb.ResizeRequest(replicas=replicas, step=-1 if step is None else step)
    try:
        reply = asyncio.run(_resize(address, access_of(controller), request))
    except grpc.aio.AioRpcError as e:
        raise ConfigError(f"{run_dir}: no controller answers at {address} ({e.code()})") from e
    except StrangerError as e:
        raise ConfigError(f"{run_dir}: its controller is gone: {e}") from e
    if reply.error:
        raise ConfigError(reply.error)
    click.echo(f"{replicas} replicas from " + ("the next step on" if step is None else f"step {step} on"))


async def _resize(address: str, access: Access, request: pb.ResizeRequest) -> pb.ResizeReply:
    async with access.dial(address, CONTROLLER, _ANSWER_S) as channel:
        reply: pb.ResizeReply = await rpc.ControllerStub(channel).Resize(request, timeout=_ANSWER_S)
        return reply
