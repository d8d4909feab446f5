"""A job ends before its last step: the state of its ranks is saved before their processes end.

The reason does not matter (a signal, a script that fails in the same step again and again, an error of the controller):
the living ranks are paused and stopped as in a recovery, so that each is at a complete version. Then

1. each gives its part of the newest version to its node's snapshot process. The local state of a dead rank is in its
   page, and its agent keeps that. (Not in a job that may change its size or layout: snapshots belong to one of them.)
2. If the job has a directory for checkpoints, or may change, each writes its part of a checkpoint. The part of a dead
   rank is written by a rank that holds its state.

All of this takes at most ``timeouts.last_save_s``. Then the agents end their processes, and write the snapshots to
disk, unless the checkpoint has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flashrecovery import events as ev
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_inventory import local_state_name
from flashrecovery.controller.state.rank_record import BUILT_UP, Place, RankRecord
from flashrecovery.kinds import NoticeKind, Ordered
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_OF_STOPPING = 0.6
"""The part of the time in which ranks have to come to a stop."""
_OF_HOLDING = 0.2
"""... and to say where they are."""


def newest_whole(records: Sequence[RankRecord], gone: Sequence[RankRecord] = ()) -> int:
    """The newest version of which these ranks together have everything: each its own state, and all shards of the ranks
    that are ``gone``; -1 if there is none."""
    needed = {name for record in records for name in record.inventory.needs}
    needed |= {name for record in gone for name in record.inventory.needs if name != local_state_name(record.rank)}
    for version in sorted(
        {record.inventory.newest for record in records} | {record.inventory.live for record in records}, reverse=True
    ):
        there = {name for record in records for name in names_at(record, version)}
        if version >= 0 and needed <= there:
            return version
    return -1


def names_at(record: RankRecord, version: int) -> set[str]:
    """The shards that this rank has at ``version``, its own and others'."""
    return {*(record.inventory.needs if record.inventory.live == version else ()), *record.inventory.kept_at(version)}


def has_all(record: RankRecord, version: int) -> bool:
    """Whether this rank has everything of its own at ``version``."""
    return record.inventory.needs.keys() <= names_at(record, version)


def writers(stopped: Sequence[RankRecord], gone: Sequence[RankRecord], version: int) -> dict[int, int]:
    """The writer of each lost rank's part: among the ranks that have all that it had, except its rank-local state, the
    one that writes the fewest parts. A part that no rank has is missing from the result."""
    there = {record.rank: names_at(record, version) for record in stopped}
    found: dict[int, int] = {}
    for record in gone:
        needed = record.inventory.needs.keys() - {local_state_name(record.rank)}
        able = [rank for rank, names in there.items() if needed <= names]
        if able:
            found[record.rank] = min(able, key=lambda rank: (list(found.values()).count(rank), rank))
    return found


