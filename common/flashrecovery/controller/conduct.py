"""What is known of the nodes from before decides how they are used: last, or not at all.

:mod:`flashrecovery.plan.node_marks` rates them; :mod:`.node_memory` keeps the file from which that is known. A node
that is used last is treated like one that a device plugin has warned of: it takes ranks when no other can, and is left
with the next failure if a spare node is there. An excluded one takes ranks only if the job could not go on otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashrecovery.controller.job_state import JobState
from flashrecovery.controller.nodes import NodeRecord
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.node_marks import Rating, Use


class Conduct:
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
        """Say so once if a node is not used like the others (any more)."""
        rating = self._ratings.get(node.name)
        use, reason = (Use.NORMAL, "") if rating is None else (rating.use, rating.reason)
        if use is not node.use and use is not Use.NORMAL:
            kind = NoticeKind.NODE_EXCLUDED if use is Use.EXCLUDED else NoticeKind.NODE_USED_LAST
            self._job.notice(kind, f"node {node.name} is {use.value} from now on: {reason}")
        node.use, node.use_reason = use, reason
