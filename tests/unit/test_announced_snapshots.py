"""Snapshots of versions that the controller announces, where no step makes copies anyway."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from flashrecovery.plan.snapshot_interval import MARGIN_S, SnapshotSchedule
from flashrecovery.redundancy.announcement import Announcement
from flashrecovery.redundancy.memory.flat_buffer import NOTHING
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec
from flashrecovery.worker.replication import snapshots
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.replication.snapshots import AnnouncedSnapshots


class Weights(Shard):
    name = "weights"
    holders = (0, 1)

    def __init__(self) -> None:
        self.live = torch.arange(10.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weights": self.live}

    def values(self) -> dict[str, Any]:
        return {}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


# -- when -------------------------------------------------------------------------------------------------


def test_the_first_one_is_due_at_once_and_the_next_one_after_half_of_the_age() -> None:
    schedule = SnapshotSchedule(30.0)
    assert schedule.announce(0, 0.1, now=100.0) == 1 + MARGIN_S / 0.1
    schedule.taken(0.0)
    assert schedule.announce(50, 0.1, now=114.9) is None
    assert schedule.announce(50, 0.1, now=115.0) == 51 + MARGIN_S / 0.1


def test_long_steps_are_named_one_ahead() -> None:
    assert SnapshotSchedule(30.0).announce(7, 60.0, now=0.0) == 9


def test_the_announced_version_is_waited_for() -> None:
    """With steps of a minute, one that is due each 15 seconds would be put off for ever."""
    schedule = SnapshotSchedule(30.0)
    assert schedule.announce(7, 60.0, now=0.0) == 9
    assert schedule.announce(8, 60.0, now=60.0) is None
    assert schedule.announce(9, 60.0, now=120.0) is None
    assert schedule.announce(10, 60.0, now=180.0) == 12


def test_what_holds_training_up_is_taken_seldom() -> None:
    schedule = SnapshotSchedule(30.0)
    schedule.announce(0, 0.1, now=0.0)
    schedule.taken(0.2)
    assert schedule.interval_s() == pytest.approx(100.0)


def test_after_a_recovery_one_is_due_at_once() -> None:
    schedule = SnapshotSchedule(30.0)
    assert schedule.announce(50, 0.1, now=0.0) == 71
    schedule.recovered()
    assert schedule.announce(20, 0.1, now=1.0) == 41


# -- what a rank has heard ----------------------------------------------------------------------------------


def test_only_the_announced_version_is_taken_and_once() -> None:
    announcement = Announcement()
    assert not announcement.take(4)
    announcement.hear(5, 0)
    assert announcement.version == 5
    assert [announcement.take(version) for version in (4, 5, 5, 6)] == [False, True, False, False]


def test_one_that_is_heard_too_late_is_not_taken() -> None:
    announcement = Announcement()
    announcement.hear(5, 0)
    assert not announcement.take(6) and announcement.version is None


def test_what_was_announced_before_a_recovery_is_void() -> None:
    announcement = Announcement()
    announcement.hear(9, 2)
    announcement.withdraw(2)  # heard before the news of that generation
    assert announcement.version == 9
    announcement.withdraw(3)
    assert announcement.version is None


# -- the copy -----------------------------------------------------------------------------------------------


def _announced(waits: list[float], risks: list[str]) -> AnnouncedSnapshots:
    return AnnouncedSnapshots(PreStepCopy([Weights()]), waits.append, risks.append, 2)


def _held(of_rank: AnnouncedSnapshots) -> list[int]:
    return sorted(version for version, _, _ in of_rank.copies.held())


def test_a_copy_is_made_of_the_announced_version_only() -> None:
    waits: list[float] = []
    of_rank = _announced(waits, [])
    of_rank.announcement.hear(3, 0)
    for version in range(6):
        of_rank.start(version, lambda _: NOTHING)
        of_rank.before_mutation()
    assert len(waits) == 1 and _held(of_rank) == [3]
    of_rank.copies.close()


def test_where_memory_is_short_there_are_none_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 bytes, two versions, two ranks of the node; half of what there is stays free."""
    risks: list[str] = []
    for available, fits in ((319, False), (320, True)):
        monkeypatch.setattr(snapshots, "available_memory", lambda available=available: available)
        of_rank = _announced([], risks)
        for version in (1, 2):
            of_rank.announcement.hear(version, 0)
            of_rank.start(version, lambda _: NOTHING)
            of_rank.before_mutation()
        assert _held(of_rank) == ([1, 2] if fits else [])
        of_rank.copies.close()
    (said,) = risks
    assert said.startswith("no snapshots are taken: they need about")


@pytest.mark.parametrize(("version", "has_it"), [(5, True), (6, False)])
def test_at_the_end_a_copy_counts_only_for_its_own_version(version: int, has_it: bool) -> None:
    """A rank that has gone on is asked for nothing that only a copy of each step would have."""
    registry, settings = MagicMock(), MagicMock()
    registry.world_size, registry.rank, registry.adapters = 2, 0, []
    registry.unique_shards.return_value, registry.tensor_shards.return_value = [], [Weights()]
    settings.elastic = settings.parallelism = settings.checkpoint.dir = None
    settings.redundancy, settings.pre_step_copy = "none", "never"
    made = Copies(registry, settings, *[MagicMock()] * 5)
    of_rank = _announced([], [])
    made._own.take_snapshots(of_rank)
    made._snapshots = MagicMock(given_up=False)
    of_rank.announcement.hear(5, 0)
    of_rank.start(5, lambda _: NOTHING)
    of_rank.before_mutation()
    made.keep_last(version, [1], live=False)
    kept = made._snapshots.keep_last.call_args.args[2]
    assert kept is (of_rank.copies if has_it else None)
    of_rank.copies.close()
