"""What a rank does on the controller's commands: a stop, in which order and with which answer; a restore; a resume."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import DrainError, RegroupError, RestoreError
from flashrecovery.groups import DrainReport
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.state.version import VERSIONS_KEPT
from flashrecovery.worker.context import Worker
from flashrecovery.worker.control.device_sync import DeviceClock
from flashrecovery.worker.recovery_commands import RecoveryExecutor
from flashrecovery.worker.registry import ObjectShard

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
    """A rank that is asked to stop, and its answer."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, quiet: bool = True, aborts: bool | None = None, touched: bool = False
    ) -> None:
        """``quiet``: all operations let go. ``aborts``: the device does, if not as ``quiet``."""
        self.device, self.order = Device(), list[str]()
        accelerator: Any = self.device
        monkeypatch.setattr("flashrecovery.worker.control.device_sync.accelerator", lambda: accelerator)

        def drain(deadline_s: float, **waits: bool) -> DrainReport:
            assert deadline_s == DRAIN_S
            self.waits = waits
            self.order.append("drained")
            if quiet if aborts is None else aborts:
                self.device.aborted.set()
            return DrainReport(quiet, 0.0, stuck_aborts=() if quiet else ("0",))

        monkeypatch.setattr(groups, "drain", drain)
        monkeypatch.setattr(groups, "detach_all", lambda: self.order.append("detached"))
        self.worker, loop, adapter = MagicMock(), MagicMock(), MagicMock()
        worker = self.worker
        worker.rank, worker.device = 0, DeviceClock()
        worker.settings.timeouts.drain_s = DRAIN_S
        worker.gate.live, worker.gate.version, loop.touched = 3, 3, touched
        worker.gate.outdated.return_value = False
        worker.registry.shards, worker.registry.adapters = {}, [adapter]
        worker.registry.gradient_bytes.return_value = 0
        worker.registry.common.versions.return_value, worker.registry.local_state.versions.return_value = [], [2, 3]
        worker.registry.common.name, worker.registry.local_state.name = "common", "local-state"
        worker.registry.local_state.nbytes.return_value = 0
        worker.registry.local_state.early.side_effect = lambda version: version == 2
        worker.connection.page.local_state_versions.return_value = [1, 4]
        worker.connection.page.early_local_states.return_value = [4]
        loop.sealing.late, loop.copies.inventory.return_value = {2: True, 3: False}, []
        loop.copies.parity.return_value = pb.Parity()
        worker.send.side_effect = self._hear
        loop.copies.stop.side_effect = lambda: self.order.append("copies stopped")
        worker.gate.torn.side_effect = lambda: self.order.append("torn")
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
    assert stopped.order[:3] == ["copies stopped", "drained", "detached"]


@pytest.mark.parametrize("beside", [True, False])
def test_the_aborts_are_waited_for_in_the_stop_or_in_the_next_attach(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(groups, "may_connect_beside_aborts", lambda: beside)
    assert Stopped(monkeypatch).waits == {"aborts": not beside}


@pytest.mark.parametrize("stuck", [(), ("0",)])
def test_after_an_abort_that_does_not_return_the_next_stop_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, stuck: tuple[str, ...]
) -> None:
    """So that the process is replaced, and does not fail in each attempt."""
    worker = MagicMock()
    worker.settings.timeouts.drain_s = DRAIN_S
    worker.gate.outdated.return_value = False
    executor = RecoveryExecutor(worker, MagicMock())

    def attach(*_: object) -> None:
        raise RegroupError("in vain")

    monkeypatch.setattr(groups, "attach", attach)
    monkeypatch.setattr(groups, "stuck_aborts", lambda: stuck)
    monkeypatch.setattr(groups, "may_connect_beside_aborts", lambda: True)
    with pytest.raises(RegroupError):
        executor._regroup(pb.Command(regroup=pb.Regroup()))
    waits: dict[str, bool] = {}

    def drain(deadline_s: float, *, aborts: bool) -> DrainReport:
        waits["aborts"] = aborts
        return DrainReport(False, deadline_s)

    monkeypatch.setattr(groups, "drain", drain)
    monkeypatch.setattr(groups, "detach_all", lambda: None)
    with pytest.raises(DrainError):
        executor._stop(pb.Command(stop=pb.Stop()), pb.Reply())
    assert waits == {"aborts": bool(stuck)}


def test_memory_is_made_free_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller waits for the answer, and others take as long."""
    stopped = Stopped(monkeypatch)
    assert stopped.order == ["copies stopped", "drained", "detached", "answered", "let go", "reset"]
    assert stopped.device.emptied == 1, "the new communicators' buffers are not taken from torch's cache"


def test_a_device_that_is_not_aborted_is_waited_for_no_longer_than_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Stopped(monkeypatch, quiet=False)
    assert stopped.reply.error_type == DrainError.__name__ and not stopped.reply.fatal


def test_operations_that_do_not_let_go_are_an_error_though_the_device_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left might write into what is restored."""
    stopped = Stopped(monkeypatch, quiet=False, aborts=True)
    assert stopped.reply.error_type == DrainError.__name__ and not stopped.reply.held


