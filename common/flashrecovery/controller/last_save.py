"""A job ends before its last step: what its ranks hold is kept before their processes end.

Whatever the reason is (a signal, a script that fails in the same step again and again, an error of the controller): the
ranks that live are held and stopped as in a recovery, so that they stand at whole versions; then each has its node's
snapshot process hold its part of the newest one. What only a rank that is gone had is in its page, and its agent keeps
that. All of it together takes at most ``timeouts.last_save_s``; then the agents end their processes, and write what is
held to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flashrecovery import events as ev
from flashrecovery.controller.job_state import JobState
from flashrecovery.controller.records import BUILT_UP, Place, RankRecord, capsule_name
from flashrecovery.kinds import NoticeKind, Ordered
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_OF_STOPPING = 0.6
"""The part of the time in which ranks have to come to a stop."""
_OF_HOLDING = 0.2
"""... and to say where they are."""


def newest_whole(records: Sequence[RankRecord]) -> int:
    """The newest version of which these ranks together have everything that they need, each its own state included; -1
    if there is none."""
    needed = {name for record in records for name in record.needs}
    for version in sorted({record.newest for record in records} | {record.live for record in records}, reverse=True):
        there: set[str] = set()
        for record in records:
            there.update(record.needs if record.live == version else record.kept_at(version))
        if version >= 0 and needed <= there:
            return version
    return -1


def has_all(record: RankRecord, version: int) -> bool:
    """Whether this rank has everything of its own at ``version``."""
    return record.live == version or record.needs.keys() <= {*record.kept_at(version)}


class LastSave:
    """Begins with the first :meth:`tick` after the job has failed, if there is something to keep.

    Args:
        stop_held: stops those ranks that are held, at whole versions; once for those that have to finish their steps,
            then for the others.
    """

    def __init__(self, job: JobState, stop_held: Callable[[float, float], None]) -> None:
        self._job = job
        self._stop_held = stop_held
        self._began: float | None = None
        self._version = -1
        self._missing: dict[int, str] = {}

    def tick(self, now: float) -> None:
        """Go on, as far as that is possible."""
        job, limit = self._job, self._job.config.timeouts.last_save_s
        if not job.saving:
            return
        if self._began is None:
            self._begin(now)
        began = self._began or now
        if self._version < 0:
            if job.places[Place.STOPPING] and now < began + _OF_STOPPING * limit:
                self._stop_held(now, _OF_HOLDING * limit)
            if not job.places[Place.STOPPING] or now >= began + _OF_STOPPING * limit:
                self._keep(now, began + limit)
        elif not job.outbox.waits_for(Ordered.KEEP_LAST):
            self._end()

    def lost(self, ranks: Collection[int]) -> None:
        """The processes of these ranks are gone."""
        self._job.outbox.keep(lambda _, rank: rank not in ranks)
        for rank in ranks:
            self._job.ranks[rank].vacate()
            if self._version >= 0:
                self._missing.setdefault(rank, "its process has ended")

    def late(self, late: Mapping[int, Ordered]) -> None:
        """These have not answered in time."""
        for rank, what in late.items():
            if what is Ordered.KEEP_LAST:
                self._missing[rank] = "no answer in time"

    def kept(self, ranks: Collection[int], message: pb.Reply) -> None:
        """An answer of these ranks, or of the agent for them."""
        for rank in ranks:
            if message.error_type:
                self._missing[rank] = message.error

    def _begin(self, now: float) -> None:
        job = self._job
        self._began = now
        job.generation += 1
        living = [r for r in job.ranks.values() if r.place not in BUILT_UP]
        for record in living:
            record.place = Place.STOPPING
        deadline = now + _OF_HOLDING * job.config.timeouts.last_save_s
        job.command_all(living, pb.Command(hold=pb.Hold()), deadline, Ordered.HOLD)

    def _keep(self, now: float, deadline: float) -> None:
        job = self._job
        job.outbox.clear()
        stopped = [r for r in job.ranks.values() if r.place is Place.STOPPED]
        gone = [r for r in job.ranks.values() if r.place is not Place.STOPPED]
        self._version = newest_whole(stopped)
        if self._version <= 0:
            job.shut_down()
            return
        holders = [r.rank for r in stopped if has_all(r, self._version)]
        order = pb.KeepLast(version=self._version, holders=holders)
        job.command_all(stopped, pb.Command(keep_last=order), deadline, Ordered.KEEP_LAST)
        there = {name for record in stopped for name in record.needs}
        late = {version for record in stopped for version in record.late}
        for record in gone:
            node = record.page_on or record.home
            order = pb.KeepLast(
                version=self._version,
                gone=True,
                tensors=not record.needs.keys() - {capsule_name(record.rank)} <= there,
                early=self._version not in late,
            )
            if not node or not job.nodes[node].alive:
                self._missing[record.rank] = "its node is gone"
                continue
            command = pb.Command(generation=job.generation, rank=record.rank, keep_last=order)
            job.outbox.send(node, command, deadline, Ordered.KEEP_LAST)

    def _end(self) -> None:
        version, missing = self._version, self._missing
        if missing:
            why = "; ".join(f"{ranks_text([rank])}: {why}" for rank, why in sorted(missing.items())[:3])
            text = f"the state of step {version} is not kept whole: {why}"
        else:
            text = f"the state of step {version} is kept whole"
        generation = self._job.generation
        self._job.emit(ev.Notice(generation=generation, kind=NoticeKind.LAST_SAVE, text=text, step=version))
        self._job.shut_down(version, whole=not missing)
