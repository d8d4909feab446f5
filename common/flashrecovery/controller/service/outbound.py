"""Carries out what the machine wants: commands to agents, events to the log, the rank table to all. At the job's end it
dismisses the agents."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from flashrecovery import events as ev
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.service.batches import Batches
from flashrecovery.controller.service.checkpoints import Checkpoints, Snapshots
from flashrecovery.controller.service.connections import Connections
from flashrecovery.controller.service.heartbeats import ControllerHeartbeats
from flashrecovery.controller.service.rank_table_publisher import RankTablePublisher
from flashrecovery.controller.state.fault_drills import FaultDrills
from flashrecovery.controller.state.job_state import AGENT
from flashrecovery.controller.state.outbox import Action, Blame, Emit, Publish, Send
from flashrecovery.controller.storage.generation_file import GenerationFile, Numbers
from flashrecovery.controller.storage.node_failure_log import NodeFailureLog
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

_IN_GENERATION = frozenset({"regroup", "restore", "resume"})
_YOUNG_OBJECTS = 200_000
"""Between two looks of the garbage collector."""


@dataclass(frozen=True)
class Receivers:
    """What the actions of one controller go to."""

    agents: Connections
    heartbeats: ControllerHeartbeats
    tables: RankTablePublisher
    drills: FaultDrills
    checkpoints: Checkpoints
    snapshots: Snapshots
    memory: NodeFailureLog
    numbers: GenerationFile


class Actions:
    """The actions of one controller. ``record`` writes an event down; ``go_on`` carries out what has waited for the
    disk."""

    def __init__(
        self, machine: Machine, to: Receivers, record: Callable[[ev.Event], None], go_on: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._agents = to.agents
        self._own_heartbeats = to.heartbeats
        self._tables = to.tables
        self._drills = to.drills
        self._checkpoints = to.checkpoints
        self._snapshots = to.snapshots
        self._memory = to.memory
        self._numbers = to.numbers
        self._record = record
        self._go_on = go_on
        self._gathered = False  # the agents that know that this controller gathers also know that it no longer does
        self._dismissed = False
        self._absent: set[str] = set()
        self.over = asyncio.Event()
        """The job has finished or failed, or this controller has ended."""

    def carry_out(self) -> None:
        """Carry out all actions in the machine's outbox, in order. While the generation's number is not on disk, stop
        before the first command that makes a process act in that generation."""
        job = self._machine.job
        self._machine.check_before_acting()
        in_use = job.launched and not self.over_for_all
        actions = job.take_actions()
        # Numbers of starts stay written down, also those that no live process has heard of.
        numbers = Numbers(job.generation, job.restarts, max(job.parallel.changes, job.attempts - job.restarts))
        if in_use and not self._numbers.kept(job.launch, numbers, self._go_on):
            # What begins in an older generation is void meanwhile.
            actions = [a for a in actions if not (begins(a) and a.command.generation < job.generation)]
            now = next((n for n, action in enumerate(actions) if begins(action)), len(actions))
            job.outbox.put_back(actions[now:])
            actions = actions[:now]
        batches = Batches()
        for action in actions:
            if isinstance(action, Emit):
                self._record(action.event)
                if isinstance(action.event, ev.JobStarted):
                    self._agents.post_batches(batches, len(self._machine.job.nodes))
                    for request in self._drills.take_armed():
                        self.inject(request)
                    _keep_what_there_is()
                elif isinstance(action.event, ev.RecoveryStarted):
                    self._checkpoints.recovered()
                    self._snapshots.recovered()
                elif isinstance(action.event, ev.RecoveryFinished):
                    _keep_what_there_is()
            elif isinstance(action, Blame):
                self._memory.remember(action)
            elif isinstance(action, Publish):
                for node, command in self._tables.publish(action, self._agents.links):
                    self._agents.post(node, command)
            elif action.node is None or action.command.HasField("fence"):  # which the session itself must see
                self._agents.post_batches(batches, len(self._machine.job.nodes))
                self._agents.post(action.node, action.command)
            else:
                batches.add(action.node, action.command)
        self._agents.post_batches(batches, len(self._machine.job.nodes))
        if self._machine.takeover.gathered and not self._gathered:
            # From now on the ranks of a failed collective can be stopped, and a node that was cut off goes on.
            self._gathered = True
            self._agents.post(None, self._own_heartbeats.message(gathering=False))
        if self._machine.job.state is State.FINISHED and not self._dismissed:
            self._dismissed = True
            self._agents.post(None, self.last_word())
        if self.over_for_all and not job.ending.saving and not self.over.is_set():
            self._absent = {n.name for n in self._machine.job.nodes.values() if n.alive}.difference(
                self._agents.connected()
            )
            self.over.set()

    def inject(self, r: pb.InjectRequest) -> None:
        """Deliver a fault to the agent of its rank; of one that the job does not have yet, to one that may get it."""
        generation = self._machine.job.generation
        if r.fault != "corrupt":  # of which no rank fails
            self._machine.job.asked.drills.append(r)
        self._record(ev.FaultInjected(generation=generation, rank=r.rank, fault=r.fault, phase=r.phase, step=r.step))
        message = pb.Fault(fault=r.fault, phase=r.phase, step=r.step)
        command = pb.Command(generation=generation, rank=r.rank, fault=message)
        job = self._machine.job
        self._agents.post(job.ranks.get(r.rank, job.in_order[-1]).home, command)

    @property
    def over_for_all(self) -> bool:
        """The job has ended, well or not."""
        return self._machine.job.state in (State.FINISHED, State.FAILED)

    def last_word(self) -> pb.Command:
        """The last command to an agent, when the job has ended."""
        return pb.Command(rank=AGENT, shutdown=pb.Shutdown(reason=self._machine.job.failure_reason))

    async def dismissed(self, timeout_s: float) -> None:
        """The job is over: wait until every agent knows, also one that is just connecting again: it would wait for a
        controller for a long time."""
        await self._agents.settled(self._absent, timeout_s)


def begins(action: Action) -> TypeGuard[Send]:
    """Whether the command makes a process act in its generation: ranks are stopped and replaced before that, but meet
    under its number in a process group only then. (Processes that are not detached do so when they start.) Until then
    the number is known only to agents and ranks; these either live and report it, or are gone together with it."""
    if not isinstance(action, Send):
        return False
    body = action.command.WhichOneof("body")
    return body in _IN_GENERATION or (body == "replace" and not action.command.replace.detached)


def _keep_what_there_is() -> None:
    """The garbage collector need not look at it again, nor at what comes as often as it would by itself: in a large job
    that is a fifth of a recovery's work."""
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.collect()
    gc.freeze()
