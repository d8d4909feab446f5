"""What the controller knows of one job, and the few things that every part of the machine does with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.admission import other_command
from flashrecovery.controller.history import Recovery
from flashrecovery.controller.nodes import NodeRecord, NodeState, rooms
from flashrecovery.controller.outbox import Action, Outbox
from flashrecovery.controller.rank_table import RankTable
from flashrecovery.controller.records import Place, RankRecord
from flashrecovery.controller.restore import RestoreRound
from flashrecovery.controller.states import State, check_transition
from flashrecovery.plan.placement import place
from flashrecovery.plan.stores import choose, store_count
from flashrecovery.proto import flashrecovery_pb2 as pb

AGENT = -1
"""Rank number of commands to the agent itself."""
_SAID = 3
"""Of so many nodes it is said that they run something else; the others mostly do so, too."""


@dataclass
class JobState:
    """State of one job. ``now`` arguments are CLOCK_MONOTONIC seconds."""

    config: RunConfig
    state: State = State.STARTING
    generation: int = 0
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    places: Counter[Place] = field(default_factory=Counter)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    stride: int = 1
    checkpoint: tuple[int, str] | None = None
    recovery: Recovery | None = None
    history: list[Recovery] = field(default_factory=list)
    failure_reason: str = ""
    last_failure: str = ""
    outbox: Outbox = field(default_factory=Outbox)
    _restarts: int = 0
    _start_version: int = 0
    _round: RestoreRound | None = None
    _started_at: float = 0.0
    _restore_from: str = ""
    _retry_at: float | None = None
    _retries: int = 0
    _launched: bool = False
    _first_command: tuple[str, list[str]] | None = None  # of the first node that has come: its name, what it runs
    _other_commands: int = 0  # nodes that were said to run something else
    _homeless_since: float | None = None
    _found_since: float | None = None
    _found_at: float | None = None
    _failures: list[pb.Failure] = field(default_factory=list)  # of the recovery under way, in order
    _asked_again: bool = False  # nobody at all has met a deadline in this recovery: once, everybody is asked again
    _unprotected: bool = False  # the time for the first protected step is over, and no rank has come to one
    _stuck_at: dict[int, int] = field(default_factory=dict)
    _homes: list[str] = field(default_factory=list)  # by rank, as they were for ...
    _ranks_of: dict[str, list[int]] = field(default_factory=dict)  # ... this, by home
    _store_nodes: list[str] = field(default_factory=list)
    _start_stores: list[pb.StoreServer] = field(default_factory=list)  # the same for all ranks of one start
    _needs_known: int = 0  # the generation whose stop has told every rank's needs, 0: none
    _confirmed: int = 0  # ranks before this one have committed a step since the last recovery

    def __post_init__(self) -> None:
        self.ranks = {r: RankRecord(r, self.places) for r in range(self.config.world_size)}

    def take_actions(self) -> list[Action]:
        """What is to be done because of the events so far, in order."""
        return self.outbox.take()

    def _compare_command(self, message: pb.Register) -> None:
        """Do all nodes run the same?"""
        if self._first_command is None:
            self._first_command = (message.node, list(message.command))
        if self._other_commands >= _SAID:
            return
        text = other_command(message.node, message.command, *self._first_command)
        if text:
            self._other_commands += 1
            self._emit(ev.Notice(generation=self.generation, kind="other_command", text=text))

    def _all(self, *places: Place) -> bool:
        """Whether every rank is in one of these places."""
        return sum(self.places[p] for p in places) == len(self.ranks)

    def _to(self, state: State, now: float | None = None) -> None:
        check_transition(self.state, state)
        if self.recovery is not None and now is not None:
            phase = self.recovery.enter(state, now)
            if phase is not None:
                self._emit(ev.RecoveryPhase(generation=self.generation, name=phase[0], seconds=phase[1]))
        self.state = state

    def _fail(self, reason: str) -> None:
        """Nothing is left to try: say why, stop everything, keep the evidence."""
        self.failure_reason = reason
        self.outbox.clear()
        self._to(State.FAILED)
        self._emit(ev.JobFailed(generation=self.generation, reason=reason))
        shutdown = pb.Shutdown(reason=reason, grace_s=self.config.timeouts.shutdown_grace_s)
        self._command(AGENT, pb.Command(shutdown=shutdown))

    # -- which process, on which node -------------------------------------------------------------

    def _settle(self, ranks: list[int], now: float, lost_domain: str = "") -> bool:
        """Give ``ranks``, which have lost their node, a new one; False if there is no room for them."""
        taken = [r.home for r in self.ranks.values() if r.home]
        places = place(ranks, rooms(self.nodes.values(), taken), lost_domain)
        if places is None:
            if self._homeless_since is None:
                self._homeless_since = now
                limit_s = self.config.timeouts.node_wait_s
                wait = f"ranks {ranks} wait {limit_s:g} s at most for a node with room for them"
                self._emit(ev.Notice(generation=self.generation, kind="waiting_for_node", text=wait))
            return False
        used: dict[str, set[int]] = {name: set() for name in places.values()}
        for other in self.ranks.values():
            if other.home in used:
                used[other.home].add(other.local_rank)
        for rank, name in places.items():
            record, taken_there = self.ranks[rank], used[name]
            if record.local_rank in taken_there:
                record.local_rank = next(i for i in range(len(taken_there) + 1) if i not in taken_there)
            taken_there.add(record.local_rank)
            record.home = name
            self.nodes[name].state = NodeState.ACTIVE
        if not self._homeless():
            self._homeless_since = None
        return True

    def _fence(self, node: NodeRecord, why: str) -> None:
        """Have the node end its processes; it may come back as a spare one."""
        node.state = NodeState.LOST
        fence = pb.Fence(reason=f"node {node.name}: {why}")
        self.outbox.send(node.name, pb.Command(generation=self.generation, rank=AGENT, fence=fence))

    def _homeless(self) -> list[int]:
        """Ranks whose node is lost and that have no other one yet."""
        return [r.rank for r in self.ranks.values() if not r.home]

    def _fill(self, record: RankRecord, now: float, *, detached: bool, reason: str) -> None:
        """Have the rank's node start a process for it."""
        if not detached and not self._start_stores:
            self._start_stores = self._stores()
        host, port = self._store() if detached else (self._start_stores[0].host, self._start_stores[0].port)
        record.store, record.filled, record.on_its_way = (host, port), self.generation, True
        replace = pb.Replace(
            detached=detached,
            reason=reason,
            attempt=self._restarts,
            store_host=host,
            store_port=port,
            local_rank=record.local_rank,
            node_rank=record.rank // self.config.nproc_per_node,
            stride=self.stride,
            setup_from=self._keeper_of(record) if detached else "",
            stores=() if detached else self._start_stores,
        )
        limits = self.config.timeouts
        deadline = now + limits.fence_s + (limits.replacement_s if detached else limits.startup_s)
        self._command(record.rank, pb.Command(replace=replace), deadline, "replace")

    def _keeper_of(self, record: RankRecord) -> str:
        """The agent that keeps the rank's set-up log for when its own node is lost; "" if its node still has it."""
        if record.page_on == record.home:
            return ""
        node = self.nodes.get(self.keeper_of_copies(record.rank).page_on)
        return node.peer if node is not None and node.alive else ""

    def keeper_of_copies(self, rank: int) -> RankRecord:
        """Who holds this rank's neighbour copies."""
        return self.ranks[(rank + self.stride) % len(self.ranks)]

    def _store(self) -> tuple[str, int]:
        """Host and port of the TCPStore for a process's own start: the first node's that holds ranks and lives."""
        for record in self.ranks.values():
            node = self.nodes.get(record.home)
            if node is not None and node.alive:
                return node.store
        return "localhost", 0

    def _stores(self) -> list[pb.StoreServer]:
        """The TCPStores over which the groups are spread from now on, the same for all ranks."""
        count = self.config.stores or store_count(len(self.ranks), self.config.nnodes)
        if count == 1:
            addresses = [self._store()]
        else:
            living = {node.name for node in self.nodes.values() if node.alive}
            self._store_nodes = choose([r.home for r in self.ranks.values()], living, count, self._store_nodes)
            addresses = [self.nodes[name].store for name in self._store_nodes] or [self._store()]
        return [pb.StoreServer(host=host, port=port) for host, port in addresses]

    def _publish_rank_table(self) -> None:
        peers = {name: node.peer for name, node in self.nodes.items()}
        homes = {r.home for r in self.ranks.values()}
        entries = tuple(r.entry(peers.get(r.home, "")) for r in self.ranks.values())
        living = [node for node in self.nodes.values() if node.state in (NodeState.ACTIVE, NodeState.SPARE)]
        others = tuple(sorted((node.name, node.peer) for node in living if node.name not in homes))
        self.outbox.publish(self.generation, RankTable(entries, self.stride, others))

    def _publish_others(self) -> None:
        """A node without ranks has come or gone: a node that has all of them is to know of it, or it could not tell
        that it is cut off. (If a rank has no process now, the table is published when it has.)"""
        if self._launched and not self.places[Place.EMPTY] and len({r.home for r in self.ranks.values()}) == 1:
            self._publish_rank_table()

    def saved(self) -> pb.Command:
        """What the agents are to remember: the newest checkpoint, or (version -1) that there is none."""
        version, path = self.checkpoint or (-1, "")
        saved = pb.CheckpointSaved(version=version, path=path)
        return pb.Command(generation=self.generation, rank=AGENT, saved=saved)

    def _command(self, rank: int, command: pb.Command, deadline: float | None = None, what: str = "") -> None:
        command.generation, command.rank = self.generation, rank
        self.outbox.send(None if rank == AGENT else self.ranks[rank].home, command, deadline, what)

    def _command_all(self, records: Iterable[RankRecord], command: pb.Command, deadline: float, what: str) -> None:
        """The same to all of these ranks."""
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

    def _emit(self, event: ev.Event) -> None:
        self.outbox.emit(event)
