"""A controller that is started while its job runs: it learns from the agents what there is, and goes on.

Nothing of the old controller is needed. Every agent says which ranks it holds and whether they take steps. If all do,
in one generation, the job simply runs; if not, because a rank is missing or the old controller died in the middle of a
recovery, a recovery in the next generation brings everybody together, as any further failure would. Generations never
go back: the newest that any agent has seen counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.controller.history import Recovery
from flashrecovery.controller.job_state import AGENT
from flashrecovery.controller.nodes import NodeRecord, NodeState
from flashrecovery.controller.records import THROUGH, Place, RankRecord
from flashrecovery.controller.recovery import RecoverySteps
from flashrecovery.controller.states import State
from flashrecovery.proto import flashrecovery_pb2 as pb

_GOING = THROUGH | {Place.RUNNING}
QUIET = 3.0
"""Times ``node_silence_s`` without another agent: all that live have come to an elected controller."""


@dataclass
class TakeOver(RecoverySteps):
    """The way from a running job to a machine that knows it."""

    @property
    def gathering(self) -> bool:
        """Whether the job runs already and not all of its agents have come yet."""
        return self._found_since is not None and not self._launched

    @property
    def begun(self) -> bool:
        """Whether the job runs under this controller, as far as it knows: launched by it, or found."""
        return self._launched or self._found_since is not None

    def inherit(self, now: float) -> None:
        """The job runs already, under a controller that is lost with its node; the others' agents are on their way."""
        self._found_since = self._started_at = self._found_at = now

    def _find(self, node: NodeRecord, message: pb.Register, now: float) -> None:
        """A node with ranks has come to a controller that has not launched them."""
        if self._found_since is None:
            self._found_since = self._started_at = now
        if self._found_at is not None:
            self._found_at = now
        for worker in message.workers:
            record = self.ranks[worker.rank]
            lives = record.place is not Place.EMPTY
            if record.home and record.joined_generation >= message.generation + (not lives):
                self._fence(node, f"rank {worker.rank} {'lives' if lives else 'was last'} on node {record.home}")
                return
        for worker in message.workers:
            record = self.ranks[worker.rank]
            if record.place is not Place.EMPTY:
                self._fence(self.nodes[record.home], f"rank {worker.rank} lives on node {node.name}")
            self._adopt_worker(record, worker, node, message.generation)
        for page in message.pages:
            self._adopt_page(self.ranks[page.rank], page, node, message.generation)
        self.generation = max(self.generation, message.generation)
        self.stride = message.stride or self.stride
        self._restarts = max(self._restarts, message.attempt)
        if all(r.home for r in self.ranks.values()):
            self._take_over(now)

    def _adopt_page(self, record: RankRecord, page: pb.PageOf, node: NodeRecord, generation: int) -> None:
        """The rank's process has died there. Filled again on that node, it finds its capsules."""
        if record.place is not Place.EMPTY or (record.home and record.joined_generation >= generation):
            return
        self._is_at_home(record, page, node, generation)

    @staticmethod
    def _is_at_home(record: RankRecord, said: pb.WorkerState | pb.PageOf, node: NodeRecord, generation: int) -> None:
        """The rank belongs to ``node``, with what that says of its page."""
        record.home = record.page_on = node.name
        record.local_rank, record.joined_generation, record.committed = said.local_rank, generation, said.committed
        record.capsules, record.early = tuple(said.capsules), frozenset(said.early)

    def _adopt_worker(self, record: RankRecord, worker: pb.WorkerState, node: NodeRecord, generation: int) -> None:
        self._is_at_home(record, worker, node, generation)
        record.pid, record.node, record.host = worker.pid, node.name, node.host
        record.store = (worker.store_host, worker.store_port)
        record.place = Place.STARTING
        if worker.HasField("joined"):
            record.joined(worker.joined)
        if worker.released:
            record.place = Place.FINISHED if worker.exited else Place.RELEASED
        elif worker.HasField("done"):
            record.place, record.committed = Place.DONE, worker.done.version
        elif worker.stepping:
            record.place = Place.RUNNING
        elif worker.resumed:
            record.place = Place.STOPPING  # in the middle of a recovery; the next one tells it what to do

    def _take_over_if_late(self, now: float) -> None:
        if not self.gathering or self._found_since is None:
            return
        limits = self.config.timeouts
        quiet = self._found_at is not None and now - self._found_at >= QUIET * limits.node_silence_s
        if quiet or now - self._found_since >= limits.takeover_s:
            self._take_over(now)

    def _take_over(self, now: float) -> None:
        """All agents are there, or have had the time."""
        self._launched = True
        if self.checkpoint is not None:
            self._command(AGENT, self.saved())
        homes = {r.home for r in self.ranks.values()}
        for node in self.nodes.values():
            if node.alive:
                node.state = NodeState.ACTIVE if node.name in homes else NodeState.SPARE
        records = list(self.ranks.values())
        missing = [r.rank for r in records if r.place is Place.EMPTY]
        behind = [r.rank for r in records if r.joined_generation < self.generation and r.rank not in missing]
        said = f"a new controller has found {len(records) - len(missing)} of {len(records)} ranks"
        if len(missing) == len(records) and self.checkpoint is None:
            self._fail(f"{said}, so nobody holds any state; start the job again, with --resume if it had checkpoints")
            return
        self._emit(ev.Notice(generation=self.generation, kind="taken_over", text=said))
        going = all(r.place in _GOING for r in records) and not behind
        if going:
            self._to(State.RUNNING)
            self._publish_rank_table()
            self._confirm(now)
            self._finish_if_all_have(now)
            return
        if self.places[Place.RELEASED] or self.places[Place.FINISHED]:
            unknown = [r.rank for r in records if r.place not in _GOING]
            self._fail(f"{said}; all have taken their last step, but how ranks {unknown} have ended, nobody here knows")
            return
        self.last_failure = self.last_failure or f"{said}, not all of them in their loop"
        trained = any(r.place in (Place.RUNNING, Place.DONE, Place.STOPPING) or r.committed > 0 for r in records)
        if not trained and len(missing) < len(records):
            self._settle_found(now)
            self._start_again(f"{said}, before the first step", now)
            return
        self.recovery = Recovery(self.generation, now, 0.0)
        for rank in missing:
            self.recovery.add_victim(rank, "controller", self.generation + 1)
        self._settle_found(now)
        self._publish_others()
        limit = now + self.config.timeouts.replacement_s
        for record in records:
            if record.place is Place.STARTING:
                self.outbox.expect(record.rank, "replace", limit)
        self._enter_recovery("controller", now, missing)

    def _settle_found(self, now: float) -> None:
        """Give the ranks that nobody has come with a node. Who has died meanwhile is filled again where it was."""
        homeless = self._homeless()
        if homeless:
            self._settle(homeless, now)
