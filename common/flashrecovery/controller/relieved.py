"""Processes whose ranks others are about to fill, until these have all that they need.

A hand-off is no loss: the process on the node that is to leave lives, and what only it has (its random numbers, its
place in the data) is there until the new one has got it. So it stays, stopped, and takes no part; and if anything fails
before the new processes are restored, it takes its rank back, as if nobody had come. What becomes of it then:
:mod:`.last_resort`.
"""

from __future__ import annotations

from flashrecovery.controller.job_state import JobState
from flashrecovery.controller.nodes import NodeState
from flashrecovery.controller.records import RankRecord
from flashrecovery.proto import flashrecovery_pb2 as pb


class Relieved:
    """Those of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._old: dict[int, RankRecord] = {}

    def keep(self, record: RankRecord) -> None:
        """Another process is about to fill its rank."""
        self._old[record.rank] = record

    def let_go(self) -> list[RankRecord]:
        """The others have all that they need. Returns those that were relieved, whose processes are still there."""
        old = list(self._old.values())
        self._old.clear()
        return old

    def take_back(self) -> list[int]:
        """The others have not got everything: those who live have their ranks again. Returns these ranks."""
        job, back = self._job, sorted(self._old)
        for rank in back:
            gone, old = job.depart(rank), self._old.pop(rank)
            if gone.home != old.home:  # else its node is lost, and it has been given no other room than the old one's
                job.tell_to_leave(rank, gone.home)
            job.enrol(old)
            node = job.nodes.get(gone.home)
            if node is not None and node.alive and not any(r.home == node.name for r in job.in_order):
                node.state = NodeState.SPARE
        if back and all(record.home for record in job.in_order):
            job.homeless_since = None
        return back

    def on_node_lost(self, name: str) -> None:
        """Their node is lost."""
        for rank in [rank for rank, record in self._old.items() if record.home == name]:
            del self._old[rank]

    def on_ended(self, message: pb.Failure | pb.Exited, node: str) -> bool:
        """One has died. Returns whether it was one of these."""
        record = self._old.get(message.rank)
        if record is None or record.home != node or record.pid != message.pid:
            return False
        del self._old[message.rank]
        return True
