"""The agents' connections: which node's agent is connected, by which way, and what it is sent.

A node has one link for as long as its agent lives, over however many connections; of these the newest counts. What is
sent to a node that is not connected now goes out when it is again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from flashrecovery.controller.service.batches import Batches
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.link import Link

AgentLink = Link[pb.Command, pb.AgentMessage]


@dataclass(frozen=True, eq=False)
class AgentConnection:
    """One connection of an agent. ``via``: the node whose agent carries it; "": the agent comes straight here."""

    node: str
    link: AgentLink
    via: str = ""


class Connections:
    """The agents' connections and links, by name of the node."""

    def __init__(self) -> None:
        self.links: dict[str, AgentLink] = {}
        self._incarnations: dict[str, str] = {}
        self._newest: dict[str, AgentConnection] = {}
        self._cut_off: set[str] = set()

    def link_of(self, message: pb.Register, *, lost: bool) -> AgentLink:
        """The node's link; a new one for a new incarnation of its agent, and for one that was taken for ``lost``: what
        earlier commands to it are void."""
        if lost or self._incarnations.get(message.node) != message.incarnation:
            self._incarnations[message.node] = message.incarnation
            if message.node in self.links:
                self.end(message.node)
            self.links[message.node] = Link()
        return self.links[message.node]

    # -- what is connected ------------------------------------------------------------------------

    def open(self, connection: AgentConnection) -> None:
        """``connection`` is the node's present one from now on."""
        self._newest[connection.node] = connection
        self._cut_off.discard(connection.node)

    def is_newest(self, connection: AgentConnection) -> bool:
        """Whether no other one has taken its place."""
        return self._newest.get(connection.node) is connection

    def ended(self, connection: AgentConnection, *, blameless: bool = False) -> bool:
        """``connection`` has ended; ``blameless``: not because of its agent, which is to connect again. Returns whether
        its node is not connected any more."""
        if not self.is_newest(connection):
            return False
        del self._newest[connection.node]
        if blameless:
            self._cut_off.add(connection.node)
        return True

    def is_connected(self, node: str) -> bool:
        """Whether the node is connected now."""
        return node in self._newest

    def connected(self) -> list[str]:
        """The nodes that are connected now."""
        return list(self._newest)

    def newest(self) -> Collection[AgentConnection]:
        """One for each node that is connected now, in the order in which they came."""
        return self._newest.values()

    # -- sending ----------------------------------------------------------------------------------

    def post(self, node: str | None, command: pb.Command) -> None:
        """Send ``command`` to one agent, or to all (None). It arrives also if a connection breaks."""
        if node is not None:
            if node:  # a rank that waits for a node has no agent to tell
                self.links[node].send(command)
            return
        for link in self.links.values():
            copy = pb.Command()
            copy.CopyFrom(command)
            link.send(copy)

    def post_batches(self, batches: Batches, nodes: int) -> None:
        """Send what has been gathered for each agent. ``nodes``: how many the job has."""
        for node, command in batches.take(nodes):
            self.post(node, command)

    def end(self, node: str) -> None:
        """End the node's connection when what is queued has been handed over."""
        self._cut_off.discard(node)
        self.links[node].close()

    def close(self) -> None:
        """Every connection ends when what is queued has been handed over."""
        for node in self.links:
            self.end(node)

    async def settled(self, absent: set[str], timeout_s: float) -> None:
        """Wait until every agent that is connected has got everything, and until those have been that were not when it
        was sent (``absent``), or have lost their relay before they had it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            absent = absent - self._newest.keys()
            there = all(self.links[n].settled() for n in self._newest)
            if there and not absent and all(self.links[n].settled() for n in self._cut_off):
                return
            await asyncio.sleep(0.01)
