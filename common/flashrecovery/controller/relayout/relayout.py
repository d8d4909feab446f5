"""A running job changes its parallelism: to which one, when, and how its state gets there.

There are two reasons: a command, for which all ranks pause before a step, and ranks that cannot be replaced.

1. All live ranks are stopped, and the version to resume from is decided as in any recovery, including the shards that
   the lost ranks needed.
2. One of the ranks that have a shard writes it into its node's memory (:class:`StagedFiles`). All processes end.
3. The processes of the new layout start from the script's first line, on the live nodes
   (:mod:`flashrecovery.controller.membership.relayout_slots`), and read what they need from that memory.

The staged state is kept until all ranks have taken a step. If a rank dies before that, the job starts from it again, as
long as a node that has it is alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from flashrecovery import events as ev
from flashrecovery.controller.elastic.resizing import Resizing
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.membership.relayout_slots import RelayoutSlots, facts_now
from flashrecovery.controller.parallelism import FIXED, Parallelism
from flashrecovery.controller.relayout.next_step import NextLayout, RelayoutFacts, relayout_step
from flashrecovery.controller.relayout.staging_state import StagedState
from flashrecovery.controller.state.custody import kept_for
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.controller.state.relayout_outcome import (
    CannotChange,
    KeepLayout,
    RelayoutStep,
    StartLayout,
    WriteState,
)
from flashrecovery.controller.state.restore_plan import Decision, NothingLeft, RestoreRound
from flashrecovery.controller.state.saved_state import SavedState
from flashrecovery.errors import ConfigError, JobFailedError, UnsupportedError
from flashrecovery.kinds import FailureKind, NoticeKind
from flashrecovery.plan.strategy import step_cost
from flashrecovery.plan.strategy.layout_places import NodeSlot, numbered, stride
from flashrecovery.plan.strategy.relayout import (
    LayoutFacts,
    StayingFacts,
    best,
    layout_text,
    parse_layout,
    why_another_job,
    why_not,
    with_most_replicas,
)
from flashrecovery.plan.strategy.strategy import Strategy, StrategyChoice
from flashrecovery.plan.transitions import RelayoutState, State
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_TRIES = 3
"""Number of layouts that are tried if the script cannot start in them."""
_STATE_IS_LOST = "no rank has the state that lost ranks needed"


class ParallelismChange(Parallelism):
    """Changes of the parallel layout of one job."""

    def __init__(self, job: JobState, placement: RankPlacement, resizing: Resizing) -> None:
        self._job = job
        self._resizing = resizing
        self._placement = placement
        self._rooms = RelayoutSlots(job)
        self._next: NextLayout | None = None
        self._memory = StagedState(job)
        self._least = job.config.world_size  # ranks of a layout
        if job.config.parallelism is not None:
            self._least = job.config.parallelism.min
            step_cost.get_ready()
        self._tried: list[str] = []  # layouts in which the script could not begin

    # -- which layout -----------------------------------------------------------------------------

    def ask(self, text: str, step: int) -> tuple[str, str, tuple[str, ...]]:
        """Have the layout changed from ``step`` on (-1: the next one). ``text``: the sizes; "": the best ones. Returns
        (why not, "" if it will be done; the layout; why this one)."""
        job = self._job
        facts = self._facts()
        if isinstance(facts, str):
            return facts, "", ()
        if job.state is not State.RUNNING or job.recovery is not None:
            return f"the job is {job.state.value}, or has just recovered; ask again when it trains", "", ()
        if self._resizing.wanted:
            return "the job is about to change its number of replicas; ask again when it has", "", ()
        newest = max(record.committed for record in job.in_order)
        if 0 <= step <= newest:
            return f"--at-step {step}: step {newest} has begun already; a later one is allowed", "", ()
        steps = job.in_order[0].steps
        if steps is not None and 0 <= steps <= step:  # -1: its script does not say how many
            return f"--at-step {step}: the job takes {steps} steps; an earlier one is allowed", "", ()
        try:
            strategy, why = self._chosen(text, facts)
        except (ConfigError, UnsupportedError) as e:
            return str(e), "", ()
        if strategy == facts.now:
            return f"the job has the layout {layout_text(strategy)} already", "", ()
        self._next = NextLayout(strategy, why, step)
        for record in job.in_order:
            job.command(record.rank, pb.Command(pause=self._pause(self._next)))
        return "", layout_text(strategy), why

    def _chosen(self, text: str, facts: LayoutFacts) -> tuple[Strategy, tuple[str, ...]]:
        """Raises ConfigError or UnsupportedError."""
        rooms = self._rooms.open_all()
        if text:
            found = parse_layout(text, facts, sum(rooms))
            if found.ranks < self._least:
                raise ConfigError(
                    f"--layout {text}: {found.ranks} ranks; {self._least} (parallelism.min) or more are allowed"
                )
            return found, ("commanded",)
        choice = best(facts, rooms, self._least, self._job.step_s)
        return choice.best.strategy, choice.lines

    def _facts(self) -> LayoutFacts | str:
        """What parallelism there is to choose for; or why it cannot change."""
        if self._job.config.parallelism is None:
            return FIXED
        if not self._job.parallel.facts:
            return "the job's workers have not come to their first step yet"
        return facts_now(self._job)

    def lose(self, lost: Collection[int]) -> bool:
        """These ranks have no process, and get none: choose a layout for those that are left. Returns whether there is
        one; they have left the job then.

        Raises JobFailedError, which says why no layout fits.
        """
        facts = self._facts()
        if isinstance(facts, str) or self._job.state is State.STARTING:
            return False
        rooms = self._rooms.narrow(lost)
        left = sum(rooms)
        wanted = self._next
        if wanted is not None and not why_not(facts, wanted.strategy, left) and wanted.strategy != facts.now:
            chosen = replace(wanted, step=-1, lost=True)
        else:
            try:
                choice = best(facts, rooms, self._least, self._job.step_s)
            except UnsupportedError as e:
                raise JobFailedError(
                    f"{ranks_text(sorted(lost))} cannot be replaced, and no parallel layout fits the {left} ranks that "
                    f"are left: {e}"
                ) from e
            chosen = NextLayout(choice.best.strategy, choice.lines, lost=True)
        self._next = chosen
        for rank in lost:
            record = self._job.remove_member(rank)
            self._job.tell_to_leave(rank, record.home)
        self._job.stop_awaiting_node_if_housed()
        return True

    # -- when -------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """The layout is to change, and has not yet."""
        return self._next is not None

    @property
    def state(self) -> RelayoutState:
        """Where a change is."""
        if self._memory.writing:
            return RelayoutState.WRITING
        if self._next is not None:
            return RelayoutState.FORCED if self._next.lost else RelayoutState.ORDERED
        return RelayoutState.STABLE if self._memory.kept is None else RelayoutState.STARTED

    @property
    def has_to(self) -> bool:
        """The layout is to change because ranks cannot be replaced."""
        return self._next is not None and self._next.lost

    def may_lose(self, lost: Collection[int]) -> None:
        """These ranks have no process, and perhaps get none: their places are none for a layout that is commanded."""
        if self._next is not None:
            self._rooms.narrow(lost)

    def pause(self) -> pb.Pause | None:
        """The pending command, for ranks that continue after a recovery."""
        return None if self._next is None else self._pause(self._next)

    @staticmethod
    def _pause(wanted: NextLayout) -> pb.Pause:
        return pb.Pause(step=max(wanted.step, 0), copies=False)

    def why_paused(self, version: int) -> str:
        """For the ranks that are stopped; "" if the layout does not change."""
        if self._next is None:
            return ""
        return f"the job goes on in the layout {layout_text(self._next.strategy)} from step {version} on"

    # -- the state --------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """A rank has died: what was being written cannot be used."""
        self._memory.interrupted()

    def next_step(self, found: Decision | NothingLeft) -> RelayoutStep:
        """All that live are stopped, and this is what they could go on from: what becomes of the change."""
        memory, job = self._memory, self._job
        facts = RelayoutFacts(
            found=found,
            wanted=self._next,
            kept=memory.kept,
            readable=memory.now(),
            lost_with="" if memory.kept is None else memory.kept.lost_with(job.nodes),
            retries=job.tries.retries,
            unknown="" if self._next is None else self._unknown(),
            checkpoint=self._checkpoint,
            rooms=0 if self._next is None else sum(self._rooms.rooms()),
            elastic=self._elastic,
        )
        return relayout_step(facts)

    def why_not_written(self, step: RelayoutStep) -> str:
        """Why the state cannot be written, if that is the next step: what no rank has; "" if it can."""
        return self._memory.why_not_written(step.version) if isinstance(step, WriteState) else ""

    def carry_out(self, step: RelayoutStep, now: float) -> None:
        """Do that."""
        wanted = self._next
        if self._memory.litter and self._memory.kept is None:  # it has not been written to its end
            self._memory.drop()
        match step:
            case CannotChange():
                self._job.fail(step.why)
            case StartLayout():
                if step.once_more and wanted is None and self._elastic:
                    self._rooms.narrow(())  # replicas may have left since the layout has changed
                self._start(wanted or self._same(), step.kept, now)
            case WriteState():
                self._memory.write(step.version, now)
            case KeepLayout():
                if step.given_up and wanted is not None:
                    self._give_up(wanted, step.given_up)

    @property
    def _elastic(self) -> bool:
        return self._job.config.elastic is not None

    @property
    def _checkpoint(self) -> tuple[int, str] | None:
        """The newest one that any layout can read: those of an elastic job are of one."""
        return None if self._elastic else self._job.checkpoint

    def _unknown(self) -> str:
        """Why it is unknown whether the remaining ranks have the whole state; "" if they are known to. A restarted
        controller has not heard what the ranks needed that died before it started."""
        facts = self._facts()
        if isinstance(facts, str) or facts.whole_everywhere:
            return ""  # every rank has all of it
        records = self._job.ranks.values()
        unknown = [
            rank for rank, needs in self._job.membership.removed.items() if not needs and not kept_for(rank, records)
        ]
        if self._elastic and not facts.sharded:  # those with its model rank have the same
            model_ranks = {record.model_rank for record in records if record.inventory.needs}
            unknown = [rank for rank in unknown if self._job.shape.model_rank(rank) not in model_ranks]
        if not unknown:
            return ""
        return (
            f"this controller was started again and does not know what {ranks_text(sorted(unknown))} had, and no rank "
            "keeps copies of it"
        )

    def _same(self) -> NextLayout:
        facts = facts_now(self._job)
        now = facts.now  # with the replicas that are left, which may be no number that is allowed
        same = with_most_replicas(facts, now, now.ranks)
        return NextLayout(same, ("the layout stays; not all of its ranks have had the state yet",))

    @property
    def writing(self) -> bool:
        """State is being written."""
        return self._memory.writing

    def wrote(self, rank: int, reply: pb.Reply) -> str:
        """See :meth:`.staging_state.StagedState.wrote`."""
        return self._memory.wrote(rank, reply)

    def could_not(self, rank: int, why: str, now: float, *, differs: bool) -> bool:
        """A rank could not write. ``differs``: it has another state than others where one will be everybody's; which
        rank has the right one is not known, nor whether a checkpoint has it. Returns whether the job can go on in its
        layout; a command is dropped then. If the layout has to change, the recovery starts over with the state that the
        memory has of the change before, or goes back to a checkpoint that any layout reads, or ends."""
        wanted = self._next
        self.interrupted()
        if wanted is None:
            return True
        if not wanted.lost:
            self._give_up(wanted, f"rank {rank}: {why}")
            return True
        before = self._memory.now()
        if before is not None and not differs:  # of the layout in which not all have taken a step yet
            self._start(wanted, replace(before, written=0), now)
            return False
        if differs or self._checkpoint is None:
            self._job.fail(f"the layout does not change to {layout_text(wanted.strategy)}: rank {rank}: {why}")
            return False
        self._memory.drop()
        version, path = self._checkpoint
        self._start(wanted, SavedState(version, pb.StagingPlace(), path), now, because=f"rank {rank}: {why}")
        return False

    def _give_up(self, wanted: NextLayout, why: str) -> None:
        """A command is not carried out."""
        self._next = None
        text = f"the layout does not change to {layout_text(wanted.strategy)}: {why}"
        self._job.notice(NoticeKind.NOT_REPLANNED, text)

    def go_on(self, now: float) -> None:
        """If all is written, start the new layout."""
        kept, wanted = self._memory.written(), self._next
        if kept is not None and wanted is not None:
            self._start(wanted, kept, now)

    # -- the new layout ---------------------------------------------------------------------------

    def _start(self, wanted: NextLayout, kept: SavedState, now: float, because: str = _STATE_IS_LOST) -> None:
        """``because``: why it begins with a checkpoint, if it does."""
        job = self._job
        facts = facts_now(job)
        before = facts.now
        # All may be lost that were on their way; and a rank that is filled again has told another controller nothing
        # yet.
        told = next((record for record in job.in_order if record.steps is not None), RankRecord(0))
        staying = StayingFacts(facts, told.batches, told.steps)
        found = self._as_there_is_room(wanted, facts)
        if found is None:
            return
        wanted = found
        self._memory.keep(kept, staying, before)
        self._next = None
        self._resizing.before_layout()
        size = wanted.strategy.ranks
        slots = self._rooms.places(wanted.strategy)
        for record in job.in_order:
            # Filling a rank ends its previous process. Where no rank is filled under this number, that ends by itself.
            if record.home and (record.rank >= size or slots[record.rank].node != record.home):
                job.tell_to_leave(record.rank, record.home)
        records = [
            RankRecord(rank, home=slot.node, local_rank=slot.local_rank, committed=kept.version)
            for rank, slot in enumerate(slots)
        ]
        job.lay_out(layout_text(wanted.strategy), records)
        self._resizing.laid_out()
        if self._elastic and job.checkpoints:  # of the layout before
            job.checkpoints.clear()
            job.command(AGENT, job.saved_as(None))
        self._settle_nodes(slots)
        job.to(State.STARTING, now)
        job.next_generation()
        job.outbox.clear()
        job.new_start()
        job.stop_awaiting_node()
        job.emit(
            ev.JobReplanned(
                generation=job.generation,
                step=kept.version,
                before=layout_text(before),
                layout=job.parallel.text,
                ranks=size,
                bytes=kept.written,
                why=list(wanted.why),
            )
        )
        job.tell_staged()
        if kept.checkpoint:
            job.emit(
                ev.FallbackStarted(
                    generation=job.generation, version=kept.version, path=kept.checkpoint, reason=because
                )
            )
        for record in job.in_order:
            self._placement.fill(record, now, detached=False)

    # -- another controller -----------------------------------------------------------------------

    def inherit(self, told: pb.StagingKept | None) -> bool:
        """See :meth:`.staging_state.StagedState.inherit`."""
        return self._memory.inherit(told)

    def await_confirmation(self, now: float) -> None:
        """See :meth:`.staging_state.StagedState.await_confirmation`."""
        self._memory.await_confirmation(now)

    def begin_again(self, now: float) -> bool:
        """No rank of the layout has been let into its loop: it starts over with the state that was kept for it, if this
        controller has heard of that. Returns whether that has been seen to, which may be that the job has failed."""
        job, staged = self._job, self._job.parallel.staged
        if staged is None:
            return False
        kept, staying = staged.kept, staged.staying
        again = kept.now(job.nodes)
        if again is None and self._checkpoint is not None:
            again = SavedState(self._checkpoint[0], pb.StagingPlace(), self._checkpoint[1])
        if again is None:
            job.fail(f"{kept.lost_with(job.nodes)}; and there is no checkpoint")
            return True
        job.parallel.hear_facts(staying.facts.text())
        job.open_recovery(now, cause=FailureKind.CONTROLLER)
        self._rooms.narrow(())
        strategy = parse_layout(job.parallel.text, staying.facts, job.parallel.world)
        self._start(NextLayout(strategy, (job.last_failure,)), replace(again, written=0), now)
        return True

    def _as_there_is_room(self, wanted: NextLayout, facts: LayoutFacts) -> NextLayout | None:
        """``wanted``, or the best other one where a node has gone meanwhile that was to have some of its ranks. None:
        there is none, and the job has failed."""
        rooms = self._rooms.rooms()
        if wanted.strategy.ranks <= sum(rooms):
            return wanted
        choice = self._best_or_fail(facts, rooms)
        return None if choice is None else replace(wanted, strategy=choice.best.strategy, why=choice.lines)

    def _best_or_fail(self, facts: LayoutFacts, rooms: Sequence[int]) -> StrategyChoice | None:
        """The layout to go on with after a further loss. None: there is none, and the job has failed."""
        job = self._job
        try:
            return best(facts, rooms, self._least, job.step_s)
        except UnsupportedError as e:
            job.fail(f"{job.last_failure}, and no parallel layout fits what is left: {e}")
            return None

    def _settle_nodes(self, slots: Sequence[NodeSlot]) -> None:
        """These are the places of the ranks."""
        job, homes = self._job, {slot.node for slot in slots}
        for node in job.nodes.values():
            if node.alive:
                node.use_for(homes)
        for name in sorted(homes):
            self._placement.say_if_excluded(job.nodes[name])
        if len(homes) > 1:
            nodes = [slot.node for slot in slots]
            domains = numbered([job.nodes[name].domain for name in nodes], nodes)
        else:
            domains = ()
        job.place_copies(stride(domains) if domains else 1, domains)

    def on_node_lost(self, lost: Collection[int], now: float) -> bool:
        """A node is lost with these ranks, and perhaps with what ranks of another layout have to read. If they are on
        their way to their first step, the recovery starts over with the state that there is. Returns whether that has
        been seen to, which may be that it has failed."""
        job, kept = self._job, self._memory.kept
        if kept is None or job.config.parallelism is None or job.state is not State.STARTING:
            return False
        again = kept.now(job.nodes)
        if again is not None and not lost:
            return False
        if again is None and self._checkpoint is not None:
            again = SavedState(self._checkpoint[0], pb.StagingPlace(), self._checkpoint[1])
        if again is None:
            job.fail(f"{kept.lost_with(job.nodes)}; and there is no checkpoint")
            return True
        facts = LayoutFacts.parse(job.parallel.facts)
        wanted = NextLayout(
            parse_layout(job.parallel.text, facts, job.parallel.world), (f"{job.last_failure}, before its first step",)
        )
        if lost:
            choice = self._best_or_fail(facts, self._rooms.narrow(lost))
            if choice is None:
                return True
            wanted = NextLayout(choice.best.strategy, choice.lines)
        for rank in lost:
            job.remove_member(rank)
        self._start(wanted, replace(again, written=0), now)
        return True

    def begin_otherwise(self, why: str, now: float) -> bool:
        """The script cannot begin in the layout that the job has changed to: it begins in the one before, if there are
        ranks enough, or the next best. Returns whether it does."""
        job, staged = self._job, self._job.parallel.staged
        if staged is None or job.config.parallelism is None:
            return False
        kept, before, staying = staged.kept, staged.layout_before, staged.staying
        rooms = self._rooms.rooms()
        self._tried.append(job.parallel.text)
        try:
            ranked = best(staying.facts, rooms, self._least, job.step_s).ranked
        except UnsupportedError:
            ranked = ()
        options = [] if why_not(staying.facts, before, sum(rooms)) else [before]  # replicas may have been lost of it
        options += [estimate.strategy for estimate in ranked]
        found = next((one for one in options if layout_text(one) not in self._tried), None)
        if found is None or len(self._tried) >= _TRIES:
            return False
        text = f"the script cannot begin in the layout {job.parallel.text}, and begins in {layout_text(found)}: {why}"
        job.notice(NoticeKind.NOT_REPLANNED, text)
        self._start(NextLayout(found, (f"the script cannot begin in {' or in '.join(self._tried)}",)), kept, now)
        return True

    def another_job(self, message: pb.Joined) -> str:
        """Why what a rank's script has made is not this job in the layout that it has changed to; "" if it
        is."""
        if self._memory.job_is is None or not message.facts:
            return ""
        now = StayingFacts(LayoutFacts.parse(message.facts), message.batches, message.steps)
        return why_another_job(self._memory.job_is, now, self._job.parallel.text)

    @property
    def change(self) -> HistoryEntry | None:
        """The recovery in which the layout changes, also if it had to start over."""
        return self._memory.change

    def restored_from(self) -> Decision | None:
        """All ranks of a new layout have come to their first step: what they go on from. None: there is no new
        layout."""
        kept = self._memory.now() or self._memory.kept
        if kept is None:
            return None
        staging = None if kept.checkpoint else kept.place
        return Decision(RestoreRound.from_checkpoint(kept.version, self._job.ranks, staging=staging), kept.checkpoint)

    def confirmed(self) -> None:
        """Every rank has taken a step: what the memory has is not needed any more."""
        if self._memory.had():
            self._tried = []
