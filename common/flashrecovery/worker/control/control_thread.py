"""The control thread of a worker: listens to the agent while the training thread is blocked anywhere.

It stops the step (by abandoning every collective, see :mod:`flashrecovery.groups`), answers pings, arms faults, and
passes all other commands on to the training thread's inbox. While the training thread hangs, it reports where
(:class:`HangReport`).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashrecovery import groups
from flashrecovery.config import Timeouts
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.channel import Channel
from flashrecovery.runtime.thread_stack import thread_stack
from flashrecovery.terminal import say
from flashrecovery.worker.control.device_sync import DeviceClock
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.script_checks.stray_collectives import BETWEEN_CALLS

_FRAMES = 8
"""The innermost frames of the stack that are reported."""


def hang_report(rank: int, training_thread: threading.Thread) -> pb.HangReport:
    """Operations that have not finished, how far each group has come, and the stack if nothing is under way. What a
    device has not come to is not under way, though its host has launched it."""
    message = pb.HangReport(rank=rank, answered=True)
    under_way: list[tuple[float, pb.Operation]] = []
    for group in groups.groups():
        if group.size == 1:
            continue
        progress = group.progress
        pairs = [pb.PairProgress(peer=p, sent=s, received=r) for p, (s, r) in progress.pairs.items()]
        message.groups.add(
            group=group.name,
            members=group.members,
            size=group.size,
            collectives=progress.collectives,
            ahead=progress.ahead,
            pairs=pairs,
        )
        on_device = group.on_device
        pending = group.pending if on_device is None else (on_device,)  # the host's may be ahead of it
        under_way += [(op.since, _operation(op, group.members)) for op in pending]
    message.operations.extend(operation for _, operation in sorted(under_way, key=lambda entry: entry[0]))
    if not any(operation.certain for operation in message.operations):
        message.stack = _stack(training_thread)
    return message


def _operation(op: groups.OpInfo, members: int) -> pb.Operation:
    return pb.Operation(
        group=op.group,
        members=members,
        op=op.op,
        peer=op.peer,
        number=op.number,
        certain=op.certain,
    )


def _stack(thread: threading.Thread) -> str:
    """As :func:`traceback.format_stack` writes it."""
    inner = thread_stack(thread.ident or 0)[:_FRAMES]
    frames = [traceback.FrameSummary(place.file, place.line or 0, place.function) for place in reversed(inner)]
    return "".join(traceback.StackSummary.from_list(frames).format())


log = logging.getLogger("flashrecovery")


class Control:
    """Owns the channel's reading side. ``inbox`` holds the commands that the training thread carries out;
    ``staging_answers`` what the agent says to its requests.

    Args:
        is_reading: whether the training thread reads the script's data, which is not interrupted.
    """

    def __init__(
        self,
        channel: Channel,
        gate: Gate,
        limits: Timeouts,
        device: DeviceClock,
        on_fault: Callable[[pb.Fault], None],
        on_checkpoint: Callable[[int, int, str], None],
        on_snapshot: Callable[[int, int], None],
        on_keep_undo: Callable[[int], None],
        is_reading: Callable[[], bool],
    ) -> None:
        self.inbox: queue.Queue[pb.Command] = queue.Queue()
        self.staging_answers: queue.Queue[pb.StagingThere] = queue.Queue()
        self._channel = channel
        self._gate = gate
        self._limits = limits
        self._device = device
        self._is_reading = is_reading
        self._at_once: Mapping[str, Callable[[pb.Command], None]] = {
            "hold": self._hold,
            "stop": self._stop,
            "quiet": self._let_go,
            "ping": self._answer,
            "fault": lambda command: on_fault(command.fault),
            "checkpoint": lambda c: on_checkpoint(c.checkpoint.version, c.generation, c.checkpoint.launch),
            "snapshot": lambda command: on_snapshot(command.snapshot.version, command.generation),
            "pause": self._pause,
            "keep_undo": lambda command: on_keep_undo(command.keep_undo.step),
        }
        """What does not wait for the training thread, by its body."""
        self._training_thread = threading.main_thread()
        self.controller_heard = True  # by the agent
        self._hook: Any = None
        self._thread = threading.Thread(target=self._run, name="flashrecovery-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while True:
            message = self._channel.receive()
            if message is None:
                # The agent is gone, and with it the word of what the other ranks do.
                say("the agent is gone; this process ends")
                os._exit(1)
            if message.HasField("controller"):
                self.controller_heard = message.controller.heard
                continue
            if message.HasField("staging_there"):
                self.staging_answers.put(message.staging_there)
                continue
            command = message.command
            body = command.WhichOneof("body")
            if body is not None:
                self._at_once.get(body, self.inbox.put)(command)

    def _hold(self, command: pb.Command) -> None:
        """Say where this rank is, and let no mutation begin."""
        settled, mutating, version = self._gate.hold(command.generation)
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=command.rank)
        reply.position.CopyFrom(pb.Position(settled=settled, mutating=mutating, version=version))
        self._channel.send(pb.FromWorker(reply=reply))

    def _stop(self, command: pb.Command) -> None:
        """Free the training thread; a step that others have finished may finish (paper section III-E)."""
        if self._gate.stale(command.generation):
            return
        if self._gate.stop(command.generation, command.stop.finish_to):
            if self._gate.waits_in_barrier:
                groups.abandon(command.stop.reason)  # the dead rank will never let it through
            self._let_finish(command.stop.mutation_grace_s)
        self._gate.give_up()
        with self._gate.lock:
            if self._gate.stands_in:
                groups.stand_in(True)
            between = self._gate.between
            unprotected = self._gate.above_call
        if between:
            heard = pb.Reply(serial=command.serial, generation=command.generation, rank=command.rank, outside=True)
            self._channel.send(pb.FromWorker(reply=heard))
        groups.abandon(f"{command.stop.reason}; {BETWEEN_CALLS}" if unprotected else command.stop.reason)
        self._interrupt_modules()
        self.inbox.put(command)

    def _let_go(self, command: pb.Command) -> None:
        """This process is about to be killed: abort its communicators before that."""
        groups.abandon(command.quiet.reason)

    def _let_finish(self, grace_s: float) -> None:
        """Wait until the training thread has finished its step, at most ``grace_s`` seconds, unless it waits for what
        the dead rank will never send."""
        began = moved = time.monotonic()
        blocked_s = self._limits.mutation_blocked_s
        at = -1
        while self._gate.finishing and (now := time.monotonic()) < began + grace_s:
            waiting = groups.main_op()
            if waiting is not None and now - waiting.since > blocked_s:
                return
            if self._device.runs_behind:
                # NCCL's operations block the device, which has kernels of the step to run as well, and the host waits
                # for it anywhere (``loss.item()``). A step takes `step_s`, so this is longer than any part of one.
                longest_s = max(blocked_s, self._gate.step_s)
                if (operations := groups.operation_count()) != at:
                    at, moved = operations, now
                if self._device.blocked_s > longest_s or now - moved > longest_s:
                    return
            time.sleep(0.001)

    def _interrupt_modules(self) -> None:
        """Makes a stop also reach a forward pass that computes without communicating, at its next module, and a script
        that catches the errors of collectives and makes them again."""

        def interrupt(module: torch.nn.Module, args: Any) -> None:
            if threading.current_thread() is self._training_thread and not self._is_reading():
                self._gate.check()

        groups.watch_outside(True)
        if self._hook is None:
            self._hook = torch.nn.modules.module.register_module_forward_pre_hook(interrupt)

    def resumed(self) -> None:
        """Training goes on: take the interrupting hooks away (they cost nothing while there is no stop)."""
        groups.watch_outside(False)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _pause(self, command: pb.Command) -> None:
        """A new size comes with a step. In a newer generation a resume would announce it."""
        if command.generation == self._gate.generation:
            self._gate.order_pause(command.pause.step, copies=command.pause.copies)

    def _answer(self, command: pb.Command) -> None:
        """Say where the training thread is."""
        found = hang_report(max(command.rank, 0), self._training_thread)
        self._channel.send(pb.FromWorker(hang_report=found))
