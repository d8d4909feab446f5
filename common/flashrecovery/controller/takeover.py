"""A controller that is started while its job runs: it learns from the agents what there is, and goes on.

Nothing of the old controller is needed. Every agent says which ranks it holds and whether they take steps. If all do,
in one generation, the job simply runs; if not, because a rank is missing or the old controller died in the middle of a
recovery, a recovery in the next generation brings everybody together, as any further failure would. Generations never
go back: the newest that any agent has seen counts, or that a controller before this one has written down
(:mod:`.storage.generation_file`): all agents that had seen it may be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashrecovery.controller.membership.found_layout import FoundLayout
from flashrecovery.controller.membership.launch import LaunchSequence
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.parallelism import Parallelism
from flashrecovery.controller.recovery import RecoverySteps
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.rank_record import BUILT_UP, THROUGH, Place, RankProcess, RankRecord, unequal_ends
from flashrecovery.controller.storage.generation_file import Numbers
from flashrecovery.kinds import FailureKind, NoticeKind, Ordered
from flashrecovery.plan.membership.failure_domains import labelled_gpus
from flashrecovery.plan.membership.placement import neighbour_stride
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

_GOING = THROUGH | {Place.RUNNING}
QUIET = 3.0
"""Times ``node_silence_s`` without another agent: all that live have come to an elected controller."""


class TakeOver:
    """The way from a running job to a machine that knows it."""

    def __init__(
        self,
        job: JobState,
        placement: RankPlacement,
        starting: LaunchSequence,
        steps: RecoverySteps,
        parallelism: Parallelism,
    ) -> None:
        self._job = job
        self._parallelism = parallelism
        self._staging: pb.StagingKept | None = None  # the newest that a node has heard of
        self._placement = placement
        self._starting = starting
        self._steps = steps
        self.written_down: Mapping[str, Numbers] = {}
        self._launch_of = -1  # the newest generation in which a node has named the launch
        self._layout = FoundLayout(job)
        self._found_at: float | None = None  # when the last agent has come to an elected controller
        self._knows_stride = False  # a node has told it
        self._regrouped = -1  # the newest generation in which a node has heard who forms the groups
        self._members_of = -1  # the newest generation in which a node has told who belongs to an elastic job

    def read_numbers(self, written_down: Mapping[str, Numbers]) -> None:
        """What controllers before this one have written down, by launch."""
        self.written_down = written_down

    @property
    def gathering(self) -> bool:
        """Whether the job runs already and not all of its agents have come yet."""
        return self._job.found_since is not None and not self._job.launched

    @property
    def gathered(self) -> bool:
        """Whether the job ran already, and all of its agents have connected, or the missing ones count as lost."""
        return self._job.found_since is not None and self._job.launched

    @property
    def begun(self) -> bool:
        """Whether the job runs under this controller, as far as it knows: launched by it, or found."""
        return self._job.launched or self._job.found_since is not None

    def inherit(self, now: float) -> None:
        """The job runs already, under a controller that is lost with its node; the others' agents are on their way."""
        self._job.found_running(now)
        self._found_at = now

    def find(self, node: NodeRecord, message: pb.Register, now: float) -> None:
        """A node with ranks has come to a controller that has not launched them."""
        if self._job.found_since is None:
            self._job.found_running(now)
        if self._found_at is not None:
            self._found_at = now
        if self._job.config.parallelism is not None:
            newest, older = self._layout.hear(message)
            for name in [*older, *([] if newest else [node.name])]:
                self._placement.fence(self._job.nodes[name], "the job has changed its parallel layout since")
            if not newest:
                return
        self._forget_who_left(node, message)
        self._forget_who_was_to_come(node, message)
        for worker in message.workers:
            record = self._job.ranks[worker.rank]
            lives = record.place is not Place.EMPTY
            if record.home and record.process.joined_generation >= message.generation + (not lives):
                self._placement.fence(
                    node, f"rank {worker.rank} {'lives' if lives else 'was last'} on node {record.home}"
                )
                return
        for worker in message.workers:
            record = self._job.ranks[worker.rank]
            if record.place is not Place.EMPTY:
                self._placement.fence(self._job.nodes[record.home], f"rank {worker.rank} lives on node {node.name}")
            self._adopt_worker(record, worker, node, message.generation)
        for page in message.pages:
            self._adopt_page(self._job.ranks[page.rank], page, node, message.generation)
        self._job.hear_generation(message.generation)
        self._knows_stride |= message.stride > 0
        self._job.place_copies(message.stride or self._job.stride, tuple(message.domains) or self._job.domains)
        if not self._job.parallel.text:  # else it is counted with the changes
            self._job.hear_restarts(message.attempt)
        if all(r.home for r in self._job.ranks.values()):
            self._take_over(now)

    def hear_of_staging(self, message: pb.Register) -> None:
        """A node knows where the state is with which the ranks of another layout begin."""
        if message.HasField("staging") and (
            self._staging is None or message.staging.generation > self._staging.generation
        ):
            self._staging = pb.StagingKept()
            self._staging.CopyFrom(message.staging)

    def hear_of_launch(self, message: pb.Register) -> None:
        """A node names the launch of which it has heard with the newest generation that it knows."""
        if message.launch and message.generation > self._launch_of:
            self._job.hear_launch(message.launch)
            self._launch_of = message.generation

    def _forget_who_left(self, node: NodeRecord, message: pb.Register) -> None:
        """An elastic job has gone on without some ranks; one of their processes may not have heard of it yet. Nor has a
        node that was cut off, and comes with an older generation, heard of ranks that have come since."""
        if message.members:
            self._regrouped = max(self._regrouped, message.regrouped)
        if message.members and message.generation >= self._members_of:
            come = set(message.members).difference(self._job.ranks) if message.generation > self._members_of else ()
            self._members_of = message.generation
            for rank in come:
                self._job.enrol(RankRecord(rank))
            for rank in set(self._job.ranks).difference(message.members):
                self._job.tell_to_leave(rank, self._job.remove_member(rank).home)
            self._job.settle_layout()
        for left in [worker for worker in message.workers if worker.rank not in self._job.ranks]:
            self._job.tell_to_leave(left.rank, node.name)
            message.workers.remove(left)
        for page in [page for page in message.pages if page.rank not in self._job.ranks]:
            message.pages.remove(page)

    def _forget_who_was_to_come(self, node: NodeRecord, message: pb.Register) -> None:
        """A rank was being handed over when the controller was lost, and two nodes have a process of it. The old one is
        there until the new one has all that it needs (:mod:`.relieved`): as long as that has not been let into its
        loop, it is the one that ends, and takes no node's other ranks with it."""
        for worker in list(message.workers):
            record = self._job.ranks[worker.rank]
            if record.place is Place.EMPTY or record.process.joined_generation != message.generation:
                continue
            if not worker.resumed and record.place not in BUILT_UP:
                self._job.tell_to_leave(worker.rank, node.name)
                message.workers.remove(worker)
            elif worker.resumed and record.place in BUILT_UP:
                self._job.tell_to_leave(worker.rank, record.home)
                self._job.vacate(record.rank)
                record.forget_home()
            elif worker.resumed and not (worker.stepping and record.place in _GOING):
                # the old one has stayed until all had taken a step (:mod:`.elastic.released_processes`)
                here, there = (worker.stepping, worker.committed), (record.place in _GOING, record.committed)
                self._job.tell_to_leave(worker.rank, record.home if here > there else node.name)
                if here > there:
                    self._job.vacate(record.rank)
                    record.forget_home()
                else:
                    message.workers.remove(worker)

    def _adopt_page(self, record: RankRecord, page: pb.PageOf, node: NodeRecord, generation: int) -> None:
        """The rank's process has died there. Filled again on that node, it finds its rank-local states."""
        if record.place is not Place.EMPTY or (record.home and record.process.joined_generation >= generation):
            return
        record.found_on(node.name, page, generation)

    def _adopt_worker(self, record: RankRecord, worker: pb.WorkerState, node: NodeRecord, generation: int) -> None:
        record.found_on(node.name, worker, generation)
        process = RankProcess(worker.pid, node.name, node.host, generation)
        record.found_process(process, (worker.store_host, worker.store_port))
        place = Place.STARTING
        if worker.HasField("joined"):
            place = Place.JOINED
            elastic = self._job.config.elastic is not None
            record.joined(worker.joined, as_launched=elastic)  # perhaps it has not said anything since
            self._job.parallel.hear_facts(worker.joined.facts)
        if worker.released:
            place = Place.FINISHED if worker.exited else Place.RELEASED
        elif worker.HasField("done"):
            place = Place.DONE
            record.done(worker.done)
        elif worker.stepping:
            place = Place.RUNNING
        elif worker.resumed:
            place = Place.STOPPING  # in the middle of a recovery; the next one tells it what to do
        self._job.move(record.rank, place)

    def take_over_if_late(self, now: float) -> None:
        if not self.gathering or self._job.found_since is None:
            return
        limits = self._job.config.timeouts
        quiet = self._found_at is not None and now - self._found_at >= QUIET * limits.node_silence_s
        if quiet or now - self._job.found_since >= limits.takeover_s:
            self._take_over(now)

    def _take_over(self, now: float) -> None:
        """All agents are there, or have had the time."""
        self._job.take_charge()
        config = self._job.config
        if not self._job.parallel.text and not self._knows_stride:  # no agent had a rank table yet
            domains = list(map(str, self._job.domains or range(config.nnodes)))
            gpus = labelled_gpus(config.gpu_domain, config.nproc_per_node)
            self._job.place_copies(neighbour_stride(domains, config.nproc_per_node, gpus), self._job.domains)
        heard = Numbers(self._job.generation, self._job.restarts, self._job.parallel.changes)
        written = self.written_down.get(self._job.launch, Numbers())
        self._job.hear_generation(written.generation)
        self._job.hear_attempts(max(heard.attempts, written.attempts))
        if self._regrouped == self._job.generation:  # the one before this has told it, before a node heard of it
            self._job.membership.size_told(len(self._job.ranks))
        if self._job.checkpoint is not None:
            self._job.command(AGENT, self._job.saved())
        replanned = self._job.config.parallelism is not None
        if replanned and not self._parallelism.inherit(self._staging):  # what was written there will not be read
            self._job.command(AGENT, pb.Command(drop_staging=pb.DropStaging()))
        homes = {r.home for r in self._job.ranks.values()}
        for node in self._job.nodes.values():
            if node.alive:
                node.use_for(homes)
        records = list(self._job.ranks.values())
        missing = [r.rank for r in records if r.place is Place.EMPTY]
        behind = [
            r.rank for r in records if r.process.joined_generation < self._job.generation and r.rank not in missing
        ]
        said = f"a new controller has found {len(records) - len(missing)} of {len(records)} ranks"
        lost = self._layout.why_lost()
        if lost:
            self._job.remember_failure(f"{said}, none of them in its loop")
            if not self._parallelism.begin_again(now):
                self._job.fail(lost)
            return
        if len(missing) == len(records) and self._job.checkpoint is None:
            self._job.fail(
                f"{said}, so no rank holds any state; start the job again, with --resume if it had checkpoints"
            )
            return
        unknown = self._ranks_of_unknown_replica()
        if unknown:
            self._job.fail(
                f"{said}, and no remaining rank says which ranks make up a replica, so the state with which ranks "
                f"{unknown}, which the launch did not have, must begin is unknown; start the job again, with --resume"
            )
            return
        uneven = unequal_ends(records)
        if uneven:  # else all may end, or a rank that makes more calls waits for ever
            self._job.fail(uneven)
            return
        self._job.notice(NoticeKind.TAKEN_OVER, said)
        going = all(r.place in _GOING for r in records) and not behind
        if going:
            self._job.to(State.RUNNING)
            self._parallelism.await_confirmation(now)
            self._placement.publish_rank_table()
            self._steps.confirm(now)
            self._steps.finish_if_all_have(now)
            return
        if self._job.places[Place.RELEASED] or self._job.places[Place.FINISHED]:
            unknown = [r.rank for r in records if r.place not in _GOING]
            self._job.fail(f"{said}; all have taken their last step, but how ranks {unknown} have ended is unknown")
            return
        self._job.remember_failure(self._job.last_failure or f"{said}, not all of them in their loop")
        self._job.membership.doubt_members(unsure=self._job.config.elastic is not None)
        trained = any(r.place in (Place.RUNNING, Place.DONE, Place.STOPPING) or r.committed > 0 for r in records)
        # There was a recovery. Who says that it has taken no step may have come in it, and who had the state is lost.
        self._job.hear_recovered(before=any(known.generation > known.restarts for known in (heard, written)))
        trained |= self._job.recovered_before
        if not trained and len(missing) < len(records):
            # Nodes may come back with set-up logs of starts that this controller has not heard of.
            self._job.hear_restarts(written.restarts)
            self._settle_found(now)
            self._starting.start_again(f"{said}, before the first step", now)
            return
        recovery = self._job.open_recovery(now)
        for rank in missing:
            recovery.add_victim(rank, FailureKind.CONTROLLER, self._job.generation + 1)
        self._settle_found(now)
        self._placement.publish_others()
        limit = now + self._job.config.timeouts.replacement_s
        for record in records:
            if record.place is Place.STARTING:
                self._job.outbox.expect(record.rank, Ordered.REPLACE, limit)
        self._steps.enter("controller", now, missing)

    def _ranks_of_unknown_replica(self) -> list[int]:
        """Ranks beyond the launch that are to be filled and may be of replicas of several ranks, if no process is left
        that has said so: begun at another place of its replica than its own, such a rank would train with other
        values than it should."""
        job, elastic = self._job, self._job.config.elastic
        beyond = [record for record in job.in_order if record.rank >= job.world_size]
        if elastic is None or any(record.shape is not None for record in job.in_order):
            return []
        launches = range(max(elastic.min, 2), elastic.max)  # of one replica of several ranks, none come
        several = {job.world_size // n for n in launches if job.world_size % n == 0} - {1}
        numbers = {record.rank for record in beyond}
        if not any(numbers == {r // each * each + at for r in numbers for at in range(each)} for each in several):
            return []  # replicas come as a whole
        return [record.rank for record in beyond if record.place is Place.EMPTY]

    def _settle_found(self, now: float) -> None:
        """Give a node to the ranks with which no agent has come. A rank that has died meanwhile is filled where it
        was."""
        homeless = self._placement.homeless()
        if homeless:
            self._placement.settle(homeless, now)
