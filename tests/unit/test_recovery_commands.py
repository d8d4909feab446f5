"""What a rank does on the controller's commands: a stop on one that has a device, in which order; a restore."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from flashrecovery import groups
from flashrecovery.errors import DrainError
from flashrecovery.groups import DrainReport
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.control.device_sync import DeviceClock
from flashrecovery.worker.recovery_commands import RecoveryExecutor

DRAIN_S = 0.2


class Device:
    """It waits for a dead peer until the communicators have been aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.emptied = 0

    def in_use(self) -> bool:
        return True

    def current(self) -> None:
        return None

    def synchronize(self, device: object = None) -> None:
        self.aborted.wait(10)

    def free_bytes(self) -> int:
        return 0

    def empty_cache(self) -> None:
        self.emptied += 1


class Stopped:
    """A rank that is told to stop, and its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, quiet: bool = True) -> None:
        self.device, self.order = Device(), list[str]()
        accelerator: Any = self.device
        monkeypatch.setattr("flashrecovery.worker.control.device_sync.accelerator", lambda: accelerator)

        def drain(deadline_s: float) -> DrainReport:
            assert deadline_s == DRAIN_S
            self.order.append("drained")
            if quiet:
                self.device.aborted.set()
            return DrainReport(quiet, 0.0, stuck_aborts=() if quiet else ("0",))

        monkeypatch.setattr(groups, "drain", drain)
        monkeypatch.setattr(groups, "detach_all", lambda: self.order.append("detached"))
        self.worker, loop, adapter = MagicMock(), MagicMock(), MagicMock()
        worker = self.worker
        worker.rank, worker.device = 0, DeviceClock()
        worker.settings.timeouts.drain_s = DRAIN_S
        worker.gate.live, worker.gate.version, loop.touched = 3, 3, False
        worker.gate.outdated.return_value = False
        worker.registry.shards, worker.registry.adapters = {}, [adapter]
        worker.registry.gradient_bytes.return_value = 0
        worker.registry.common.versions.return_value = worker.registry.local_state.versions.return_value = []
        worker.connection.page.local_state_versions.return_value = []
        worker.connection.page.early_local_states.return_value = []
        loop.sealing.late, loop.copies.inventory.return_value = {}, []
        loop.copies.parity.return_value = pb.Parity()
        worker.send.side_effect = self._hear
        loop.let_go.side_effect = lambda: self.order.append("let go")
        adapter.reset.side_effect = lambda: self.order.append("reset")
        self.reply = pb.Reply()
        RecoveryExecutor(worker, loop)._carry_out(pb.Command(serial=1, generation=1, stop=pb.Stop()))
        self.device.aborted.set()

    def _hear(self, message: pb.FromWorker) -> None:
        self.reply = message.reply
        self.order.append("answered")


def test_first_all_operations_let_go_then_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Stopped(monkeypatch)
    assert not stopped.reply.error and stopped.reply.live_version == 3
    assert stopped.order[:2] == ["drained", "detached"]


def test_memory_is_made_free_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller waits for the answer, and others take as long."""
    stopped = Stopped(monkeypatch)
    assert stopped.order == ["drained", "detached", "answered", "let go", "reset"]
    assert stopped.device.emptied == 1, "the new communicators' buffers are not taken from torch's cache"


def test_a_device_that_is_not_aborted_is_waited_for_no_longer_than_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Stopped(monkeypatch, quiet=False)
    assert stopped.reply.error_type == DrainError.__name__ and not stopped.reply.fatal


@pytest.mark.parametrize(("order", "placed"), [(pb.Restore(version=5), True), (pb.Restore(version=3), False)])
def test_what_is_restored_whole_is_held_before_the_word_to_go_on(order: pb.Restore, placed: bool) -> None:
    """Another rank, which has given it, may be gone before that word has come."""
    worker, loop = MagicMock(), MagicMock()
    worker.gate.live = worker.gate.version = 3
    worker.gate.outdated.return_value = False
    worker.faults.hit.return_value = None
    RecoveryExecutor(worker, loop)._carry_out(pb.Command(serial=1, generation=1, restore=order))
    assert worker.gate.placed.mock_calls == ([call(5)] if placed else [])
    assert loop.replaced.called == placed
    loop.restore_plain.assert_called_once()
