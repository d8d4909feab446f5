"""The state that ranks of another layout begin with: written into the nodes' memory, and kept there until they have it.

Each shard is written by one of the ranks that have it, or by two on different nodes (:mod:`.staging_writers`). From the
start of the new ranks on, agents know where it is, for a controller that comes in between
(:class:`~flashrecovery.controller.state.staged_layout.StagedLayout`).
"""

from __future__ import annotations

from dataclasses import replace

from flashrecovery.controller.relayout.staging_writers import assigned
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.saved_state import SavedState
from flashrecovery.controller.state.staged_layout import StagedLayout
from flashrecovery.errors import JobFailedError, ProtocolError
from flashrecovery.kinds import FailureKind, NoticeKind, Ordered
from flashrecovery.plan.strategy.relayout import StayingFacts, layout_text
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb


class StagedState:
    """The staged state of one job.

    Attributes:
        litter: there is state in memory that will not be needed.
        job_is: what the job was before its layout changed, and has to stay.
        change: the recovery in which it changes.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.litter = False
        self.job_is: StayingFacts | None = None
        self.change: HistoryEntry | None = None
        self._writing: SavedState | None = None  # is being written
        self._rounds = 0
        self._said: dict[str, tuple[str, int]] = {}  # digests of what writers have alike, and whose they are

    # -- is written -------------------------------------------------------------------------------

    def write(self, version: int, now: float) -> None:
        """Have each shard written by one of the ranks that have it. Raises JobFailedError if no rank has a shard."""
        job = self._job
        orders = self._assigned(version)
        self._said, self.litter = {}, True
        self._rounds += 1
        directory = f"{job.generation}-{self._rounds}-{version}"
        self._writing = SavedState.of(version, directory, orders, job.ranks, job.nodes)
        deadline = now + 1.5 * job.config.timeouts.restore_s
        for rank, items in orders.items():
            staging = pb.Stage(version=version, directory=directory, items=items)
            job.order(rank, pb.Command(staging=staging), deadline, Ordered.STAGING)

    def _assigned(self, version: int) -> dict[int, list[pb.StagingItem]]:
        job = self._job
        domains = {node.name: node.domain for node in job.nodes.values()}
        return assigned(job.ranks, job.membership.removed, version, domains)

    def why_not_written(self, version: int) -> str:
        """Why the state of this version cannot be written; "" if it can."""
        try:
            self._assigned(version)
        except JobFailedError as e:
            return str(e)
        return ""

    @property
    def writing(self) -> bool:
        """State is being written."""
        return self._writing is not None

    def interrupted(self) -> None:
        """A rank has died: what was being written cannot be used."""
        if self._writing is not None:
            self._writing = None
            self._job.outbox.keep(lambda what, _: what is not Ordered.STAGING)

    def wrote(self, rank: int, reply: pb.Reply) -> str:
        """A rank has written its part. Returns what it has otherwise than another one, though one state of it
        will be everybody's; "" if nothing."""
        if self._writing is not None:
            self._writing = replace(self._writing, written=self._writing.written + reply.staged_bytes)
        for what, digest in sorted(reply.sent_digests.items()):
            first, whose = self._said.setdefault(what, (digest, rank))
            if first != digest:
                return f"{what} is not what it is on rank {whose}, and only one of them can be everybody's"
        return ""

    def written(self) -> SavedState | None:
        """What has been written, once all is."""
        if self._job.outbox.waits_for(Ordered.STAGING):
            return None
        kept, self._writing = self._writing, None
        return kept

    # -- is kept ----------------------------------------------------------------------------------

    @property
    def kept(self) -> SavedState | None:
        """The state that is there and may be needed again."""
        staged = self._job.parallel.staged
        return None if staged is None else staged.kept

    def now(self) -> SavedState | None:
        """What can be read now; None if that is not everything."""
        return None if self.kept is None else self.kept.now(self._job.nodes)

    def keep(self, kept: SavedState, facts: StayingFacts, before: Strategy) -> None:
        """Ranks of another layout are about to be started with this."""
        job, staged = self._job, self._job.parallel.staged
        self.job_is = self.job_is or facts
        layout = layout_text(before) if staged is None else staged.before
        job.parallel.begin_with(StagedLayout(kept, self.job_is, layout, job.attempt))
        self.change = job.recovery or self.change

    def drop(self) -> None:
        """What there is in memory is of no use."""
        self.litter = False
        self._job.command(AGENT, pb.Command(drop_staging=pb.DropStaging()))

    def had(self) -> bool:
        """Every rank has taken a step: it is not needed any more. Returns whether it was until now."""
        if self.kept is None:
            return False
        self._job.parallel.forget_staged()
        self.change = None
        self.drop()
        return True

    # -- another controller -----------------------------------------------------------------------

    def inherit(self, told: pb.StagingKept | None) -> bool:
        """A controller before this one had ranks of a new layout started, and has told so. Returns whether it was about
        those that there are."""
        job = self._job
        if told is None or not job.parallel.text:
            return False
        try:
            words = StagedLayout.parse(told.content)
        except ProtocolError as e:
            job.notice(NoticeKind.NOT_REPLANNED, str(e))
            return False
        if words.attempt != job.attempt:
            return False
        if any(record.committed > words.kept.version + 1 for record in job.in_order):
            return False  # all have had it; a node has not heard that it is to be given back
        facts = words.staying.facts
        if not job.parallel.facts:
            job.parallel.hear_facts(facts.text())
        job.parallel.begin_with(words)
        self.job_is = words.staying
        self.litter = not words.kept.checkpoint
        return True

    def await_confirmation(self, now: float) -> None:
        """All ranks are in their loop, and this controller has just come: what is kept is needed until each of them has
        taken a step."""
        if self.kept is not None:
            self.change = self._job.open_recovery(now, cause=FailureKind.CONTROLLER)
            self.change.resume_at(self.kept.version)
