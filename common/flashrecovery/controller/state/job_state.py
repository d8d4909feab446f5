"""What the controller knows of one job, and the few things that every part of the machine does with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.state.crashes import Crashes
from flashrecovery.controller.state.custody import sharded
from flashrecovery.controller.state.fault_drills import Asked
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.iteration_numbers import Counting
from flashrecovery.controller.state.membership import ChangedLayout, Membership
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.outbox import Action, Blame, Outbox
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.controller.state.recovery_round import RecoveryRound, RecoveryTries, StartRound
from flashrecovery.controller.state.restore_plan import Decision
from flashrecovery.kinds import NoticeKind, Ordered
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.membership.failure_domains import labelled_gpus
from flashrecovery.plan.membership.node_failures import SLOW, WEIGHTS
from flashrecovery.plan.membership.placement import ring_of
from flashrecovery.plan.ownership import turned_out_own
from flashrecovery.plan.transitions import State, check_transition
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.snapshot.files import LAST_CHECKPOINT

AGENT = -1
"""Rank number of commands to the agent itself."""


@dataclass(frozen=True)
class EarlierLaunch:
    """What is in the run directory.

    Attributes:
        step: to which an earlier launch in it had come; 0: there was none.
        left_last: checkpoints, as version and directory, that it has left when it ended.
    """

    step: int = 0
    left_last: tuple[tuple[int, str], ...] = ()


@dataclass
class Ending:
    """How a job ends before its last step.

    Attributes:
        asked_by: the signal that ends the job while the script still has time to end by itself; "": none.
        until: the end of that time, CLOCK_MONOTONIC seconds.
        saving: it has failed, and what its ranks hold is being kept (:mod:`flashrecovery.controller.last_save`).
        void: it has failed because its ranks do not agree.
    """

    asked_by: str = ""
    until: float = 0.0
    saving: bool = False
    void: bool = False

    def await_script(self, reason: str, until: float) -> None:
        """The script has been told, and may end by itself."""
        self.asked_by, self.until = reason, until

    def has_failed(self, *, void: bool) -> None:
        """The job has failed. ``void``: because its ranks do not agree."""
        self.void = void

    def keep_state(self, *, saving: bool) -> None:
        """Whether what the ranks hold is being kept from now on."""
        self.saving = saving


@dataclass
class JobState:
    """State of one job. All times are CLOCK_MONOTONIC seconds.

    Attributes:
        ranks: the ranks of the job, numbered as it was launched; in an elastic job some may have left.
        in_order: the same, in order.
        generation: grows with each recovery and each new start; everything of an older one is void.
        places: how many ranks are in each place; their sum is the world size.
        given_up: nodes that may not come back, and why.
        stride: distance in ranks to the neighbour that keeps copies.
        domains: at the launch, see :func:`~flashrecovery.plan.membership.placement.shared_domains`.
        checkpoint: the newest complete one, its version and directory.
        recovery: the one under way; over when every rank has taken a step again.
        last_failure: as text, for commands and for the end.
        launch: distinguishes this job from another one on the same nodes; set by the controller that launched it.
        launched: this controller has started the ranks, or has taken them over.
        restarts: starts from the script's first line, not counting the first one.
        start_version: the version at which the job began here.
        recovered_before: a previous controller has begun a recovery, so the job may have trained for long.
        started_at: when the current start began.
        unprotected: the time limit for the first protected step has passed, and no rank has reached one.
        start: state of this start; replaced at the next one.
        homeless_since: when the first rank lost its node without a replacement; None: all ranks have a node.
        found_since: when the first agent of a running job connected; None if this controller launched the job.
        tries: attempts of the recovery under way; replaced at its end.
        round: state of this generation; replaced at the next one.
        crashes: of all ranks together, for jobs in which lost ranks are not replaced.
        stuck_at: how often the job has hung at the newest step where it hung.
        membership: which ranks join, which have left, and among which state is sharded.
        parallel: the parallel layout that the job has changed to.
        attempts: the newest start has at least this number (restarts and changes of the layout), which is not used
            again.
        where: the run directory.
        earlier: what an earlier launch has left in it.
        ending: how the job ends, if it is about to.
        not_registered: what reportedly changes from step to step without being registered; "": nothing.
        counting: where steps are a framework's calls, to which iterations they belong.
        tokens_per_step: of all ranks together, as reported by the script; 0: not reported.
        asked: requested faults whose ranks have not failed yet.
    """

    config: RunConfig
    state: State = State.STARTING
    generation: int = 0
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    places: Counter[Place] = field(default_factory=Counter)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    stride: int = 1
    domains: tuple[int, ...] = ()
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    recovery: HistoryEntry | None = None
    history: list[HistoryEntry] = field(default_factory=list)
    failure_reason: str = ""
    last_failure: str = ""
    outbox: Outbox = field(default_factory=Outbox)

    launch: str = ""
    launched: bool = False
    restarts: int = 0
    start_version: int = 0
    recovered_before: bool = False
    started_at: float = 0.0
    unprotected: bool = False
    start: StartRound = field(default_factory=StartRound)
    homeless_since: float | None = None
    found_since: float | None = None

    tries: RecoveryTries = field(default_factory=RecoveryTries)
    round: RecoveryRound = field(default_factory=RecoveryRound)
    stuck_at: dict[int, int] = field(default_factory=dict)
    tokens_per_step: int = 0
    counting: Counting = field(default_factory=Counting)
    membership: Membership = field(default_factory=Membership)
    parallel: ChangedLayout = field(default_factory=ChangedLayout)
    attempts: int = 0
    asked: Asked = field(default_factory=Asked)
    where: str = ""
    earlier: EarlierLaunch = EarlierLaunch()
    ending: Ending = field(default_factory=Ending)
    not_registered: str = ""

    in_order: list[RankRecord] = field(default_factory=list)
    crashes: Crashes = field(default_factory=Crashes)
    _blamed: set[tuple[str, bool, int, int]] = field(default_factory=set)
    _homes: list[str] = field(default_factory=list)  # of the ranks in order, as they were for ...
    _ranks_of: dict[str, list[int]] = field(default_factory=dict)  # ... this, by home

    def __post_init__(self) -> None:
        self.ranks = {r: RankRecord(r) for r in range(self.config.world_size)}
        self.places.update(record.place for record in self.ranks.values())
        self.in_order = list(self.ranks.values())
        self.membership.resharded(tuple(self.ranks))
        self.membership.size_told(len(self.ranks))

    def take_actions(self) -> list[Action]:
        """What is to be done because of the events so far, in order."""
        return self.outbox.take()

    def move(self, rank: int, place: Place) -> None:
        """The process of this rank is there now."""
        record = self.ranks[rank]
        self.places[record.place] -= 1
        self.places[place] += 1
        record.move_to(place)

    def vacate(self, rank: int) -> None:
        """The process of this rank is gone."""
        self.move(rank, Place.EMPTY)
        self.ranks[rank].forget_process()

    def all_in(self, *places: Place) -> bool:
        """Whether every rank is in one of these places."""
        return sum(self.places[p] for p in places) == len(self.ranks)

    @property
    def checkpoint(self) -> tuple[int, str] | None:
        """Version and directory of the newest complete checkpoint that is not known to be damaged."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def step_s(self) -> float:
        """What a step takes, on the slowest rank; 0: not known."""
        return max((record.health.step_s for record in self.ranks.values()), default=0.0)

    @property
    def committed(self) -> int:
        """The newest version that every rank has committed, as far as heartbeats say; -1: not known."""
        return min((record.committed for record in self.ranks.values()), default=-1)  # all may have left

    def found_running(self, now: float) -> None:
        """The job runs already, as an agent that has come says."""
        self.found_since = self.started_at = now

    def found_earlier(self, earlier: EarlierLaunch) -> None:
        """The run directory has been read, because the job is to be resumed."""
        self.earlier = earlier

    def launch_at(self, now: float) -> None:
        """All nodes are there: the ranks are about to be started."""
        self.launched, self.started_at = True, now

    def take_charge(self) -> None:
        """The job that was found is this controller's from now on."""
        self.launched = True

    def hear_launch(self, launch: str) -> None:
        """A node has named the launch that its processes are of."""
        self.launch = launch

    def hear_generation(self, generation: int) -> None:
        """A node has been in this one: what follows is of a newer one."""
        self.generation = max(self.generation, generation)

    def hear_restarts(self, restarts: int) -> None:
        """The ranks were started again at least so often, under controllers before this one."""
        self.restarts = max(self.restarts, restarts)

    def hear_attempts(self, attempts: int) -> None:
        """Starts of at least so many numbers have been, of which none is used again."""
        self.attempts = attempts

    def found_in_layout(self, attempt: int) -> None:
        """The processes found are of this start, in a layout that the job has changed to."""
        self.restarts = 0
        self.parallel.found_changes(attempt)

    def hear_recovered(self, *, before: bool) -> None:
        """Whether a controller before this one had begun a recovery."""
        self.recovered_before = before

    def hear_tokens(self, per_step: int) -> None:
        """What the script says of its steps; 0: nothing."""
        self.tokens_per_step = per_step or self.tokens_per_step

    def hear_unregistered(self, text: str) -> None:
        """What changes from step to step without being registered; the first one that is found is kept."""
        self.not_registered = self.not_registered or text

    def place_copies(self, stride: int, domains: tuple[int, ...]) -> None:
        """Where ranks keep copies for each other, by the nodes that they are on."""
        self.stride, self.domains = stride, domains

    def remember_failure(self, text: str) -> None:
        """The newest one."""
        self.last_failure = text

    def give_up_checkpoint(self, path: str) -> bool:
        """It is damaged: the one before it is the newest from now on, and is tried as often. Returns whether it was
        known as a good one."""
        rest = [known for known in self.checkpoints if known[1] != path]
        if len(rest) == len(self.checkpoints):
            return False
        self.checkpoints = rest
        self.tries.count_from_zero()
        return True

    def count_stuck(self, step: int) -> int:
        """The job has hung at this step. Returns how often it has."""
        self.stuck_at = {step: self.stuck_at.get(step, 0) + 1}
        return self.stuck_at[step]

    def await_node(self, now: float) -> None:
        """A rank has lost its node, and no other one has room for it."""
        self.homeless_since = now

    def stop_awaiting_node(self) -> None:
        """No rank waits for a node any more."""
        self.homeless_since = None

    def stop_awaiting_node_if_housed(self) -> None:
        """Ranks have left, or are others: perhaps all of them have a node."""
        if self.homeless_since is not None and all(record.home for record in self.in_order):
            self.homeless_since = None

    def run_unprotected(self) -> None:
        """The script runs on without recovery."""
        self.unprotected = True

    def run_protected(self) -> None:
        """Every rank has come to a protected step."""
        self.unprotected = False

    def count_restart(self) -> None:
        """All processes start from the script's first line once more."""
        self.restarts += 1
        self.begin_attempt()

    def new_start(self) -> None:
        """Nothing of the start before counts for the one that begins."""
        self.start = StartRound()

    def new_tries(self) -> None:
        """A recovery is over: the next one counts its own attempts."""
        self.tries = RecoveryTries()

    def begin_from(self, decision: Decision) -> None:
        """All ranks are at their first step, and the job goes on from a version that was kept."""
        self.round.restore_from(decision)
        self.start_version = decision.round.version

    def open_recovery(self, failed_at: float, detect_s: float = 0.0, cause: str = "") -> HistoryEntry:
        """A recovery begins."""
        self.recovery = HistoryEntry(self.generation, failed_at, detect_s, cause=cause)
        return self.recovery

    def continue_recovery(self, before: HistoryEntry | None) -> None:
        """All start in another layout: the recovery goes on in which it was changed, if none is under way."""
        self.recovery = self.recovery or before

    def abandon_recovery(self) -> None:
        """All ranks start again, so there is nothing to recover."""
        self.recovery = None
        self.new_tries()

    def close_recovery(self, recovery: HistoryEntry) -> None:
        """It is over."""
        self.history.append(recovery)
        self.recovery = None

    def next_generation(self) -> None:
        """Whatever is of an older one is void from now on."""
        self.generation += 1
        self.round = RecoveryRound()

    def to(self, state: State, now: float | None = None) -> None:
        check_transition(self.state, state)
        if self.recovery is not None and now is not None:
            phase = self.recovery.enter(state, now)
            if phase is not None:
                self.emit(ev.RecoveryPhase(generation=self.generation, name=phase[0], seconds=phase[1]))
        self.state = state

    def notice(self, kind: NoticeKind, text: str, *, rank: int = -1) -> None:
        """Something that an operator may want to know."""
        self.emit(ev.Notice(generation=self.generation, rank=rank, kind=kind, text=text))

    def blame(self, node: str, kind: str, detail: str) -> None:
        """Have it remembered that a node has failed, or is slow: once until the end of a recovery, or the next start,
        however many of its ranks have failed and how often."""
        key = (node, kind == SLOW, len(self.history), self.restarts)
        if node and WEIGHTS.get(kind) and key not in self._blamed:
            self._blamed.add(key)
            self.outbox.blame(Blame(node, str(kind), self.generation, detail))

    def fail(self, reason: str, *, void: bool = False) -> None:
        """Nothing is left to try: say why, stop everything, keep the evidence, and what the ranks hold. ``void``: they
        do not agree, so that nothing may go on from what they hold."""
        self.failure_reason = reason
        self.ending.has_failed(void=void)
        self.outbox.clear()
        self.round.stop_waiting()
        self.ending.keep_state(saving=not void and self._has_something_to_save())
        self.to(State.FAILED)
        self.emit(ev.JobFailed(generation=self.generation, reason=reason, step=self.committed, step_s=self.step_s))
        if not self.ending.saving:
            self.shut_down()

    def shut_down(self, version: int = 0, *, whole: bool = False, saved: str = "") -> None:
        """Have all agents end their processes. ``version``: the version that is kept, completely (``whole``) or in
        part; 0: unknown. ``saved``: the checkpoint that has it."""
        self.ending.keep_state(saving=False)
        void = self.ending.void
        shutdown = pb.Shutdown(reason=self.failure_reason, version=version, whole=whole, void=void, saved=saved)
        self.command(AGENT, pb.Command(shutdown=shutdown))

    @property
    def changes(self) -> bool:
        """Its size or its layout may change: what a rank's memory has is of one of them."""
        return self.config.elastic is not None or self.config.parallelism is not None

    @property
    def keeps_last(self) -> bool:
        """What its ranks hold when it ends is kept by the nodes' snapshot processes."""
        snapshots = self.config.snapshots
        return not self.changes and snapshots.keep != "never" and snapshots.persist

    @property
    def last_directory(self) -> str:
        """Where the checkpoint goes that is written when it ends, unless its ranks write theirs elsewhere; "": none
        is."""
        if self.ranks and self.in_order[0].checkpoints:
            return str(self.config.checkpoint.dir or self.where)
        alone = self.changes and not self.config.several_nodes  # else each node has its own run directory
        return str(Path(self.where) / LAST_CHECKPOINT) if alone else ""

    def _has_something_to_save(self) -> bool:
        """Whether ranks hold a state that a later launch could go on from, and it can be kept."""
        if self.unprotected or not self.launched or self.places[Place.RELEASED] or self.places[Place.FINISHED]:
            return False
        in_loop = sum(
            self.places[p] for p in (Place.RUNNING, Place.STOPPING, Place.STOPPED, Place.RECOVERING, Place.DONE)
        )
        if not in_loop or not any(record.committed > 0 for record in self.in_order):
            return False
        if self.changes and not self.last_directory:
            text = "nothing is kept of what the ranks hold: a job of several nodes that may change its size or its "
            self.notice(NoticeKind.CHECKPOINT_FAILED, f"{text}layout needs --checkpoint-dir for that")
        return self.keeps_last or bool(self.last_directory)

    def keepers_of_copies(self, records: Sequence[RankRecord] = ()) -> dict[int, int]:
        """By rank, the one that holds its neighbour copies, if the job consists of these ``records`` (default: all). It
        may have left."""
        shape = self.shape
        ranks = shape.in_order(record.rank for record in records or self.in_order)
        if len(ranks) < 2:
            return {rank: rank for rank in ranks}
        if self.parallel.text and self.config.elastic is None:  # nodes need not have equally many ranks there
            return {rank: (rank + self.stride) % self.world_size for rank in ranks}
        alone = self.config.parallelism is not None and len(shape.by_replica(ranks)) == 1  # they keep each other's then
        if shape.each > 1 and sharded(self.in_order) and not alone:
            if len(shape.whole(ranks)) * shape.each < len(ranks):  # some of a replica are leaving
                keepers = self.keepers_of_parts()
                return {rank: keepers.get(rank, rank) for rank in ranks}
            ring = shape.ring(ranks, *self._where_copies_go)
        else:
            ring = ring_of(ranks, *self._where_copies_go)
        return {rank: ranks[place] for rank, place in zip(ranks, ring, strict=True)}

    def keepers_of_parts(self) -> dict[int, int]:
        """The rank that keeps the copies of each one's part of what is sharded among the ranks of the layout; it may
        have left."""
        layout = self.shape.in_order(self.membership.sharded_among)
        ring = self.shape.ring(layout, *self._where_copies_go)
        return {rank: layout[keeper] for rank, keeper in zip(layout, ring, strict=True)}

    @property
    def _where_copies_go(self) -> tuple[int, int, Sequence[int], Sequence[int]]:
        # Nodes need not have equally many ranks in a layout that was changed to, and domains are those of ranks there.
        if self.parallel.text:
            return self.stride, 1, self.domains, ()
        per_node = self.config.nproc_per_node
        return self.stride, per_node, self.domains, labelled_gpus(self.config.gpu_domain, per_node)

    @property
    def whole(self) -> bool:
        """No rank has left since the launch, or the last change of the parallel layout, and none has come beyond it."""
        return len(self.ranks) == self.world_size and self.in_order[-1].rank < self.world_size

    @property
    def world_size(self) -> int:
        """Ranks of the launch, or of the last change of the parallel layout."""
        return self.parallel.world or self.config.world_size

    def lay_out(self, layout: str, records: Iterable[RankRecord]) -> None:
        """The job consists of these ranks, which have no processes yet, in another parallel layout."""
        self.places.clear()
        self.ranks.clear()
        for record in records:
            self.places[record.place] += 1
            self.ranks[record.rank] = record
        self.parallel.change_to(layout, len(self.ranks))
        self.begin_attempt()
        self.membership.size_told(len(self.ranks))
        self.membership.resharded(tuple(self.ranks))
        self._members_changed()

    def tell_staged(self) -> None:
        """Have the agents keep in mind what all processes of a changed layout begin with, for the next controller."""
        if self.parallel.staged is not None:
            told = replace(self.parallel.staged, attempt=self.attempt)
            kept = pb.StagingKept(generation=self.generation, content=told.text())
            self.command(AGENT, pb.Command(staging_kept=kept))

    def begin_attempt(self) -> None:
        """All processes are restarted, and the restart has been counted: use a number that no start has had."""
        if self.attempt <= self.attempts:
            self.parallel.skip_changes(self.attempts + 1 - self.attempt)
        self.attempts = self.attempt

    @property
    def attempt(self) -> int:
        """The number of the start that its processes are of."""
        return self.restarts + self.parallel.changes

    @property
    def shape(self) -> ReplicaShape:
        """Which ranks make up its replicas, as they have said; as long as they have not, each is one."""
        said = next((record.shape for record in self.in_order if record.shape is not None), None)
        return said or ReplicaShape(self.world_size)

    @property
    def replicas(self) -> int:
        """How many there are."""
        return len(self.shape.by_replica(self.ranks))

    def remove_member(self, rank: int) -> RankRecord:
        """The rank belongs to the job no longer. Returns what was known of it."""
        record = self.ranks.pop(rank)
        known = not (record.inventory.sharded and record.inventory.as_launched)
        self.membership.removed[rank] = dict(record.inventory.needs) if known else {}
        self.places[record.place] -= 1
        self._members_changed()
        self.outbox.keep(lambda _, other: other != rank)
        return record

    def elastic_layout(self) -> tuple[int, ...]:
        """The layout of an elastic job, in the order of its ranks; () for other jobs, which do not need it. (A
        controller that is started in the middle of a job knows its ranks before it knows what they make up.)"""
        return () if self.config.elastic is None else tuple(self.shape.in_order(self.membership.sharded_among))

    def begins_as_sharded(self, rank: int) -> bool:
        """Whether state is sharded as a process of this rank divides it when it begins: as in the launch's size. Of one
        beyond the launch it never is, because it begins with another rank's part."""
        return rank < self.world_size and self.membership.sharded_among == tuple(range(self.world_size))

    def settle_layout(self) -> None:
        """All ranks of the job have what they need of a state that is sharded among them alone."""
        self.membership.resharded(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks, as they are counted in process groups of all of them."""
        return tuple(self.shape.in_order(self.ranks))

    def name_own(self) -> list[str]:
        """Shards that have turned out to be each rank's own, as ranks have said, are so for all of them: also for one
        that has not come to hear of it, and for one that has just been filled again. Returns the names that they
        had."""
        own = turned_out_own(name for record in self.ranks.values() for name in record.inventory.needs)
        for record in self.ranks.values() if own else ():
            record.inventory.rename_own(own)
        return sorted(own)

    def sharded_among(self, layout: tuple[int, ...]) -> None:
        """State is sharded among these ranks, as those that have it have said to a controller that did not know."""
        self.membership.resharded(layout)
        gone = (rank for rank in layout if rank not in self.ranks)
        self.membership.removed.update((rank, {}) for rank in gone)  # what is known may be of another one
        for record in self.in_order:
            known = record.place is not Place.JOINED
            record.inventory.sharding_told(as_launched=not known, has_part=record.rank in layout)

    def enrol(self, record: RankRecord) -> None:
        """The rank belongs to the job from now on, in its place by number."""
        self.places[record.place] += 1
        self.membership.removed.pop(record.rank, None)
        others = [*self.ranks.values(), record]
        self.ranks.clear()
        self.ranks.update((one.rank, one) for one in sorted(others, key=lambda one: one.rank))
        self._members_changed()

    def _members_changed(self) -> None:
        self.in_order = list(self.ranks.values())
        self._homes = []
        self.round.confirm(0)

    def tell_to_leave(self, rank: int, home: str, grace_s: float = 0.0) -> None:
        """Have the process of a rank, if its node lives, end by itself within ``grace_s`` seconds, or end it."""
        node = self.nodes.get(home)
        if node is not None and node.alive:
            self.outbox.send(home, pb.Command(generation=self.generation, rank=rank, leave=pb.Leave(grace_s=grace_s)))

    def homes(self) -> list[str]:
        """The node of each process that fills a rank, or is to."""
        records = [*self.ranks.values(), *(joining.record for joining in self.membership.joining.values())]
        return [record.home for record in records if record.home]

    def saved(self) -> pb.Command:
        """What the agents are to remember: the newest checkpoint, or (version -1) that there is none."""
        return self.saved_as(self.checkpoint)

    def saved_as(self, checkpoint: tuple[int, str] | None) -> pb.Command:
        """The same, of this one."""
        version, path = checkpoint or (-1, "")
        saved = pb.CheckpointSaved(version=version, path=path)
        return pb.Command(generation=self.generation, rank=AGENT, saved=saved)

    def command(self, rank: int, command: pb.Command) -> None:
        """Send a command to a rank, or (AGENT) to all agents, without waiting for an answer."""
        command.generation, command.rank = self.generation, rank
        self.outbox.send(None if rank == AGENT else self.ranks[rank].home, command)

    def order(self, rank: int, command: pb.Command, deadline: float, what: Ordered) -> None:
        """Tell a rank, and wait until ``deadline`` for its answer."""
        command.generation, command.rank = self.generation, rank
        self.outbox.order(self.ranks[rank].home, command, deadline, what)

    def command_all(self, records: Iterable[RankRecord], command: pb.Command, deadline: float, what: Ordered) -> None:
        """Send the same command to all of these ranks, and wait until ``deadline`` for their answers."""
        homes = [record.home for record in self.ranks.values()]
        if homes != self._homes:
            self._homes, self._ranks_of = homes, {}
            for rank, home in zip(self.ranks, homes, strict=True):
                self._ranks_of.setdefault(home, []).append(rank)
        meant = {record.rank for record in records}
        ranks_of = {
            home: ranks if meant.issuperset(ranks) else [rank for rank in ranks if rank in meant]
            for home, ranks in self._ranks_of.items()
            if not meant.isdisjoint(ranks)
        }
        command.generation = self.generation
        self.outbox.send_all(ranks_of, command, deadline, what)

    def emit(self, event: ev.Event) -> None:
        self.outbox.emit(event)
