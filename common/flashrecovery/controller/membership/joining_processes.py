"""Processes that start while training continues, to fill a rank later: ordered, ready, or aborted.

A joining process runs the script up to its first step alone, as a replacement does, while the others keep training. It
is not a rank of the job yet: no rank waits for it, and its death is no failure. A process that does not become ready is
given up, with a notice. Once all are ready, the ranks pause, and in the recovery that follows the joining processes
become members (:mod:`flashrecovery.controller.elastic.growing`).
"""

from __future__ import annotations

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_inventory import local_state_name
from flashrecovery.controller.state.rank_record import (
    JoiningProcess,
    Place,
    RankProcess,
    RankRecord,
    registration_differs,
)
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.ownership import base_name
from flashrecovery.proto import flashrecovery_pb2 as pb


def give_up(job: JobState, rank: int, why: str) -> None:
    """The joining process for this rank does not come; its process, if there is one, ends. A replica comes as a whole
    or not at all."""
    if rank not in job.membership.joining:
        return
    _give_up(job, rank, why)
    if rank not in job.ranks:
        replica = job.shape.replica(rank)
        for other in [r for r in job.membership.joining if r not in job.ranks and job.shape.replica(r) == replica]:
            _give_up(job, other, f"rank {rank} of the same replica does not come")


def _give_up(job: JobState, rank: int, why: str) -> None:
    record = job.membership.joining.pop(rank).record
    job.tell_to_leave(rank, record.home)
    job.notice(
        NoticeKind.JOINING_PROCESS_GIVEN_UP,
        f"rank {rank} was to come in on node {record.home}, and does not: {why}; training goes on without it",
        rank=rank,
    )


def give_up_all(job: JobState, why: str) -> None:
    """Give up all joining processes."""
    for rank in list(job.membership.joining):
        give_up(job, rank, why)


class JoiningProcesses:
    """What becomes of the joining processes of one job. What agents say is of a joining process if it comes from its
    node; each method returns whether it was. ``node`` "": not known."""

    def __init__(self, job: JobState) -> None:
        self._job = job

    @property
    def all_here(self) -> bool:
        """There are some, and all wait at their first step."""
        return bool(self._job.membership.joining) and all(
            joining.here for joining in self._job.membership.joining.values()
        )

    def _of(self, rank: int, node: str) -> JoiningProcess | None:
        found = self._job.membership.joining.get(rank)
        return found if found is not None and node in ("", found.record.home) else None

    def on_started(self, message: pb.WorkerStarted, node: str, host: str) -> bool:
        """Its process runs."""
        found = self._of(message.rank, node)
        if message.joining and found is not None and found.number == message.joining:
            found.record.started_joining(RankProcess(message.pid, node, host))
        return bool(message.joining)  # else it was aborted, and is ending

    def on_joined(self, message: pb.Joined, node: str) -> bool:
        """It has come to its first step."""
        found = self._of(message.rank, node)
        if found is None or found.record.place is not Place.STARTING or found.record.filled != message.generation:
            return False
        found.record.move_to(Place.JOINED)
        found.record.joined(message)
        wrong = self._unlike(found.record)
        if wrong:
            give_up(self._job, message.rank, wrong)
        return True

    def _unlike(self, record: RankRecord) -> str:
        """How it differs from the ranks that there are; "" if it does not."""
        alike = (
            r for r in self._job.in_order if r.model_rank == record.model_rank
        )  # a replica's ranks differ from each other
        other = self._job.ranks.get(record.rank) or next(alike, self._job.in_order[0])
        here = {*map(base_name, record.inventory.common_needs())} - {local_state_name(record.rank)}
        there = {*map(base_name, other.inventory.common_needs())} - {local_state_name(other.rank)}
        old, new = other.registration(there, steps=True), record.registration(here, steps=True)
        return registration_differs(old, new, f"rank {other.rank}")

    def on_failure(self, message: pb.Failure, node: str) -> bool:
        """Its process has died."""
        found = self._of(message.rank, node)
        if found is None or found.record.process.pid not in (0, message.pid):
            return False
        give_up(self._job, message.rank, f"{message.kind}: {message.evidence}")
        return True

    def on_exited(self, message: pb.Exited, node: str) -> bool:
        """Its script has ended before its first step."""
        found = self._of(message.rank, node)
        if found is None or found.record.process.pid != message.pid:
            return False
        give_up(self._job, message.rank, "its script has ended before a first step")
        return True

    def on_node_lost(self, name: str) -> None:
        """A node is lost, perhaps theirs, or the one whose TCPStore they were asked to use."""
        living = {node.store for node in self._job.nodes.values() if node.alive}
        for rank, joining in list(self._job.membership.joining.items()):
            if joining.record.home == name:
                give_up(self._job, rank, f"node {name} is lost")
            elif joining.record.store not in living:
                give_up(self._job, rank, f"node {name} is lost, whose TCPStore it was asked to use")

    def give_up_late(self, now: float) -> None:
        """Those that are not there in time."""
        for rank, joining in list(self._job.membership.joining.items()):
            if not joining.here and now >= joining.due:
                limit_s = self._job.config.timeouts.replacement_s
                give_up(self._job, rank, f"it has not come to its first step within {limit_s:g} s")
