"""The nodes of a job: which have come, which ranks they hold, which are spare or lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from flashrecovery.errors import ConfigError
from flashrecovery.plan.membership.node_failures import Use
from flashrecovery.plan.membership.placement import Room
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.machine_speed import NOT_MEASURED, MachineSpeed


class NodeState(str, Enum):
    """What a node is to the job."""

    WAITING = "waiting"
    """The node has come; the job has not started yet."""
    ACTIVE = "active"
    SPARE = "spare"
    LOST = "lost"


@dataclass
class NodeRecord:
    """What is known of one agent.

    Attributes:
        suspect: what a device plugin has warned of, or "".
        leaving: it is to leave the job, and gets no more ranks.
        use: what its earlier failures mean, with the reason.
        speed: of the host, as it has measured it.
    """

    name: str
    host: str
    domain: str
    slots: int
    peer: str
    store: tuple[str, int]
    incarnation: str
    wanted_rank: int
    wants_spare: bool
    state: NodeState = NodeState.WAITING
    suspect: str = ""
    use: Use = Use.NORMAL
    use_reason: str = ""
    leaving: bool = False
    speed: MachineSpeed = NOT_MEASURED

    @staticmethod
    def of(message: pb.Register, before: NodeRecord | None = None) -> NodeRecord:
        """``before``: what was known of it when it came last."""
        return NodeRecord(
            name=message.node,
            host=message.host,
            domain=message.domain or message.node,
            slots=message.slots,
            peer=f"{message.host}:{message.peer_port}",
            store=(message.host, message.store_port),
            incarnation=message.incarnation,
            wanted_rank=message.node_rank,
            wants_spare=message.spare,
            suspect=message.suspect or (before.suspect if before is not None else ""),
            speed=MachineSpeed(message.speed.copy, message.speed.link),
        )

    def activate(self) -> None:
        """It holds ranks, or is about to."""
        self.state = NodeState.ACTIVE

    def make_spare(self) -> None:
        """It holds no rank, and may get some."""
        self.state = NodeState.SPARE

    def use_for(self, homes: Collection[str]) -> None:
        """It is one of ``homes``, which hold the job's ranks, or a spare node."""
        self.state = NodeState.ACTIVE if self.name in homes else NodeState.SPARE

    def declare_lost(self) -> None:
        """It is lost, or was told to end its processes: whatever it still holds does not count."""
        self.state = NodeState.LOST

    def start_leaving(self) -> None:
        """It gets no more ranks."""
        self.leaving = True

    def stop_leaving(self) -> None:
        """It has left, or stays after all."""
        self.leaving = False

    def suspect_of(self, text: str) -> None:
        """It is suspected from now on."""
        self.suspect = text

    def rate_use(self, use: Use, reason: str) -> None:
        """What its earlier failures mean now."""
        self.use, self.use_reason = use, reason

    def speed_measured(self, speed: MachineSpeed) -> None:
        """Its host has measured itself."""
        self.speed = speed

    @property
    def alive(self) -> bool:
        return self.state is not NodeState.LOST

    @property
    def doubt(self) -> str:
        """Why other nodes are preferred; "" if they are not."""
        return self.suspect or (self.use_reason if self.use is not Use.NORMAL else "")

    @property
    def excluded(self) -> bool:
        return self.use is Use.EXCLUDED


def is_spare(node: NodeRecord, nnodes: int) -> bool:
    """Whether a node is none of those ``nnodes`` that begin the job."""
    return node.wants_spare or node.wanted_rank >= nnodes


def launch_order(
    nodes: Iterable[NodeRecord], nnodes: int, nproc: int, *, spares: bool = False
) -> list[NodeRecord] | None:
    """The nodes that begin, in the order of their node ranks; None if some are still missing.

    A node that names its rank gets it; the others fill what is left, in the order in which they came, those that are
    used last at the end. A node rank past the last one makes a spare node, so that a scheduler can number all of its
    nodes alike. ``spares``: spare nodes with room fill what is still left.

    Raises:
        ConfigError: two nodes name the same rank, or a node has fewer slots than ranks a node.
    """
    chosen: dict[int, NodeRecord] = {}
    others: list[NodeRecord] = []
    waiting: list[NodeRecord] = []
    for node in nodes:
        if not node.alive:
            continue
        if is_spare(node, nnodes):
            waiting += [node] if spares and node.slots >= nproc else []
            continue
        if node.slots < nproc:
            raise ConfigError(f"node {node.name}: slots = {node.slots}, but every node takes {nproc} ranks")
        if node.wanted_rank < 0:
            others.append(node)
        elif node.wanted_rank in chosen:
            raise ConfigError(
                f"--node-rank {node.wanted_rank} is given to two nodes: {chosen[node.wanted_rank].name} and {node.name}"
            )
        else:
            chosen[node.wanted_rank] = node
    others = sorted([*others, *waiting], key=lambda node: node.use is not Use.NORMAL)
    for rank in range(nnodes):
        if rank not in chosen and others:
            chosen[rank] = others.pop(0)
    return [chosen[rank] for rank in range(nnodes)] if len(chosen) == nnodes else None


def rooms(nodes: Iterable[NodeRecord], taken: Iterable[str], *, excluded: bool = False) -> list[Room]:
    """The room that each node has left. ``taken``: the node of each rank that has one. ``excluded``: with the nodes
    that are not to be used."""
    used = Counter(taken)
    return [
        Room(n.name, n.domain, n.slots - used[n.name], n.state is NodeState.SPARE, bool(n.doubt))
        for n in nodes
        if n.state in (NodeState.ACTIVE, NodeState.SPARE) and not n.leaving and (excluded or not n.excluded)
    ]
