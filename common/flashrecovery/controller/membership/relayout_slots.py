"""On which nodes there is room for the ranks of another parallel layout.

Those that live stay where they are, or go to each other's places. Free places of nodes count, too: on command all of
them, up to the ranks of the launch; where ranks cannot be replaced, only those of nodes that have lost none of them
(the others may be why), and none where no rank is ever replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.loss_policy import never_replaced
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.strategy.layout_places import NodeSlot, places
from flashrecovery.plan.strategy.relayout import LayoutFacts, best
from flashrecovery.plan.strategy.strategy import Strategy

Slots = Mapping[str, tuple[int, ...]]
"""Local ranks, by node."""


class RelayoutSlots:
    """The places among which the next layout of one job is chosen."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._slots: Slots = {}

    def open_all(self) -> list[int]:
        """Use all slots that exist, because a layout was commanded. Returns how many each node has."""
        self._slots = all_slots(self._job)
        return self.rooms()

    def narrow(self, lost: Collection[int]) -> list[int]:
        """Those without these ranks, which get no other process."""
        self._slots = slots_without(self._job, lost)
        return self.rooms(lost)

    def rooms(self, lost: Collection[int] = ()) -> list[int]:
        """How many each node has that still lives. ``lost``: ranks that still belong to the job, and are about to
        leave it."""
        return [len(locals_) for locals_ in self._now(lost).values()]

    def places(self, strategy: Strategy) -> list[NodeSlot]:
        """The slots of the ranks of a layout, in order."""
        return places(strategy.tp, strategy.ranks, self._now())

    def _now(self, lost: Collection[int] = ()) -> Slots:
        return _merged(_of_members(self._job, lost), self._slots, self._job)


def all_slots(job: JobState) -> Slots:
    """The slots of the ranks that live, and free ones, up to the ranks of the launch."""
    return _capped(_merged(_of_members(job, ()), _free(job, ()), job), job)


def slots_without(job: JobState, lost: Collection[int]) -> Slots:
    """The slots of the other ranks, and free slots if ranks are replaced at all."""
    members = _of_members(job, lost)
    if never_replaced(job):
        return members
    bad = {job.ranks[rank].home for rank in lost if rank in job.ranks}
    return _capped(_merged(members, _free(job, bad), job), job)


def facts_now(job: JobState) -> LayoutFacts:
    """What a layout would shard. Of an elastic job whose ranks have said their replicas, with as many as there are."""
    facts = LayoutFacts.parse(job.parallel.facts)
    if job.config.elastic is None or all(record.shape is None for record in job.in_order):
        return facts
    # With expert parallelism a replica has several data-parallel ranks, the same number in any size.
    dp = facts.layout["dp"] * job.replicas // job.shape.replicas
    return replace(facts, layout={**facts.layout, "dp": dp})


def a_layout_fits(job: JobState, lost: Collection[int], least: int) -> bool:
    """Whether one of ``least`` ranks or more does, in a job without these ones."""
    facts = facts_now(job)
    rooms = [len(locals_) for locals_ in slots_without(job, lost).values()]
    try:
        best(facts, rooms, least, job.step_s)
    except UnsupportedError:
        return False
    return True


def _of_members(job: JobState, without: Collection[int]) -> Slots:
    found: dict[str, tuple[int, ...]] = {}
    for record in job.in_order:
        if record.home and record.rank not in without:
            found[record.home] = (*found.get(record.home, ()), record.local_rank)
    return found


def _free(job: JobState, but: Collection[str]) -> Slots:
    taken = _of_members(job, ())
    usable = (
        node
        for node in job.nodes.values()
        if node.state in (NodeState.ACTIVE, NodeState.SPARE) and not node.leaving and not node.excluded
    )
    return {
        node.name: tuple(n for n in range(node.slots) if n not in taken.get(node.name, ()))
        for node in usable
        if node.name not in but
    }


def _merged(first: Slots, more: Slots, job: JobState) -> Slots:
    """Both, of the nodes that live, without those of which nothing is left."""
    names: Iterable[str] = dict.fromkeys([*first, *more])
    both = {name: tuple(dict.fromkeys([*first.get(name, ()), *more.get(name, ())])) for name in names}
    return {name: slots for name, slots in both.items() if slots and name in job.nodes and job.nodes[name].alive}


def _capped(slots: Slots, job: JobState) -> Slots:
    """The first ones, as many as the launch had ranks."""
    found: dict[str, tuple[int, ...]] = {}
    left = job.config.world_size
    for name, locals_ in slots.items():
        taken = locals_[:left]
        left -= len(taken)
        if taken:
            found[name] = taken
    return found
