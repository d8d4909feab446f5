"""How often a node has failed lately, over generations and jobs, and so whether it is used last, or not at all. Pure.

Each failure of a node is a *mark*. A mark is weighted by its kind (a lost device or node says more about a machine than
an exception in a script), and decays: after a week, half of it is left. Failures of several nodes of one job at about
the same time are not the fault of one node (a switch, the storage, a bug at some step, a scheduler that ends
everything), and do not count.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flashrecovery.kinds import TRAITS

SLOW = "slow"
"""The kind of a mark for holding the others up."""
WEIGHTS: Mapping[str, float] = {
    **{kind.value: traits.node_weight for kind, traits in TRAITS.items() if traits.node_weight},
    SLOW: 0.5,
}
"""What a fresh mark counts. Other kinds are no node's doing, and leave none."""
HALF_LIFE_S = 7 * 86400.0
LAST = 1.5
"""A node with so much is used last: more than one failure of the weightiest kinds."""
EXCLUDED = 3.0
"""... and with so much not at all."""
KEEP_S = 10 * HALF_LIFE_S
"""Older marks count for nothing."""
TOGETHER_S = 600.0
"""Marks of one kind and job within this time have a common cause, ..."""
TOGETHER_NODES = 3
"""... if they are on at least this many nodes."""


@dataclass(frozen=True, slots=True)
class NodeMark:
    """One failure of one node.

    Attributes:
        time: Unix seconds.
        kind: a :class:`~flashrecovery.kinds.FailureKind`, or :data:`SLOW`.
        job: the run directory.
        generation: of the job, in which it failed.
        detail: as text.
    """

    time: float
    node: str
    kind: str
    job: str
    generation: int = 0
    detail: str = ""


class Use(str, Enum):
    """What a node's marks mean for its use, from good to bad."""

    NORMAL = "normal"
    LAST = "used last"
    EXCLUDED = "excluded"


@dataclass(frozen=True, slots=True)
class Rating:
    """The rating of a node.

    Attributes:
        score: the sum of its marks, with decay.
        counted, common: marks that count, and those that do not because other nodes failed with it.
        reason: as text; "" without any mark.
    """

    use: Use
    score: float
    counted: int
    common: int
    reason: str


def ratings(marks: Iterable[NodeMark], now: float) -> dict[str, Rating]:
    """A rating for each node that has a mark. ``now``: Unix seconds. A mark of the future, by another host's clock, is
    as fresh as one of now."""
    known = [mark for mark in marks if WEIGHTS.get(mark.kind, 0.0) > 0 and now - mark.time <= KEEP_S]
    common = _common(known)
    by_node: dict[str, list[tuple[NodeMark, bool]]] = defaultdict(list)
    for mark, shared in zip(known, common, strict=True):
        by_node[mark.node].append((mark, shared))
    return {node: _rating(some, now) for node, some in sorted(by_node.items())}


def _common(marks: Sequence[NodeMark]) -> list[bool]:
    """Which marks have a cause that several nodes share."""
    alike: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for mark in marks:
        alike[mark.job, mark.kind].append((mark.time, mark.node))
    for some in alike.values():
        some.sort()
    found = []
    for mark in marks:
        some = alike[mark.job, mark.kind]
        first = bisect.bisect_left(some, (mark.time - TOGETHER_S, ""))
        nodes: set[str] = set()
        for time, node in some[first:]:
            if time > mark.time + TOGETHER_S or len(nodes) >= TOGETHER_NODES:
                break
            nodes.add(node)
        found.append(len(nodes) >= TOGETHER_NODES)
    return found


def faded(mark: NodeMark, now: float) -> float:
    """What is left of a mark."""
    return WEIGHTS.get(mark.kind, 0.0) * float(0.5 ** (max(0.0, now - mark.time) / HALF_LIFE_S))


def _rating(marks: Sequence[tuple[NodeMark, bool]], now: float) -> Rating:
    own = [mark for mark, shared in marks if not shared]
    score = sum(faded(mark, now) for mark in own)
    use = Use.EXCLUDED if score >= EXCLUDED else Use.LAST if score >= LAST else Use.NORMAL
    return Rating(use, score, len(own), len(marks) - len(own), _words(own, len(marks) - len(own), score, now))


def _words(own: Sequence[NodeMark], common: int, score: float, now: float) -> str:
    said = []
    if own:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(mark.kind for mark in own).most_common())
        jobs = len({mark.job for mark in own})
        days = max(0.0, now - min(mark.time for mark in own)) / 86400
        said.append(f"{kinds} in {jobs} job{'s' * (jobs > 1)} within {days:.1f} days (score {score:.2f})")
    if common:
        said.append(f"{common} together with other nodes, which do not count")
    return "; ".join(said)


def may_be_used_again(marks: Iterable[NodeMark], node: str, now: float) -> float:
    """Seconds until an excluded node is only used last, if nothing more happens; 0 if it is not excluded."""
    score = ratings(marks, now).get(node)
    if score is None or score.use is not Use.EXCLUDED:
        return 0.0
    return math.log2(score.score / EXCLUDED) * HALF_LIFE_S  # all marks fade alike, and so does their sum