def test_state_that_the_interrupted_step_has_touched_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torn" in Stopped(monkeypatch, touched=True).order
    assert "torn" not in Stopped(monkeypatch).order


def test_a_stop_tells_which_rank_local_states_are_late_or_early(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = Stopped(monkeypatch).reply
    assert list(reply.late) == [2]
    assert [(held.kind, held.version, held.early) for held in reply.held] == [
        ("undo", 2, True),  # version 3 is live
        ("page", 1, False),
        ("page", 4, True),
    ]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that carries out commands: worker, loop and executor."""
    worker, loop = MagicMock(), MagicMock()
    worker.rank, worker.members, worker.registry.shards = 1, (0, 1), {}
    worker.registry.gradient_bytes.return_value = 0
    worker.gate.live = worker.gate.version = 3
    worker.gate.outdated.return_value = worker.connection.detached = False
    worker.faults.hit.return_value = None
    monkeypatch.setattr(groups, "set_detached", MagicMock())
    executor = RecoveryExecutor(worker, loop)
    monkeypatch.setattr(executor, "_reshaping", MagicMock(settle=MagicMock(return_value=-1)))
    return SimpleNamespace(worker=worker, loop=loop, executor=executor)


def _order(rank: Any, **body: Any) -> pb.Reply:
    """Has ``rank`` carry out one command. Returns its answer."""
    rank.executor._carry_out(pb.Command(serial=1, generation=body.pop("generation", 1), **body))
    reply: pb.Reply = rank.worker.send.call_args.args[0].reply
    return reply


def test_data_sources_are_fresh_until_the_first_resume_and_again_where_they_have_never_been(rank: Any) -> None:
    fresh = []
    for version, resumes in ((5, True), (5, False), (6, False), (4, False)):
        _order(rank, restore=pb.Restore(version=version))
        fresh.append(rank.loop.restore_plain.call_args.kwargs["fresh"])
        if resumes:
            _order(rank, resume=pb.Resume(version=version))
    assert fresh == [True, False, False, True]


def test_a_resumed_rank_communicates_again(rank: Any) -> None:
    _order(rank, resume=pb.Resume(version=3))
    assert groups.set_detached.mock_calls == [call(False)]  # type: ignore[attr-defined]
    rank.worker.gate.resume.return_value = False  # a newer stop has come
    _order(rank, resume=pb.Resume(version=3))
    assert len(groups.set_detached.mock_calls) == 1  # type: ignore[attr-defined]


def test_an_outdated_command_is_not_carried_out_and_not_answered(rank: Any) -> None:
    rank.worker.gate.outdated.return_value = True
    rank.executor._carry_out(pb.Command(serial=1, generation=1, restore=pb.Restore(version=5)))
    assert not rank.worker.send.called and not rank.loop.restore_plain.called


@pytest.mark.parametrize("verify", [True, False])
def test_of_what_arrives_only_what_was_sent_is_adopted(
    rank: Any, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    shards = rank.worker.registry.shards = {name: MagicMock(spec=ObjectShard) for name in ("right", "wrong")}
    rank.worker.settings.verify = verify
    report = SimpleNamespace(
        mismatched=["wrong"], bytes_received=8, bytes_on_device=0, sent_digests={}, received_digests={}
    )
    monkeypatch.setattr("flashrecovery.worker.recovery_commands.exchange", lambda *args, **kwargs: report)
    monkeypatch.setattr(groups, "control_group", object)
    monkeypatch.setattr(groups, "device_group", lambda: None)
    transfers = [pb.TransferItem(source=0, dest=1, shard=name) for name in shards]
    reply = _order(rank, restore=pb.Restore(version=3, transfers=transfers, deadline_s=9.0))
    assert not reply.error and reply.bytes_received == 8
    rank.worker.gate.torn.assert_called_once()  # before anything is written
    assert shards["right"].adopt.mock_calls == [call(3)]
    assert shards["wrong"].adopt.called == rank.loop.restore_plain.called == (not verify)


def test_a_ranks_own_copy_is_written_over_state_that_is_said_to_be_torn(rank: Any) -> None:
    shard = rank.worker.registry.shards["weight"] = MagicMock()
    order = MagicMock()
    order.attach_mock(rank.worker.gate.torn, "torn")
    order.attach_mock(rank.loop.copies.restore_own, "restore_own")
    _order(rank, restore=pb.Restore(version=3, local=["weight"]))
    assert order.mock_calls == [call.torn(), call.restore_own(shard, 3)]


def test_needs_are_told_again_unless_the_controller_has_heard_the_newest(
    rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "drain", lambda deadline_s, **_: DrainReport(True, 0.0, stuck_aborts=()))
    monkeypatch.setattr(groups, "detach_all", lambda: None)
    shard = MagicMock(holders=(0, 1))
    shard.name, shard.spec.return_value.nbytes = "weight", 4
    registry, copies = rank.worker.registry, rank.loop.copies
    registry.shards, registry.sharded_shards, registry.adapters = {"weight": shard}, {}, []
    registry.common.versions.return_value = registry.local_state.versions.return_value = []
    copies.inventory.return_value, copies.parity.return_value, rank.loop.sealing.late = [], pb.Parity(), {}
    rank.loop.touched = False
    told = [
        len(_order(rank, generation=generation, stop=pb.Stop(needs_known=known)).needs)
        for generation, known in ((1, 0), (2, 1), (3, 1), (4, 3))
    ]
    assert told == [1, 0, 1, 0]


def test_what_the_page_has_of_before_is_offered_for_as_long_as_others_hold_it(rank: Any) -> None:
    page, local_state = rank.worker.connection.page, rank.worker.registry.local_state
    page.local_state_versions.return_value = [3, 4, 5]
    local_state.at.side_effect = lambda version: b"" if version == 3 else None
    assert rank.executor._in_page() == [], "it has never come into a loop that others had begun"
    _order(rank, resume=pb.Resume(version=5))
    rank.worker.gate.version = 6
    assert rank.executor._in_page() == [4]
    rank.worker.gate.version = 5 + VERSIONS_KEPT
    assert rank.executor._in_page() == []


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


@pytest.mark.parametrize("replacement", [False, True])
def test_a_rank_of_the_launch_seals_what_it_begins_with_and_is_live_at_version_0(
    replacement: bool, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, loop = rank.worker, rank.loop
    worker.connection.detached, worker.connection.setup, worker.connection.unprotected_steps = replacement, None, None
    worker.connection.start_profile.joined.return_value = None
    worker.settings.elastic, worker.settings.resume, worker.own_staging, worker.registry.batches = (
        None,
        False,
        None,
        None,
    )
    worker.settings.checkpoint.dir, worker.settings.checkpoint.interval_s = None, "auto"
    worker.settings.timeouts.hang_step_s = 1.0
    worker.gate.generation = 0
    loop.copies.in_snapshots, loop.copies.parity.return_value = False, pb.Parity()
    monkeypatch.setattr(groups, "take_setup_log", lambda: b"")
    for name in ("_needs", "_held"):
        monkeypatch.setattr(rank.executor, name, lambda **told: [])
    monkeypatch.setattr(rank.executor, "run", MagicMock())
    rank.executor.join(9)
    joined = worker.send.call_args.args[0].joined
    assert (joined.rank, joined.steps, joined.checkpoints) == (1, 9, False)
    assert worker.gate.initialised.called != replacement and loop.seal_start.called != replacement
    rank.executor.run.assert_called_once_with()


class Left(Exception):
    """The process would have ended."""


@pytest.mark.parametrize("body", ["stop", "regroup", "restore", "staging", "resume"])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), RestoreError("a shard"), dist.DistBackendError("NCCL")])
def test_a_process_without_a_device_answers_nothing_and_ends(
    rank: Any, monkeypatch: pytest.MonkeyPatch, body: str, error: Exception
) -> None:
    """Whatever was raised where that has shown: no answer, no retry, and no error for the script to catch."""
    rank.worker.end_if_context_is_lost.side_effect = Left
    monkeypatch.setattr(rank.executor, f"_{body}", MagicMock(side_effect=error))
    parts = {"stop": pb.Stop(), "regroup": pb.Regroup(), "restore": pb.Restore(), "staging": pb.Stage()}
    with pytest.raises(Left):
        _order(rank, **{body: parts.get(body, pb.Resume())})
    assert not rank.worker.send.called and rank.worker.end_if_context_is_lost.mock_calls == [call(error)]


def test_so_it_does_where_it_shows_only_after_the_answer_to_a_stop(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.worker.end_if_context_is_lost.side_effect = Left
    monkeypatch.setattr(rank.executor, "_stop", MagicMock())
    monkeypatch.setattr(rank.executor, "_reset", MagicMock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(Left):
        _order(rank, stop=pb.Stop())
    assert rank.worker.send.called


def test_its_last_words_have_the_devices_error(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[pb.FromWorker] = []
    worker = SimpleNamespace(send=heard.append)
    monkeypatch.setattr(groups, "lost_context", lambda: "CUDA error: contained (code 226)")
    ended = MagicMock(side_effect=Left)
    monkeypatch.setattr("flashrecovery.worker.context.os._exit", ended)
    with pytest.raises(Left):
        Worker.end_if_context_is_lost(worker, RestoreError("a shard"))  # type: ignore[arg-type]
    (words,) = [message.last_words for message in heard]
    assert words.device == "CUDA error: contained (code 226)" and words.exception.endswith("RestoreError")
    monkeypatch.setattr(groups, "lost_context", lambda: "")
    Worker.end_if_context_is_lost(worker, RestoreError("a shard"))  # type: ignore[arg-type]
    assert ended.call_count == 1
