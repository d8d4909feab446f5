"""One message for each agent instead of one for each of its ranks. Pure.

What the machine decides at one moment mostly concerns every rank, and mostly it is the same for all. Whatever there is
for one agent travels as one message, and the agent answers with one
(:mod:`flashrecovery.agent.monitoring.reply_batching`): it waits a moment for its ranks, no longer than the controller
needs to read the others' answers anyway.
"""

from __future__ import annotations

from flashrecovery.controller.state.job_state import AGENT
from flashrecovery.proto import flashrecovery_pb2 as pb

_READ_S = 20e-6
"""What one more message costs the controller to read, at the least."""
_SMALL = 16
"""Nodes. Up to here answers come as they come."""
_LONGEST_S = 0.05


def gather_s(nodes: int) -> float:
    """How long an agent may wait for its other ranks' answers in a job of this many nodes."""
    return min(nodes * _READ_S, _LONGEST_S) if nodes > _SMALL else 0.0


class Batches:
    """The commands of one moment, by agent; each agent's stay in order."""

    def __init__(self) -> None:
        self._of: dict[str, list[pb.Command]] = {}

    def add(self, node: str, command: pb.Command) -> None:
        self._of.setdefault(node, []).append(command)

    def take(self, nodes: int) -> list[tuple[str, pb.Command]]:
        """(agent, what to send it), and begin again. ``nodes``: how many the job has."""
        found = [(node, _one(commands, gather_s(nodes))) for node, commands in self._of.items()]
        self._of = {}
        return found


def _one(commands: list[pb.Command], within_s: float) -> pb.Command:
    if len(commands) == 1 and not commands[0].ranks:
        return commands[0]
    one = pb.Command(generation=max(c.generation for c in commands), rank=AGENT)
    one.batch.gather_s = within_s
    one.batch.commands.extend(commands)
    return one
