"""What lies between two steps: when a version is complete and published, and how a discarded attempt is taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from flashrecovery import groups
from flashrecovery.errors import JobFailedError, StepInterrupted
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.local_state.step_profile import StepProfile
from flashrecovery.worker.loop import Loop
from flashrecovery.worker.session import Session
from flashrecovery.worker.step import activation_release

VERSION = 5


class Weight(Shard):
    name, holders = "weight", (0, 1)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self._tensor}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


class Rank:
    """The loop of rank 1 of two, with one weight. What is done is written down, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, own_calls: bool = False) -> None:
        self.done: list[str] = []
        monkeypatch.setattr(groups, "stand_in", lambda on: self.done.append(f"stand in {on}"))
        monkeypatch.setattr(groups, "between_steps", lambda on: self.done.append(f"between {on}"))
        monkeypatch.setattr(groups, "watch_outside", lambda on: None)
        self.worker, self.copies = MagicMock(), MagicMock()
        self.worker.rank, self.worker.own_staging, self.worker.settings.elastic = 1, None, None
        self.worker.device.runs_behind = False
        self.registry, self.gate = self.worker.registry, self.worker.gate
        self.weight = torch.zeros(3)
        shard = Weight(self.weight)
        self.stream = DataStream([])
        adapter = MagicMock(whole_framework=True)
        adapter.reset.side_effect = self._writes("reset")
        self.registry.adapters, self.registry.streams = [adapter], [self.stream]
        self.registry.world_size, self.registry.tensor_shards.return_value = 2, [shard]
        self.registry.shards = {"weight": shard}
        self.registry.habits.learn.return_value = []
        self.registry.habits.touched, self.registry.habits.known = False, True
        self.registry.restore_plain.side_effect = self._writes("plain state restored")
        self.gate.version, self.gate.stopped, self.gate.mutating, self.gate.generation = VERSION, False, False, 1
        self.gate.torn.side_effect = self._writes("torn")
        self.copies.start.side_effect = self._writes("copies begin")
        self.loop = Loop(self.worker, self.copies, own_calls=own_calls)
        self.stood_in = False
        parts: dict[str, Any] = {
            "_outside": MagicMock(told=False),
            "_step": MagicMock(quiet=True),
            "_recoverer": MagicMock(),
            "_touches": MagicMock(),
            "_stops": MagicMock(),
            "_termination": MagicMock(),
            "sealing": MagicMock(),
            "_told_modules": True,
        }
        for name, part in parts.items():
            monkeypatch.setattr(self.loop, name, part)
        self.loop.sealing.complete.side_effect = self._writes("complete")  # type: ignore[attr-defined]
        stood_in = property(lambda watch: self.stood_in)
        monkeypatch.setattr("flashrecovery.worker.step.collectives.CollectiveWatch.stood_in_for", stood_in)

    def _writes(self, word: str) -> Callable[..., None]:
        return lambda *arguments, **more: self.done.append(word)

    def commit(self) -> Rank:
        assert self.loop.end(None)
        return self

    def is_cut_short(self) -> Rank:
        """A step that is done again; what follows it until the next one is discarded."""
        assert self.loop.end(StepInterrupted())
        return self


def test_a_committed_version_is_complete_and_copied_when_the_next_step_is_yielded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch).commit()
    assert rank.done == ["between True"], "the script may still change what belongs to it"
    rank.loop.settle()
    assert rank.done[1:] == ["between False", "stand in False", "complete", "copies begin"]
    rank.copies.save_checkpoint_if_due.assert_called_once_with(VERSION, 1)
    rank.copies.start.assert_called_once_with(VERSION)
    rank.loop.settle()
    assert rank.done.count("complete") == 1


def test_nothing_lies_between_the_calls_of_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, own_calls=True).commit()
    assert rank.done == ["between False", "stand in False", "complete", "copies begin"]


def test_what_a_stand_in_has_led_to_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch).commit()
    rank.stood_in, rank.gate.stopped = True, True
    rank.loop.settle()
    assert "torn" in rank.done and "complete" not in rank.done and "copies begin" not in rank.done


