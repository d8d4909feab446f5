"""Which process fills a rank, on which node, and which commands the ranks get for that."""

from __future__ import annotations

from collections.abc import Mapping

from flashrecovery.controller.membership.joining_processes import give_up_all
from flashrecovery.controller.membership.smaller_layout import divides_sequences, fits_without
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.loss_policy import leaving_without, never_replaced, worth_filling
from flashrecovery.controller.state.nodes import NodeRecord, NodeState, rooms
from flashrecovery.controller.state.rank_record import JoiningProcess, Place, RankRecord
from flashrecovery.controller.state.rank_table import RankTable
from flashrecovery.kinds import NoticeKind, Ordered
from flashrecovery.plan.elastic.new_ranks import stand_in
from flashrecovery.plan.membership.placement import Room, apart, place, setup_log_keepers
from flashrecovery.plan.membership.stores import choose, store_count
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

_SKIPS = 0.7
"""Part of ``replacement_s``, for which a process that is built up beside training may skip what others have done."""


class RankPlacement:
    """Gives ranks to nodes, and has these start processes."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._orders = 0  # for joining processes
        self._store_nodes: list[str] = []  # whose TCPStores serve the groups
        self._numbers: dict[str, int] = {}  # of nodes, in ...
        self._numbered = -1  # ... this generation

    def settle(self, ranks: list[int], now: float, lost_domain: str = "", *, excluded: bool = False) -> bool:
        """Give ``ranks``, which have lost their node, a new one; False if there is no room for them. ``excluded``: also
        one that is not to be used. Where an elastic job can go on without some, and there is no room for all, those get
        one for which there is."""
        places = self._places(ranks, lost_domain, excluded)
        if places is None and self._job.membership.joining and not never_replaced(self._job):
            give_up_all(self._job, "its room is needed for a rank that has lost its node")
            places = self._places(ranks, lost_domain, excluded)
        if places is None:
            places = self._places_of_some(ranks, lost_domain, excluded)
        without = places is None and bool(leaving_without(self._job, ranks) or fits_without(self._job, ranks))
        if places is None and not without:
            places = self._places_of_last_resort(ranks, lost_domain, excluded)
        if places is None:
            if self._job.homeless_since is None and not without:
                self._job.await_node(now)
                limit_s = self._job.config.timeouts.node_wait_s
                wait = f"ranks {ranks} wait {limit_s:g} s at most for a node with room for them"
                wait += "".join(
                    f"; node {n.name} is excluded: {n.use_reason}" for n in self._job.nodes.values() if n.excluded
                )
                self._job.notice(NoticeKind.WAITING_FOR_NODE, wait)
            return False
        for rank, name in self.apart(places).items():
            self._house(self._job.ranks[rank], name)
        for name in sorted(set(places.values())):
            self.say_if_excluded(self._job.nodes[name])
            self._job.nodes[name].activate()
        if not self.homeless():
            self._job.stop_awaiting_node()
        return True

    def _places(self, ranks: list[int], lost_domain: str, excluded: bool) -> dict[int, str] | None:
        return place(ranks, self._free(excluded), lost_domain)

    def apart(self, places: Mapping[int, str]) -> Mapping[int, str]:
        """Ranks that are given to several nodes, if possible not with the ranks that keep their copies."""
        if len({*places.values()}) == 1:
            return places
        going_on = [r for r in self._job.in_order if r.home or r.rank in places]  # others have no node, and may leave
        homes = {record.rank: record.home for record in going_on if record.rank not in places}
        return apart(places, homes, self._job.keepers_of_copies(going_on))

    def _free(self, excluded: bool) -> list[Room]:
        """Where a lost rank could be filled again."""
        if never_replaced(self._job):
            return []
        return rooms(self._job.nodes.values(), self._job.homes(), excluded=excluded)

    def _places_of_some(self, ranks: list[int], lost_domain: str, excluded: bool) -> dict[int, str] | None:
        """For the ranks of an elastic job for which there is room; the job continues without the others."""
        free = self._free(excluded)
        some = worth_filling(self._job, ranks, sum(max(room.free, 0) for room in free))
        return place(some, free, lost_domain) if some else None

    def _places_of_last_resort(self, ranks: list[int], lost_domain: str, excluded: bool) -> dict[int, str] | None:
        """With nodes that are to leave: they have to stay then."""
        leaving = [node for node in self._job.nodes.values() if node.leaving and node.alive]
        for node in leaving:
            node.stop_leaving()
        places = self._places(ranks, lost_domain, excluded)
        for node in leaving:
            if places is None or node.name not in places.values():
                node.start_leaving()
            else:
                text = f"node {node.name} does not leave: it has the only room for ranks that have lost their node"
                self._job.notice(NoticeKind.NODE_LEAVES, text)
        return places

    def _house(self, record: RankRecord, name: str) -> None:
        """Give the rank to a node with room for it, in a free slot."""
        others = [*self._job.ranks.values(), *(joining.record for joining in self._job.membership.joining.values())]
        taken = {other.local_rank for other in others if other.home == name and other is not record}
        here = record.local_rank
        record.give_home(name, next(i for i in range(len(taken) + 1) if i not in taken) if here in taken else here)

    def build_joining(self, rank: int, name: str, now: float) -> None:
        """Have a node build up a process for this rank while training goes on."""
        record = RankRecord(rank, new=self._job.config.elastic is not None)
        self._house(record, name)
        self._orders += 1
        limits = self._job.config.timeouts
        self._job.membership.joining[rank] = JoiningProcess(
            record, self._orders, now + limits.fence_s + limits.replacement_s
        )
        replace = self._order(record, detached=True)
        replace.joining = self._orders
        replace.ahead.reached, replace.ahead.for_s = max(self._job.committed, 0), _SKIPS * limits.replacement_s
        self._job.outbox.send(name, pb.Command(generation=self._job.generation, rank=rank, replace=replace))

    def say_if_excluded(self, node: NodeRecord) -> None:
        """An excluded node is used all the same."""
        if node.excluded:
            text = f"node {node.name} is used although it is excluded, because there is no other: {node.use_reason}"
            self._job.notice(NoticeKind.NODE_EXCLUDED, text)

    def fence(self, node: NodeRecord, why: str) -> None:
        """Have the node end its processes; it may come back as a spare one."""
        node.declare_lost()
        fence = pb.Fence(reason=f"node {node.name}: {why}")
        self._job.outbox.send(node.name, pb.Command(generation=self._job.generation, rank=AGENT, fence=fence))

    def homeless(self) -> list[int]:
        """Ranks whose node is lost and that have no other one yet."""
        return [r.rank for r in self._job.ranks.values() if not r.home]

    def house(self, now: float, *, excluded: bool = False) -> bool:
        """:meth:`settle` the ranks that have no node, and have their new ones start them. Whether there was room."""
        homeless = self.homeless()
        if not homeless or not self.settle(homeless, now, excluded=excluded):
            return False
        for rank in homeless:
            if self._job.ranks[rank].home:
                self.fill(self._job.ranks[rank], now, detached=self._job.state is not State.STARTING)
        return True

    def fill(self, record: RankRecord, now: float, *, detached: bool) -> None:
        """Have the rank's node start a process for it."""
        replace = self._order(record, detached=detached)
        limits = self._job.config.timeouts
        deadline = now + limits.fence_s + (limits.replacement_s if detached else limits.startup_s)
        self._job.order(record.rank, pb.Command(replace=replace), deadline, Ordered.REPLACE)

    def _order(self, record: RankRecord, *, detached: bool) -> pb.Replace:
        """The command to the node about the process that it has to start."""
        if not detached and not self._job.start.stores:
            self._job.start.use_stores(self.stores())
        host, port = self.store() if detached else (self._job.start.stores[0].host, self._job.start.stores[0].port)
        record.order_process((host, port), self._job.generation)
        return pb.Replace(
            detached=detached,
            attempt=self._job.attempt,
            world_size=self._job.parallel.world,
            layout=self._job.parallel.text,
            store_host=host,
            store_port=port,
            local_rank=record.local_rank,
            node_rank=self._node_rank(record),
            stride=self._job.stride,
            domains=self._job.domains,
            nodes=len(self._node_numbers()) if self._job.parallel.text else 0,
            sequence_parallel=divides_sequences(self._job),
            setup_from=self._keepers_of(record) if detached else (),
            stands_in=self._stands_in(record.rank),
            stores=() if detached else self._job.start.stores,
        )

    def _stands_in(self, rank: int) -> int:
        """One more than the rank in whose place this one runs the script to its first step; 0: its own."""
        if self._job.config.elastic is None:
            return 0
        other = stand_in(rank, self._job.shape)
        return 0 if other == rank else other + 1

    def _node_rank(self, record: RankRecord) -> int:
        """The number of the rank's node among those that have ranks."""
        if not self._job.parallel.text:
            return record.rank // self._job.config.nproc_per_node
        numbers = self._node_numbers()
        return numbers.setdefault(record.home, len(numbers))

    def _node_numbers(self) -> dict[str, int]:
        """The numbers of the nodes that had ranks when the job's generation began, and that have come since."""
        if self._numbered != self._job.generation:
            self._numbered = self._job.generation
            homes = dict.fromkeys(record.home for record in self._job.in_order if record.home)
            self._numbers = {home: number for number, home in enumerate(homes)}
        return self._numbers

    def _keepers_of(self, record: RankRecord) -> list[str]:
        """The agents that keep the rank's set-up log for when its own node is lost; none if its node still has it."""
        if record.page_on == record.home or not self._job.config.several_nodes:
            return []
        ranks = setup_log_keepers(record.rank, self._job.stride, self._job.world_size)
        nodes = [self._job.nodes.get(r.page_on) for rank in ranks if (r := self._job.ranks.get(rank)) is not None]
        kept = [node.peer for node in nodes if node is not None and node.alive]
        if not kept or record.rank in self._job.membership.joining or not self._job.whole:  # it may be on any node
            kept += [node.peer for node in self._job.nodes.values() if node.alive]
        return list(dict.fromkeys(kept))

    def store(self) -> tuple[str, int]:
        """Host and port of the TCPStore for a process's own start: the first node's that holds ranks and lives."""
        for record in self._job.ranks.values():
            node = self._job.nodes.get(record.home)
            if node is not None and node.alive:
                return node.store
        return "localhost", 0

    def stores(self) -> list[pb.StoreServer]:
        """The TCPStores over which the groups are spread from now on, the same for all ranks."""
        count = self._job.config.stores or store_count(len(self._job.ranks), self._job.config.nnodes)
        if count == 1:
            addresses = [self.store()]
        else:
            living = {node.name for node in self._job.nodes.values() if node.alive}
            self._store_nodes = choose([r.home for r in self._job.ranks.values()], living, count, self._store_nodes)
            addresses = [self._job.nodes[name].store for name in self._store_nodes] or [self.store()]
        return [pb.StoreServer(host=host, port=port) for host, port in addresses]

    def stranded(self) -> list[int]:
        """Ranks whose replacement is starting with the address of a TCPStore that is lost with its node, and would
        wait for it in vain."""
        living = {node.store for node in self._job.nodes.values() if node.alive}
        waiting = (r for r in self._job.ranks.values() if r.home and r.place in (Place.EMPTY, Place.STARTING))
        return [r.rank for r in waiting if r.store not in living]

    def publish_rank_table(self) -> None:
        peers = {name: node.peer for name, node in self._job.nodes.items()}
        homes = {r.home for r in self._job.ranks.values()}
        entries = tuple(r.entry(peers.get(r.home, "")) for r in self._job.ranks.values())
        living = [node for node in self._job.nodes.values() if node.state in (NodeState.ACTIVE, NodeState.SPARE)]
        others = tuple(sorted((node.name, node.peer) for node in living if node.name not in homes))
        world = max(self._job.world_size, self._job.in_order[-1].rank + 1)
        table = RankTable(entries, self._job.stride, others, world, self._job.launch, world > self._job.world_size)
        self._job.outbox.publish(self._job.generation, table)

    def publish_others(self) -> None:
        """A node without ranks has come or gone: a node that has all of them is to know of it, or it could not tell
        that it is cut off. (If a rank has no process now, the table is published when it has.)"""
        if (
            self._job.launched
            and not self._job.places[Place.EMPTY]
            and len({r.home for r in self._job.ranks.values()}) == 1
        ):
            self.publish_rank_table()
