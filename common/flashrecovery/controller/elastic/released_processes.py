"""Processes that have left the job but are kept, stopped, while they may have the only copies of some state.

* A process that leaves because of a command holds copies for others. It stays until the remaining ranks have all that
  they need, and copies of it among themselves.
* A process whose rank was taken over by another one (:class:`RelievedProcesses`) also holds copies for others, and the
  new process has none before its first step here. The old one stays until all ranks have taken a step.

If a rank dies meanwhile and the others can recover from what they have, the kept processes are not used. Otherwise they
rejoin the job with their state, and the change is made again.
"""

from __future__ import annotations

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.proto import flashrecovery_pb2 as pb


class ReleasedProcesses:
    """Those of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._there: dict[int, tuple[RankRecord, float]] = {}

    def keep(self, record: RankRecord, grace_s: float = 0.0) -> None:
        """A process of this rank, which the job has released. It ends within ``grace_s`` seconds once it is
        dismissed."""
        self._there[record.rank] = record, grace_s

    def __bool__(self) -> bool:
        """Some are there."""
        return bool(self._there)

    def let_go(self) -> None:
        """They are needed no more."""
        for rank, (record, grace_s) in self._there.items():
            filled = self._job.ranks.get(rank)
            if filled is None or filled.home != record.home:  # else its agent has ended it for the one that fills it
                self._job.tell_to_leave(rank, record.home, grace_s)
        self._there.clear()

    def take_back(self) -> list[int]:
        """They have their ranks again. Returns these ranks."""
        job, back = self._job, sorted(self._there)
        for rank in back:
            record, _ = self._there.pop(rank)
            if rank in job.ranks:
                self._end_other(rank, record)
            job.enrol(record)
        if back:
            job.stop_awaiting_node_if_housed()
        return back

    def _end_other(self, rank: int, record: RankRecord) -> None:
        """The process that has taken the rank over ends."""
        job, other = self._job, self._job.remove_member(rank)
        if other.home != record.home:
            job.tell_to_leave(rank, other.home)
        node = job.nodes.get(other.home)
        if node is not None and node.alive and not any(r.home == node.name for r in job.in_order):
            node.make_spare()

    def on_node_lost(self, name: str) -> None:
        """Their node is lost."""
        for rank in [rank for rank, (record, _) in self._there.items() if record.home == name]:
            del self._there[rank]

    def on_ended(self, rank: int, pid: int, node: str) -> bool:
        """A process has ended. Returns whether it was one of these."""
        record, _ = self._there.get(rank, (None, 0.0))
        if record is None or record.home != node or record.process.pid != pid:
            return False
        del self._there[rank]
        return True


class RelievedProcesses:
    """Those of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._old: dict[int, RankRecord] = {}

    def keep(self, record: RankRecord) -> None:
        """Another process is about to fill its rank."""
        self._old[record.rank] = record

    def __bool__(self) -> bool:
        """Some are there."""
        return bool(self._old)

    def let_go(self) -> list[RankRecord]:
        """The other ranks have all that they need. Returns the released ranks whose processes still run."""
        old = list(self._old.values())
        self._old.clear()
        return old

    def take_back(self) -> list[int]:
        """The other ranks have not got everything: released processes that still run get their ranks back. Returns
        these."""
        job, back = self._job, sorted(self._old)
        for rank in back:
            gone, old = job.remove_member(rank), self._old.pop(rank)
            if gone.home != old.home:  # else its node is lost, and it has been given no other room than the old one's
                job.tell_to_leave(rank, gone.home)
            job.enrol(old)
            node = job.nodes.get(gone.home)
            if node is not None and node.alive and not any(r.home == node.name for r in job.in_order):
                node.make_spare()
        if back:
            job.stop_awaiting_node_if_housed()
        return back

    def on_node_lost(self, name: str) -> None:
        """Their node is lost."""
        for rank in [rank for rank, record in self._old.items() if record.home == name]:
            del self._old[rank]

    def on_ended(self, message: pb.Failure | pb.Exited, node: str) -> bool:
        """One has died. Returns whether it was one of these."""
        record = self._old.get(message.rank)
        if record is None or record.home != node or record.process.pid != message.pid:
            return False
        del self._old[message.rank]
        return True
