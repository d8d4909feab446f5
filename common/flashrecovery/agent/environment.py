"""The environment of a training process: torchrun's variables, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping

from flashrecovery.config import CONFIG_ENV, RunConfig

AGENT_PID_ENV = "FLASHRECOVERY_AGENT_PID"


def common_env(config: RunConfig) -> dict[str, str]:
    """What standbys and ranks have in common; a library may read it at import."""
    env = {
        "FLASHRECOVERY": "1",
        AGENT_PID_ENV: str(os.getpid()),
        CONFIG_ENV: config.settings().model_dump_json(),
        # NCCL's own detection is slow and ends the process (torch 2.13): ours is outside of it.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
        "TORCH_NCCL_ENABLE_MONITORING": os.environ.get("TORCH_NCCL_ENABLE_MONITORING", "0"),
    }
    if config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"  # torchrun's default
    return env


def rank_env(config: RunConfig, rank: int, generation: int, store_host: str, store_port: int) -> Mapping[str, str]:
    """torchrun's variables for ``rank`` (torch 2.13, torch/distributed/run.py)."""
    local = rank - config.node_rank * config.nproc_per_node
    world = str(config.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(config.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "GROUP_WORLD_SIZE": str(config.nnodes),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": store_host,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": "flashrecovery",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "FLASHRECOVERY_GENERATION": str(generation),
    }
