"""Real ranks for tests of parts: a few forked processes with gloo between them, and a hard deadline."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery import groups


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its function's result, its traceback, or the signal that ended it."""

    value: Any = None
    error: str | None = None
    signal: int = 0


def run_ranks(
    function: Callable[..., Any],
    world: int,
    tmp_path: Path,
    *args: Any,
    deadline_s: float = 60.0,
    group: bool = True,
) -> list[Outcome]:
    """``function(rank, world, *args)`` in ``world`` forked processes; with ``group``, under a gloo process
    group.

    Raises AssertionError with every rank's stack on stderr if they have not all ended within the deadline.
    """
    context = multiprocessing.get_context("fork")
    rendezvous = tmp_path / f"rendezvous-{time.monotonic_ns()}"
    readers, processes = [], []
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_child,
            args=(writer, function, rank, world, rendezvous if group else None, args, deadline_s),
        )
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    outcomes: dict[int, Outcome] = {}
    end = time.monotonic() + deadline_s
    try:
        while len(outcomes) < world and time.monotonic() < end:
            waiting = {readers[r]: r for r in range(world) if r not in outcomes}
            for ready in multiprocessing.connection.wait(list(waiting), timeout=end - time.monotonic()):
                rank = waiting[ready]  # type: ignore[index]
                try:
                    outcomes[rank] = readers[rank].recv()
                except EOFError:
                    processes[rank].join()
                    outcomes[rank] = Outcome(signal=-(processes[rank].exitcode or 0))
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        stuck = [r for r, p in enumerate(processes) if p.is_alive()]
        for rank in stuck:
            processes[rank].kill()
        for process, reader in zip(processes, readers, strict=True):
            process.join()
            reader.close()
            process.close()
    assert not stuck, f"ranks {stuck} had not ended after {deadline_s} s: {outcomes}"
    return [outcomes[r] for r in range(world)]


def results(outcomes: list[Outcome]) -> list[Any]:
    """The values of all ranks. Raises AssertionError with the traceback of any that failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None and not outcome.signal, f"rank {rank}: {outcome.error or outcome}"
    return [o.value for o in outcomes]


def die() -> None:
    """SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _child(
    writer: Any,
    function: Callable[..., Any],
    rank: int,
    world: int,
    rendezvous: Path | None,
    args: tuple[Any, ...],
    deadline_s: float,
) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, deadline_s - 2), exit=False, file=sys.__stderr__)
    torch.set_num_threads(1)  # the parent's thread pool does not exist in a forked child
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if rendezvous is not None:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        outcome = Outcome(value=function(rank, world, *args))
    except BaseException:  # noqa: BLE001 - handed to the parent
        outcome = Outcome(error=traceback.format_exc())
    writer.send(outcome)
    writer.close()
    if outcome.error is None and rendezvous is not None and dist.is_initialized():
        dist.destroy_process_group()


def managed_control_group(rank: int, world: int, folder: Path) -> dist.ProcessGroup:
    """The control group, when all ranks have made theirs: one that gives up closes connections that a peer may be
    making."""
    groups.install()
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group = groups.control_group()
    assert group is not None
    dist.barrier()
    return group
