"""Ray Train: a ``train_loop_per_worker`` whose ranks are replaced when they die, without Ray noticing.

Ray Train runs the loop in an actor for each rank, and starts all of them again if one dies. So here the actor keeps a
guard, and the loop runs in a process of the guard's (:mod:`.rank`). What rank 0 reports is handed to Ray by all actors
together, for ``ray.train.report`` waits for all of them, and counts.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import ray.cloudpickle
import ray.train
import ray.train.collective
import ray.train.torch
import torch.distributed as dist
from ray.train.v2._internal.execution.context import get_train_context

from flashrecovery.capabilities.of_ray import RAY
from flashrecovery.errors import JobFailedError, UnsupportedError
from flashrecovery.ray.place import Meeting, start_guard

CALL_ENV = "FLASHRECOVERY_RAY_CALL"
"""Where rank 0's process calls its actor: the name of a socket without a file."""
ABOUT_ENV = "FLASHRECOVERY_RAY_ABOUT"
"""What the rank's process is to know of its actor, pickled, as hexadecimal digits."""


@dataclass(frozen=True)
class About:
    """An actor, for the process of its rank. ``devices``: as Ray gives them; ``backend``: of torch.distributed;
    ``checkpoint``: the path of the one to resume from."""

    experiment: str
    devices: list[str]
    backend: str
    checkpoint: str | None


@dataclass(frozen=True)
class TrainReport:
    """What rank 0 reports. ``key``: the version of the state, and the how many-th report of it."""

    key: tuple[int, int]
    metrics: dict[str, Any]
    checkpoint: str | None
    checkpoint_dir_name: str | None


@dataclass(frozen=True)
class AskPreemption:
    """Rank 0 asks whether its nodes are about to be taken away."""


def recoverable(
    train_loop_per_worker: Callable[..., None],
    *,
    options: Sequence[str] = ("--standby", "1"),
    run_dir: str | Path | None = None,
) -> Callable[..., None]:
    """The loop for ``TorchTrainer`` in which ranks may die.

    The loop uses flashrecovery as any script does. In it ``ray.train.get_context()``, ``report()``,
    ``get_checkpoint()``, ``get_preemption_info()``,
    ``ray.train.collective`` and ``ray.train.torch`` are there; the process group is initialised.

    Args:
        train_loop_per_worker: as ``TorchTrainer`` takes it, with or without a config.
        options: of ``flashrecovery adopt``.
        run_dir: events and logs, on a file system that all nodes share; none: ``runs/<job>`` below the driver's
            working directory.

    Raises:
        UnsupportedError: this version of Ray lacks what is used of its inside, by name.
    """
    RAY.require()
    pickled = ray.cloudpickle.dumps(train_loop_per_worker)
    folder = Path(run_dir).absolute() if run_dir is not None else None
    below = Path.cwd() / "runs"

    def without_config() -> None:
        _train_in_actor(pickled, None, list(options), folder, below)

    def with_config(config: dict[str, Any]) -> None:
        _train_in_actor(pickled, config, list(options), folder, below)

    return with_config if signature(train_loop_per_worker).parameters else without_config  # Ray looks there, too


def _train_in_actor(
    pickled: bytes, config: dict[str, Any] | None, options: list[str], folder: Path | None, below: Path
) -> None:
    """In an actor: until the job's end."""
    context = ray.train.get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    meeting: Meeting = ray.train.collective.broadcast_from_rank_zero(Meeting.here(host) if rank == 0 else None)
    path = folder or below / meeting.job
    file = path / "loop.pkl"
    if local_rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{rank}")
        part.write_bytes(pickle.dumps((pickled, config)))
        part.replace(file)
    ray.train.collective.barrier()
    checkpoint = ray.train.get_checkpoint()
    about = About(
        context.get_experiment_name(),
        [str(device) for device in ray.train.torch.get_devices()],
        str(dist.get_backend()) if dist.is_initialized() else "gloo",
        checkpoint.path if checkpoint is not None else None,
    )
    call = f"flashrecovery-ray-{meeting.job}-{rank}"
    env = meeting.env(rank, context.get_world_size(), local_rank, context.get_local_world_size())
    env |= {CALL_ENV: call, ABOUT_ENV: pickle.dumps(about).hex()}
    calls = _Calls(call, meeting.token.encode()) if rank == 0 else None
    guard = start_guard([*options, "--run-dir", str(path), "-m", "flashrecovery.ray.rank", str(file)], env)
    try:
        _pass_on(guard, calls)
        code = guard.wait()
    finally:
        guard.kill()
        if calls is not None:
            calls.close()
    if code:
        raise JobFailedError(f"the guard of rank {rank} has ended with code {code}; see {path}")


_Next = tuple[TrainReport, "Connection[Any, Any]"] | tuple[None, None]
NOTHING = (None, None)


def _pass_on(guard: subprocess.Popen[bytes], calls: _Calls | None) -> None:
    """Report what rank 0 reports, in all actors, until rank 0's guard has ended."""
    last = (-2, 0)
    while True:
        found, caller = calls.next(guard) if calls is not None else NOTHING
        fresh = found is not None and found.key > last
        if found is None or fresh:
            said = ray.train.collective.broadcast_from_rank_zero(None if found is None else found.metrics)
            if said is None:
                return
            kept = ray.train.Checkpoint(found.checkpoint) if found is not None and found.checkpoint else None
            name = None if found is None else found.checkpoint_dir_name
            ray.train.report(said, checkpoint=kept, checkpoint_dir_name=name)
        if found is not None and caller is not None:
            last = max(last, found.key)
            _answer(caller)


class _Calls:
    """Rank 0's process calls, whichever it is by now."""

    def __init__(self, name: str, key: bytes) -> None:
        self._listener = Listener(f"\0{name}", "AF_UNIX", authkey=key)
        self._arrived: queue.Queue[tuple[TrainReport, Connection[Any, Any]]] = queue.Queue()
        threading.Thread(target=self._accept, name="flashrecovery-calls", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller = self._listener.accept()
            except OSError:
                return  # it is closed, or the caller has died
            threading.Thread(target=self._hear, args=(caller,), name="flashrecovery-call", daemon=True).start()

    def _hear(self, caller: Connection[Any, Any]) -> None:
        while True:
            try:
                asked = caller.recv()
                if isinstance(asked, AskPreemption):
                    caller.send(_preemption())
                else:
                    self._arrived.put((asked, caller))
            except (EOFError, OSError):
                return

    def next(self, guard: subprocess.Popen[bytes]) -> _Next:
        """The next report, and what waits for an answer; nothing once the guard has ended."""
        while True:
            try:
                return self._arrived.get(timeout=0.2)
            except queue.Empty:
                if guard.poll() is not None:
                    return NOTHING

    def close(self) -> None:
        self._listener.close()


def _answer(caller: Connection[Any, Any]) -> None:
    """Ray has taken the report."""
    try:
        caller.send(True)
    except OSError:
        pass  # that process is dead, and another one takes its place


def _preemption() -> Any:
    """What Ray has told this actor; None where this version of Ray tells nothing."""
    preemption = getattr(get_train_context(), "preemption_context", None)
    return None if preemption is None else preemption.preemption_info


def unsupported(what: str, instead: str) -> UnsupportedError:
    """In a rank's process there is no such thing of Ray Train's."""
    return UnsupportedError(f"{what} in a loop of flashrecovery.ray.recoverable(): {instead}")
