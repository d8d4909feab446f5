"""What the controller knows of each rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from flashrecovery.config import RunConfig
from flashrecovery.controller.state.crashes import Crashes
from flashrecovery.controller.state.rank_inventory import RankInventory
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.hang import Work
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb


class Place(str, Enum):
    """What the process that fills a rank is doing, as far as the controller knows."""

    EMPTY = "empty"
    STARTING = "starting"
    JOINED = "joined"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    RECOVERING = "recovering"
    DONE = "done"
    RELEASED = "released"
    FINISHED = "finished"


BUILT_UP = frozenset({Place.EMPTY, Place.STARTING, Place.JOINED})
"""Places of a rank whose process has not been in its loop, so that it has no state yet."""
THROUGH = frozenset({Place.DONE, Place.RELEASED, Place.FINISHED})
"""Places of a process that has taken its last step."""
_LAST_WORDS_S = 2.0
"""A script that has left its loop by an exception has said so by then."""


ENDLESS = -1
"""Steps of a rank for which the script's end is the end of the steps."""


@dataclass(frozen=True, slots=True)
class HeldAt:
    """Where a rank was when it got the hold command. ``settled``: in a step, or done with all, and not in a recovery;
    ``mutating``: its state is changing from ``version`` to the next."""

    settled: bool = False
    mutating: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process that fills a rank, or filled it last. A new object for each process.

    Attributes:
        pid: 0: none has filled it.
        node, host: where it runs, as reported by its agent.
        joined_generation: the generation in which it joined.
    """

    pid: int = 0
    node: str = ""
    host: str = ""
    joined_generation: int = 0


@dataclass(slots=True)
class HeartbeatHealth:
    """What the last heartbeat said of a rank.

    Attributes:
        tag: its step, or what it does between two of them.
        progress_age_s: for so long it had made no progress.
        heard_at: when it came, CLOCK_MONOTONIC seconds.
        step_s: what its last steps have taken; 0: not known.
        own_s, own_least_s: its own work in a step, and the least of its last steps; 0: not known yet.
        overhead_s: what recovery takes of a step; 0: not known yet.
        kept, kept_age_s: newest version of which it keeps a whole copy for another rank (-1: none), and for how long
            it had.
        entered: the step that it has begun; -1: not known, or of another generation.
        work: what it does.
    """

    tag: int = -2
    progress_age_s: float = 0.0
    heard_at: float = 0.0
    step_s: float = 0.0
    own_s: float = 0.0
    own_least_s: float = 0.0
    overhead_s: float = 0.0
    kept: int = -1
    kept_age_s: float = 0.0
    entered: int = -1
    work: Work = Work.STEP

    def idle_s(self, now: float) -> float:
        """For so long the rank has made no progress, as far as is known."""
        return self.progress_age_s + now - self.heard_at

    def heard(self, said: pb.RankHealth, now: float, *, counts: bool) -> None:
        """A heartbeat has come. ``counts``: it is of this generation, and of a process in its loop."""
        self.tag, self.step_s = said.tag, said.step_s
        self.progress_age_s, self.heard_at = said.progress_age_s, now
        self.own_s, self.own_least_s = said.own_s, said.own_least_s
        self.overhead_s, self.kept, self.kept_age_s = said.overhead_s, said.kept - 1, said.kept_age_s
        self.entered = said.entered - 1 if counts else -1
        self.work = Work(said.work)

    def forget_process(self) -> None:
        """The process of which it told is gone; how fast the rank is stays known."""
        self.tag, self.kept = -2, -1


@dataclass(slots=True)
class RankRecord:
    """One place in the world and the process in it.

    Attributes:
        process: the process that fills it, or filled it last.
        health: what its heartbeats say.
        inventory: which state it needs, and which it holds.
        place: changed only by :meth:`~flashrecovery.controller.state.job_state.JobState.move` for a rank of the job.
        home: name of the node that holds the rank, or will; "" while no node has room for it.
        store: host and port of the TCPStore that its process uses.
        page_on: name of the node whose agent has the page of its last process; "" if that node is lost.
        filled: the generation in which it was last ordered to be filled; -1: ordered by another controller.
        on_its_way: the process has not been let into its loop yet.
        irreplaceable: its replacements have failed so often that an elastic job goes on without it.
        new: it has joined a running job, and no rank has rank-local state of it; in an elastic job another rank's
            serves.
        batches: in an elastic job, what the rank's batches are made of.
        outline: of the sharded state, the same in every process that runs the same script; "" if there is none.
        backends: what stands in its process groups.
        steps: the number of steps it will take; :data:`ENDLESS` if they end with the script; None while it has not
            reported this.
        ended: the number of calls after which its script ended; 0: it has not ended, or takes steps.
        in_snapshots: its copies outlive the processes of the job.
        takes_snapshots: of the versions that are announced.
        checkpoints: it has a directory for them.
        shape: which ranks make up the replicas of an elastic job; None: it has not said.
        sizes: the numbers of replicas with which an elastic job can go on; empty: all.
        hang_step_s: no progress in a step for less than this is never a hang of this rank; 0: as launched.
    """

    rank: int
    process: RankProcess = field(default_factory=RankProcess)
    health: HeartbeatHealth = field(default_factory=HeartbeatHealth)
    inventory: RankInventory = field(init=False)
    place: Place = Place.EMPTY
    home: str = ""
    page_on: str = ""
    store: tuple[str, int] = ("", 0)
    local_rank: int = 0
    filled: int = -1
    on_its_way: bool = False
    irreplaceable: bool = False
    new: bool = False
    batches: str = ""
    steps: int | None = None
    ended: int = 0
    in_snapshots: bool = False
    takes_snapshots: bool = False
    checkpoints: bool = False
    shape: ReplicaShape | None = None
    sizes: frozenset[int] = frozenset()
    outline: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    start: list[pb.StartLine] = field(default_factory=list)
    backends: list[pb.GroupBackend] = field(default_factory=list)
    committed: int = -1
    hang_step_s: float = 0.0
    left_at: float = 0.0
    held_at: HeldAt = field(default_factory=HeldAt)
    crashes: Crashes = field(default_factory=Crashes)
    _entry: pb.RankEntry = field(default_factory=pb.RankEntry)
    _entry_says: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.inventory = RankInventory(self.rank)

    def forget_process(self) -> None:
        """What its last process had is gone; what the rank needs stays known."""
        self.ended = 0
        self.inventory.forget_process()
        self.health.forget_process()

    def entry(self, peer: str) -> pb.RankEntry:
        """The rank's entry in the rank table, the same object for as long as it says the same. ``peer``: its node's
        agent."""
        process = self.process
        says = (process, peer)
        if says != self._entry_says:
            self._entry_says = says
            self._entry = pb.RankEntry(
                rank=self.rank,
                host=process.host,
                pid=process.pid,
                node=process.node,
                joined_generation=process.joined_generation,
                peer=peer,
            )
        return self._entry

    def move_to(self, place: Place) -> None:
        """Its process is there now. Of a rank of the job
        :meth:`~flashrecovery.controller.state.job_state.JobState.move` says so, which counts them."""
        self.place = place

    def give_home(self, node: str, local_rank: int) -> None:
        """A node has room for it."""
        self.home, self.local_rank = node, local_rank

    def lose_home(self) -> None:
        """It is on no node any more, and what its page there had is gone."""
        self.home = ""
        self.inventory.forget_pages()

    def forget_home(self) -> None:
        """Where it was does not count: neither its node nor its page."""
        self.home = self.page_on = ""

    def lose_page_on(self, node: str) -> None:
        """This node is lost, perhaps with the page of its last process."""
        if self.page_on == node:
            self.page_on = ""

    def order_process(self, store: tuple[str, int], generation: int) -> None:
        """Its node is told to fill it. ``store``: the TCPStore that the process is to use."""
        self.store, self.filled, self.on_its_way = store, generation, True

    def process_started(self, process: RankProcess, local_states: Iterable[int], early: Iterable[int]) -> None:
        """A process fills it, on its node. The others: what is in the page that this one was given."""
        self.process, self.page_on = process, self.home
        self.inventory.found_pages(local_states, early)

    def started_joining(self, process: RankProcess) -> None:
        """A process was started that is to fill it, beside training."""
        self.place, self.process = Place.STARTING, process

    def become_member(self, generation: int) -> None:
        """The process that was built up beside training belongs to the job from this generation on."""
        self.process = replace(self.process, joined_generation=generation)
        self.page_on = self.home

    def found_on(self, node: str, said: pb.WorkerState | pb.PageOf, generation: int) -> None:
        """It belongs to this node, whose agent says so to a controller that has not launched the job."""
        self.home = self.page_on = node
        self.process = replace(self.process, joined_generation=generation)
        self.local_rank, self.committed = said.local_rank, said.committed
        self.inventory.found_pages(said.local_states, said.early)

    def found_process(self, process: RankProcess, store: tuple[str, int]) -> None:
        """Its process runs there, and was told to use this TCPStore."""
        self.process, self.store = process, store

    def process_resumed(self) -> None:
        """Its process was let into its loop."""
        self.on_its_way = self.new = False
        self.inventory.process_resumed()

    def note_hold(self, at: HeldAt) -> None:
        """It was told to hold, and was there."""
        self.held_at = at
        self.has_committed(at.version)

    def has_committed(self, version: int) -> None:
        """So much at least; what says so may be older than what is known."""
        self.committed = max(self.committed, version)

    def begin_at(self, version: int) -> None:
        """It goes on at this version, whatever it had committed before."""
        self.committed = version

    def begin_again(self) -> None:
        """It starts from the script's first line, and nothing that it had counts."""
        self.inventory.forget_needs()
        self.committed = -1

    def stop_replacing(self) -> None:
        """Its replacements have failed so often that the job goes on without it."""
        self.irreplaceable = True

    def replace_again(self) -> None:
        """All processes are started again, and so is its."""
        self.irreplaceable = False

    def done(self, message: pb.Done, left_at: float = 0.0) -> None:
        """It takes no more steps. Where the script's end is the end of them, there will be none in this process.
        ``left_at``: when it said so; 0: before this controller came."""
        self.committed, self.left_at = message.version, left_at
        if self.steps == ENDLESS:
            self.ended = message.version

    def joined(self, message: pb.Joined, *, as_launched: bool = False) -> None:
        """What its process says at its first step. ``as_launched``: see :class:`.rank_inventory.RankInventory`."""
        self.steps, self.ended = message.steps, 0
        self.hang_step_s = message.hang_step_s
        self.in_snapshots = message.in_snapshots
        self.takes_snapshots = message.takes_snapshots
        self.checkpoints = message.checkpoints
        self.sizes = frozenset(message.sizes)
        self.shape = _shape_said(message) or self.shape
        self.batches = message.batches
        self.outline = message.outline
        self.inventory.process_joined(message.needs, as_launched=as_launched, uses_device=message.uses_device)
        self.digests = {n.name: n.digest for n in message.needs if n.digest}
        self.start = list(message.start)
        self.backends = list(message.backends)
        self.inventory.take(-1, message.held, message.parity)

    @property
    def model_rank(self) -> int:
        """Its number within its replica: ranks with the same model rank have the same state."""
        return 0 if self.shape is None else self.shape.model_rank(self.rank)

    def registration(self, shards: Iterable[str], *, steps: bool) -> Registration:
        """What its process has said. ``steps``: their number is compared, too."""
        return Registration(frozenset(shards), self.outline, self.shape, self.batches, self.steps if steps else None)


