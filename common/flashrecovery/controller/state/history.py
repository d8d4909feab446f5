"""One recovery from failure to first newly committed step, phase by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.controller.state.restore_plan import RestoreRound
from flashrecovery.kinds import FailureKind
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.machine_speed import NOT_MEASURED, MachineSpeed, slower

PHASE_OF = {
    State.QUIESCING: "quiesce",
    State.REPLACING: "replace",
    State.STARTING: "replace",  # of all ranks, in another layout
    State.FALLBACK: "fallback",
    State.REGROUPING: "regroup",
    State.RESTORING: "restore",
    State.VERIFYING: "verify",
    State.RUNNING: "redo",
}


def start_lines(lines: Iterable[pb.StartLine]) -> list[ev.StartLine]:
    """For an event."""
    return [ev.StartLine(where=line.where, text=line.text, seconds=line.seconds) for line in lines]


def group_backends(records: Iterable[RankRecord]) -> list[ev.GroupBackend]:
    """For an event: what stands in the ranks' groups, once for the ranks that say the same."""
    ranks: dict[tuple[str, str, str, str, int], list[int]] = defaultdict(list)
    for record in records:
        for one in record.backends:
            ranks[one.name, one.torch_class, one.device, one.chosen_by, one.groups].append(record.rank)
    return [
        ev.GroupBackend(
            name=name, torch_class=torch_class, device=device, chosen_by=chosen_by, groups=count, ranks=sorted(numbers)
        )
        for (name, torch_class, device, chosen_by, count), numbers in sorted(ranks.items())
    ]


@dataclass
class HistoryEntry:
    """What is known of one recovery. Times are CLOCK_MONOTONIC seconds, durations seconds. A further failure on the way
    adds to the same recovery."""

    generation: int
    failed_at: float
    detect_s: float
    victims: list[int] = field(default_factory=list)
    cause: str = ""
    resume_step: int = -1
    iteration: int = -1
    reason: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    bytes_on_wire: int = 0
    bytes_on_device: int = 0
    bytes_decoded: int = 0
    bytes_reshaped: int = 0
    bytes_lacking: int = 0
    bytes_of: dict[int, int] = field(default_factory=dict)
    between_hosts: bool = False
    slowest: MachineSpeed = NOT_MEASURED
    total_s: float = 0.0
    _open: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        self.phases["detect"] = self.detect_s

    def resume_at(self, step: int, reason: str | None = None) -> None:
        """This is the version that all go to. ``reason``: why; None: as it was."""
        self.resume_step, self.reason = step, self.reason if reason is None else reason

    def caused_by(self, kind: str) -> None:
        """This is why, unless a reason is known already."""
        self.cause = self.cause or kind

    def add_victim(self, rank: int, kind: FailureKind, generation: int) -> None:
        self.generation = generation
        self.caused_by(kind)
        if rank not in self.victims:
            self.victims.append(rank)

    def enter(self, state: State, now: float) -> tuple[str, float] | None:
        """Close the open phase and open that of ``state``; returns (name, seconds) of the closed one."""
        closed = None
        if self._open is not None:
            name, since = self._open
            closed = (name, now - since)
            self.phases[name] = self.phases.get(name, 0.0) + closed[1]
        self._open = (PHASE_OF[state], now) if state in PHASE_OF else None
        return closed

    def add_round(self, done: RestoreRound, nodes: Mapping[int, NodeRecord]) -> None:
        """``nodes``: where the ranks are that were given something, and those that gave it."""
        for rank, reply in done.reports.items():
            self.bytes_of[rank] = self.bytes_of.get(rank, 0) + reply.bytes_received
        self.bytes_on_wire += done.bytes_received()
        self.bytes_on_device += done.bytes_on_device()
        self.bytes_reshaped += sum(reply.reshaped_bytes for reply in done.reports.values())
        self.bytes_lacking += sum(reply.lacking_bytes for reply in done.reports.values())
        for transfer in done.plan.transfers:
            self.given.add(transfer.dest)
            for sender in done.senders(transfer):
                key = str(sender)
                self.sources[key] = self.sources.get(key, 0) + 1
                source, dest = nodes.get(sender), nodes.get(transfer.dest)
                if source is not None and dest is not None:
                    self.between_hosts = self.between_hosts or source.host != dest.host
                    self.slowest = slower(slower(self.slowest, source.speed), dest.speed)
        for order in done.decodes:
            self.bytes_decoded += sum(order.sizes[member] for member in order.lost)
            self.given.update(order.ranks[member] for member in order.lost)

    def finish(self, now: float, iteration: int) -> None:
        """Every rank has committed a step. ``iteration``: of a framework, to which the first of them belongs."""
        self.enter(State.FINISHED, now)
        self.total_s, self.iteration = now - self.failed_at, iteration

    def finished_event(
        self, generation: int, ranks: Collection[int], start: Iterable[pb.StartLine] = ()
    ) -> ev.RecoveryFinished:
        """``ranks``: of which the job consists now; ``start``: where the slowest replacement's time went."""
        return ev.RecoveryFinished(
            generation=generation,
            resume_step=self.resume_step,
            victims=list(self.victims),
            sources=dict(self.sources),
            survivors_given=sorted(self.given.difference(self.victims)),
            bytes=self.bytes_on_wire,
            rank_bytes=max(self.bytes_of.values(), default=0),
            copy_speed=self.slowest.copy,
            link_speed=self.slowest.link if self.between_hosts else 0.0,
            device_bytes=self.bytes_on_device,
            decoded_bytes=self.bytes_decoded,
            reshaped_bytes=self.bytes_reshaped,
            lacking_bytes=self.bytes_lacking,
            phases=dict(self.phases),
            total_s=self.total_s,
            cause=self.cause,
            reason=self.reason,
            left=[rank for rank in self.victims if rank not in ranks],
            start=start_lines(start),
        )
