"""Which ranks come and which have left, among which state is sharded, and in which parallel layout: what a job of fixed
size and layout never changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flashrecovery.controller.state.rank_record import JoiningProcess
from flashrecovery.proto import flashrecovery_pb2 as pb

if TYPE_CHECKING:
    from flashrecovery.controller.state.staged_layout import StagedLayout


@dataclass(frozen=True)
class ResizeRequest:
    """A commanded change of size.

    Attributes:
        replicas: the number of replicas afterwards.
        step: the first step with that number; -1: the next one.
        ranks: those that leave; none: the last ones.
        tries: pauses for it so far.
    """

    replicas: int
    step: int
    ranks: tuple[int, ...] = ()
    tries: int = 0

    def pause(self, *, copies: bool) -> pb.Pause:
        """For the ranks. ``copies``: those of the version are waited for."""
        return pb.Pause(step=max(self.step, 0), copies=copies)


@dataclass
class CommandedSize:
    """What is commanded of the number of replicas, and not done yet.

    Attributes:
        wanted: for this ranks pause.
        put_aside: this waits until no node is drained any more.
    """

    wanted: ResizeRequest | None = None
    put_aside: ResizeRequest | None = None

    @property
    def open(self) -> bool:
        """Something is."""
        return self.wanted is not None or self.put_aside is not None

    def order_size(self, request: ResizeRequest) -> None:
        """This is to be done, and nothing that was commanded before."""
        self.wanted, self.put_aside = request, None

    def order_size_first(self, request: ResizeRequest | None) -> None:
        """This is to be done before what is put aside; None: nothing is."""
        self.wanted = request

    def order_size_later(self, request: ResizeRequest) -> None:
        """This waits for what is to be done now."""
        self.put_aside = request

    def withdraw_orders(self) -> None:
        """Nothing is to be done."""
        self.wanted = self.put_aside = None

    def put_order_aside(self) -> bool:
        """What is to be done waits. Returns whether something was."""
        if self.wanted is None:
            return False
        self.put_aside, self.wanted = replace(self.wanted, tries=0), None
        return True

    def take_order_up(self) -> ResizeRequest | None:
        """What was put aside waits no longer; None if nothing was, or something is to be done before."""
        if self.wanted is not None:
            return None
        request, self.put_aside = self.put_aside, None
        return request


@dataclass
class Membership:
    """The membership of one job, besides its ranks.

    Attributes:
        size: what is commanded of it.
        joining: processes that are built up beside training, by the rank that they are to fill.
        sharded_among: the ranks among which sharded state is sharded, as all of them have it or can have it at once.
        unsure: a controller before this one may have been in the middle of a change of these ranks.
        removed: those of these ranks that have left the job, and what they needed: size in bytes by shard.
        awaited: ranks that had left, and were taken back since the version was decided on: they do not leave again.
        told_size: the number of ranks of the job in the last announcement, by this controller or an earlier one.
    """

    size: CommandedSize = field(default_factory=CommandedSize)
    joining: dict[int, JoiningProcess] = field(default_factory=dict)
    sharded_among: tuple[int, ...] = ()
    unsure: bool = False
    removed: dict[int, dict[str, int]] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    told_size: int = 0
    _parts: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())

    def has_part(self, rank: int) -> bool:
        """Whether this rank is one of those among which state is sharded. In constant time, as every rank of a large
        job is asked for in each recovery."""
        if self._parts[0] is not self.sharded_among:
            self._parts = self.sharded_among, frozenset(self.sharded_among)
        return rank in self._parts[1]

    def resharded(self, among: tuple[int, ...]) -> None:
        """State is sharded among these ranks, and each of them belongs to the job."""
        self.sharded_among, self.removed = among, {}

    def size_told(self, size: int) -> None:
        """All know that the job consists of so many ranks."""
        self.told_size = size

    def doubt_members(self, *, unsure: bool) -> None:
        """Whether a controller before this one may have been in the middle of a change."""
        self.unsure = unsure


@dataclass
class ChangedLayout:
    """The changed layout of one job.

    Attributes:
        text: the layout that it has changed to, as tp=1,pp=2,dp=1; "": that of the launch.
        world: ranks of that layout; 0: those of the launch.
        changes: how often it has changed.
        staged: what the processes of that layout begin with, until every rank of it has taken a step.
        facts: what the job's workers say of what a layout would shard, as JSON; "": it cannot change.
    """

    text: str = ""
    world: int = 0
    changes: int = 0
    staged: StagedLayout | None = None
    facts: str = ""

    def change_to(self, text: str, world: int) -> None:
        """The job consists of so many ranks in this layout now."""
        self.text, self.world = text, world
        self.changes += 1

    def skip_changes(self, count: int) -> None:
        """So many numbers have been used by starts of which this controller knows nothing else."""
        self.changes += count

    def found_changes(self, changes: int) -> None:
        """It has changed so often under controllers before this one."""
        self.changes = changes

    def hear_facts(self, facts: str) -> None:
        """A worker has said it; "": it knows of none."""
        self.facts = facts or self.facts

    def begin_with(self, staged: StagedLayout) -> None:
        """The processes of the layout begin with this."""
        self.staged = staged

    def forget_staged(self) -> None:
        """Every rank of it has taken a step."""
        self.staged = None
