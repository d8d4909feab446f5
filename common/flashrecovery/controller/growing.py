"""An elastic job grows: on command, and by itself when a node comes.

The ranks that come are the lowest ones, as the job was launched, that do not belong to it. Their processes are built up
beside training (:mod:`.newcomers`). Once all are at their first step, the members pause before their next one, and in
the recovery that follows, which has no victim, the newcomers are members: the groups are formed with them, and they get
their state as a replacement does.
"""

from __future__ import annotations

from flashrecovery.controller.job_state import JobState
from flashrecovery.controller.newcomers import Newcomers, give_up_all
from flashrecovery.controller.nodes import NodeState, rooms
from flashrecovery.controller.records import THROUGH
from flashrecovery.controller.restore import Decision, decide
from flashrecovery.controller.staffing import Staffing
from flashrecovery.errors import JobFailedError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.layouts import RankGrid
from flashrecovery.plan.placement import Room, place
from flashrecovery.plan.resize import ReplicaRange, growth
from flashrecovery.plan.transitions import State
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb


class Growing:
    """The growth of one job."""

    def __init__(self, job: JobState, staffing: Staffing) -> None:
        self._job = job
        self._staffing = staffing
        self.newcomers = Newcomers(job)
        self._step = -1  # they are to take part from this step on
        self._called_in = -1  # the generation in which the members were told to pause
        self._most: int | None = None  # somebody has commanded so many replicas: a node that comes does not change that
        self._arrived: set[str] = set()  # nodes that have come since it was last looked whether the job can grow

    # -- who comes --------------------------------------------------------------------------------

    def commanded(self, replicas: int) -> None:
        """Somebody wants the job to have so many replicas."""
        self._most = replicas
        self._arrived.clear()

    def ask(self, replicas: int, step: int, now: float) -> str:
        """Have the job grown to so many replicas from ``step`` on (-1: as soon as they are there). Returns why not, ""
        if they are being built up."""
        job, elastic = self._job, self._job.config.elastic
        assert elastic is not None
        size = len(job.ranks)
        if replicas > elastic.max:
            return f"--to {replicas}: the job was launched with {elastic.text}; {elastic.max} at most is allowed"
        if self._in_last_step():
            return "ranks have taken their last step; nobody can come in any more"
        free = rooms(job.nodes.values(), job.homes())
        room = sum(max(one.free, 0) for one in free)
        if room < replicas - size:
            where = ", ".join(f"node {one.name}: {max(one.free, 0)}" for one in free)
            least = f"{size + room} at most is allowed now" if room else "a node with room has to come first"
            return f"--to {replicas}: the job has {size} replicas, and there is room for {room} more ({where}); {least}"
        self._build_up(replicas - size, free, step, now)
        return ""

    def on_node(self, name: str) -> None:
        """A node has come that may hold ranks."""
        self._arrived.add(name)

    def _grow_by_itself(self, now: float) -> None:
        """Have as many replicas as there is room for on nodes that have come."""
        job, elastic = self._job, self._job.config.elastic
        if not self._arrived or job.state is not State.RUNNING or job.recovery is not None or job.newcomers:
            return
        arrived, self._arrived = self._arrived, set()
        if elastic is None or elastic.grow == "never" or self._in_last_step():
            return
        most = elastic.max if self._most is None else min(self._most, elastic.max)
        free = [room for room in rooms(job.nodes.values(), job.homes()) if room.name in arrived and room.free > 0]
        grid, sizes = RankGrid(dp=len(job.ranks)), ReplicaRange(elastic.min, most)
        if len(job.ranks) < most and free:
            found = growth(grid, sum(room.free for room in free), sizes, micro_batches=elastic.max)
            self._build_up(found.coming, free, -1, now)

    def _build_up(self, count: int, free: list[Room], step: int, now: float) -> None:
        job, elastic = self._job, self._job.config.elastic
        assert elastic is not None
        ranks = [rank for rank in range(elastic.max) if rank not in job.ranks][:count]
        places = place(ranks, free) or {}
        self._step, self._called_in = step, -1
        for rank, name in places.items():
            self._staffing.build_beside(rank, name, now)
        if places:
            where = ", ".join(f"rank {rank} on node {name}" for rank, name in places.items())
            text = f"{where}: built up beside training, to come in at a step boundary"
            job.notice(NoticeKind.NEWCOMERS, text)

    # -- the way in -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at deadlines, at nodes that have come, and whether the newcomers can come in."""
        job = self._job
        if job.state in (State.FINISHED, State.FAILED):
            job.newcomers.clear()  # their processes end with all others
            return
        if job.newcomers and job.state is State.RUNNING and self._in_last_step():
            give_up_all(job, "ranks have taken their last step")
        self.newcomers.give_up_late(now)
        self._grow_by_itself(now)
        self.call_in()
        if not job.newcomers and self._called_in == job.generation and job.state is State.RUNNING:
            self._call(pb.Pause(step=-1))  # nobody comes, so nobody needs to pause
            self._called_in = -1

    def _in_last_step(self) -> bool:
        return any(record.place in THROUGH for record in self._job.ranks.values())

    def _call(self, pause: pb.Pause) -> None:
        for record in self._job.in_order:
            self._job.command(record.rank, pb.Command(pause=pause))

    def call_in(self) -> None:
        """If all newcomers are there, have the members pause before the step at which these are to come in."""
        job = self._job
        ready = self.newcomers.all_here and job.state is State.RUNNING and job.recovery is None
        if ready and self._called_in != job.generation:
            self._called_in = job.generation
            self._call(self._pause())

    def _pause(self) -> pb.Pause:
        return pb.Pause(step=max(self._step, 0))

    def pause(self) -> pb.Pause | None:
        """What members that go on after a recovery are told."""
        if not self.newcomers.all_here:
            return None
        self._called_in = self._job.generation
        return self._pause()

    def why_paused(self, version: int) -> str:
        """In words; "" if nobody is to come in."""
        if not self._job.newcomers:
            return ""
        return f"{ranks_text(list(self._job.newcomers))} come in at step {version}"

    def come_in(self, decision: Decision) -> tuple[Decision, list[int]]:
        """All members are stopped and are to go on as in ``decision``. If all newcomers are there, and it is time,
        they are members from now on. Returns what is decided with them, and who they are."""
        job = self._job
        if not self.newcomers.all_here or decision.round.version < self._step:
            return decision, []
        coming = {rank: newcomer.record for rank, newcomer in job.newcomers.items()}
        everybody = dict(sorted({**job.ranks, **coming}.items()))
        try:
            found = decide(everybody, job.checkpoint)
        except JobFailedError as e:
            give_up_all(job, str(e))
            return decision, []
        if (found.round.version, found.checkpoint) != (decision.round.version, decision.checkpoint):
            give_up_all(
                job, f"nobody could give it its state at version {decision.round.version}: {found.round.reason}"
            )
            return decision, []
        for rank, record in coming.items():
            del job.newcomers[rank]
            record.joined_generation, record.page_on = job.generation, record.home
            job.enrol(record)
            job.nodes[record.home].state = NodeState.ACTIVE
        return found, sorted(coming)
