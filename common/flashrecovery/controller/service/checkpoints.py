"""When the ranks save a checkpoint, or take a snapshot: the controller names the version, far enough ahead that all
hear it in time."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Literal

from flashrecovery.config import CheckpointSettings
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.plan.checkpoint_interval import CheckpointSchedule
from flashrecovery.plan.snapshot_interval import SnapshotSchedule
from flashrecovery.proto import flashrecovery_pb2 as pb


class Checkpoints:
    """The checkpoints of one job. ``now``: CLOCK_MONOTONIC seconds."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._failures_per_day = settings.failures_per_day
        self._interval_s = settings.interval_s
        self._wanted = settings.dir is not None
        self._schedule = self._new_schedule(time.monotonic())

    def _new_schedule(self, now: float) -> CheckpointSchedule:
        return CheckpointSchedule(self._interval_s, self._failures_per_day, now=now)

    def adopt(self, message: pb.Joined, now: float) -> None:
        """A framework's configuration may ask for checkpoints; rank 0's counts."""
        if message.rank != 0:
            return
        self._wanted = message.checkpoints
        interval_s: float | Literal["auto"] = message.checkpoint_interval_s or "auto"
        if interval_s != self._interval_s:
            self._interval_s = interval_s
            self._schedule = self._new_schedule(now)

    def saved(self, message: pb.CheckpointSaved) -> None:
        """A checkpoint is complete, and training was held up for so long."""
        self._schedule.published(message.k0_s, message.seconds)

    def recovered(self) -> None:
        """A version that has been announced may never come."""
        self._schedule.recovered()

    def hurry(self) -> None:
        """Take one as soon as possible."""
        self._schedule.hurry()

    def announce(self, ranks: Collection[RankRecord], launch: str, now: float) -> list[pb.Command]:
        """What to tell each rank of this launch now, while all are training; mostly nothing."""
        if not self._wanted or not self._schedule.is_due(now):
            return []
        version = _next_version(self._schedule, ranks, now)
        if version is None:
            return []
        return [pb.Command(rank=r.rank, checkpoint=pb.TakeCheckpoint(version=version, launch=launch)) for r in ranks]


class Snapshots:
    """The snapshots of a job in which not every step makes one."""

    def __init__(self, max_age_s: float) -> None:
        self._schedule = SnapshotSchedule(max_age_s)

    def taken(self, message: pb.SnapshotTaken) -> None:
        """A rank has its part of one."""
        self._schedule.taken(message.waited_s)

    def recovered(self) -> None:
        """A version that has been announced may never come."""
        self._schedule.recovered()

    def announce(self, ranks: Collection[RankRecord], now: float) -> list[pb.Command]:
        """What to tell each rank now, while all are training; mostly nothing."""
        if not self._schedule.is_due(now) or not all(r.takes_snapshots for r in ranks):
            return []
        version = _next_version(self._schedule, ranks, now)
        if version is None:
            return []
        return [pb.Command(rank=r.rank, snapshot=pb.TakeSnapshot(version=version)) for r in ranks]


def _next_version(
    schedule: CheckpointSchedule | SnapshotSchedule, ranks: Collection[RankRecord], now: float
) -> int | None:
    return schedule.announce(max(r.committed for r in ranks), max(r.health.step_s for r in ranks), now=now)
