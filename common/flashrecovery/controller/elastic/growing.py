"""An elastic job grows: on command, and by itself when a node comes.

The replicas that come are the lowest ones, as the job was launched, that do not belong to it, and then those beyond the
launch. The processes of their ranks are built up beside training
(:mod:`flashrecovery.controller.membership.joining_processes`) and come in at a step boundary (:mod:`.join`).
"""

from __future__ import annotations

from dataclasses import replace

from flashrecovery.config import ElasticSettings
from flashrecovery.controller.elastic.join import Joining
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.loss_policy import allowed_sizes
from flashrecovery.controller.state.nodes import NodeState, rooms
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.elastic.new_ranks import missing
from flashrecovery.plan.elastic.resize import coming
from flashrecovery.plan.membership.placement import Room, place_joining
from flashrecovery.plan.transitions import State


class Growing:
    """The growth of one job."""

    def __init__(self, job: JobState, placement: RankPlacement, coming: Joining) -> None:
        self._job = job
        self._placement = placement
        self._coming = coming
        self._most: int | None = None  # the commanded number of replicas; a new node does not change it
        self._arrived: set[str] = set()  # nodes that have come since it was last looked whether the job can grow
        self._unused: set[str] = set()  # that came before; as long as they have no ranks, another one may make it up
        self._begun = False  # it has been looked at the nodes that were there before the launch

    # -- which ranks come -------------------------------------------------------------------------

    def commanded(self, replicas: int) -> None:
        """A user has commanded this number of replicas."""
        self._most = replicas
        self._arrived.clear()
        self._unused.clear()

    def laid_out(self) -> None:
        """The job has changed its parallel layout: what was commanded was for the one before."""
        self._most = None
        self._coming.expect(-1)

    def ask(self, elastic: ElasticSettings, replicas: int, step: int, now: float) -> str:
        """Start to grow the job to this many replicas from ``step`` on (-1: as soon as they are ready). Returns why it
        cannot grow; "" if the processes are being started."""
        job = self._job
        size, shape, sizes = job.replicas, job.shape, allowed_sizes(job)
        if replicas > sizes.most:
            launched = f"was launched with {elastic.text}"
            state = f"has changed to {job.parallel.text}" if job.parallel.text else launched
            return f"--to {replicas}: the job {state}; {sizes.most} at most is allowed"
        if self._coming.in_last_step:
            return "ranks have taken their last step; no process can join any more"
        free = rooms(job.nodes.values(), job.homes())
        room = sum(max(one.free, 0) for one in free)
        if room < (replicas - size) * shape.each:
            where = ", ".join(f"node {one.name}: {max(one.free, 0)}" for one in free)
            possible = size + room // shape.each
            least = f"{possible} at most is allowed now" if possible > size else "a node with room has to come first"
            each = "" if shape.each == 1 else f" of {shape.each} ranks each"
            more = f"{room} more" if shape.each == 1 else f"{room} more rank{'' if room == 1 else 's'}"
            return (
                f"--to {replicas}: the job has {size} replicas{each}, and there is room for {more} ({where}); {least}"
            )
        self._build_up(replicas - size, elastic.max, free, step, now)
        return ""

    def on_node(self, name: str) -> None:
        """A node has come that may hold ranks."""
        self._arrived.add(name)

    def grow_by_itself(self, now: float) -> None:
        """Have as many replicas as there is room for on nodes that have come."""
        job, elastic = self._job, self._job.config.elastic
        if not self._begun and job.state is State.RUNNING:
            self._begun = True
            if elastic is not None and elastic.max > job.shape.replicas and job.found_since is None:  # for growth, too
                self._arrived |= {node.name for node in job.nodes.values() if node.state is NodeState.SPARE}
        if not self._arrived or job.state is not State.RUNNING or job.recovery is not None or job.membership.joining:
            return
        arrived, self._arrived = self._arrived, set()
        if elastic is None or elastic.grow == "never" or self._coming.in_last_step:
            return
        allowed = allowed_sizes(job)
        most = allowed.most if self._most is None else min(self._most, allowed.most)
        free = [room for room in rooms(job.nodes.values(), job.homes()) if room.free > 0]
        new = [room for room in free if room.name in arrived or (room.spare and room.name in self._unused)]
        self._unused = {room.name for room in new}
        if job.shape.each == 1:
            free = new
        size, sizes = job.replicas, replace(allowed, most=most)
        if size < most and new:
            # Some ranks of a replica may have their place on a node that its other ranks have left.
            room = min(sum(room.free for room in free), sum(room.free for room in new) * job.shape.each)
            self._build_up(coming(size, room, sizes, job.shape.each), elastic.max, free, -1, now)

    def _build_up(self, count: int, most: int, free: list[Room], step: int, now: float) -> None:
        job, shape = self._job, self._job.shape
        replicas = missing(shape, job.ranks, most)[:count]
        ranks = sorted(rank for replica in replicas for rank in shape.ranks(replica))
        homes = {record.rank: record.home for record in job.in_order}
        per_node = job.world_size if job.parallel.text else job.config.nproc_per_node  # where they were is not known
        places = place_joining(ranks, free, homes, per_node)
        self._coming.expect(step)
        for rank, name in places.items():
            self._placement.build_joining(rank, name, now)
        if places:
            where = ", ".join(f"rank {rank} on node {name}" for rank, name in places.items())
            text = f"{where}: built up beside training, to come in at a step boundary"
            job.notice(NoticeKind.JOINING_PROCESSES, text)
