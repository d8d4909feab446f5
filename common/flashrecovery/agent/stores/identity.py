"""The identity of this node in the job."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, replace

from flashrecovery.config import RunConfig
from flashrecovery.health import nvlink
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.addresses import interface_of


@dataclass(frozen=True)
class Identity:
    """What an agent says of itself when it connects.

    Attributes:
        name: of the node, unique in the job.
        host: address under which the other nodes reach it.
        slots: ranks that it can hold.
        domain: failure domain; "" for the node alone.
        incarnation: changes when the agent starts again, or has been fenced.
    """

    name: str
    host: str
    slots: int
    domain: str = ""
    node_rank: int = -1
    spare: bool = False
    incarnation: str = ""

    @staticmethod
    def of(config: RunConfig, host: str) -> Identity:
        """The identity of the node that the configuration describes. ``host``: this node's address."""
        ranks = config.nproc_per_node
        return Identity(
            name=config.node_name or socket.gethostname(),
            host=host,
            slots=config.slots or config.nproc_per_node,
            domain=config.failure_domain or (nvlink.look(os.environ, ranks).fabric if config.several_nodes else ""),
            node_rank=-1 if config.node_rank is None else config.node_rank,
            spare=config.spare,
            incarnation=uuid.uuid4().hex,
        )

    def renewed(self) -> Identity:
        """After a fence: the same node, without its past, and without its rank."""
        return replace(self, incarnation=uuid.uuid4().hex, node_rank=-1, spare=True)

    def register(self, store_port: int, peer_port: int) -> pb.Register:
        return pb.Register(
            node=self.name,
            host=self.host,
            node_rank=self.node_rank,
            slots=self.slots,
            domain=self.domain,
            spare=self.spare,
            store_port=store_port,
            peer_port=peer_port,
            incarnation=self.incarnation,
        )

    def network_env(self) -> dict[str, str]:
        """Have gloo listen where the other nodes reach this one (by default it takes the host name's address)."""
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return {}
        name = interface_of(self.host)
        return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
