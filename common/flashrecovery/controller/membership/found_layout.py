"""A controller that is started while its job runs, in another parallel layout than the launch's: which one it is.

Agents and workers know. With each change of the layout the processes' attempt grows, so of two agents that say
different things, one of which was cut off while it changed, the one with the newer attempt is right.
"""

from __future__ import annotations

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_record import BUILT_UP, RankRecord
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.parallel_layout import layout_ranks


class FoundLayout:
    """The layout that a new controller finds, of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._attempt = -1

    def hear(self, message: pb.Register) -> tuple[bool, list[str]]:
        """An agent comes with ranks. Returns whether they are of the newest layout that is known, and the nodes that
        have come with ranks of an older one."""
        job, older = self._job, list[str]()
        # A layout may come back: an earlier time is another one. Within one, all have the same attempt.
        another = message.layout != job.parallel.text or (job.parallel.text != "" and message.attempt != self._attempt)
        if another and self._attempt >= message.attempt:
            return False, older
        if another:
            older = sorted({record.home for record in job.in_order if record.home})
            job.lay_out(message.layout, [RankRecord(rank) for rank in range(layout_ranks(message.layout))])
            job.place_copies(1, ())  # else as in the older one
        self._attempt = max(self._attempt, message.attempt)
        if job.parallel.text:  # what ranks keep of their set-up is of this very attempt
            job.found_in_layout(self._attempt)
        return True, older

    def why_lost(self) -> str:
        """All have come: why their state is lost; "" if it is not. As long as no rank has been let into its
        loop in the new layout, one whose script has just begun looks like one that has read the state."""
        job = self._job
        if not job.parallel.text or any(record.place not in BUILT_UP for record in job.in_order):
            return ""
        return (
            f"the controller was lost while the job changed its parallel layout to {job.parallel.text}: where its "
            "state is, no node that is left has heard; launch it again, from its newest checkpoint"
        )