@dataclass(frozen=True)
class Registration:
    """What a process has said at its first step that another one in its place must say, too.

    Attributes:
        shards: names of those that it needs, as far as they are the same in both.
        outline, shape, batches: as of :class:`RankRecord`.
        steps: the same; None: not compared.
    """

    shards: frozenset[str]
    outline: str
    shape: ReplicaShape | None
    batches: str
    steps: int | None = None


def registration_differs(old: Registration, new: Registration, other: str) -> str:
    """How ``new`` differs from ``old``, which is that of ``other``, as text; "" if it does not. Pure."""
    if new.outline != old.outline:  # where ranks have other parts of a model, their names do not tell
        return f"its model has other parameters, or other shapes or types of them, than that of {other}"
    if new.shards != old.shards:
        return f"it has registered other state than {other}: {sorted(new.shards ^ old.shards)[:3]}"
    if new.shape != old.shape:
        return f"its replicas are not those of {other}"
    if new.steps != old.steps:
        return f"it would take {new.steps} steps, and {other} takes {old.steps}"
    if new.batches != old.batches:
        return f"its batches are {new.batches}, and those of {other} are {old.batches}"
    return ""


@dataclass
class JoiningProcess:
    """A process that is built up beside training, to fill a rank later.

    Attributes:
        record: of the rank that it will fill; the job does not count it yet.
        number: of the order, so that its first word is not taken for that of an earlier one.
        due: when it has to be at its first step, CLOCK_MONOTONIC seconds.
    """

    record: RankRecord
    number: int
    due: float

    @property
    def here(self) -> bool:
        """It has come to its first step and waits."""
        return self.record.place is Place.JOINED


