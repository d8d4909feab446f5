"""What the copies of a job's state cost, computed before it runs: host memory, network, and whether that is hidden.

A rank's state is cut by the layout. What no other rank holds (*unique*) goes to other nodes' host memory in each step;
the last two versions of all that the rank has (*own*) stay in its own host memory. The copy is hidden if it is complete
when the last micro-batch's gradients are about to be synchronised: so there is time for it as long as training computes
without them, less what training's own messages take of the network.

With W bytes of unique state on a node, in groups of n nodes, what other nodes keep and what is sent in a step are

    ==========  ==============  ===================  ===========================================================
    protection  kept on a node  sent
    ==========  ==============  ===================  ===========================================================
    neighbour   W               W                    each node has one other node's whole copy
    parity 1    W / (n - 1)     W                    RAIM5: n - 1 units of a node, each into another node's parity
    parity 2    2 W / (n - 2)   W (n - 1) / (n - 2)  n - 2 units into one parity, which sends one on to the second
    ==========  ==============  ===================  ===========================================================

of one version; two are kept. REFT (section 4.2) encodes without any traffic because there every node of a group holds
the same tensors; shards of ZeRO or FSDP differ, so they have to be sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashrecovery.plan.estimates.copy_holders import Protection
from flashrecovery.plan.model_state import OPTIMIZER_BYTES, WEIGHT_BYTES, Sharding

VERSIONS = 2


@dataclass(frozen=True)
class JobShape:
    """A job and its machines.

    Attributes:
        parameters: of the model.
        gpus: in the job; gpus_per_node of them on each node.
        tensor_parallel, pipeline_parallel: sizes; the rest is data-parallel.
        expert_parallel: number of data-parallel ranks that share each layer's experts.
        expert_parameters: number of parameters in experts.
        step_s: seconds per step.
        window: part of a step in which copies can be made: until the last micro-batch's gradients are synchronised.
        pcie_bytes_s: from one GPU to host memory, bytes a second.
        network_bytes_s: between nodes, over the network used for copies, bytes a second.
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
    expert_parallel: int = 1
    expert_parameters: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        model_parallel = self.tensor_parallel * self.pipeline_parallel
        positive = {
            "parameters": self.parameters,
            "gpus": self.gpus,
            "tensor parallel size": self.tensor_parallel,
            "pipeline parallel size": self.pipeline_parallel,
            "expert parallel size": self.expert_parallel,
            "GPUs per node": self.gpus_per_node,
            "step time": self.step_s,
            "PCIe bandwidth": self.pcie_bytes_s,
            "network bandwidth": self.network_bytes_s,
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value:g}: more than 0 is allowed")
        if not 0 < self.window <= 1:
            raise ValueError(f"window = {self.window:g}: more than 0 and at most 1 is allowed, a part of the step")
        if self.gpus % model_parallel:
            raise ValueError(
                f"{self.gpus} GPUs: a multiple of tensor x pipeline parallel size ({model_parallel}) is allowed"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs: a multiple of the GPUs per node ({self.gpus_per_node}) is allowed")
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert parallel size = {self.expert_parallel}: a divisor of the data-parallel ranks "
                f"({self.data_parallel}) is allowed"
            )
        if not 0 <= self.expert_parameters <= self.parameters:
            raise ValueError(
                f"expert parameters = {self.expert_parameters:g}: 0 to the number of parameters ({self.parameters:g}) "
                "is allowed"
            )

    @property
    def data_parallel(self) -> int:
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def span(self) -> int:
        """Number of consecutive nodes that hold shards of one kind: all, or those of one pipeline stage. Ranks are
        ordered as in Megatron and DeepSpeed: a tensor-parallel group first, then data-parallel ranks, then stages."""
        return max(1, min(self.nodes // self.pipeline_parallel, self.data_parallel))

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True)
class Footprint:
    """The footprint of one protection. Bytes and seconds are those of one step where nothing else is said.

    Attributes:
        unique_bytes: of a GPU's state no other rank holds.
        own_bytes: a GPU's state of which the last two versions are kept beside it; 0 without unique state.
        node_memory_bytes: host memory on a node, all versions.
        node_network_bytes: what a node sends; 0 if there is one node.
        to_host_s, network_s: what the two parts of a copy take.
        window_s: what there is for them.
        restore_s: what a lost rank's shards take from where they are kept; decoding sends them once, combined on the
            way.
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


def footprint(job: JobShape, protection: Protection = Protection.NEIGHBOUR, group: int = 0) -> Footprint:
    """The copies of ``job``. Without unique state there are none, and a replica is what a lost rank gets. ``group``:
    nodes of the smallest group with parity.

    Raises ValueError if there is no parity over so few nodes.
    """
    model_part = job.tensor_parallel * job.pipeline_parallel
    dense, experts = job.parameters - job.expert_parameters, job.expert_parameters
    held = (dense + experts / job.expert_parallel) / model_part  # parameters that a GPU computes with
    local = min(job.gpus_per_node, job.gpus)
    if job.sharding is Sharding.REPLICATED:
        unique = OPTIMIZER_BYTES * (dense / model_part if job.data_parallel == 1 else 0.0)
        if job.data_parallel == job.expert_parallel:  # each expert is on one rank only
            unique += OPTIMIZER_BYTES * experts / job.expert_parallel / model_part
        lost = (OPTIMIZER_BYTES + WEIGHT_BYTES) * held
        own = lost if unique else 0.0  # then all that a rank has is kept, so that it can go a step back
    else:
        # Experts are divided by expert parallelism and then over the ranks that are left: in all, over as many as the
        # rest.
        unique = OPTIMIZER_BYTES * job.parameters / model_part / job.data_parallel
        own = lost = unique + (0.0 if job.sharding is Sharding.FULL else WEIGHT_BYTES * held)
    if protection in (Protection.CHECKPOINT, Protection.REPLICA):
        kept = sent = own = 0.0
    else:
        kept, sent = unique, unique
    parity = protection.parity
    if parity:
        if group <= parity:
            raise ValueError(f"parity {parity} over groups of {group} nodes: {parity + 1} nodes or more are allowed")
        kept, sent = parity * unique / (group - parity), unique
        if parity == 2:  # the holder of a stripe's first parity sends one unit on to that of the second
            sent += unique / (group - parity)
    if job.nodes == 1:  # the neighbour reads the owner's memory, and nothing is sent
        kept = sent = 0.0
    return Footprint(
        unique_bytes=round(unique),
        own_bytes=round(own),
        node_memory_bytes=round(local * VERSIONS * (own + kept)),
        node_network_bytes=round(local * sent),
        to_host_s=own / job.pcie_bytes_s,
        network_s=local * sent / job.network_bytes_s,
        window_s=job.window * job.step_s,
        restore_s=lost / job.pcie_bytes_s + (lost / job.network_bytes_s if job.nodes > 1 else 0.0),
    )


def step_s(parameters: float, tokens: float, gpus: int, flop_s: float) -> float:
    """Seconds of a step of a dense transformer: 6 operations a parameter and token. ``flop_s``: what a GPU reaches."""
    return 6 * parameters * tokens / (gpus * flop_s)
