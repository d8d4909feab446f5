"""Nodes that are to leave while they still work: their ranks move to other nodes, and no step is lost.

A user commands it (``flashrecovery drain``), or the node itself is asked to end.
:func:`flashrecovery.plan.elastic.drain.hand_off` decides what is done. One node at a time; the others wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashrecovery.controller.elastic.join import Joining
from flashrecovery.controller.elastic.resizing import Resizing
from flashrecovery.controller.membership.joining_processes import give_up_all
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.loss_policy import allowed_sizes, never_replaced
from flashrecovery.controller.state.nodes import NodeRecord, rooms
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.elastic.drain import HandOff, HandOffWay, Parting, hand_off
from flashrecovery.plan.transitions import DrainState, State
from flashrecovery.proto import flashrecovery_pb2 as pb

_TRIES = 3
"""Times that the ranks of one node are on their way, where something else fails meanwhile."""


@dataclass
class NodeDrain:
    """One node that is to leave. A new object is made for each drain.

    Attributes:
        until: the end of its time, CLOCK_MONOTONIC seconds.
        cause: as text; "": a user command.
        moves: how often its ranks were on their way.
    """

    until: float
    cause: str
    moves: int = 0

    def count_move(self) -> None:
        """Its ranks are on their way once more."""
        self.moves += 1


class Drain:
    """The nodes of one job that are to leave."""

    def __init__(self, job: JobState, placement: RankPlacement, coming: Joining, resizing: Resizing) -> None:
        self._job = job
        self._placement = placement
        self._coming = coming
        self._resizing = resizing
        self._nodes: dict[str, NodeDrain] = {}  # in the order of the requests
        self._save_wanted = False

    def take_save_wanted(self) -> bool:
        """Whether a checkpoint should be taken now, since the last call."""
        wanted, self._save_wanted = self._save_wanted, False
        return wanted

    def ask(self, name: str, within_s: float, now: float, cause: str = "") -> tuple[str, str]:
        """Make a node leave within this many seconds. ``cause``: the reason. Returns (why it cannot leave, what is
        done); one of them is ""."""
        job = self._job
        node = job.nodes.get(name)
        if node is None or not node.alive:
            known = ", ".join(sorted(n.name for n in job.nodes.values() if n.alive))
            return f"node {name} does not belong to the job; these do: {known}", ""
        if name in self._nodes:
            return f"node {name} is leaving already", ""
        if job.state in (State.STARTING, State.FINISHED, State.FAILED):
            return f"the job is {job.state.value}; a node can leave when it trains", ""
        plan = self._plan(node)
        if plan.way is HandOffWay.NOTHING:
            return plan.reason, ""
        node.start_leaving()
        self._nodes[name] = NodeDrain(now + within_s, cause)
        return "", plan.reason

    def on_node_lost(self, name: str) -> None:
        """It has not lasted so long."""
        if self._nodes.pop(name, None) is not None:
            give_up_all(self._job, f"node {name} is lost before its ranks were handed over")

    def states(self) -> dict[str, DrainState]:
        """Where each node is that is on its way out."""
        return {name: DrainState.MOVING if drain.moves else DrainState.ASKED for name, drain in self._nodes.items()}

    def tick(self, now: float) -> None:
        """Do what can be done now for the first of them."""
        job = self._job
        if job.state is not State.RUNNING or job.recovery is not None:
            return
        if not self._nodes:
            self._resizing.take_up()
            return
        name, drain = next(iter(self._nodes.items()))
        node = job.nodes[name]
        ranks = [record.rank for record in job.ranks.values() if record.home == name]
        if not node.leaving:  # it was needed
            self._forget(node)
        elif not ranks:
            self._let_go(node)
        elif now >= drain.until:
            self._give_up(node, f"{len(ranks)} of its ranks are still there, and its time is over")
        elif drain.moves and self._coming.came_to_nothing and drain.moves < _TRIES:
            self._begin(node, drain, now)
        elif drain.moves and not job.membership.joining.keys() >= set(ranks) and not self._resizing.under_way:
            self._give_up(node, "its ranks could not be handed over")
        elif not drain.moves and not self._resizing.under_way:
            self._begin(node, drain, now)

    def _plan(self, node: NodeRecord) -> HandOff:
        job, elastic = self._job, self._job.config.elastic
        ranks = tuple(record.rank for record in job.ranks.values() if record.home == node.name)
        taken = [record.home for record in job.ranks.values() if record.home]
        unable = ""
        if never_replaced(job):
            unable = "no rank gets another process (replace: never)"
        elif job.config.parallelism is not None:
            unable = "ranks of a job whose parallel layout may change (parallelism) are not handed over yet"
        elif job.config.redundancy == "none" and elastic is None:
            unable = "no other node has what only this one's ranks have (redundancy: none)"
        return hand_off(
            Parting(
                node=node.name,
                domain=node.domain,
                ranks=ranks,
                members=list(job.ranks),
                rooms=rooms(job.nodes.values(), taken),
                cannot_move=unable,
                sizes=None if elastic is None else replace(allowed_sizes(job), allowed=None),
                shape=job.shape,
                saves=job.checkpoint is not None or job.config.checkpoint.dir is not None,
            )
        )

    def _begin(self, node: NodeRecord, drain: NodeDrain, now: float) -> None:
        """Its ranks are needed elsewhere more than others that are on their way in."""
        job = self._job
        if job.membership.joining:
            give_up_all(job, f"node {node.name} is to leave")
        self._resizing.put_aside()
        self._coming.try_again()
        plan = self._plan(node)
        drain.count_move()
        cause = f", because {drain.cause}" if drain.cause else ""
        job.notice(NoticeKind.NODE_LEAVES, f"node {node.name} is to leave{cause}: {plan.reason}")
        if plan.way is HandOffWay.MOVE:
            self._coming.expect(-1, taking_over=True)
            for rank, name in self._placement.apart(plan.places).items():
                self._placement.build_joining(rank, name, now)
        elif plan.way is HandOffWay.SHRINK:
            self._resizing.dismiss([record.rank for record in job.ranks.values() if record.home == node.name])
        else:
            self._save_wanted = plan.way is HandOffWay.SAVE
            self._forget(node)

    def _let_go(self, node: NodeRecord) -> None:
        """Nothing is left there: its agent ends."""
        job = self._job
        self._forget(node)
        job.notice(NoticeKind.NODE_LEFT, f"node {node.name} has left the job")
        job.outbox.send(node.name, pb.Command(generation=job.generation, rank=AGENT, shutdown=pb.Shutdown()))
        node.declare_lost()
        self._placement.publish_rank_table()

    def _give_up(self, node: NodeRecord, why: str) -> None:
        if self._job.membership.joining:
            give_up_all(self._job, why)
        self._job.notice(NoticeKind.NODE_LEAVES, f"node {node.name} does not leave: {why}")
        self._forget(node)

    def _forget(self, node: NodeRecord) -> None:
        node.stop_leaving()
        del self._nodes[node.name]
