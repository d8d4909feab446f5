"""What the controller knows of one job, and the few things that every part of the machine does with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.history import Recovery
from flashrecovery.controller.outbox import Action, Outbox
from flashrecovery.controller.records import RankRecord
from flashrecovery.controller.restore import RestoreRound
from flashrecovery.controller.states import State, check_transition
from flashrecovery.proto import flashrecovery_pb2 as pb

AGENT = -1
"""Rank number of commands to the agent itself."""


@dataclass
class JobState:
    """State of one job. ``now`` arguments are CLOCK_MONOTONIC seconds."""

    config: RunConfig
    store_address: Callable[[], tuple[str, int]]
    state: State = State.STARTING
    generation: int = 0
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    checkpoint: tuple[int, str] | None = None
    recovery: Recovery | None = None
    history: list[Recovery] = field(default_factory=list)
    failure_reason: str = ""
    last_failure: str = ""
    outbox: Outbox = field(default_factory=Outbox)
    _restarts: int = 0
    _start_version: int = 0
    _round: RestoreRound | None = None
    _started_at: float = 0.0
    _restore_from: str = ""
    _retry_at: float | None = None
    _retries: int = 0

    def __post_init__(self) -> None:
        self.ranks = {r: RankRecord(r) for r in range(self.config.world_size)}

    def take_actions(self) -> list[Action]:
        """What is to be done because of the events so far, in order."""
        return self.outbox.take()

    def _to(self, state: State, now: float | None = None) -> None:
        check_transition(self.state, state)
        if self.recovery is not None and now is not None:
            phase = self.recovery.enter(state, now)
            if phase is not None:
                self._emit(ev.RecoveryPhase(generation=self.generation, name=phase[0], seconds=phase[1]))
        self.state = state

    def _fail(self, reason: str) -> None:
        """Nothing is left to try: say why, stop everything, keep the evidence."""
        self.failure_reason = reason
        self.outbox.pending.clear()
        self._to(State.FAILED)
        self._emit(ev.JobFailed(generation=self.generation, reason=reason))
        shutdown = pb.Shutdown(reason=reason, grace_s=self.config.timeouts.shutdown_grace_s)
        self._command(AGENT, pb.Command(shutdown=shutdown))

    def _fill(
        self, record: RankRecord, now: float, *, detached: bool, reason: str, restart_store: bool = False
    ) -> None:
        replace = pb.Replace(detached=detached, reason=reason, restart_store=restart_store)
        limits = self.config.timeouts
        deadline = now + limits.fence_s + (limits.replacement_s if detached else limits.startup_s)
        self._command(record.rank, pb.Command(replace=replace), deadline, "replace")

    def _publish_rank_table(self) -> None:
        entries = [
            pb.RankEntry(rank=r.rank, host=r.host, pid=r.pid, node=r.node, joined_generation=r.joined_generation)
            for r in self.ranks.values()
        ]
        self._command(AGENT, pb.Command(rank_table=pb.RankTable(ranks=entries)))

    def _command(self, rank: int, command: pb.Command, deadline: float | None = None, what: str = "") -> None:
        self.outbox.send(rank, self.generation, command, deadline, what)

    def _emit(self, event: ev.Event) -> None:
        self.outbox.emit(event)
