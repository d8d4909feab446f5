"""Fault injection inside a worker, for drills and for the project's own tests.

A fault is armed for a phase of a step (or of a recovery) and fires once. Before it fires, it reports itself to the
agent: a drill whose fault did not fire has proved nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from flashrecovery import groups
from flashrecovery.contract import roles
from flashrecovery.contract.adapter import Adapter
from flashrecovery.groups.accelerator import accelerator
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.words import step_text
from flashrecovery.proto import flashrecovery_pb2 as pb

ANY_STEP = -1


class InjectedFault(RuntimeError):
    """The exception of a ``raise`` fault."""


class Faults:
    """The armed faults of this worker. ``notify`` tells the agent that one fires; ``in_words`` names a step."""

    def __init__(
        self, notify: Callable[[NoticeKind, str, pb.Fault], None], in_words: Callable[[int], str] = step_text
    ) -> None:
        self._armed: list[pb.Fault] = []
        self._waiting: list[tuple[pb.Fault, int]] = []  # handed to an adapter, in this step
        self._missed: list[pb.Fault] = []  # handed to an adapter in an earlier step
        self._step = ANY_STEP
        self._lock = threading.Lock()
        self._notify = notify
        self._in_words = in_words

    def arm(self, fault: pb.Fault) -> None:
        """Arm ``fault``; called by the control thread."""
        with self._lock:
            self._armed.append(fault)

    def take(self, phase: str, step: int) -> pb.Fault | None:
        """The fault that is due at ``phase`` of ``step``; it is disarmed."""
        if not self._armed:
            return None
        with self._lock:
            for fault in self._armed:
                if fault.phase == phase and fault.step in (ANY_STEP, step):
                    self._armed.remove(fault)
                    return fault
        return None

    def hit(self, phase: str, step: int) -> str:
        """The training thread is at ``phase``. Returns the fault that fired and left the process alive, or ""."""
        fault = self.take(phase, step)
        if fault is None:
            return ""
        self.fire(fault)
        return fault.fault

    def begin_step(self, step: int, adapters: Sequence[Adapter]) -> None:
        """Hand the faults of this step to the adapter, if only the framework can find their phase."""
        self._step = step
        for late, since in [waiting for waiting in self._waiting if waiting[1] < step]:
            text = (
                f"phase {late.phase!r} has not been seen in {self._in_words(since)}, which was a call without it (a "
                "log, an evaluation, a checkpoint), or the model is compiled; the fault strikes where that phase is "
                "next seen"
            )
            self._notify(NoticeKind.FAULT_IMPOSSIBLE, text, late)
            self._waiting.remove((late, since))
            self._missed.append(late)
        # An attempt that is done again: the reset of a recovery has taken some of its traps away.
        with self._lock:
            self._armed += [fault for fault, _ in self._waiting]
        self._waiting = []
        if not self._armed:
            return
        inspectable = roles.inspectable(adapters).values()
        for adapter in inspectable:
            for phase, arm in adapter.fault_points().items():
                fault = self.take(phase, step)
                if fault is not None:
                    self._waiting.append((fault, step))
                    arm(lambda fault=fault: self._trapped(fault))  # type: ignore[misc]
        fault = self.take("grad-sync", step)
        if fault is not None:
            self._arm_at_gradient_sync(fault)
        with self._lock:
            left = [f for f in self._armed if f.step == step and not f.phase.startswith("recovery:")]
        known = {p for a in inspectable for p in a.fault_points()} | {
            "data",
            "optimizer-start",
            "commit",
            "between",
            "below",
        }
        for fault in left:
            if fault.phase not in known:
                self._notify(NoticeKind.FAULT_IMPOSSIBLE, f"phase {fault.phase!r} does not occur in this layout", fault)

    def _arm_at_gradient_sync(self, fault: pb.Fault) -> None:
        """Fire when the step starts a reduction."""

        def at_operation(group: str, op: str) -> None:
            if "reduce" in op:
                groups.set_operation_hook(None)
                self.fire(fault)

        groups.set_operation_hook(at_operation)

    def _trapped(self, fault: pb.Fault) -> None:
        if any(fault is armed for armed in (*self._missed, *(waiting for waiting, _ in self._waiting))):
            self.fire(fault)  # the first time; it may have been handed over more than once

    def fire(self, fault: pb.Fault) -> None:
        if fault.fault == "device" and not accelerator().in_use():
            self._notify(NoticeKind.FAULT_IMPOSSIBLE, "this process uses no device", fault)
            return
        step = self._step if any(missed is fault for missed in self._missed) else fault.step
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not fault]
        self._missed = [missed for missed in self._missed if missed is not fault]
        self._notify(NoticeKind.FAULT_FIRED, f"{fault.fault} at {fault.phase}, {self._in_words(step)}", fault)
        if fault.fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.fault == "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.fault == "exit":
            os._exit(3)
        elif fault.fault == "segv":
            ctypes.string_at(0)
        elif fault.fault == "hang":
            while True:
                time.sleep(0.1)
        elif fault.fault == "device":
            accelerator().fail()
        elif fault.fault == "raise":
            raise InjectedFault(f"injected at {fault.phase}")