def test_a_stopped_rank_completes_its_version_and_publishes_it_after_the_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have to give the version up again."""
    rank = Rank(monkeypatch).commit()
    rank.gate.stopped = True
    rank.loop.settle()
    assert "complete" in rank.done and "copies begin" not in rank.done and not rank.loop._published
    rank.gate.stopped = False
    rank.loop.resumed()
    rank.loop.settle()
    assert rank.done.count("complete") == 1, "a recovery has brought it: the script has added nothing"
    assert rank.done[-1] == "copies begin" and rank.loop._published
    rank.copies.save_checkpoint_if_due.assert_not_called()
    local_state = rank.registry.local_state.at(VERSION)
    assert rank.gate.page.write_local_state.mock_calls == [call(VERSION, local_state)]


@pytest.mark.parametrize(("touched", "known"), [(True, True), (True, False), (False, False), (False, True)])
def test_a_version_that_may_be_changed_early_has_its_copy_at_once(
    touched: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch).commit()
    rank.registry.habits.touched, rank.registry.habits.known = touched, known
    rank.loop.settle()
    if touched or not known:
        rank.copies.enable_undo.assert_called_once_with(brief=not touched)
        rank.copies.before_mutation.assert_called_once_with(VERSION)
    else:
        rank.copies.before_mutation.assert_not_called()


def test_what_a_script_does_after_a_discarded_attempt_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch).is_cut_short()
    assert rank.loop.void and rank.stream.void and rank.done == ["stand in True"]
    rank.loop._recoverer.run.assert_called_once_with()  # type: ignore[attr-defined]
    rank.weight += 1
    rank.loop.settle()
    assert not rank.loop.void and not rank.stream.void and rank.weight.tolist() == [0, 0, 0]
    assert rank.done == ["stand in True", "reset", "plain state restored", "stand in False"]
    registry = rank.registry
    registry.restore_plain.assert_called_once_with(
        registry.common.at(VERSION), registry.local_state.at(VERSION), VERSION, fresh=False
    )
    for shard in (registry.common, registry.local_state):
        shard.drop_after.assert_called_once_with(VERSION)


def test_what_the_interrupted_attempt_keeps_in_memory_is_released_in_the_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[BaseException] = []
    monkeypatch.setattr(activation_release, "release", lambda error, since: released.append(error) or 1)
    rank = Rank(monkeypatch)
    rank.loop._recoverer.run.side_effect = rank.loop.let_go  # type: ignore[attr-defined]
    rank.is_cut_short()
    assert [type(error) for error in released] == [StepInterrupted]


def test_a_rank_that_leaves_its_loop_in_a_discarded_attempt_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch).is_cut_short()
    rank.worker.end_process.side_effect = SystemExit
    with pytest.raises(SystemExit):
        rank.loop.leave_early()
    rank.loop._recoverer.tell_done.assert_not_called()  # type: ignore[attr-defined]


def test_the_first_version_is_sealed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.loop.seal_start()
    rank.registry.common.keep.assert_called_once_with(0, rank.registry.capture_common(0))
    rank.loop.sealing.start.assert_called_once_with()  # type: ignore[attr-defined]


@pytest.mark.parametrize("generation", [0, 1])
def test_the_scripts_loop_is_looked_at_once_and_not_in_a_replacement(
    generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[object] = []
    monkeypatch.setattr("flashrecovery.worker.loop.check_loop", frames.append)
    monkeypatch.setattr("flashrecovery.worker.loop.join_refusal", MagicMock())
    rank = Rank(monkeypatch, own_calls=True)
    rank.gate.generation = generation
    here = sys._getframe()
    for _ in range(2):
        rank.loop.entered(here)
    assert frames == ([here] if generation == 0 else [])


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose ranks have compared what they have: ``buffer`` and the setting ``seed`` are each rank's own."""
    for name in ("check_wrappers", "check_world", "TORCH", "Copies", "Loop", "all_equal"):
        monkeypatch.setattr(f"flashrecovery.worker.session.{name}", MagicMock())
    monkeypatch.setattr("flashrecovery.worker.session.find_own", lambda registry: (["buffer"], ["seed"]))
    worker = MagicMock(rank=1)
    worker.registry.habits = StepProfile(own=["declared"])
    settings = SimpleNamespace(elastic=None, parallelism=None)
    parts = dict.fromkeys(("_checkpoint_published", "_checkpoint_failed", "_snapshot_taken"))
    return SimpleNamespace(_loop=None, _worker=worker, registry=worker.registry, settings=settings, **parts)


def test_what_differs_at_the_start_is_each_ranks_own(session: Any) -> None:
    Session.open(session, 5)
    assert session.registry.habits.own == ["buffer", "declared"]
    assert session.registry.habits.own_settings == ["seed"]
    session._loop.join.assert_called_once_with(5)


def test_a_process_runs_through_its_steps_once(session: Any) -> None:
    Session.open(session, 5)
    with pytest.raises(JobFailedError, match="only once in a process"):
        Session.open(session, 5)


def test_a_process_group_that_is_not_the_world_is_refused_before_the_loop_is_made(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = MagicMock(side_effect=JobFailedError("another world"))
    monkeypatch.setattr("flashrecovery.worker.session.check_world", refuse)
    with pytest.raises(JobFailedError, match="another world"):
        Session.open(session, 5)
    assert session._loop is None
