"""The environment of a training process: torchrun's variables, and ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from flashrecovery.config import CONFIG_ENV, RunConfig
from flashrecovery.plan.membership.failure_domains import labelled_gpus
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS

AGENT_PID_ENV = "FLASHRECOVERY_AGENT_PID"
STORES_ENV = "FLASHRECOVERY_STORES"
"""Hosts and ports of the servers for the groups of the start, JSON; unset if there is one."""
STANDBY_DEVICE_ENV = "FLASHRECOVERY_STANDBY_DEVICE"
"""The GPU that a standby begins to use at once: that of the local rank with this number."""
CPUS_ENV = "FLASHRECOVERY_CPUS"
"""The CPUs that the process may use, JSON; unset: those of its parent."""
LAUNCHER_PID_ENV = "FLASHRECOVERY_LAUNCHER_PID"
"""For a guard: its parent, with which it ends; unset: it has none."""
PER_TASK_ENV = "FLASHRECOVERY_PER_TASK"
"""Names of variables in which the tasks of a launcher differ, separated by blanks. A process that imports before it
has a rank must not read them."""
UNFORKABLE_ENV = "FLASHRECOVERY_UNFORKABLE"
"""Packages that the setting ``fork_denylist`` names, with blanks between."""
ZYGOTE_ENV = "FLASHRECOVERY_ZYGOTE_FD"
"""The file descriptor of the first zygote's socket."""
OF_ZYGOTES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""What zygotes have, and ranks do not: torch, asked by an import whether there is a GPU, shall not open it (torch 2.13,
torch/cuda/__init__.py)."""
STRIDE_ENV = "FLASHRECOVERY_NEIGHBOUR_STRIDE"
"""Rank r's copies are kept by rank r + stride, modulo the world size."""
DOMAINS_ENV = "FLASHRECOVERY_DOMAINS"
"""Numbers of the nodes' failure domains at the launch, JSON; unset if no two nodes share one. In a parallel layout that
the job has changed to: of the ranks' ones; unset on one node."""
GPUS_ENV = "FLASHRECOVERY_GPUS"
"""Numbers of the domains of a node's GPUs, by local rank, JSON, as ``gpu_domain`` has them; unset: it says nothing, or
the job has changed its parallel layout."""
LAYOUT_ENV = "FLASHRECOVERY_LAYOUT"
"""The parallel layout that the job has changed to, as tp=1,pp=2,dp=1; unset: that of the launch."""
SEQUENCE_PARALLEL_ENV = "FLASHRECOVERY_SEQUENCE_PARALLEL"
"""Set in such a layout, if it has been seen that the script divides sequences where there is tensor parallelism."""
STAGING_ENV = "FLASHRECOVERY_STAGING"
"""The directory in the node's memory for state that outlives its processes while the layout changes; unset: none."""
STAGING_ELSEWHERE = "elsewhere"
"""Within it, what has been read from other nodes."""
NEW_RANK_ENV = "FLASHRECOVERY_NEW_RANK"
"""For a process that fills a rank that no launch has had: that rank. Up to its first step its RANK is another one's."""
LOCAL_RANK_MACRO = "${local_rank}"
"""In an argument of the script, each rank finds its LOCAL_RANK instead of this, as under torchrun."""


def in_changed_layout() -> bool:
    """Whether this is a process of a parallel layout that the job has changed to."""
    return LAYOUT_ENV in os.environ


def common_env(config: RunConfig) -> dict[str, str]:
    """What standbys and ranks have in common; a library may read it at import."""
    env = {
        "FLASHRECOVERY": "1",
        AGENT_PID_ENV: str(os.getpid()),
        CONFIG_ENV: config.settings().model_dump_json(),
    }
    env |= {name: os.environ.get(name, value) for name, value in LAUNCH_DEFAULTS.items()}
    env |= {
        "ROLE_NAME": config.role,
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "GROUP_WORLD_SIZE": str(config.nnodes),
        "ROLE_WORLD_SIZE": str(config.world_size),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"  # torchrun's default
    return env


def rank_env(config: RunConfig, rank: int, generation: int, replace: pb.Replace) -> Mapping[str, str]:
    """What torchrun's variables say of ``rank`` alone (torch 2.13, torch/distributed/run.py).

    The restart count is that of whole restarts, before the first step: the process groups keep their keys in the
    store apart by it. A recovery is no restart.
    """
    several = {STORES_ENV: json.dumps([[s.host, s.port] for s in replace.stores])} if len(replace.stores) > 1 else {}
    if replace.domains:
        several[DOMAINS_ENV] = json.dumps(list(replace.domains))
    if config.gpu_domain is not None and not replace.layout:
        several[GPUS_ENV] = json.dumps(labelled_gpus(config.gpu_domain, config.nproc_per_node))
    if replace.layout:
        several |= {LAYOUT_ENV: replace.layout}
        several |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(replace.world_size))
        several["GROUP_WORLD_SIZE"] = str(max(replace.nodes, 1))
        several |= {SEQUENCE_PARALLEL_ENV: "1"} if replace.sequence_parallel else {}
    node_rank = replace.node_rank
    if replace.stands_in:
        several[NEW_RANK_ENV] = str(rank)
        rank = replace.stands_in - 1
        node_rank = rank // config.nproc_per_node
    return {
        **several,
        "RANK": str(rank),
        "LOCAL_RANK": str(replace.local_rank),
        "GROUP_RANK": str(node_rank),
        "ROLE_RANK": str(rank),
        "MASTER_ADDR": replace.store_host,
        "MASTER_PORT": str(replace.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(replace.attempt),
        "FLASHRECOVERY_GENERATION": str(generation),
        STRIDE_ENV: str(replace.stride),
    }


def with_local_rank(argument: str, environ: Mapping[str, str]) -> str:
    """An argument of the script as the rank with these variables gets it."""
    return argument.replace(LOCAL_RANK_MACRO, environ["LOCAL_RANK"]) if LOCAL_RANK_MACRO in argument else argument
