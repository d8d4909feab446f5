"""Which nodes may join the job, and how a joining node differs from the other nodes. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc

from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass(frozen=True)
class Refusal:
    """Why an agent's session ends, by code and as its user reads it. It is a message, not the call's status: a status
    is not sealed, and this one ends the agent."""

    code: grpc.StatusCode
    text: str

    def command(self) -> pb.Command:
        """The answer to the agent."""
        return pb.Command(refused=pb.Refused(code=self.code.value[0], reason=self.text))


def refusal(
    message: pb.Register,
    settings: Mapping[str, str],
    known: NodeRecord | None,
    *,
    there: bool,
    only: str = "",
    given_up: str = "",
) -> Refusal | None:
    """Why this agent may not join; None: it may. ``settings``: the controller's own, by key. ``known``: the node of
    this name, ``there``: its agent is connected and heard. ``only``: the node of a job that has no other one.
    ``given_up``: why this node is out for good; "": it is not."""
    name = message.node
    if given_up:
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"node {name}: {given_up}")
    if known is not None and known.alive and there and known.incarnation != message.incarnation:
        # It has not been started again: two hosts have one host name, or two agents are tried on one host.
        text = f"another agent, at {known.host}, is node {name} already; give each agent a different --node-name"
        return Refusal(grpc.StatusCode.ALREADY_EXISTS, text)
    differs = _other_settings(message.settings, settings) if message.settings else ""
    if differs:
        text = f"all nodes and the controller need the same settings; node {name} has {differs}"
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)
    if only and only != name:
        # That node has no lease, because it was alone: if cut off, it would go on beside this one.
        text = (
            f"this job has one node (nnodes = 1, spare_nodes = 0), which is {only} and is not known to be lost; "
            "with spare_nodes = 1 another one may wait for that"
        )
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)
    return None


def _other_settings(theirs: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """The settings in which a node differs from the controller; "" if in none."""
    keys = [key for key in mine if theirs.get(key) != mine[key]] + [key for key in theirs if key not in mine]
    return ", ".join(f"{key} = {theirs.get(key)} (here {mine.get(key)})" for key in keys)


def other_command(node: str, command: Sequence[str], first: str, firsts: Sequence[str]) -> str:
    """How ``node``'s command differs from the ``first`` node's; "" if it does not. A difference is mostly a
    mistake (a flag on some nodes only), which would show as ranks that wait for each other for ever."""
    mine, theirs = Counter(command), Counter(firsts)
    alone = {node: list((mine - theirs).elements()), first: list((theirs - mine).elements())}
    if not any(alone.values()):
        return "" if list(command) == list(firsts) else f"nodes {node} and {first} run the same in another order"
    return "; ".join(f"only node {name} has {shlex.join(words)}" for name, words in alone.items() if words)
