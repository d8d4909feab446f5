"""What the copies of a job's state cost, computed before it runs: host memory, network, and whether that is hidden.

A rank's state is cut by the layout. What no other rank holds (*unique*) goes to a neighbour's host memory in each step;
the last two versions of all that the rank has (*own*) stay in its own host memory. The copy is hidden if it is complete
when the last micro-batch's gradients are about to be synchronised: so there is time for it as long as training computes
without them, less what training's own messages take of the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

OPTIMIZER_BYTES = 12
"""A parameter: fp32 master weight and Adam's two moments."""
WEIGHT_BYTES = 2
"""A parameter as it is computed with, where that is kept beside the master weight."""
VERSIONS = 2


class Sharding(Enum):
    """Who holds what of the state."""

    REPLICATED = "replicated"
    """DDP, Megatron without the distributed optimizer: every data-parallel rank holds everything."""
    OPTIMIZER = "optimizer"
    """ZeRO-1 and 2, Megatron's distributed optimizer: optimizer state is cut over the data-parallel ranks."""
    FULL = "full"
    """FSDP, ZeRO-3: weights and optimizer state are cut over the data-parallel ranks."""


@dataclass(frozen=True)
class JobShape:
    """A job and its machines.

    Attributes:
        parameters: of the model.
        gpus: in the job; gpus_per_node of them on each node.
        tensor_parallel, pipeline_parallel: sizes; the rest is data-parallel.
        step_s: seconds a step takes.
        window: part of a step in which copies can be made: until the last micro-batch's gradients are synchronised.
        pcie_bytes_s: from one GPU to host memory, bytes a second.
        network_bytes_s: from one node to another by the network that copies take, bytes a second.
    """

    parameters: float
    gpus: int
    sharding: Sharding
    step_s: float
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpus_per_node: int = 8
    window: float = 0.8
    pcie_bytes_s: float = 50e9
    network_bytes_s: float = 12.5e9

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        model_parallel = self.tensor_parallel * self.pipeline_parallel
        positive = {
            "parameters": self.parameters,
            "gpus": self.gpus,
            "tensor parallel size": self.tensor_parallel,
            "pipeline parallel size": self.pipeline_parallel,
            "GPUs per node": self.gpus_per_node,
            "step time": self.step_s,
            "PCIe bandwidth": self.pcie_bytes_s,
            "network bandwidth": self.network_bytes_s,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} = {value:g}: more than 0 is allowed")
        if not 0 < self.window <= 1:
            raise ValueError(f"window = {self.window:g}: more than 0 and at most 1 is allowed, a part of the step")
        if self.gpus % model_parallel:
            raise ValueError(
                f"{self.gpus} GPUs: a multiple of tensor x pipeline parallel size ({model_parallel}) is allowed"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs: a multiple of the GPUs per node ({self.gpus_per_node}) is allowed")

    @property
    def data_parallel(self) -> int:
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True)
class Footprint:
    """Of neighbour copies. Bytes and seconds are those of one step where nothing else is said.

    Attributes:
        unique_bytes: of a GPU's state no other rank holds.
        own_bytes: a GPU's state of which the last two versions are kept beside it; 0 without unique state.
        node_memory_bytes: host memory on a node, all versions.
        node_network_bytes: what a node sends; 0 if there is one node.
        to_host_s, network_s: what the two parts of a copy take.
        window_s: what there is for them.
        restore_s: what a lost rank's shards take from its neighbour.
    """

    unique_bytes: int
    own_bytes: int
    node_memory_bytes: int
    node_network_bytes: int
    to_host_s: float
    network_s: float
    window_s: float
    restore_s: float

    @property
    def copy_s(self) -> float:
        """A version is copied to the host, and sent from there."""
        return self.to_host_s + self.network_s

    @property
    def hidden(self) -> bool:
        """Whether training never waits for it."""
        return self.copy_s <= self.window_s


def footprint(job: JobShape) -> Footprint:
    """The copies of ``job``; without unique state there are none, and a replica is what a lost rank gets."""
    model_part = job.parameters / (job.tensor_parallel * job.pipeline_parallel)
    weights, optimizer = WEIGHT_BYTES * model_part, OPTIMIZER_BYTES * model_part
    local = min(job.gpus_per_node, job.gpus)
    if job.sharding is Sharding.REPLICATED and job.data_parallel > 1:
        unique = own = 0.0
        lost = weights + optimizer
    elif job.sharding is Sharding.FULL:
        unique = own = lost = optimizer / job.data_parallel
    else:
        unique = optimizer / job.data_parallel
        own = lost = unique + weights
    apart = job.nodes > 1
    # On one node the neighbour reads the owner's memory, and nothing is sent.
    memory = local * VERSIONS * (own + (unique if apart else 0.0))
    sent = local * unique if apart else 0.0
    return Footprint(
        unique_bytes=round(unique),
        own_bytes=round(own),
        node_memory_bytes=round(memory),
        node_network_bytes=round(sent),
        to_host_s=own / job.pcie_bytes_s,
        network_s=sent / job.network_bytes_s,
        window_s=job.window * job.step_s,
        restore_s=lost / job.pcie_bytes_s + (lost / job.network_bytes_s if apart else 0.0),
    )


def step_s(parameters: float, tokens: float, gpus: int, flop_s: float) -> float:
    """Seconds of a step of a dense transformer: 6 operations a parameter and token. ``flop_s``: what a GPU reaches."""
    return 6 * parameters * tokens / (gpus * flop_s)
