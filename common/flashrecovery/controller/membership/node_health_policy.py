"""Nodes that a device plugin, or their own past, warns of are replaced with the next failure, if a spare node is there.

Which ones is decided once the survivors have stopped and said what they hold
(:mod:`flashrecovery.plan.restore.proactive_replacement`). Their ranks become further victims of the recovery that is
under way; the node is fenced and comes back as a spare, still marked.

What is known of nodes from before (:mod:`flashrecovery.plan.membership.node_failures`) decides, too, whether a node is
used last, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.loss_policy import left_of_replicas, never_replaced
from flashrecovery.controller.state.nodes import NodeRecord, NodeState, rooms
from flashrecovery.kinds import FailureKind, NoticeKind
from flashrecovery.plan.membership.node_failures import Rating, Use
from flashrecovery.plan.restore.proactive_replacement import Warned, proactive_replacements
from flashrecovery.plan.words import ranks_text


class ProactiveReplacement:
    """Moves whole nodes in the middle of a recovery."""

    def __init__(self, job: JobState, placement: RankPlacement) -> None:
        self._job = job
        self._placement = placement

    def replace_ahead(self, now: float) -> None:
        """Abandon the warned nodes that the job does not need. A node whose ranks are being handed over is kept:
        processes for them are built up elsewhere already, and it still has what they have. Nor is any while ranks leave
        the job, or may have left it under a controller before this one: it may have the only copies of what these have
        had."""
        if (
            never_replaced(self._job)
            or self._job.membership.unsure
            or self._job.membership.removed
            or left_of_replicas(self._job)
        ):
            return
        active = (n for n in self._job.nodes.values() if n.state is NodeState.ACTIVE and not n.leaving)
        marked = [n for n in active if n.doubt]
        if not marked:
            return
        records = self._job.ranks.values()
        warned = [Warned(n.name, n.domain, tuple(r.rank for r in records if r.home == n.name)) for n in marked]
        free = rooms(self._job.nodes.values(), [r.home for r in records if r.home])
        needs = [n for r in records for n in r.inventory.need_list()]
        holdings = [h for r in records for h in r.inventory.holdings()]
        for name, spare in proactive_replacements(warned, free, needs, holdings).items():
            self._move_out(self._job.nodes[name], spare, now)

    def _move_out(self, node: NodeRecord, spare: str, now: float) -> None:
        moved = [r for r in self._job.ranks.values() if r.home == node.name]
        ranks = [r.rank for r in moved]
        why = f"{ranks_text(ranks)} go to node {spare}, because of a warning: {node.doubt}"
        self._job.notice(NoticeKind.NODE_REPLACED, f"node {node.name}: {why}")
        self._placement.fence(node, why)
        self._job.outbox.keep(lambda _, rank: rank not in ranks)
        for record in self._job.ranks.values():
            record.lose_page_on(node.name)
        for record in moved:
            self._job.vacate(record.rank)
            record.lose_home()
            if self._job.recovery is not None:
                self._job.recovery.add_victim(record.rank, FailureKind.WARNING, self._job.generation)
        self._placement.settle(ranks, now, node.domain)
        for record in moved:
            self._placement.fill(record, now, detached=True)


class NodePolicy:
    """Tells the job's nodes what is thought of them."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._ratings: Mapping[str, Rating] = {}

    def on_ratings(self, ratings: Mapping[str, Rating]) -> None:
        """The file has been read, or a mark has been added to it."""
        self._ratings = ratings
        for node in self._job.nodes.values():
            self.judge(node)

    def judge(self, node: NodeRecord) -> None:
        """Emit a notice once if a node is excluded or used last, or no longer is."""
        rating = self._ratings.get(node.name)
        use, reason = (Use.NORMAL, "") if rating is None else (rating.use, rating.reason)
        if use is not node.use and use is not Use.NORMAL:
            kind = NoticeKind.NODE_EXCLUDED if use is Use.EXCLUDED else NoticeKind.NODE_USED_LAST
            self._job.notice(kind, f"node {node.name} is {use.value} from now on: {reason}")
        node.rate_use(use, reason)