def _shape_said(message: pb.Joined) -> ReplicaShape | None:
    if not message.replicas:
        return None
    return ReplicaShape(message.replicas, message.inner, message.each // message.inner)


def slowest_start(records: Iterable[RankRecord]) -> Sequence[pb.StartLine]:
    """Where the time of the one went that took longest to its first step."""
    starts = [record.start for record in records]
    return max(starts, key=lambda lines: sum(line.seconds for line in lines), default=[])


def unequal_steps(records: Iterable[RankRecord]) -> str:
    """Ranks that will not take the same number of steps; "" if all agree. The others would wait for ever."""
    by_count: dict[int, list[int]] = {}
    for record in records:
        if record.steps is not None:
            by_count.setdefault(record.steps, []).append(record.rank)
    if len(by_count) <= 1:
        return ""
    said = "; ".join(
        f"{'no steps() but single calls' if n < 0 else f'steps({n})'} on rank{'s' * (len(r) > 1)} {str(r)[1:-1]}"
        for n, r in sorted(by_count.items())
    )
    return f"recovery.steps() needs the same number on every rank, but there is {said}"


def unequal_ends(records: Iterable[RankRecord]) -> str:
    """Scripts that have come to their end after other numbers of calls than others have made; "" if there are
    none. A rank that makes more waits for ever."""
    ended: dict[int, list[int]] = {}
    newest = 0
    for record in records:
        if record.ended:
            ended.setdefault(record.ended, []).append(record.rank)
        if record.steps == ENDLESS:
            newest = max(newest, record.committed)
    if not ended or (len(ended) == 1 and newest <= max(ended)):
        return ""
    said = "; ".join(f"of {ranks_text(ranks)} after {calls}" for calls, ranks in sorted(ended.items()))
    return (
        f"the scripts have come to their end after different numbers of calls: {said}; {newest} have been made. What "
        "ends the script's loop must be the same on all ranks, and in a process that takes the place of a dead one"
    )


def told_of(words: pb.LastWords, config: RunConfig, ranks: Collection[int]) -> str:
    """What is to be said of what a script has raised on ``ranks`` besides its message: where, and the traceback if none
    of their outputs is shown live, where it stands already."""
    place = f" (at {words.place})" if words.place else ""
    shown = config.log == "all" or (config.log == "0" and 0 in ranks)
    return place if shown else f"{place}\n{words.traceback}".rstrip()


def left_behind(records: Iterable[RankRecord], now: float) -> dict[int, str]:
    """Ranks whose scripts have left their loop before its last step where others have begun the step after, each with
    what it has done. If all leave it together, none of them begins another. A script that raises leaves its
    loop, too: what it raises is heard soon after."""
    known = list(records)
    goes_on = [r for r in known if r.place is Place.RUNNING]
    found = {}
    for record in known:
        if record.place not in THROUGH or record.steps is None or not 0 <= record.committed < record.steps:
            continue
        if record.place is Place.DONE and now < record.left_at + _LAST_WORDS_S:
            continue
        others = [r.rank for r in goes_on if r.health.entered >= record.committed]
        if others:
            what = "ended (exit code 0)" if record.place is Place.FINISHED else "left its loop"
            when = f"after step {record.committed - 1}" if record.committed else "before step 0"
            found[record.rank] = (
                f"its script has {what} {when} of {record.steps}, and {ranks_text(others)} "
                f"{'goes' if len(others) == 1 else 'go'} on with the next one: what ends the loop (break, return, "
                "sys.exit) must be the same on all ranks"
            )
    return found


def who_has_left(records: Iterable[RankRecord], hung: RankRecord) -> str:
    """Ranks whose scripts have left their loop where ``hung`` goes on and stands still, perhaps because of that, in
    words; "" if there are none."""
    left = [r.rank for r in records if r.place in THROUGH and r.steps != r.committed <= hung.committed]
    return f"{ranks_text(left)} {'has' if len(left) == 1 else 'have'} left the loop by then" if left else ""


def unequal_claims(records: Iterable[RankRecord]) -> list[str]:
    """Shards that several ranks claim to hold equally, but whose digests differ at the start.

    A replacement would silently get another rank's state; so such a job is refused before its first step.
    """
    seen: dict[str, tuple[str, int]] = {}
    wrong = []
    for record in records:
        for name, digest in record.digests.items():
            first = seen.setdefault(name, (digest, record.rank))
            if first[0] != digest:
                wrong.append(f"{name!r} differs between rank {first[1]} and rank {record.rank}")
    return wrong
