"""The way to the first step: all ranks are started, once their nodes are there, and again if that fails."""

from __future__ import annotations

from flashrecovery.controller.membership.admission import other_command
from flashrecovery.controller.membership.joining_processes import give_up_all
from flashrecovery.controller.membership.placement import RankPlacement
from flashrecovery.controller.state.job_state import AGENT, JobState
from flashrecovery.controller.state.nodes import NodeRecord, is_spare, launch_order
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import NoticeKind, Ordered
from flashrecovery.plan.membership.failure_domains import labelled_gpus
from flashrecovery.plan.membership.placement import neighbour_stride, shared_domains
from flashrecovery.plan.transitions import State
from flashrecovery.plan.words import HOW_TO_PROTECT, shortened
from flashrecovery.proto import flashrecovery_pb2 as pb

_AWAITED_S = 3.0
"""For so long nodes may come one after another without a word."""
_SAID = 3
"""The number of nodes that are named if they run something else; where there are more, most of them do."""


class LaunchSequence:
    """Starts every rank from the script's first line."""

    def __init__(self, job: JobState, placement: RankPlacement) -> None:
        self._job = job
        self._placement = placement
        self._excluded_since: float | None = None
        self._first_since: float | None = None
        self._here: list[str] = []
        self._here_since = 0.0
        self._told = False
        self._first_command: tuple[str, list[str]] | None = None  # of the first node that has come, and its name
        self._other_commands = 0  # nodes that were said to run something else

    def compare_command(self, message: pb.Register) -> None:
        """Do all nodes run the same?"""
        if self._first_command is None:
            self._first_command = (message.node, list(message.command))
        if self._other_commands >= _SAID:
            return
        text = other_command(message.node, message.command, *self._first_command)
        if text:
            self._other_commands += 1
            self._job.notice(NoticeKind.OTHER_COMMAND, text)

    def launch(self, now: float) -> None:
        """Once all nodes are there, start every rank."""
        try:
            order = self._order(now)
        except ConfigError as e:
            self._job.fail(str(e))
            return
        if order is None:
            return
        self._excluded_since = None
        for node in order:
            self._placement.say_if_excluded(node)
        self._job.launch_at(now)
        if self._job.checkpoint is not None:  # what an agent remembers is of a job that it has served before
            self._job.checkpoints.clear()
            self._job.command(AGENT, self._job.saved())
        chosen = {node.name for node in order}
        for node in self._job.nodes.values():
            node.use_for(chosen)
        nproc = self._job.config.nproc_per_node
        gpus = labelled_gpus(self._job.config.gpu_domain, nproc)
        domains = [n.domain for n in order]
        self._job.place_copies(neighbour_stride(domains, nproc, gpus), shared_domains(domains))
        for record in self._job.ranks.values():
            record.give_home(order[record.rank // nproc].name, record.rank % nproc)
        for record in self._job.ranks.values():
            self._placement.fill(record, now, detached=False)

    def _order(self, now: float) -> list[NodeRecord] | None:
        """The nodes that begin; None if some are still missing. Spare ones stand in for excluded ones, and these are
        used only when all that are expected have come, or have had the time."""
        config, nodes = self._job.config, self._job.nodes.values()
        shape = config.nnodes, config.nproc_per_node
        everybody = launch_order(nodes, *shape)
        good = [node for node in nodes if not node.excluded]
        if everybody is None or len(good) == len(nodes):
            return launch_order(good, *shape)
        order = launch_order(good, *shape) or launch_order(good, *shape, spares=True)
        if order is not None:
            return order
        if self._excluded_since is None:
            self._excluded_since = now
        all_here = sum(node.alive for node in nodes) >= config.nnodes + config.spare_nodes
        return everybody if all_here or now - self._excluded_since >= config.timeouts.node_wait_s else None

    def launch_if_late(self, now: float) -> None:
        """Excluded nodes would complete the job, and others have had the time to come; or nodes are missing that never
        come, and those that are here do not wait for them for ever. A job that runs already, as its agents say, is
        never launched."""
        job = self._job
        if job.launched or job.found_since is not None or job.state is not State.STARTING:
            return
        if self._excluded_since is not None:
            self.launch(now)
            return
        alive = [node for node in job.nodes.values() if node.alive]
        spare = [node.name for node in alive if is_spare(node, job.config.nnodes)]
        here = [node.name for node in alive if node.name not in spare]
        self._first_since = None if not alive else now if self._first_since is None else self._first_since
        limit = job.config.timeouts.rendezvous_s
        if self._first_since is not None:
            self._tell_who_is_awaited([node.name for node in alive], self._first_since + limit, now)
        if self._first_since is not None and now - self._first_since >= limit:
            others = f"; and spare ones: {', '.join(spare)}" if spare else ""
            job.fail(
                f"{len(here)} of {job.config.nnodes} nodes have come within {limit:g} s (timeouts.rendezvous_s): "
                f"{', '.join(here) or 'none'}{others}. All of them are needed at the start, "
                "also those that have left the job before"
            )

    def _tell_who_is_awaited(self, here: list[str], until: float, now: float) -> None:
        """Once it is seen that nodes do not come at the same time, and whenever another one has come."""
        if here != self._here:
            self._here, self._here_since, self._told = here, now, False
        if not self._told and now - self._here_since >= _AWAITED_S:
            self._told = True
            wanted = self._job.config.nnodes
            text = f"{len(here)} of {wanted} nodes have come ({shortened(here, _SAID)}); waiting for the "
            text += f"others, for at most {until - now:.0f} s more (timeouts.rendezvous_s)"
            self._job.notice(NoticeKind.WAITING_FOR_NODE, text)

    def let_run_unprotected(self) -> None:
        """No rank has come to a protected step in all the time for it. It looks as if none ever will, and what runs
        may be hours of training."""
        self._job.run_unprotected()
        self._job.notice(
            NoticeKind.UNPROTECTED,
            f"no rank has come to a protected step within {self._job.config.timeouts.startup_s:g} s "
            "(timeouts.startup_s), so the script runs on without recovery, as under torchrun: "
            f"{HOW_TO_PROTECT}; if its first step takes longer than that, set timeouts.startup_s",
        )

    def await_the_others(self, now: float) -> None:
        """A first rank has reached a protected step after all; the time limit for the other ranks starts again."""
        if self._job.places[Place.JOINED] == 1:
            for record in self._job.ranks.values():
                if record.place is Place.STARTING:
                    self._job.outbox.expect(record.rank, Ordered.REPLACE, now + self._job.config.timeouts.startup_s)

    def start_again(self, why: str, now: float) -> None:
        """Every rank from the script's first line, because no step that counts has been taken."""
        if self._job.unprotected:
            self._job.fail(
                f"{why}. The script had run for longer than timeouts.startup_s without a protected step, so there is "
                "nothing to recover it from, and it is not started from its beginning again: start it yourself, from "
                "its own checkpoint if it has one"
            )
            return
        self._job.count_restart()
        if self._job.restarts > self._job.config.max_restarts:
            self._job.fail(f"{why}, {self._job.restarts} times (max_restarts)")
            return
        self._job.notice(NoticeKind.START_AGAIN, why)
        give_up_all(self._job, "all ranks start again")
        self._job.to(State.STARTING)
        self._job.next_generation()
        self._job.abandon_recovery()
        self._job.outbox.clear()
        self._job.new_start()
        for record in self._job.ranks.values():
            self._job.vacate(record.rank)
            record.begin_again()
        self._job.tell_staged()
        for record in self._job.ranks.values():
            if record.home:
                self._placement.fill(record, now, detached=False)
