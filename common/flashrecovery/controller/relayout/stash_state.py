"""The state that ranks of another layout begin with: written into the nodes' memory, and kept there until they have it.

Each shard is written by one of those who have it, or by two on different nodes (:mod:`.stash_writers`). From the start
of the new ranks on, agents know where it is, for a controller that comes in between
(:mod:`flashrecovery.controller.relayout.stash_writers`).
"""

from __future__ import annotations

from dataclasses import replace

from flashrecovery.controller.relayout.stash_writers import SavedState, SavedStateCodec, assigned
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.errors import JobFailedError, ProtocolError
from flashrecovery.kinds import FailureKind, NoticeKind, Ordered
from flashrecovery.plan.strategy.relayout import StayingFacts, layout_text
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb


class StagedState:
    """Of one job.

    Attributes:
        kept: what is there, and may be needed once more.
        litter: there is state in memory that nobody will need.
        job_is: what the job was before its layout changed, and has to stay.
        before: the layout that it changes from.
        change: the recovery in which it changes.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.kept: SavedState | None = None
        self.litter = False
        self.job_is: StayingFacts | None = None
        self.before: Strategy | None = None
        self.change: HistoryEntry | None = None
        self._writing: SavedState | None = None  # is being written
        self._rounds = 0
        self._said: dict[str, tuple[str, int]] = {}  # digests of what writers have alike, and whose they are

    # -- is written -------------------------------------------------------------------------------

    def write(self, version: int, now: float) -> None:
        """Have each shard written by one of those who have it. Raises JobFailedError if nobody has one."""
        job = self._job
        orders = self._assigned(version)
        self._said, self.litter = {}, True
        self._rounds += 1
        directory = f"{job.generation}-{self._rounds}-{version}"
        self._writing = SavedState.of(version, directory, orders, job.ranks, job.nodes)
        deadline = now + 1.5 * job.config.timeouts.restore_s
        for rank, items in orders.items():
            stash = pb.Stash(version=version, directory=directory, items=items)
            job.command(rank, pb.Command(stash=stash), deadline, Ordered.STASH)

    def _assigned(self, version: int) -> dict[int, list[pb.StashItem]]:
        job = self._job
        domains = {node.name: node.domain for node in job.nodes.values()}
        return assigned(job.ranks, job.membership.departed, version, domains)

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
        """Somebody has died: what was being written is of no use."""
        if self._writing is not None:
            self._writing = None
            self._job.outbox.keep(lambda what, _: what is not Ordered.STASH)

    def wrote(self, rank: int, reply: pb.Reply) -> str:
        """A rank has written its part. Returns in words what it has otherwise than another one, though one state of it
        will be everybody's; "" if nothing."""
        if self._writing is not None:
            self._writing = replace(self._writing, written=self._writing.written + reply.stashed_bytes)
        for what, digest in sorted(reply.sent_digests.items()):
            first, whose = self._said.setdefault(what, (digest, rank))
            if first != digest:
                return f"{what} is not what it is on rank {whose}, and only one of them can be everybody's"
        return ""

    def written(self) -> SavedState | None:
        """What has been written, once all is."""
        if self._job.outbox.waits_for(Ordered.STASH):
            return None
        kept, self._writing = self._writing, None
        return kept

    # -- is kept ----------------------------------------------------------------------------------

    def now(self) -> SavedState | None:
        """What can be read now; None if that is not everything."""
        return None if self.kept is None else self.kept.now(self._job.nodes)

    def keep(self, kept: SavedState, facts: StayingFacts, before: Strategy) -> None:
        """Ranks of another layout are about to be started with this."""
        self.kept = kept
        self.job_is, self.before = self.job_is or facts, self.before or before
        self.change = self._job.recovery or self.change

    def tell(self) -> None:
        """Have the agents keep it in mind for the next controller."""
        job = self._job
        assert self.kept is not None and self.job_is is not None and self.before is not None
        words = SavedStateCodec(self.kept, self.job_is, layout_text(self.before), job.attempt)
        told = pb.StashKept(generation=job.generation, content=words.text())
        job.command(AGENT, pb.Command(stash_kept=told))

    def drop(self) -> None:
        """What there is in memory is of no use."""
        self.litter = False
        self._job.command(AGENT, pb.Command(drop_stash=pb.DropStash()))

    def had(self) -> bool:
        """Every rank has taken a step: it is not needed any more. Returns whether it was until now."""
        if self.kept is None:
            return False
        self.kept, self.change, self.before = None, None, None
        self.drop()
        return True

    # -- another controller -----------------------------------------------------------------------

    def inherit(self, told: pb.StashKept | None) -> bool:
        """A controller before this one had ranks of a new layout started, and has told so. Returns whether it was about
        those that there are."""
        job = self._job
        if told is None or not job.parallel.text:
            return False
        try:
            words = SavedStateCodec.parse(told.content)
        except ProtocolError as e:
            job.notice(NoticeKind.NOT_REPLANNED, str(e))
            return False
        if words.attempt != job.attempt:
            return False
        if any(record.committed > words.kept.version + 1 for record in job.in_order):
            return False  # all have had it; a node has not heard that it is to be given back
        facts = words.staying.facts
        job.parallel.facts = job.parallel.facts or facts.text()
        self.kept, self.job_is = words.kept, words.staying
        self.before = words.layout_before
        self.litter = not words.kept.checkpoint
        return True

    def await_confirmation(self, now: float) -> None:
        """All ranks are in their loop, and this controller has just come: what is kept is needed until each of them has
        taken a step."""
        if self.kept is not None:
            self._job.recovery = self.change = HistoryEntry(self._job.generation, now, 0.0)
            self._job.recovery.cause, self._job.recovery.resume_step = FailureKind.CONTROLLER, self.kept.version
