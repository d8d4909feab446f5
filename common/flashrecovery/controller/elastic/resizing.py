"""An elastic job changes its size: which ranks leave and join, at which step, and how this is reported.

A replica leaves as a whole (:mod:`flashrecovery.plan.elastic.replicas`). A rank that leaves is removed from the job's
records, so nothing waits for it any more. The other ranks keep their numbers in the job, and get new numbers in the
process groups (:class:`~flashrecovery.proto.flashrecovery_pb2.Regroup`). A rank whose process is lost leaves at once;
the live ranks of its replica leave once all are stopped, and exit by themselves. There are two reasons: ranks that
cannot be replaced (:mod:`flashrecovery.plan.elastic.resize`), and a command. For a command all ranks pause before a
step, and a recovery without a victim follows. Growing works the same way (:mod:`.growing`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashrecovery import events as ev
from flashrecovery.controller.elastic.growing import Growing
from flashrecovery.controller.elastic.join import Joining, PauseBarrier, commanded_pause
from flashrecovery.controller.elastic.released_processes import ReleasedProcesses
from flashrecovery.controller.membership.joining_processes import give_up_all
from flashrecovery.controller.state.custody import choose_leaving, of_their_own, sharded
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.loss_policy import allowed_sizes, leaving_without, left_of_replicas, never_replaced
from flashrecovery.controller.state.membership import ResizeRequest
from flashrecovery.controller.state.rank_record import BUILT_UP, Place, RankRecord
from flashrecovery.controller.state.restore_plan import Decision, decide
from flashrecovery.errors import JobFailedError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.transitions import SizeState, State
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

PATIENCE_S = 2.0
"""So long ranks of a job whose state is sharded are waited for that have not paused before a change."""
_TRIES = 3
"""Pauses before the same step, until those that are to leave can."""


@dataclass
class SinceStart:
    """Which ranks have left since all processes were started, and what of it can be undone. New with each start.

    Attributes:
        left: records of the ranks that have left.
        lost: those of them whose processes were lost since the size was last reported.
        carried_out: the command that made processes leave, while these processes still exist.
        returned: how often processes were taken back in one recovery.
        told_step: the reported step of a change of size that has not taken place yet.
    """

    left: dict[int, RankRecord] = field(default_factory=dict)
    lost: dict[int, RankRecord] = field(default_factory=dict)
    carried_out: ResizeRequest | None = None
    returned: int = 0
    told_step: int | None = None

    def note_lost(self, record: RankRecord) -> None:
        """This rank has left because its process was lost."""
        self.lost[record.rank] = record

    def note_left(self, record: RankRecord) -> None:
        """This rank has left."""
        self.left[record.rank] = record

    def has_carried_out(self, request: ResizeRequest | None) -> None:
        """Processes are to leave because of this command; None: there are none of any command any more."""
        self.carried_out = request

    def count_return(self) -> None:
        """Processes are taken back."""
        self.returned += 1

    def forget_returns(self) -> None:
        """Every rank has taken a step since then."""
        self.returned = 0

    def forget_lost(self) -> None:
        """The job goes on without them."""
        self.lost = {}

    def size_told(self, step: int) -> None:
        """The size was reported to change at this step."""
        self.told_step = step

    def take_told_step(self) -> int | None:
        """The step for which a change was reported that takes place now; None: there is none."""
        step, self.told_step = self.told_step, None
        return step


@dataclass
class NotTold:
    """What has changed since the size was last reported. New with each report.

    Attributes:
        left, came: ranks.
        other_processes: some of the same ranks have new processes.
    """

    left: list[int] = field(default_factory=list)
    came: list[int] = field(default_factory=list)
    other_processes: bool = False

    def note_left(self, rank: int) -> None:
        """It has left."""
        self.left.append(rank)

    def note_came(self, ranks: Collection[int]) -> None:
        """They have come."""
        self.came.extend(ranks)

    def not_left(self, ranks: Collection[int]) -> None:
        """They have been taken back before it was told that they had left."""
        self.left = [rank for rank in self.left if rank not in ranks]

    def note_other_processes(self) -> None:
        """Ranks are filled by other processes."""
        self.other_processes = True

    def take_other_processes(self) -> bool:
        """Whether ranks are filled by other processes, since the last call."""
        others, self.other_processes = self.other_processes, False
        return others


class Resizing:
    """Changes of the size of one job."""

    def __init__(self, job: JobState, growing: Growing, coming: Joining) -> None:
        self._job = job
        self._coming = coming
        self._growing = growing
        self._order = job.membership.size
        self._waiting = PauseBarrier()  # for the ranks that are to leave
        self._since = SinceStart()
        self._not_told = NotTold()
        self.last_resort = ReleasedProcesses(job)

    # -- a loss -----------------------------------------------------------------------------------

    def lose(self, lost: Collection[int]) -> bool:
        """These ranks have no process, and get none. Returns whether the job goes on without them."""
        ranks = leaving_without(self._job, lost)
        for rank in ranks:
            self._since.note_lost(self._remove_member(rank, grace_s=0.0))
        if ranks:
            for rank in left_of_replicas(self._job):
                if self._job.ranks[rank].place in BUILT_UP:  # on its way for a replica that leaves
                    self._since.note_lost(self._remove_member(rank, grace_s=0.0))
        return bool(ranks)

    def dissolve_replicas(self) -> None:
        """All ranks are stopped: those of whose replica others have left leave, too."""
        for rank in left_of_replicas(self._job):
            self._remove_member(rank, grace_s=self._job.config.timeouts.fence_s)

    def take_back_needed(self) -> list[int]:
        """The lost ranks that must rejoin the job; called when all ranks are stopped.

        Some ranks are about to leave because a rank of their replica was lost and had no node. If another rank has died
        since, they may be the only ones that have its part. Then the lost ranks belong to the job again, and the job
        waits for a node. (With a checkpoint there are none: the job goes back to the checkpoint.)"""
        job = self._job
        useless = set(left_of_replicas(job))
        replicas = {job.shape.replica(rank) for rank in useless}
        lost = [rank for rank in self._since.lost if rank not in job.ranks and job.shape.replica(rank) in replicas]
        if job.checkpoint is not None or never_replaced(job) or not lost or not of_their_own(job.in_order):
            return []
        staying = {rank: record for rank, record in job.ranks.items() if rank not in useless}
        gone = {**job.membership.removed, **{rank: job.ranks[rank].inventory.needs for rank in useless}}
        if any(self._since.lost[r].irreplaceable for r in lost) or self._in_memory(staying, gone):
            return []
        if not self._in_memory(job.ranks, job.membership.removed):
            return []
        for rank in lost:
            record = self._since.lost.pop(rank)
            job.enrol(record)  # counted where it was when it left, and without a process after that
            job.vacate(rank)
            record.forget_home()
            record.inventory.forget_pages()
        self._not_told.not_left(lost)
        job.membership.awaited.update(lost)
        return lost

    def newest_of_all(self) -> int | None:
        """The newest version that a rank has committed, those included that have left since all were started. None if
        the job cannot be as it was then: others have come, or which ranks have left is not known here."""
        job, left = self._job, [r for rank, r in self._since.left.items() if rank not in self._job.ranks]
        everybody = [*job.in_order, *left]
        if {record.rank for record in everybody} != set(range(job.world_size)):
            return None
        return max(record.committed for record in everybody)

    def take_back_all(self) -> None:
        """All processes are about to be started again, as those are that have left since they were started before."""
        job = self._job
        if self._since.carried_out is not None:
            text = f"the job is not resized to {self._since.carried_out.replicas} replicas: all ranks are started again"
            job.notice(NoticeKind.NOT_RESIZED, text)
        taken = {(record.home, record.local_rank) for record in job.in_order}
        for rank, record in self._since.left.items():
            if rank in job.ranks:
                continue
            job.enrol(record)
            record.replace_again()
            node, place = job.nodes.get(record.home), (record.home, record.local_rank)
            if node is None or not node.alive or node.leaving or place in taken:
                record.forget_home()
            taken.add(place)
        job.settle_layout()
        job.membership.size_told(len(job.ranks))
        self._not_told = NotTold()

    def _in_memory(self, records: Mapping[int, RankRecord], removed: Mapping[int, Mapping[str, int]]) -> bool:
        """Whether these ranks could go on from what they hold."""
        try:
            decide(records, None, self._job.elastic_layout(), removed)
        except JobFailedError:
            return False
        return True

    def without_replacement(self, victims: Sequence[int]) -> list[int]:
        """Those that have no node, or are not to be replaced."""
        never, useless = never_replaced(self._job), left_of_replicas(self._job)
        records = [record for rank in victims if (record := self._job.ranks.get(rank)) is not None]
        return [r.rank for r in records if never or r.irreplaceable or not r.home or r.rank in useless]

    def end_process(self, rank: int) -> None:
        """Whatever is left of the rank's process ends; it is not replaced now."""
        record = self._job.ranks[rank]
        self._job.tell_to_leave(rank, record.home)
        self._job.vacate(rank)
        record.lose_home()

    # -- a command --------------------------------------------------------------------------------

    def ask(self, replicas: int, step: int, now: float) -> str:
        """Change the job to this many replicas from ``step`` on (-1: the next step). Returns why not; "" if it will be
        done."""
        job, elastic = self._job, self._job.config.elastic
        if elastic is None:
            return "the job is not elastic: launch it with --elastic MIN:MAX"
        if job.state is not State.RUNNING or job.recovery is not None:
            return f"the job is {job.state.value}, or has just recovered; ask again when it trains"
        size, sizes = job.replicas, allowed_sizes(job)
        if job.membership.joining and replicas == size:
            give_up_all(job, "by command")
            self._growing.commanded(replicas)
            return ""
        if job.membership.joining:
            who = ranks_text(list(job.membership.joining))
            return (
                f"{who} {'is' if len(job.membership.joining) == 1 else 'are'} on the way in; --to {size} calls that off"
            )
        if replicas < sizes.least or replicas == size:
            allowed = f"{sizes.least} to {sizes.most}, but for {size}"
            of = f"elastic = {elastic.text}" + (f"; in the layout {job.parallel.text}" if job.parallel.text else "")
            return f"--to {replicas}: the job has {size} replicas ({of}); {allowed}, is allowed"
        possible = sizes.allowed
        if possible is not None and replicas not in possible and replicas <= sizes.most:
            fitting = [str(n) for n in sorted(possible) if sizes.least <= n <= sizes.most and n != size]
            allowed = f"{' or '.join(fitting)} is allowed" if fitting else "no other number is allowed"
            return f"--to {replicas}: the job's global batch, or its configuration, does not allow that; {allowed}"
        newest = max(record.committed for record in job.in_order)
        if 0 <= step <= newest:
            return f"--at-step {step}: step {newest} has begun already; a later one is allowed"
        steps = job.in_order[0].steps
        if steps is not None and 0 <= steps <= step:  # -1: the script's end is the end of the steps
            return f"--at-step {step}: the job takes {steps} steps; an earlier one is allowed"
        if replicas > size:
            why_not = self._growing.ask(elastic, replicas, step, now)
            if not why_not:
                self._order.withdraw_orders()
                self._growing.commanded(replicas)
            return why_not
        self._growing.commanded(replicas)
        request, wanted = ResizeRequest(replicas, step), self._order.wanted
        if wanted is not None and wanted.ranks:  # ranks of a node that is to leave, which cannot wait
            self._order.order_size_later(request)
            return ""
        self._order.order_size(request)
        self._tell_to_pause()
        return ""

    def dismiss(self, ranks: Collection[int]) -> None:
        """These ranks leave before the next step."""
        replicas = {self._job.shape.replica(rank) for rank in ranks}
        self._order.order_size_first(ResizeRequest(self._job.replicas - len(replicas), -1, tuple(ranks)))
        self._tell_to_pause()

    def put_aside(self) -> None:
        """A node is to leave within its time limit: a resize commanded for a later step waits for that."""
        if self._order.put_order_aside():
            self._tell_to_pause()

    def take_up(self) -> None:
        """No node is to leave any more: what was put aside is to be done, if there are still more replicas."""
        request = self._order.take_order_up()
        if request is not None and request.replicas < self._job.replicas:
            self._order.order_size_first(request)
            self._tell_to_pause()

    def _tell_to_pause(self) -> None:
        pause = commanded_pause(self._job)
        for record in self._job.in_order:
            self._job.command(record.rank, pb.Command(pause=pause))

    @property
    def state(self) -> SizeState:
        """Where a commanded change of the size is."""
        if self.last_resort:
            return SizeState.LEAVING
        if self._order.wanted is not None:
            return SizeState.ORDERED
        return SizeState.STABLE if self._order.put_aside is None else SizeState.PUT_ASIDE

    @property
    def under_way(self) -> bool:
        """Ranks are about to leave: before the next step, or the one after it."""
        wanted = self._order.wanted
        return wanted is not None and wanted.step <= self._job.committed + 1

    def paused(self, rank: int, now: float) -> bool:
        """A rank has come to the step at which the job is to change. Returns whether it changes now. Where state is
        sharded, and ranks leave, the recovery waits for the other ranks: they pause once copies of their state
        exist."""
        if self._order.wanted is None or not of_their_own(self._job.in_order):
            return True
        self._waiting.come(rank, now)
        return self._waiting.complete(self._job.ranks.keys())

    def overdue(self, now: float) -> bool:
        """Whether the other ranks have been waited for long enough: one that had begun the step before it heard of the
        command does not pause."""
        if self._order.wanted is not None and self._waiting.complete(self._job.ranks.keys()):
            return self._job.state is State.RUNNING  # the last of them have paused before all had said that they go on
        waited = self._waiting.overdue(now, PATIENCE_S)
        return waited and self._job.state is State.RUNNING and self._job.recovery is None

    def resumed(self) -> None:
        """No rank is paused any more."""
        self._waiting.dissolve()

    def paused_since(self, now: float) -> float:
        """When the first rank has paused."""
        since = (self._waiting.since, self._coming.paused_since)
        return min((at for at in since if at is not None), default=now)

    def why_paused(self, version: int) -> str:
        """For the ranks that are stopped: some have paused at ``version``. A command that was given to a
        controller before this one is not known any more."""
        size = "as many" if self._order.wanted is None else self._order.wanted.replicas
        coming = self._coming.why_paused(version)
        if coming:
            return coming
        return f"the job goes on with {size} replicas from step {version} on"

    def pause(self) -> pb.Pause | None:
        """The pending command, for ranks that continue after a recovery."""
        return self._coming.pause() if self._order.wanted is None else commanded_pause(self._job)

    def leave_at(self, version: int, *, on_disk: bool = False) -> bool:
        """Remove the ranks that leave at ``version`` (``on_disk``: of a checkpoint); called when all ranks are stopped.

        Ranks leave because of a command, or because there are more replicas than are allowed. What only they have must
        also exist elsewhere. If it does not, for a command, all ranks pause again before the same step, with their
        copies made. Returns whether any rank leaves.

        Raises JobFailedError: there are more ranks than are allowed, and none of them can leave.
        """
        if self._job.config.elastic is None:
            return False
        wish, size = self._order.wanted, self._job.replicas
        allowed = allowed_sizes(self._job)
        most = allowed.largest(size) or size
        ranks: list[int] | None = None
        if wish is not None and version >= wish.step:
            named = [rank for rank in wish.ranks if rank in self._job.ranks]
            replicas = {self._job.shape.replica(rank) for rank in named}
            wanted = min(most, size - len(replicas) if wish.ranks else wish.replicas)
            ranks = self._choose(allowed.largest(wanted) or most, version, named, on_disk=on_disk)
            wish = replace(wish, tries=wish.tries + 1)
            self._order.order_size_first(wish)
            if ranks is None and wish.tries >= _TRIES:
                self._job.notice(
                    NoticeKind.NOT_RESIZED,
                    f"the job is not resized to {wish.replicas} replicas: of what {size - wish.replicas} of them "
                    "have alone, the others keep no copies; fewer at a time can leave",
                )
            if ranks is not None or wish.tries >= _TRIES:
                self._since.has_carried_out(wish if ranks is not None else None)
                self._order.order_size_first(None)
        if ranks is None:
            ranks = self._choose(most, version, on_disk=on_disk)
        if ranks is None:
            raise JobFailedError(
                f"{size} replicas are left, {most} are allowed, and what the others have alone is nowhere else at "
                f"version {version}"
            )
        for rank in ranks:
            self._step_aside(rank)
        return bool(ranks)

    def _step_aside(self, rank: int) -> None:
        """It leaves, and its process runs until the other ranks have what they need."""
        grace_s = self._job.config.timeouts.fence_s
        if self._job.ranks[rank].place is Place.STOPPED:
            self.last_resort.keep(self._remove_member(rank, grace_s=None), grace_s)
        else:
            self._remove_member(rank, grace_s=grace_s)

    def _choose(self, size: int, version: int, named: Sequence[int] = (), *, on_disk: bool = False) -> list[int] | None:
        """The ranks that leave so that ``size`` replicas remain, replicas of ``named`` ranks first; None if this many
        cannot leave."""
        job = self._job
        count = job.replicas - size
        if count <= 0:
            return []
        return choose_leaving(
            job.ranks, job.membership.removed, count, version, named, shape=job.shape, on_disk=on_disk
        )

    def come_at(self, decision: Decision) -> Decision:
        """The same for ranks that come: returns what is decided with those that do so now."""
        before = set(self._job.ranks)
        found, came = self._coming.come_in(decision)
        self._not_told.note_came([rank for rank in came if rank not in before])
        if came and before.issuperset(came):
            self._not_told.note_other_processes()
        return found

    def take_back(self) -> list[int]:
        """Something has failed before the new ones could go on: the processes whose ranks they were to take over have
        them again. Returns these ranks."""
        back = self._coming.take_back()
        if back:
            self._not_told.note_other_processes()
        return back

    def all_have_what_they_need(self) -> None:
        """The state that was decided on is everywhere."""
        self.last_resort.let_go()
        for record in self._coming.relieved.let_go():
            self.last_resort.keep(record)
        self._since.has_carried_out(None)
        found = self._job.round.restoring
        if found is None or found.reshape is not None or self._job.round.checkpoint:
            self.last_resort.let_go()  # what they have is of another sharding, or another version

    def begins_again(self) -> None:
        """All ranks are started again, perhaps in another parallel layout: forget which ranks left or were taken back
        before that."""
        self.last_resort.let_go()
        self._since = SinceStart()
        self._job.membership.awaited.clear()

    def all_have_gone_on(self) -> None:
        """Every rank has taken a step since then, so all have copies of each other's state."""
        self.last_resort.let_go()
        self._since.forget_returns()

    @property
    def can_take_back(self) -> bool:
        """Released processes still run, and have not been taken back too often in this recovery."""
        return bool(self.last_resort) and self._since.returned < _TRIES

    def take_back_last(self) -> bool:
        """The continuing ranks lack some state: if released processes still run, they belong to
        the job again. Returns whether there were some."""
        if not self.can_take_back:
            return False
        self._since.count_return()
        before = set(self._job.ranks)
        back = self.last_resort.take_back()
        again = [rank for rank in back if rank not in before]
        self._not_told.not_left(again)
        if again:
            self._not_told.note_came(again)
            again_wanted = self._order.wanted or self._since.carried_out
            self._order.order_size_first(None if again_wanted is None else replace(again_wanted, tries=0))
        if len(again) < len(back):
            self._coming.has_come_to_nothing()
            self._not_told.note_other_processes()
        return bool(back)

    def given_up_ended(self, message: pb.Failure | pb.Exited, node: str) -> bool:
        """A process has ended. Returns whether the job had already given it up, so that nothing waits for it."""
        if self._coming.relieved.on_ended(message, node):
            return True
        return self.last_resort.on_ended(message.rank, message.pid, node)

    # -- both -------------------------------------------------------------------------------------

    def tell(self, version: int) -> bool:
        """The ranks that there are now go on at ``version``. Returns whether they differ from the last announcement, or
        filled by others."""
        self._since.forget_lost()
        self._job.membership.awaited.clear()
        size = len(self._job.ranks)
        came = sorted(rank for rank in self._not_told.came if rank in self._job.ranks)
        left = sorted(set(self._not_told.left).difference(came))
        if size != self._job.membership.told_size or came or left:
            self._job.emit(
                ev.JobResized(
                    generation=self._job.generation,
                    step=version,
                    before=self._job.membership.told_size // self._job.shape.each,
                    replicas=self._job.replicas,
                    ranks=list(self._job.members),
                    left=left,
                    came=came,
                )
            )
            self._job.membership.size_told(size)
            self._since.size_told(version)
            self._not_told = NotTold()
            self._say_what_is_on_one_node()
            return True
        return self._not_told.take_other_processes()

    def goes_on_at(self, version: int) -> None:
        """All ranks have the state of this version. The change may have been reported for another version: then a
        checkpoint was damaged since, or another rank has died."""
        told = self._since.take_told_step()
        if told not in (None, version):
            replicas, members = self._job.replicas, list(self._job.members)
            event = ev.JobResized(
                generation=self._job.generation, step=version, before=replicas, replicas=replicas, ranks=members
            )
            self._job.emit(event)

    @property
    def wanted(self) -> bool:
        """Whether a commanded number of replicas has not been reached yet."""
        return self._order.open or bool(self._job.membership.joining)

    def before_layout(self) -> None:
        """The job changes its parallel layout now: no rank joins or leaves the previous one."""
        give_up_all(self._job, "the job changes its parallel layout")
        self.last_resort.let_go()
        for wish in (self._order.wanted, self._order.put_aside):
            if wish is not None and not wish.ranks:
                text = f"the job is not resized to {wish.replicas} replicas: it changes its parallel layout"
                self._job.notice(NoticeKind.NOT_RESIZED, text)
        self._order.withdraw_orders()
        self._waiting.dissolve()
        self._growing.laid_out()

    def laid_out(self) -> None:
        """The job consists of the ranks of another parallel layout: what is known of ranks is of the one before."""
        self.begins_again()
        self._not_told = NotTold()

    def _say_what_is_on_one_node(self) -> None:
        """Each rank's part of sharded state has copies on one other rank. Both may be on one node: which rank keeps
        what follows from the ranks' numbers, and a node may have more of them than at the launch."""
        job = self._job
        homes = {record.rank: record.home for record in job.in_order}
        if len({*homes.values()}) == 1 or not sharded(job.in_order):
            return
        keepers = job.keepers_of_copies()
        kept = {rank: keeper for rank, keeper in keepers.items() if keeper != rank}  # the others have no copies
        alone = [rank for rank, keeper in kept.items() if homes[rank] and homes[rank] == homes.get(keeper)]
        if alone:
            nodes = ", ".join(dict.fromkeys(homes[rank] for rank in alone))
            text = (
                f"{ranks_text(alone)} and their copies are on one node each ({nodes}): if that is lost, the job ends, "
                "or goes back to a checkpoint"
            )
            job.notice(NoticeKind.REDUNDANCY, text)

    def members(self) -> Sequence[int]:
        """The ranks of an elastic job, for forming process groups; () for other jobs, which do not need them."""
        return () if self._job.config.elastic is None else self._job.members

    def _remove_member(self, rank: int, *, grace_s: float | None) -> RankRecord:
        """``grace_s`` None: its process is not told to leave yet."""
        record = self._job.remove_member(rank)
        self._not_told.note_left(rank)
        self._since.note_left(record)
        if grace_s is not None:
            self._job.tell_to_leave(rank, record.home, grace_s)
        self._job.stop_awaiting_node_if_housed()
        return record