class LastSave:
    """Begins with the first :meth:`tick` after the job has failed, if there is something to keep.

    Args:
        stop_held: stops the paused ranks at complete versions: first those that have to finish their steps, then the
            others.
    """

    def __init__(self, job: JobState, stop_held: Callable[[float, float], None]) -> None:
        self._job = job
        self._stop_held = stop_held
        self._began: float | None = None
        self._version = -1
        self._missing: dict[int, str] = {}
        self._local_states: dict[int, bytes] = {}  # of ranks that are gone
        self._writes = False  # a checkpoint is being written
        self._not_written: dict[int, str] = {}

    def tick(self, now: float) -> None:
        """Go on, as far as that is possible."""
        job, limit = self._job, self._job.config.timeouts.last_save_s
        if not job.ending.saving:
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
            if self._writes or not job.last_directory or self._checkpoint:
                self._end()
            else:
                self._write(began + limit)

    def lost(self, ranks: Collection[int]) -> None:
        """The processes of these ranks are gone."""
        self._job.outbox.keep(lambda _, rank: rank not in ranks)
        for rank in ranks:
            self._job.vacate(rank)
            if self._version >= 0:
                self._note(rank, "its process has ended")

    def late(self, late: Mapping[int, Ordered]) -> None:
        """These have not answered in time."""
        for rank, what in late.items():
            if what is Ordered.KEEP_LAST:
                self._note(rank, "no answer in time")

    def kept(self, ranks: Collection[int], message: pb.Reply) -> None:
        """An answer of these ranks, or of the agent for them."""
        for rank in ranks:
            if message.error_type:
                self._note(rank, message.error)
            if message.local_state:
                self._local_states[rank] = message.local_state

    def _note(self, rank: int, why: str) -> None:
        """Note what is missing of this rank."""
        (self._not_written if self._writes else self._missing).setdefault(rank, why)

    def _begin(self, now: float) -> None:
        job = self._job
        self._began = now
        job.next_generation()
        living = [r for r in job.ranks.values() if r.place not in BUILT_UP]
        for record in living:
            job.move(record.rank, Place.STOPPING)
        deadline = now + _OF_HOLDING * job.config.timeouts.last_save_s
        job.command_all(living, pb.Command(hold=pb.Hold()), deadline, Ordered.HOLD)

    @property
    def _stopped(self) -> list[RankRecord]:
        return [r for r in self._job.ranks.values() if r.place is Place.STOPPED]

    @property
    def _gone(self) -> list[RankRecord]:
        return [r for r in self._job.ranks.values() if r.place is not Place.STOPPED]

    def _keep(self, now: float, deadline: float) -> None:
        job = self._job
        job.outbox.clear()
        stopped, gone = self._stopped, self._gone
        self._version = newest_whole(stopped, gone if job.changes else ())
        if self._version <= 0:
            if job.changes and stopped and gone:
                self._say_not_written(f"no rank has the state of {ranks_text([r.rank for r in gone])}")
            job.shut_down()
            return
        if not job.keeps_last:
            self._write(deadline)
            return
        holders = [r.rank for r in stopped if has_all(r, self._version)]
        order = pb.KeepLast(version=self._version, holders=holders)
        job.command_all(stopped, pb.Command(keep_last=order), deadline, Ordered.KEEP_LAST)
        self._keep_of(stopped, gone, deadline)

    def _keep_of(self, stopped: Sequence[RankRecord], gone: Sequence[RankRecord], deadline: float) -> None:
        """Have the agents keep the state that is left of dead ranks."""
        job = self._job
        there = {name for record in stopped for name in record.inventory.needs}
        late = {version for record in stopped for version in record.inventory.late}
        for record in gone:
            node = record.page_on or record.home
            order = pb.KeepLast(
                version=self._version,
                gone=True,
                tensors=not record.inventory.needs.keys() - {local_state_name(record.rank)} <= there,
                early=self._version not in late,
                send=bool(job.last_directory),
            )
            if not node or not job.nodes[node].alive:
                self._missing[record.rank] = "its node is gone"
                continue
            command = pb.Command(generation=job.generation, rank=record.rank, keep_last=order)
            job.outbox.order(node, command, deadline, Ordered.KEEP_LAST)

    def _write(self, deadline: float) -> None:
        """A checkpoint of the version."""
        job, self._writes = self._job, True
        stopped, gone = self._stopped, self._gone
        found = writers(stopped, gone, self._version)
        alike = job.config.elastic is not None  # there each rank can use the local state of any other
        for record in gone:
            if record.rank not in found or not (alike or record.rank in self._local_states):
                self._not_written[record.rank] = f"its own state of step {self._version} is lost with its process"
        if (
            alike
            and any(record.inventory.sharded for record in stopped)
            and set(job.membership.sharded_among) != set(job.ranks)
        ):
            self._not_written = dict.fromkeys(job.ranks, "the job was about to change its size")
        if self._not_written:
            return
        lost = [
            pb.LostPart(
                rank=record.rank,
                writer=found[record.rank],
                shards=sorted(record.inventory.needs.keys() - {local_state_name(record.rank)}),
                local_state=self._local_states.get(record.rank, b""),
            )
            for record in gone
        ]
        order = pb.KeepLast(
            version=self._version,
            directory=job.last_directory,
            lost=lost,
            launch=job.launch,
            members=job.members if alike else (),
        )
        job.command_all(stopped, pb.Command(keep_last=order), deadline, Ordered.KEEP_LAST)

    def _end(self) -> None:
        job, version = self._job, self._version
        whole = job.keeps_last and not self._missing
        saved = self._checkpoint
        if self._not_written and not saved:
            self._say_not_written(_in_words(self._not_written))
        if whole or saved:
            text = f"the state of step {version} is saved completely"
        else:
            why = _in_words(self._missing or self._not_written)
            text = f"the state of step {version} is not saved completely: {why}"
        job.emit(ev.Notice(generation=job.generation, kind=NoticeKind.LAST_SAVE, text=text, step=version))
        job.shut_down(version, whole=whole, saved=saved)

    @property
    def _checkpoint(self) -> str:
        """The checkpoint of the saved version; "": there is none."""
        newest = self._job.checkpoint
        return newest[1] if newest is not None and newest[0] == self._version else ""

    def _say_not_written(self, why: str) -> None:
        text = f"the state in which the job ends was not written to a checkpoint: {why}"
        self._job.notice(NoticeKind.CHECKPOINT_FAILED, text)


def _in_words(missing: Mapping[int, str]) -> str:
    return "; ".join(f"{ranks_text([rank])}: {why}" for rank, why in sorted(missing.items())[:3])
