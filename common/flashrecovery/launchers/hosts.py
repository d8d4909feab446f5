"""What a hostfile makes of a launch: ranks here, this node's part of a job, or agents that are started on its hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrecovery.errors import ConfigError
from flashrecovery.launchers import hostfile, torchrun
from flashrecovery.launchers.hostfile import Filters, Resources
from flashrecovery.launchers.launch import Options
from flashrecovery.rpc.token import is_loopback
from flashrecovery.runtime.addresses import is_here, resolve

FILTERS = ("include", "exclude", "num_nodes", "num_gpus")
_SHAPE = ("nnodes", "nproc_per_node")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LOCAL_HOST = "localhost"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, the options that follow from them, and which of them this one is.

    Attributes:
        resources: the slots that are used, by host, in the order of the node ranks.
        options: of ``flashrecovery run``, the same on all hosts.
        here: this host's node rank; None: agents are started on all hosts from here.
    """

    resources: Resources
    options: Options
    here: int | None

    def environment(self, node_rank: int) -> dict[str, str]:
        """Variables of this host's processes: they see the GPUs whose slots are used, and no others."""
        slots = list(self.resources.values())[node_rank]
        return {VISIBLE_DEVICES: ",".join(map(str, slots))}

    def own_options(self, node_rank: int) -> Options:
        """The arguments that only this host's agent gets."""
        if len(self.resources) == 1:
            return {}
        return {"node_rank": node_rank, "node_name": list(self.resources)[node_rank]}


def asked_for(options: Options) -> bool:
    """Whether the options name hosts, or slots of this one."""
    return any(name in options for name in ("hostfile", *FILTERS))


def found(options: Options, others: Mapping[str, Any], is_me: Callable[[str], bool] | None = None) -> Hosts:
    """The hosts that the options ask for; takes from ``options`` what has been understood.

    Args:
        options: with ``hostfile`` or filters, changed in place.
        others: keys that are set elsewhere, in the configuration file.
        is_me: whether a name in the hostfile is that of this host.

    Raises:
        ConfigError: a filter is wrong, hosts have different numbers of slots, or this host cannot be found.
    """
    for name in _SHAPE:
        if name in options:
            raise ConfigError(f"--{name.replace('_', '-')} {options[name]}: the hostfile and its filters say it")
    file: Path | None = options.pop("hostfile", None)
    filters = Filters(**{name: options.pop(name) for name in FILTERS if name in options})
    alone, multi = options.pop("no_ssh", False), options.pop("force_multi", False)
    resources = hostfile.chosen(_slots(file, filters), filters)
    spare = options.get("spare_nodes", others.get("spare_nodes", 0))
    shape = _shape(resources, int(spare) if str(spare).isdigit() else 0)
    if len(resources) == 1 and not multi:
        options.pop("node_rank", None)
        return Hosts(resources, shape, 0)
    if "controller" not in others:
        _set_controller(resources, options)
    if not alone:
        return Hosts(resources, shape, None)
    return Hosts(resources, shape, _own_rank(resources, options, is_me or _is_me))


def _slots(file: Path | None, filters: Filters) -> dict[str, int]:
    """The slots of the hostfile, or of this host alone."""
    if file is not None:
        return hostfile.read(file)
    if filters.num_nodes is not None and filters.num_nodes > 1:
        raise ConfigError(f"--num-nodes {filters.num_nodes} needs --hostfile FILE")
    return {LOCAL_HOST: filters.num_gpus or torchrun.processes("gpu")}


def _shape(resources: Resources, spare_nodes: int) -> Options:
    numbers = {host: len(slots) for host, slots in resources.items()}
    if len({*numbers.values()}) > 1:
        each = ", ".join(f"{host}: {number}" for host, number in numbers.items())
        raise ConfigError(f"--hostfile: every host needs the same number of slots, but there are {each}; see --include")
    if not 0 <= spare_nodes < len(resources):
        raise ConfigError(f"--spare-nodes {spare_nodes}: at most {len(resources) - 1} of the hosts can be spare")
    nodes = {"nnodes": str(len(resources) - spare_nodes), "nproc_per_node": str(next(iter(numbers.values())))}
    return {**nodes, "spare_nodes": spare_nodes} if spare_nodes else dict(nodes)


def _set_controller(resources: Resources, options: Options) -> None:
    """The first host has the controller, unless another address is given."""
    if "controller" in options or "rdzv_endpoint" in options:
        return
    address = options.setdefault("master_addr", next(iter(resources)))
    if len(resources) > 1 and is_loopback(address):
        raise ConfigError(
            f"--hostfile: the first host is {address}, which the other ones cannot reach; write its name in the "
            "network there, or --controller HOST:PORT"
        )


def _own_rank(resources: Resources, options: Options, is_me: Callable[[str], bool]) -> int:
    given = options.pop("node_rank", None)
    if given is not None:
        if not 0 <= int(given) < len(resources):
            raise ConfigError(f"--node-rank {given}: allowed: 0 to {len(resources) - 1}, by the hostfile")
        return int(given)
    mine = [rank for rank, host in enumerate(resources) if is_me(host)]
    if len(mine) != 1:
        raise ConfigError(
            f"--no-ssh: {len(mine)} of the hosts {', '.join(resources)} are this one; say which with --node-rank"
        )
    return mine[0]


def _is_me(host: str) -> bool:
    return is_here(resolve(host, "--hostfile"))
