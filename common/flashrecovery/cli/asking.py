"""Ask the controller of a running job for something, from its run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc

from flashrecovery.cli.status import access_of
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import ControllerStarted, JobFailed, JobFinished, RunFiles
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER

Reply = TypeVar("Reply")

ANSWER_S = 5.0


def ask(run_dir: Path, name: str, call: Callable[[rpc.ControllerStub], Awaitable[Reply]]) -> Reply:
    """What ``call`` gives. ``name``: of the run directory, in errors.

    Raises ConfigError if no job runs there, or its controller does not answer.
    """
    files = RunFiles(run_dir)
    controller = files.controller()
    if controller is None:
        raise ConfigError(f"{name}: no job runs there (no controller.json)")
    address, access = controller["address"], access_of(controller)

    async def asked() -> Reply:
        async with access.dial(address, CONTROLLER, ANSWER_S) as channel:
            return await call(rpc.ControllerStub(channel))

    try:
        return asyncio.run(asked())
    except grpc.aio.AioRpcError as e:
        ended = _ended(files)
        raise ConfigError(f"{name}: {ended}" if ended else f"{name}: no controller answers at {address}") from e
    except StrangerError as e:
        raise ConfigError(f"{name}: {_ended(files) or f'its controller is gone: {e}'}") from e


def _ended(files: RunFiles) -> str:
    """How the newest launch has ended, as far as its event log says; "": it has not."""
    last = next(
        (e for e in reversed(files.events()) if isinstance(e, (JobFinished, JobFailed, ControllerStarted))), None
    )
    if isinstance(last, JobFinished):
        return "the job has ended: it has finished"
    if isinstance(last, JobFailed):
        return f"the job has ended: {last.reason.splitlines()[0] if last.reason else 'it has failed'}"
    return ""
